//! The one place of the bench with `unsafe`: memory that the kernel changes under us, and the calls that std lacks.
#![allow(unsafe_code)]

pub mod trap;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::process::{WaitId, WaitIdOptions};
use selfpage_core::frame::Table;
use selfpage_core::physical::{PhysAddr, PhysMemory};

use super::case::Access;

pub mod blocks;
pub mod objects;
pub mod watched;

/// Bytes of a page in every case.
pub const PAGE_BYTES: usize = 4096;
/// Words of a page.
pub const WORDS: usize = PAGE_BYTES / 8;

/// Memory that a system under test gives to the access loops. It does not own the mapping.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    base: *mut u64,
    size_pages: usize,
}

// SAFETY: bench-memory: plain words reached by volatile accesses only; the loops give each page to one thread at a time.
unsafe impl Send for Memory {}
// SAFETY: bench-memory: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// The memory of `len_bytes` at `base`; a part of a page at the end is left out.
    ///
    /// # Safety
    /// Reads and writes in the range must be answered (or end the process) until the system's `finish` returns, and nothing
    /// but the access loops may hold references into it.
    pub unsafe fn new(base: *mut u8, len_bytes: usize) -> Memory {
        assert_eq!(base.align_offset(PAGE_BYTES), 0, "memory under test must begin at a page");
        Memory { base: base.cast(), size_pages: len_bytes / PAGE_BYTES }
    }

    /// The memory of a region, whose pager answers until the system drops it in `finish`.
    pub fn of_region(region: &selfpage::Region) -> Memory {
        // SAFETY: bench-memory: a region is mapped and answered until it is dropped.
        unsafe { Memory::new(region.as_ptr(), region.len_bytes()) }
    }

    /// Whole pages.
    pub fn size_pages(self) -> usize {
        self.size_pages
    }

    /// The word `word` of page `page`.
    #[inline(always)]
    pub fn read(self, page: usize, word: usize) -> u64 {
        assert!(page < self.size_pages && word < WORDS);
        // SAFETY: bench-memory: in range by the assertion, aligned by `new`.
        unsafe { self.base.add(page * WORDS + word).read_volatile() }
    }

    /// Writes the word `word` of page `page`.
    #[inline(always)]
    pub fn write(self, page: usize, word: usize, value: u64) {
        assert!(page < self.size_pages && word < WORDS);
        // SAFETY: bench-memory: in range by the assertion, aligned by `new`.
        unsafe { self.base.add(page * WORDS + word).write_volatile(value) }
    }
}

/// A mapping made by mmap, undone when dropped.
pub struct Mapping {
    base: *mut u8,
    len_bytes: usize,
}

// SAFETY: bench-memory: the mapping is only an address and a length; what it maps is reached through `Memory`.
unsafe impl Send for Mapping {}
// SAFETY: bench-memory: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private anonymous memory of 4 KiB pages, never huge ones.
    pub fn anonymous(len_bytes: usize) -> io::Result<Mapping> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mapping = Mapping::map(len_bytes, Access::Write, flags, -1)?;
        mapping.advise(libc::MADV_NOHUGEPAGE)?;
        Ok(mapping)
    }

    /// Private anonymous memory in huge pages, as far as the kernel gives any.
    pub fn huge(len_bytes: usize) -> io::Result<Mapping> {
        let mapping = Mapping::map(len_bytes, Access::Write, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        mapping.advise(libc::MADV_HUGEPAGE)?;
        Ok(mapping)
    }

    /// Where it lies.
    pub fn addresses(&self) -> std::ops::Range<usize> {
        self.base as usize..self.base as usize + self.len_bytes
    }

    /// Has `tracker` note every write to it.
    pub fn arm(&self, tracker: &selfpage::dirty::DirtyTracker) -> selfpage::Result<()> {
        // SAFETY: own-mapping: ours, readable and writable, and no system call writes to it.
        unsafe { tracker.arm(self.addresses()) }
    }

    /// A shared mapping of the first `len_bytes` of `file`.
    pub fn shared(file: &File, len_bytes: usize) -> io::Result<Mapping> {
        Mapping::map(len_bytes, Access::Write, libc::MAP_SHARED, file.as_raw_fd())
    }

    /// The same, with all pages in place from the start.
    pub fn populated(file: &File, len_bytes: usize, access: Access) -> io::Result<Mapping> {
        Mapping::map(len_bytes, access, libc::MAP_SHARED | libc::MAP_POPULATE, file.as_raw_fd())
    }

    fn map(len_bytes: usize, access: Access, flags: libc::c_int, fd: libc::c_int) -> io::Result<Mapping> {
        let prot = match access {
            Access::Read => libc::PROT_READ,
            Access::Write => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: fresh-mapping: the kernel chooses the address, so nothing that exists is replaced.
        let base = unsafe { libc::mmap(ptr::null_mut(), len_bytes, prot, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { base: base.cast(), len_bytes })
    }

    /// Tells the kernel to expect accesses at random: no readahead.
    pub fn expect_random(&self) -> io::Result<()> {
        self.advise(libc::MADV_RANDOM)
    }

    /// Tells the kernel to write everything to swap.
    pub fn page_out(&self) -> io::Result<()> {
        self.advise(libc::MADV_PAGEOUT)
    }

    /// Writes all of it to a file, as it is then, and waits for the disk. Who writes to it meanwhile is in the file in part.
    pub fn save(&self, file: &File) -> io::Result<()> {
        let mut at = 0;
        while at < self.len_bytes {
            let len_bytes = (self.len_bytes - at).min(1 << 20);
            // SAFETY: own-mapping: mapped and readable; only the kernel looks at it, whoever writes to it meanwhile.
            let written =
                unsafe { libc::pwrite(file.as_raw_fd(), self.base.add(at).cast(), len_bytes, at as libc::off_t) };
            at += usize::try_from(written).map_err(|_| io::Error::last_os_error())?;
        }
        file.sync_data()
    }

    /// Has the kernel give it all its frames.
    pub fn populate(&self) -> io::Result<()> {
        self.advise(libc::MADV_POPULATE_WRITE)
    }

    /// Leaves reading only.
    pub fn protect(&self) -> io::Result<()> {
        // SAFETY: own-mapping: the whole range is ours, and nobody writes to it any more.
        check(unsafe { libc::mprotect(self.base.cast(), self.len_bytes, libc::PROT_READ) })
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: own-mapping: the whole range is ours, and the advice given here never drops contents.
        check(unsafe { libc::madvise(self.base.cast(), self.len_bytes, advice) })
    }

    /// The memory, for as long as the mapping is kept.
    pub fn memory(&self) -> Memory {
        // SAFETY: bench-memory: mapped readable and writable; the system that owns the mapping drops it after `finish`.
        unsafe { Memory::new(self.base, self.len_bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: own-mapping: made by `map`, undone once; `finish` of the system is the last use.
        unsafe { libc::munmap(self.base.cast(), self.len_bytes) };
    }
}

/// A forked child that does nothing, until this is dropped.
pub struct Paused(libc::pid_t);

impl Paused {
    /// Forks it.
    pub fn fork() -> io::Result<Paused> {
        // SAFETY: no-pointers: the child makes two calls, one of them again and again, and never returns.
        match unsafe { libc::fork() } {
            0 => {
                // A fork has no such wish of its parent's. Without one this would hold the memory for good.
                let _ = die_with_parent();
                loop {
                    // SAFETY: no-pointers: as above.
                    unsafe { libc::pause() };
                }
            }
            child => check(child.min(0)).map(|()| Paused(child)),
        }
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        // SAFETY: no-pointers: our own child, not waited for before.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, ptr::null_mut(), 0);
        }
    }
}

/// Memory of a machine, zeroed, that is never given back: the process ends with its case. In huge pages where there are some: a
/// kernel sees physical memory through large pages, too.
pub fn physical(first: PhysAddr, len_bytes: usize) -> io::Result<PhysMemory> {
    let mapping = Mapping::map(len_bytes, Access::Write, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
    // A kernel without huge pages refuses.
    let _ = mapping.advise(libc::MADV_HUGEPAGE);
    let memory = mapping.memory();
    (0..memory.size_pages()).for_each(|page| memory.write(page, 0, 0));
    let words = NonNull::new(mapping.base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
    std::mem::forget(mapping);
    // SAFETY: table-memory: mapped for good, aligned to a page, of zeros, and from now on used through the table alone.
    let words = unsafe { Table::new(words, len_bytes / 8) };
    Ok(PhysMemory::new(first, words))
}

/// A forked child that does one thing and ends, or becomes another program.
pub struct Child(libc::pid_t);

impl Child {
    /// Forks it; returns in the parent alone.
    pub fn fork(work: impl FnOnce() -> io::Result<()>) -> io::Result<Child> {
        // SAFETY: no-pointers: the child makes system calls on memory and files that exist, and ends, or is another program, without returning.
        match unsafe { libc::fork() } {
            0 => {
                // Numbers of errors fit a status.
                let status = work().map_or_else(|cause| cause.raw_os_error().unwrap_or(libc::EIO), |()| 0);
                // SAFETY: no-pointers: as above.
                unsafe { libc::_exit(status) }
            }
            child => check(child.min(0)).map(|()| Child(child)),
        }
    }

    /// Waits for its end, which is an error if its work was one. A signal that is caught ends it.
    pub fn wait(self) -> io::Result<()> {
        end_on_signal(Some(Running::Process(self.0 as u32)));
        let pid = rustix::process::Pid::from_raw(self.0).ok_or(io::ErrorKind::NotFound)?;
        // Not reaped yet: from then on its number may become another process's.
        let looked = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        end_on_signal(None);
        looked?;
        let mut status = 0;
        // SAFETY: out-pointer: our own child, and a number that outlives the call.
        let ended = unsafe { libc::waitpid(self.0, &mut status, 0) };
        match libc::WEXITSTATUS(status) {
            _ if ended != self.0 => Err(io::Error::last_os_error()),
            _ if !libc::WIFEXITED(status) => {
                Err(io::Error::other(format!("a signal ended the forked child: {}", libc::WTERMSIG(status))))
            }
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Waits for its end, and tells how it ended and what it took.
    pub fn wait_with_usage(self) -> io::Result<ChildUsage> {
        // SAFETY: plain-old-data: the structure is numbers.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        let mut status = 0;
        // SAFETY: out-pointer: both outlive the call.
        while unsafe { libc::wait4(self.0, &raw mut status, 0, &raw mut usage) } != self.0 {
            let cause = io::Error::last_os_error();
            if cause.kind() != io::ErrorKind::Interrupted {
                return Err(cause);
            }
        }
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
        Ok(ChildUsage {
            well: libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            cpu_s: seconds(usage.ru_utime) + seconds(usage.ru_stime),
            peak_bytes: usage.ru_maxrss as u64 * 1024,
        })
    }
}

/// What a forked child took, and all that it waited for.
#[derive(Clone, Copy, Debug)]
pub struct ChildUsage {
    /// It ended by itself, with status 0.
    pub well: bool,
    /// Seconds of CPU.
    pub cpu_s: f64,
    /// The most memory that one of them had.
    pub peak_bytes: u64,
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel charged to this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// User and system time.
    pub cpu_s: f64,
    /// Page faults that needed I/O.
    pub major_faults: u64,
    /// Page faults that needed none.
    pub minor_faults: u64,
}

/// The usage of the whole process, all threads that ever ran.
pub fn usage() -> Usage {
    // SAFETY: plain-old-data: all zeros is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: out-pointer: a valid rusage that outlives the call.
    let result = unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    assert_eq!(result, 0, "getrusage(RUSAGE_SELF) cannot fail");
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Usage {
        cpu_s: seconds(usage.ru_utime) + seconds(usage.ru_stime),
        major_faults: usage.ru_majflt as u64,
        minor_faults: usage.ru_minflt as u64,
    }
}

/// Gives `file` blocks for `len_bytes` without writing them: a full disk is noticed here and not halfway.
pub fn allocate(file: &File, len_bytes: u64) -> io::Result<()> {
    // SAFETY: own-descriptor: no memory is passed.
    check(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len_bytes as libc::off_t) })
}

/// Asks the kernel to drop what the page cache holds of `file`. Dirty pages stay.
pub fn forget(file: &File) -> io::Result<()> {
    // SAFETY: own-descriptor: no memory is passed.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Lets the kernel use `path` for swap before any other swap space.
pub fn swap_on(path: &Path) -> io::Result<()> {
    const PREFER: libc::c_int = 0x8000;
    const HIGHEST: libc::c_int = 0x7fff;
    let path = c_path(path)?;
    // SAFETY: c-string: ends in zero and outlives the call.
    check(unsafe { libc::swapon(path.as_ptr(), PREFER | HIGHEST) })
}

/// Takes `path` out of use; what is in it comes back to memory first, whatever signals come meanwhile.
pub fn swap_off(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    loop {
        // SAFETY: c-string: ends in zero and outlives the call.
        match check(unsafe { libc::swapoff(path.as_ptr()) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn c_path(path: &Path) -> io::Result<std::ffi::CString> {
    std::ffi::CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidFilename.into())
}

/// The user that this process acts as; 0 is root.
pub fn user() -> u32 {
    // SAFETY: no-pointers: nothing is passed.
    unsafe { libc::geteuid() }
}

/// The signal that came; 0: none.
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);
/// As kill(2) takes it: less than zero is a group.
static RUNNING: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    INTERRUPTED.store(signal, Ordering::SeqCst);
    end_running();
}

fn end_running() {
    let running = RUNNING.load(Ordering::SeqCst);
    if running != 0 {
        // SAFETY: signal-safe: kill may be called in a handler; the child is not reaped while RUNNING names it.
        unsafe { libc::kill(running, libc::SIGKILL) };
    }
}

/// Turns what a terminal or somebody else ends programs with into a flag and the end of the running case, so that everything is cleaned
/// up: a job is in a group of its own, which no terminal ends. What our caller ignores stays ignored: nohup's hangup, a shell's interrupt
/// in the background. But the end of children, without which none can be waited for.
pub fn catch_interrupts() -> io::Result<()> {
    // SAFETY: no-pointers: the default action is to do nothing.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: plain-old-data: all zeros is a valid sigaction (no flags, an empty mask).
        let (mut action, mut before): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
        // SAFETY: out-pointer: a sigaction that outlives the call, which changes nothing.
        check(unsafe { libc::sigaction(signal, ptr::null(), &mut before) })?;
        if before.sa_sigaction == libc::SIG_IGN {
            continue;
        }
        action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: signal-safe: the handler does atomic accesses and kill only.
        check(unsafe { libc::sigaction(signal, &action, ptr::null_mut()) })?;
    }
    Ok(())
}

/// True after one of the caught signals.
pub fn interrupted() -> bool {
    interrupted_by() != 0
}

/// The last of the caught signals that came; 0: none did.
pub fn interrupted_by() -> libc::c_int {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// What a signal ends.
#[derive(Clone, Copy)]
pub enum Running {
    /// A child alone.
    Process(u32),
    /// A child that leads a group, and all that it has started: a fork that holds its memory, programs.
    Group(u32),
}

/// Says what a signal shall end; `None` before the child is reaped.
pub fn end_on_signal(running: Option<Running>) {
    let target = match running {
        None => 0,
        Some(Running::Process(pid)) => pid as i32,
        Some(Running::Group(leader)) => -(leader as i32),
    };
    RUNNING.store(target, Ordering::SeqCst);
    if interrupted() {
        // The signal may have come before the child was named.
        end_running();
    }
}

/// Has no terminal stop this process and what it starts: a group that is not in the foreground would stop where it says something, or asks.
pub fn ignore_terminal() {
    for signal in [libc::SIGTTIN, libc::SIGTTOU] {
        // SAFETY: no-pointers: to ignore it is to do nothing.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Ends this process when the one that started it ends.
pub fn die_with_parent() -> io::Result<()> {
    // SAFETY: no-pointers: numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_tells_why_it_failed() {
        let of = |work: fn() -> io::Result<()>| Child::fork(work).and_then(Child::wait);
        assert!(of(|| Ok(())).is_ok());
        assert_eq!(
            of(|| Err(io::Error::from_raw_os_error(libc::ENOMEM))).unwrap_err().raw_os_error(),
            Some(libc::ENOMEM)
        );
        // SAFETY: no-pointers: a signal to oneself.
        let killed = of(|| check(unsafe { libc::raise(libc::SIGKILL) }));
        assert_eq!(killed.unwrap_err().to_string(), "a signal ended the forked child: 9");
    }
}
