//! What happens when the library is loaded, before the program's first line.

use std::ffi::{CStr, OsStr};
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use selfpage::store::{BackingStore, FileStore, MemoryStore, StoreError};
use selfpage::{DescriptorTable, Domain, Locking, Region};

use crate::limits::{LARGE_BYTES, Limits, MANAGED_BYTES, MAPS_BYTES, OBJECTS_BYTES, Stored};
use crate::managed::{self, Managed};
use crate::promises::{self, Staying};
use crate::{caller, children, filters, holes, malloc, process, ranges, record, rights, service, sys, threads, watch};

/// What the environment says, in one variable: `frames=BYTES;policy=NAME;user=UID;record=FILE;filters=COUNT;stats=asked;
/// trace=PATH;sample=MS;store=PLACE`.
const VARIABLE: &CStr = c"SELFPAGE_RUN";

/// Where pages go if nobody says so, and where there is no place beside the one that was named.
const ELSEWHERE: &str = "/var/tmp";

/// What a store has room for at least.
const LEAST_BYTES: u64 = 1 << 20;

/// Where `run` told us to keep pages.
#[derive(PartialEq, Eq)]
enum Place {
    /// Nowhere: none goes.
    None,
    Memory,
    /// A file without a name in this directory.
    Directory(PathBuf),
    /// This file or device.
    Named(PathBuf),
}

/// Where a trace goes, and how often the working set is estimated for it.
struct Trace {
    path: PathBuf,
    every: Duration,
}

struct Wishes {
    frames_bytes: usize,
    policy: String,
    place: Place,
    record: Option<String>,
    /// Whether its user wants to see it.
    stats: bool,
    trace: Option<Trace>,
    /// Who called `run`.
    user: Option<u32>,
    /// How many filters of system calls `run` is under itself.
    filters: Option<u32>,
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

/// Ends a program that is to be managed and may have too little for it. Nothing is allocated, since nothing may be to be had; and
/// part of it would be found out only when the program starts a thread.
fn refuse_low_limits(said: &[u8]) {
    let named = |name: &[u8]| said.split(|byte| *byte == b';').find_map(|part| part.strip_prefix(name));
    let frames = named(b"frames=").and_then(|bytes| std::str::from_utf8(bytes).ok()?.parse().ok());
    let limits = Limits { addresses_bytes: sys::limit(libc::RLIMIT_AS), data_bytes: sys::limit(libc::RLIMIT_DATA) };
    let Some(lack) = limits.lack(frames.unwrap_or(0), Stored::at(named(b"store=").unwrap_or_default())) else { return };
    let mut line = [0; 200];
    let mut rest = &mut line[..];
    let _ = writeln!(rest, "selfpage: {lack}");
    let len = 200 - rest.len();
    refuse(std::str::from_utf8(&line[..len]).unwrap_or_default());
}

extern "C" fn at_load() {
    selfpage_heap::panics::end_after(|why| sys::abort(why));
    // SAFETY: c-library: the name ends with NUL, and so does what it stands for, which nobody changes before the program's first line.
    let said = unsafe {
        let said = libc::getenv(VARIABLE.as_ptr());
        (!said.is_null()).then(|| CStr::from_ptr(said).to_bytes())
    };
    if let Some(said) = said {
        refuse_low_limits(said);
    }
    if ranges::tables().is_none() {
        refuse("selfpage: no room for tables of mappings: raise the limits (ulimit -d, ulimit -v)\n");
    }
    malloc::find_libraries();
    caller::begin();
    process::attend_forks();
    let Some(said) = said else { return };
    let set_up = Wishes::read(OsStr::from_bytes(said)).and_then(|wishes| wishes.set_up());
    if let Err(why) = set_up {
        refuse(&format!("selfpage: {why}\n"));
    }
}

fn refuse(line: &str) {
    sys::say(line);
    // SAFETY: raw-call: ends the process, of which nothing of the program has run.
    unsafe { sys::call(libc::SYS_exit_group, [125, 0, 0, 0, 0, 0]) };
}

impl Wishes {
    fn read(said: &OsStr) -> Result<Wishes, String> {
        let named =
            |name: &str, part: &[u8]| part.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec);
        let bytes = |name: &str| said.as_bytes().split(|byte| *byte == b';').find_map(|part| named(name, part));
        // A path is whatever bytes the program's user has.
        let path = |name: &str| bytes(name).map(|path| PathBuf::from(OsStr::from_bytes(&path)));
        let value = |name: &str| bytes(name).and_then(|value| String::from_utf8(value).ok());
        let frames = value("frames").and_then(|bytes| bytes.parse().ok());
        let place = match path("store") {
            None => Place::Directory(ELSEWHERE.into()),
            Some(place) if place == *"none" => Place::None,
            Some(place) if place == *"memory" => Place::Memory,
            Some(place) if place.is_dir() => Place::Directory(place),
            Some(place) => Place::Named(place),
        };
        Ok(Wishes {
            frames_bytes: frames.ok_or("SELFPAGE_RUN names no frames: use `selfpage run`")?,
            // Without a store there is nothing to choose: the one that keeps no frames back for a second chance.
            policy: value("policy").unwrap_or_else(|| if place == Place::None { "fifo" } else { "lru" }.into()),
            place,
            record: value("record"),
            stats: value("stats").is_some(),
            trace: path("trace").map(|path| Trace {
                path,
                every: Duration::from_millis(value("sample").and_then(|ms| ms.parse().ok()).unwrap_or(0)),
            }),
            user: value("user").and_then(|user| user.parse().ok()),
            filters: value("filters").and_then(|filters| filters.parse().ok()),
        })
    }

    fn set_up(&self) -> Result<(), String> {
        if let Some(run) = self.record.as_deref().and_then(record::number_of_run) {
            service::answer_for(run);
        }
        let managed = match self.managed() {
            Ok(managed) => managed,
            // A program that a service executes as another user, say. It worked before; now it does without us.
            Err(why) if self.is_another_user() => {
                sys::say(&format!("selfpage: not managed, because it runs as another user: {why}\n"));
                return Ok(());
            }
            // So is one that was executed under a filter. Another place, or more of something, is no remedy.
            Err(why) if self.is_filtered() => {
                let why = why.split(';').next().unwrap_or_default();
                sys::say(&format!("selfpage: not managed, because a filter forbids it system calls: {why}\n"));
                return Ok(());
            }
            Err(why) => return Err(why),
        };
        if self.place == Place::None {
            promises::keep_within(self.frames_bytes);
        }
        managed::begin(managed)?;
        children::begin(self.place.stored());
        crate::objects::begin()?;
        threads::begin();
        rights::begin();
        filters::begin();
        if filters::may_end_threads() {
            watch::begin();
        }
        if let Some(path) = &self.record {
            record::write_to(path);
            if self.stats {
                record::ask_for_counts(path);
            }
        }
        Ok(())
    }

    fn managed(&self) -> Result<Managed, String> {
        // Before the domain: its descriptors' numbers are free again in our table, and must not be the store's.
        let store = self.place.store()?;
        let mut wanted = Domain::with_frames(self.frames_bytes);
        if let Some(Trace { path, every }) = &self.trace {
            wanted = wanted.trace(path, *every);
        }
        let domain = wanted
            .policy(&self.policy)
            .descriptor_table(DescriptorTable::Private)
            // The regions' size would use up what the program itself may lock, and locked memory takes no guards.
            .locking(Locking::Never)
            .needs_system_calls()
            .build()
            .map_err(|error| error.to_string())?;
        let mut before = 0;
        let mut region = |len_bytes, name| -> Result<Region, String> {
            let wanted = domain.region(len_bytes).name(name).without_access();
            let made = match &store {
                Some(store) => wanted.stored_in(store.clone()),
                None => wanted.pager(Staying::after(before)),
            };
            before += len_bytes;
            made.map_err(|error| error.to_string())
        };
        let objects = region(OBJECTS_BYTES, "objects")?;
        let large = region(LARGE_BYTES, "large blocks")?;
        let maps = region(MAPS_BYTES, "mappings")?;
        Ok(Managed { domain, objects, large, maps })
    }

    /// Whether system calls are filtered that are not for `run`: all of a container's may be.
    fn is_filtered(&self) -> bool {
        self.filters.is_some_and(|of_run| filters::count().is_some_and(|own| own > of_run))
    }

    fn is_another_user(&self) -> bool {
        // SAFETY: c-library: the call has no arguments, and cannot fail.
        self.user.is_some_and(|user| user != unsafe { libc::geteuid() })
    }
}

impl Place {
    fn stored(&self) -> Stored {
        match self {
            Place::None => Stored::Nowhere,
            Place::Memory => Stored::InMemory,
            Place::Directory(_) | Place::Named(_) => Stored::InFile,
        }
    }

    fn store(&self) -> Result<Option<Arc<dyn BackingStore>>, String> {
        let wanted = MANAGED_BYTES as u64;
        let in_words = |error: StoreError| error.to_string();
        Ok(Some(match self {
            Place::None => return Ok(None),
            Place::Memory => Arc::new(MemoryStore::new(wanted).map_err(in_words)?),
            Place::Directory(dir) => Arc::new(unnamed_in(Path::new(dir)).map_err(in_words)?),
            Place::Named(path) => match largest(path, |bytes| FileStore::try_create(path, bytes)) {
                Ok(store) => Arc::new(store),
                // A program that one of ours executed finds it taken. Beside a device there is memory.
                Err(error) if error.cause.kind() == ErrorKind::ResourceBusy => {
                    // Of a link, beside what it leads to.
                    let file = path.canonicalize().unwrap_or_else(|_| path.clone());
                    let beside = file.parent().filter(|_| !is_device(path)).unwrap_or(ELSEWHERE.as_ref());
                    Arc::new(unnamed_in(beside).map_err(in_words)?)
                }
                Err(error) => return Err(error.to_string()),
            },
        }))
    }
}

fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|about| about.file_type().is_block_device())
}

fn unnamed_in(dir: &Path) -> Result<FileStore, StoreError> {
    largest(dir, |bytes| FileStore::unnamed_in(dir, bytes))
}

/// A store of as much as the program can ask for, as far as there is room at that place. Two pages at least, so that a full disk is told as one,
/// when a page is saved. How long a file may be no file system says: that is tried.
fn largest(place: &Path, make: impl Fn(u64) -> Result<FileStore, StoreError>) -> Result<FileStore, StoreError> {
    holes::check(place)?;
    let wanted = MANAGED_BYTES as u64;
    let mut bytes = FileStore::most_bytes(place).unwrap_or(wanted).clamp(LEAST_BYTES, wanted);
    loop {
        match make(bytes) {
            Err(error) if error.cause.kind() == ErrorKind::FileTooLarge && bytes > LEAST_BYTES => {
                bytes = (bytes / 2).max(LEAST_BYTES);
            }
            made => return made,
        }
    }
}
