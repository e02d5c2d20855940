//! What happens when the library is loaded, before the program's first line.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use selfpage::store::{BackingStore, FileStore, MemoryStore};
use selfpage::{DescriptorTable, Domain, Kind, Locking};

use crate::managed::{self, LARGE_BYTES, MAPS_BYTES, Managed, OBJECTS_BYTES};
use crate::{malloc, process, record, sys, threads};

/// What the environment says, in one variable: `frames=BYTES;policy=NAME;user=UID;store=PLACE;record=PATH;trace=PATH;sample=MS`.
pub const VARIABLE: &str = "SELFPAGE_RUN";

/// As many addresses as there are in all.
const MANAGED_BYTES: usize = OBJECTS_BYTES + LARGE_BYTES + MAPS_BYTES;

/// Where `run` told us to keep pages.
enum Place {
    Memory,
    /// A file without a name in this directory.
    Directory(String),
    /// This file or device.
    Named(String),
}

/// Where a trace goes, and how often the working set is estimated for it.
struct Trace {
    path: String,
    every: Duration,
}

struct Wishes {
    frames_bytes: usize,
    policy: String,
    place: Place,
    record: Option<String>,
    trace: Option<Trace>,
    /// Who called `run`.
    user: Option<u32>,
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    malloc::find_libraries();
    process::attend_forks();
    let Ok(said) = std::env::var(VARIABLE) else { return };
    let set_up = Wishes::read(&said).and_then(|wishes| wishes.set_up());
    if let Err(why) = set_up {
        sys::say(&format!("selfpage: {why}\n"));
        // SAFETY: raw-call: ends the process, of which nothing of the program has run.
        unsafe { sys::call(libc::SYS_exit_group, [125, 0, 0, 0, 0, 0]) };
    }
}

impl Wishes {
    fn read(said: &str) -> Result<Wishes, String> {
        let value =
            |name: &str| said.split(';').find_map(|part| part.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned);
        let frames = value("frames").and_then(|bytes| bytes.parse().ok());
        let place = match value("store") {
            None => Place::Directory("/var/tmp".into()),
            Some(place) if place == "memory" => Place::Memory,
            Some(place) if Path::new(&place).is_dir() => Place::Directory(place),
            Some(place) => Place::Named(place),
        };
        Ok(Wishes {
            frames_bytes: frames.ok_or_else(|| format!("{VARIABLE} names no frames: use `selfpage run`"))?,
            policy: value("policy").unwrap_or_else(|| "lru".into()),
            place,
            record: value("record"),
            trace: value("trace").map(|path| Trace {
                path,
                every: Duration::from_millis(value("sample").and_then(|ms| ms.parse().ok()).unwrap_or(0)),
            }),
            user: value("user").and_then(|user| user.parse().ok()),
        })
    }

    fn set_up(&self) -> Result<(), String> {
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
            .build();
        let domain = match domain {
            Ok(domain) => domain,
            // A program that a service executes as another user, say. It worked before; now it does without us.
            Err(error) if error.kind() == Kind::Unsupported && self.is_another_user() => {
                sys::say(&format!("selfpage: not managed, because it runs as another user: {error}\n"));
                return Ok(());
            }
            Err(error) => return Err(error.to_string()),
        };
        let region = |len_bytes, name| {
            domain
                .region(len_bytes)
                .name(name)
                .without_access()
                .stored_in(store.clone())
                .map_err(|error| error.to_string())
        };
        let objects = region(OBJECTS_BYTES, "objects")?;
        let large = region(LARGE_BYTES, "large blocks")?;
        let maps = region(MAPS_BYTES, "mappings")?;
        managed::begin(Managed { domain, objects, large, maps });
        crate::objects::begin()?;
        threads::begin();
        if let Some(path) = &self.record {
            record::write_to(path);
        }
        Ok(())
    }
}

impl Wishes {
    fn is_another_user(&self) -> bool {
        // SAFETY: c-library: the call has no arguments, and cannot fail.
        self.user.is_some_and(|user| user != unsafe { libc::geteuid() })
    }
}

impl Place {
    fn store(&self) -> Result<Arc<dyn BackingStore>, String> {
        let wanted = MANAGED_BYTES as u64;
        let in_words = |error: selfpage::store::StoreError| error.to_string();
        Ok(match self {
            Place::Memory => Arc::new(MemoryStore::new(wanted).map_err(in_words)?),
            Place::Directory(dir) => Arc::new(unnamed_in(Path::new(dir)).map_err(in_words)?),
            Place::Named(path) => {
                let path = Path::new(path);
                match FileStore::create(path, capacity_bytes(path.parent().unwrap_or(path))) {
                    Ok(store) => Arc::new(store),
                    // A program that one of ours executed finds it taken.
                    Err(error) if error.cause.kind() == std::io::ErrorKind::ResourceBusy => {
                        Arc::new(unnamed_in(path.parent().unwrap_or("/var/tmp".as_ref())).map_err(in_words)?)
                    }
                    Err(error) => return Err(error.to_string()),
                }
            }
        })
    }
}

fn unnamed_in(dir: &Path) -> Result<FileStore, selfpage::store::StoreError> {
    FileStore::unnamed_in(dir, capacity_bytes(dir))
}

/// As much as the program can ask for, as far as there is room in that directory, and the limit on files lets it.
fn capacity_bytes(dir: &Path) -> u64 {
    let mut wanted = MANAGED_BYTES as u64;
    if let Ok(name) = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes()) {
        // SAFETY: c-library: the name ends with NUL, and both results are plain numbers.
        unsafe {
            let (mut room, mut limit): (libc::statvfs, libc::rlimit) = (std::mem::zeroed(), std::mem::zeroed());
            if libc::statvfs(name.as_ptr(), &raw mut room) == 0 {
                wanted = wanted.min(room.f_bavail * room.f_frsize);
            }
            if libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) == 0 {
                // The file has a page more than the store, for its mark.
                wanted = wanted.min(limit.rlim_cur.saturating_sub(4096));
            }
        }
    }
    // Two pages at least, so that a full disk is told as one, when a page is saved.
    wanted.max(1 << 20) / 4096 * 4096
}
