//! What the kernel lets this process have.

use linux_raw_sys::general as raw;

use super::errno::Errno;
use super::syscall::call;

/// What there is a limit on, each in bytes unless it says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resource {
    /// All mappings together (`RLIMIT_AS`).
    Addresses = raw::RLIMIT_AS as isize,
    /// Private mappings that may be written (`RLIMIT_DATA`).
    Data = raw::RLIMIT_DATA as isize,
    /// The length that a file may come to (`RLIMIT_FSIZE`).
    FileSize = raw::RLIMIT_FSIZE as isize,
    /// Mappings that are locked in memory (`RLIMIT_MEMLOCK`).
    LockedMemory = raw::RLIMIT_MEMLOCK as isize,
    /// Open files, by number (`RLIMIT_NOFILE`).
    OpenFiles = raw::RLIMIT_NOFILE as isize,
    /// The stack of a program's first thread, with its arguments and environment (`RLIMIT_STACK`).
    Stack = raw::RLIMIT_STACK as isize,
}

/// The limit on a resource at present; `None`: there is none.
///
/// # Context
/// Any.
///
/// # Errors
/// What a filter of system calls says. Then nothing is known: there may be a limit.
pub fn of_this_process(resource: Resource) -> Result<Option<u64>, Errno> {
    let mut limit = raw::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: syscall-contract: the structure is borrowed until the call returns; no limit is set, and 0 is the calling process.
    unsafe { call(raw::__NR_prlimit64, [0, resource as usize, 0, &raw mut limit as usize, 0, 0]) }?;
    Ok(Some(limit.rlim_cur).filter(|limit| *limit != u64::MAX))
}
