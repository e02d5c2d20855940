//! A store in a file or on a block device.

use std::fmt;
use std::fs::read_link;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, IFlags, Mode, OFlags, SeekFrom, StatVfs};
use rustix::fs::{fcntl_getfl, fcntl_setfl, fstat, ftruncate, ioctl_getflags, ioctl_setflags};
use rustix::fs::{open, seek, stat, statvfs, unlink};
use rustix::io::{Errno, pread, pwrite};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::linux::limit::{self, Resource};
use selfpage_core::pager::{Context, PagerError};

use super::bloks::{Bloks, MEMBERS};
use super::engine::{IoChoice, forget_engines, has_no_room, read_in_trap};
use super::linux::anchor::Anchor;
use super::linux::descriptor::{Descriptor, is_locked, lock, unlock};
use super::linux::page_cache::is_always_cached;
use super::private::{MODE, Openers, made_anew};
use super::refusal::{has_name, not_made, refused};
use super::zeros::holds_nothing;
use super::{BackingStore, Blok, MOST_PAGES, ReadBlok, StoreError, WriteBlok, blok_count};
use crate::doctor::limits::TELL;
use crate::error::SystemError;

/// What blok 0 begins with: the mark of a file that may be overwritten.
const MARK: &[u8] = b"selfpage store: scratch, of no use to anybody but the program that runs\n";
/// A device without the mark is only taken over where it begins with this much nothing. (Of a file all is looked at.)
const DEVICE_LOOK_BYTES: u64 = 1 << 20;
/// How a file with a name is opened: a pipe's other end is not waited for.
const OPENED: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);
/// Whether there was a file of that name before it was opened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begins {
    New,
    There,
}

/// How long another program may still have a file that it used when it was killed.
const ENDING: Duration = Duration::from_millis(500);
/// The byte whose lock member 0 of the family holds; the other members' follow. Locks ask for no data, and none is in their way.
const LOCKS_FROM: u64 = 1 << 40;

/// Holds pages in a file, past the kernel's page cache where the file system lets it.
///
/// Parent and forked children share the file, see [`BackingStore`]. Each holds a lock that the kernel drops when it ends,
/// whatever ends it; what a dead one held is given back at the next fork, and when the file grows, or has no room.
pub struct FileStore {
    object: String,
    file: Descriptor,
    anchor: Mutex<Anchor>,
    direct: bool,
    bloks: Bloks,
    io: IoChoice,
    /// The child's part of a fork that is under way.
    child: Mutex<Option<Child>>,
    reclaiming: AtomicBool,
}

struct Child {
    file: Descriptor,
    member: u32,
}

#[repr(align(4096))]
struct Page(PageBytes);

impl FileStore {
    /// A store in the file or block device of that name, which is made where there is none, and kept.
    ///
    /// Nothing in it lasts: a later run starts empty. It is sparse, and grows with what is saved.
    ///
    /// Where another program uses it, that is given half a second: the kernel may end the requests of one that was killed a little later
    /// than the program.
    ///
    /// # Errors
    /// The file holds something else, or is another user's; another program uses it, or it cannot be had.
    pub fn create(path: impl AsRef<Path>, capacity_bytes: u64) -> Result<FileStore, StoreError> {
        let path = path.as_ref();
        let begun = Instant::now();
        loop {
            // Before it tries: it may be stopped (SIGSTOP) then, until the other has ended.
            let may_wait = begun.elapsed() < ENDING;
            match FileStore::try_create(path, capacity_bytes) {
                Err(error) if error.cause.kind() == io::ErrorKind::ResourceBusy && may_wait => {
                    std::thread::sleep(ENDING / 100);
                }
                done => return done,
            }
        }
    }

    /// The same, which waits for nobody.
    ///
    /// # Errors
    /// As for [`FileStore::create`].
    pub fn try_create(path: impl AsRef<Path>, capacity_bytes: u64) -> Result<FileStore, StoreError> {
        let path = path.as_ref();
        let object = path.display().to_string();
        has_name(path)?;
        let count = blok_count(&object, capacity_bytes)?;
        let begins = if matches!(stat(path), Err(Errno::NOENT)) { Begins::New } else { Begins::There };
        let file = open(path, OPENED | OFlags::CREATE, Mode::from_raw_mode(MODE)).map_err(|errno| {
            // Of a link it is the directory of what it names that is missing.
            let dir = if path.is_symlink() { path } else { directory_of(path) };
            not_made(&object, dir, errno)
        })?;
        // With the lock: until the name is gone nobody else begins to use it.
        let held = if begins == Begins::New { file.try_clone().ok() } else { None };
        let taken = FileStore::take_over(path, object, file, begins, count);
        if let Err(error) = &taken
            && begins == Begins::New
            // What another program has made meanwhile is that one's.
            && !matches!(error.cause.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::AlreadyExists)
        {
            // What a link names, and not the link.
            let _ = path.canonicalize().and_then(|made| Ok(unlink(&made)?));
        }
        drop(held);
        taken
    }

    /// The same, of a file that is there now.
    fn take_over(
        path: &Path,
        object: String,
        file: OwnedFd,
        begins: Begins,
        count: u32,
    ) -> Result<FileStore, StoreError> {
        let mut file = file;
        let kind = FileType::from_raw_mode(fstat(&file).map_err(refused(&object))?.st_mode);
        match kind {
            FileType::RegularFile => {}
            // Exclusive: the kernel says no where it is mounted.
            FileType::BlockDevice => {
                file = open(path, OPENED | OFlags::EXCL, Mode::empty()).map_err(refused(&object))?
            }
            _ => {
                let cause = io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a block device");
                return Err(StoreError { object, cause, remedy: "name a file, a block device, or none" });
            }
        }
        // Before the content is looked at: the other program may have just begun.
        FileStore::lock_all(&object, &file)?;
        if !is_scratch(&file, kind).map_err(refused(&object))? {
            let cause = io::Error::new(io::ErrorKind::AlreadyExists, "it holds something that is not a store's");
            let remedy = match kind {
                FileType::BlockDevice => {
                    "wipe it if nobody needs it (wipefs -a, and zeros over its first MiB), or name another"
                }
                _ => "remove it, or name another",
            };
            return Err(StoreError { object, cause, remedy });
        }
        if kind == FileType::RegularFile {
            match Openers::of(&file).map_err(refused(&object))? {
                Openers::Ours => {}
                Openers::Another if begins == Begins::There => {
                    let cause =
                        io::Error::new(io::ErrorKind::AlreadyExists, "it is another user's, who may have it open");
                    return Err(StoreError { object, cause, remedy: "remove it, or name another" });
                }
                // A new one shows another owner where the file system has its own idea of owners, or somebody else was faster.
                Openers::Anybody | Openers::Another => {
                    let made = made_anew(path, &file, OPENED).map_err(|(cause, remedy)| StoreError {
                        object: object.clone(),
                        cause,
                        remedy,
                    })?;
                    // The other one stays locked until this one is.
                    FileStore::lock_all(&object, &made)?;
                    file = made;
                }
            }
            // What an earlier run has left would take its space beside what is saved.
            ftruncate(&file, 0).map_err(refused(&object))?;
            write_in_place(&file);
        }
        FileStore::new(object, file, kind, count)
    }

    /// A store in a file without a name, in that directory. Nothing of it is left when the program ends, however it ends.
    ///
    /// # Errors
    /// There can be no such file.
    pub fn unnamed_in(dir: impl AsRef<Path>, capacity_bytes: u64) -> Result<FileStore, StoreError> {
        let dir = dir.as_ref();
        let object = format!("in {}", dir.display());
        has_name(dir)?;
        let count = blok_count(&object, capacity_bytes)?;
        let mode = Mode::from_raw_mode(MODE);
        let file = match open(dir, OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE, mode) {
            // File systems that cannot.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => briefly_named(dir, mode),
            file => file,
        };
        let file = file.map_err(|errno| not_made(&object, dir, errno))?;
        write_in_place(&file);
        FileStore::lock_all(&object, &file)?;
        FileStore::new(object, file, FileType::RegularFile, count)
    }

    /// How large a store at `path` can be at most, or in it where that is a directory: all of a device; else what the file system has
    /// room for, with what a file there takes already, and the limit on the size of files allows. A page of it is for the mark.
    ///
    /// # Errors
    /// That cannot be told.
    pub fn most_bytes(path: impl AsRef<Path>) -> io::Result<u64> {
        let path = path.as_ref();
        let bytes = match stat(path).map(|about| (FileType::from_raw_mode(about.st_mode), about.st_blocks)) {
            Ok((FileType::BlockDevice, _)) => {
                let device = open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
                seek(&device, SeekFrom::End(0))?
            }
            about => {
                let taken_bytes = if let Ok((FileType::RegularFile, blocks)) = about { blocks as u64 * 512 } else { 0 };
                let limit = limit::of_this_process(Resource::FileSize).map_err(SystemError::into_io)?;
                free_bytes(&file_system(path)?).saturating_add(taken_bytes).min(limit.unwrap_or(u64::MAX))
            }
        };
        Ok((bytes / PAGE_BYTES as u64).saturating_sub(1).min(MOST_PAGES) * PAGE_BYTES as u64)
    }

    fn new(object: String, file: OwnedFd, kind: FileType, count: u32) -> Result<FileStore, StoreError> {
        let io = IoChoice::from_env().map_err(|cause| StoreError {
            object: object.clone(),
            cause: io::Error::new(io::ErrorKind::InvalidInput, cause),
            remedy: "set it to auto or pool, or not at all",
        })?;
        make_room(&object, &file, kind, count as u64 * PAGE_BYTES as u64)?;
        let direct = write_mark(&file).map_err(refused(&object))?;
        // Member 0 is alive; the others' locks are for those who come.
        unlock(file.as_fd(), LOCKS_FROM + 1, MEMBERS as u64 - 1).map_err(refused(&object))?;
        let bloks = Bloks::family(count).map_err(|cause| StoreError {
            object: object.clone(),
            cause,
            remedy: "ask for less, or raise the limit on address space (ulimit -v)",
        })?;
        if kind == FileType::BlockDevice {
            bloks.have_space();
        }
        let file = Descriptor::new(file).map_err(refused(&object))?;
        let anchor = Mutex::new(Anchor::new(file.number()));
        Ok(FileStore { object, file, anchor, direct, bloks, io, child: Mutex::new(None), reclaiming: false.into() })
    }

    fn lock_all(object: &str, file: &OwnedFd) -> Result<(), StoreError> {
        match lock(file.as_fd(), LOCKS_FROM, MEMBERS as u64) {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError {
                object: object.to_owned(),
                cause: io::Error::new(io::ErrorKind::ResourceBusy, "another running program, or this one, uses it"),
                remedy: "name another, end that program (fuser -v shows it), or share one store (`stored_in`)",
            }),
            Err(cause) => Err(StoreError {
                object: object.to_owned(),
                cause,
                remedy: "name a place on a local file system: this one has no locks",
            }),
        }
    }

    /// Whether reads and writes go past the kernel's page cache (`O_DIRECT`). In a file system of memory none do.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// How many bloks are taken, by this process and its family.
    ///
    /// # Context
    /// Normal.
    pub fn taken_bloks(&self) -> u64 {
        self.bloks.taken_count()
    }

    /// Which way of many requests at a time to use, in place of what the environment says.
    pub fn with_io(mut self, choice: IoChoice) -> FileStore {
        self.io = choice;
        self
    }

    /// Gives back what processes of the family held that have ended. On a thread that has not the store's descriptor, nothing: since a region
    /// uses the store, no thread of the program's has it with [`DescriptorTable::Private`](crate::DescriptorTable::Private).
    ///
    /// # Context
    /// PagerThread or Normal.
    pub fn reclaim_dead(&self) {
        // A child that is no member has its parent's locks, and would take its parent for dead.
        if self.bloks.me().is_none() {
            return;
        }
        // Locks tell processes apart, not our threads.
        if self.reclaiming.swap(true, Ordering::Acquire) {
            return;
        }
        self.forget_dead(&self.file);
        self.reclaiming.store(false, Ordering::Release);
    }

    /// Forgets the other members whose lock is nobody's, which is asked of `file`.
    fn forget_dead(&self, file: &Descriptor) {
        // The highest first: below it there are fewer to look at, for whoever looks at all.
        for member in self.bloks.others().rev() {
            let byte = LOCKS_FROM + member as u64;
            // A lock on another file, at our number, would say nothing, and be in that file's way.
            if file.is_ours()
                && let Ok(true) = lock(file.borrow(), byte, 1)
            {
                if file.is_ours() {
                    self.bloks.forget(member);
                }
                let _ = unlock(file.borrow(), byte, 1);
            }
        }
    }
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileStore({}, {} of {} bloks taken)", self.object, self.taken_bloks(), self.bloks.count())
    }
}

impl FileStore {
    /// The file for a child. `table_of` is a thread that has the descriptor.
    fn reopened(&self, table_of: i32) -> Result<Descriptor, StoreError> {
        let flags = if self.direct { OFlags::DIRECT } else { OFlags::empty() };
        self.file.reopen(table_of.cast_unsigned(), flags).map_err(|cause| StoreError {
            object: self.object.clone(),
            cause,
            remedy: "a child needs the file opened anew: mount /proc, keep the right to open it, raise ulimit -n",
        })
    }

    /// This process has no part in it.
    fn ancestors(&self) -> StoreError {
        let cause = io::Error::other("it is an ancestor's, and this process was forked without it");
        StoreError { object: self.object.clone(), cause, remedy: "make one of its own in the child" }
    }

    /// There can be no further child.
    fn full_family(&self) -> StoreError {
        let cause = io::Error::new(io::ErrorKind::QuotaExceeded, format!("{MEMBERS} processes share it already"));
        let remedy =
            "have fewer forked children at a time, or keep pages in memory (MemoryStore; selfpage run --store memory)";
        StoreError { object: self.object.clone(), cause, remedy }
    }
}

impl BackingStore for FileStore {
    fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError> {
        let mark = self.bloks.mark();
        let claimed = self.bloks.claim(want);
        if claimed.is_ok() && self.bloks.mark() == mark {
            return claimed;
        }
        // So that it need not grow further.
        self.reclaim_dead();
        claimed.or_else(|_| self.bloks.claim(want))
    }

    fn release(&self, first: Blok, count: u32) {
        self.bloks.release(first, count);
    }

    fn reads_in_trap(&self) -> bool {
        true
    }

    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        match context {
            // Whatever went wrong, it need not be our file that it went wrong with.
            Context::Trap => read_in_trap(self.file.number(), bloks).map_err(|_| PagerError::WrongContext),
            Context::PagerThread | Context::Normal => self.io.read(self.file.number(), bloks),
        }
    }

    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        self.io.write(self.file.number(), bloks);
        for write in bloks.iter().filter(|write| write.outcome.is_ok()) {
            self.bloks.wrote(write.blok);
        }
        if bloks.iter().any(|write| has_no_room(write.outcome)) {
            self.reclaim_dead();
            self.bloks.found_no_space();
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.file.number()]
    }

    fn check_descriptor(&self, number: RawFd, found: BorrowedFd<'_>) -> Result<(), StoreError> {
        if self.bloks.me().is_none() {
            return Err(self.ancestors());
        }
        self.file.numbered().check(found).map_err(|cause| StoreError {
            object: self.object.clone(),
            cause: io::Error::other(format!("it is descriptor {number}, and {cause}")),
            remedy: "make it after the program has closed its descriptors; with DescriptorTable::Private make one for each domain, \
                     and another one once no region is left that uses it",
        })
    }

    fn check_fork(&self, table_of: i32) -> Result<(), StoreError> {
        if self.bloks.me().is_none() {
            return Err(self.ancestors());
        }
        let file = self.reopened(table_of)?;
        // What cannot be told is left to the fork. The last is the last to be given out, so few are looked at while there are few.
        let is_free = |member: u32| !matches!(is_locked(file.borrow(), LOCKS_FROM + u64::from(member)), Ok(true));
        if (0..MEMBERS).rev().any(is_free) { Ok(()) } else { Err(self.full_family()) }
    }

    fn before_fork(&self, table_of: i32) -> Result<(), StoreError> {
        if self.bloks.me().is_none() {
            return Err(self.ancestors());
        }
        let file = self.reopened(table_of)?;
        // Each has memory, and each claim looks at them all. This thread need not have any other descriptor of the file.
        self.forget_dead(&file);
        // The child's lock is held from now on, first by us: it never looks dead before it has lived.
        let locked = |member: u32| match lock(file.borrow(), LOCKS_FROM + member as u64, 1) {
            Ok(false) => None,
            Ok(true) => Some(Ok(member)),
            Err(cause) => {
                let remedy = match cause.raw_os_error() {
                    Some(libc::EPERM | libc::ENOSYS) => {
                        "a child needs a lock of its own: allow fcntl in the filter of system calls (seccomp)"
                    }
                    _ => "a child needs a lock of its own, and the file system gives none",
                };
                Some(Err(StoreError { object: self.object.clone(), cause, remedy }))
            }
        };
        let member = (0..MEMBERS).find_map(locked).unwrap_or_else(|| Err(self.full_family()))?;
        self.bloks.hand_to(member);
        *self.child.lock().unwrap_or_else(PoisonError::into_inner) = Some(Child { file, member });
        Ok(())
    }

    fn after_fork_in_parent(&self) {
        *self.child.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// # Panics
    /// Where [`before_fork`](BackingStore::before_fork) did not succeed.
    fn after_fork_in_child(&self) {
        let child = self.child.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Child { file, member }) = child else { panic!("store {}: not ready for a fork", self.object) };
        self.file.go_on_as(file);
        *self.anchor.lock().unwrap_or_else(PoisonError::into_inner) = Anchor::new(self.file.number());
        self.bloks.adopt(member);
        forget_engines();
        self.reclaiming.store(false, Ordering::Release);
    }

    fn let_go_in_child(&self) {
        // The parent's lock is on what it opened.
        self.file.let_go();
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        // A process that another thread is just starting has our descriptor until it calls exec, and the lock with it: whoever
        // makes the store anew need not wait for that.
        if let Some(me) = self.bloks.me()
            && self.file.is_ours()
        {
            let _ = unlock(self.file.borrow(), LOCKS_FROM + u64::from(me), 1);
        }
    }
}

/// A file that has a name for as long as it takes to remove it.
fn briefly_named(dir: &Path, mode: Mode) -> rustix::io::Result<OwnedFd> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    loop {
        let path = dir.join(format!(".selfpage-{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        match open(&path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL, mode) {
            // Left by a process of that number that was killed just then.
            Err(Errno::EXIST) => {}
            file => return file.and_then(|file| unlink(&path).map(|()| file)),
        }
    }
}

/// Asks the file system to write pages of this file, which is empty, again where they are, as most do anyhow. Btrfs would take new room each
/// time, and go by way of the page cache, for the sake of a checksum. The domain has a hash of each page.
fn write_in_place(file: &OwnedFd) {
    if let Ok(flags) = ioctl_getflags(file) {
        let _ = ioctl_setflags(file, flags | IFlags::NOCOW);
    }
}

/// Whether nobody will miss the file's contents.
fn is_scratch(file: &OwnedFd, kind: FileType) -> io::Result<bool> {
    let mut mark = [0; MARK.len()];
    let len = pread(file, &mut mark, 0)?;
    let looked_at = if kind == FileType::BlockDevice { DEVICE_LOOK_BYTES } else { u64::MAX };
    Ok(mark[..len] == *MARK || holds_nothing(file, looked_at)?)
}

/// Makes the file as long as it will ever be, so that writes need not: that is faster, and then a file that ends early was
/// cut by somebody.
fn make_room(object: &str, file: &OwnedFd, kind: FileType, len_bytes: u64) -> Result<(), StoreError> {
    let too_small = |cause: String, remedy| StoreError {
        object: object.to_owned(),
        cause: io::Error::new(io::ErrorKind::FileTooLarge, cause),
        remedy,
    };
    let now_bytes = seek(file, SeekFrom::End(0)).map_err(refused(object))?;
    if kind == FileType::BlockDevice && now_bytes < len_bytes {
        let cause = format!("the device has {now_bytes} bytes, the store needs {len_bytes}");
        return Err(too_small(cause, "ask for less, or name a larger device"));
    }
    // Beyond the limit the kernel would send SIGXFSZ.
    let limit = limit::of_this_process(Resource::FileSize).map_err(|why| StoreError {
        object: object.to_owned(),
        cause: why.into_io(),
        remedy: TELL,
    })?;
    if let Some(limit_bytes) = limit
        && limit_bytes < len_bytes
        && kind == FileType::RegularFile
    {
        let cause = format!("files may have {limit_bytes} bytes, the store needs {len_bytes}");
        return Err(too_small(cause, "ask for less, or raise the limit on file size (ulimit -f)"));
    }
    if now_bytes < len_bytes {
        ftruncate(file, len_bytes).map_err(refused(object))?;
    }
    Ok(())
}

/// Writes blok 0, past the page cache where that works, and says whether it does.
fn write_mark(file: &OwnedFd) -> io::Result<bool> {
    let mut page = Box::new(Page([0; PAGE_BYTES]));
    page.0[..MARK.len()].copy_from_slice(MARK);
    let flags = fcntl_getfl(file)? - OFlags::NONBLOCK;
    let ways: &[bool] = if is_always_cached(file) { &[false] } else { &[true, false] };
    for &direct in ways {
        let flags = if direct { flags | OFlags::DIRECT } else { flags };
        match fcntl_setfl(file, flags).and_then(|()| pwrite(file, &page.0, 0)) {
            Err(Errno::INVAL) if direct => {}
            Err(errno) => return Err(errno.into()),
            Ok(PAGE_BYTES) => return Ok(direct),
            Ok(_) => return Err(Errno::NOSPC.into()),
        }
    }
    Err(Errno::INVAL.into())
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The file system of what has the name, or of where that would be made.
fn file_system(path: &Path) -> io::Result<StatVfs> {
    match (statvfs(path), read_link(path)) {
        (Err(Errno::NOENT), Ok(place)) => file_system(&directory_of(path).join(place)),
        (Err(Errno::NOENT), Err(_)) => Ok(statvfs(directory_of(path))?),
        (found, _) => Ok(found?),
    }
}

/// What one may still have of a file system. Of one that states no size, as a ramfs, any number.
pub(crate) fn free_bytes(of: &StatVfs) -> u64 {
    if of.f_blocks == 0 { u64::MAX } else { of.f_bavail.saturating_mul(of.f_frsize) }
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
