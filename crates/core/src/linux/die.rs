//! The end, where tables no longer make sense: a fixed epitaph, and no chance to do harm.

use super::syscall::call;
use linux_raw_sys::general as raw;

/// Writes to standard error as the program has it at this moment: a pager thread's own table need not have it.
///
/// # Context
/// Any.
pub fn tell(parts: &[&str]) {
    // SAFETY: syscall-contract: numbers, and bytes that are borrowed until the call returns.
    unsafe {
        let process = call(raw::__NR_getpid, [0; 6]).and_then(|own| call(raw::__NR_pidfd_open, [own, 0, 0, 0, 0, 0]));
        let errors = process.and_then(|process| call(raw::__NR_pidfd_getfd, [process, 2, 0, 0, 0, 0]));
        for part in parts {
            let _ = call(raw::__NR_write, [errors.unwrap_or(2), part.as_ptr() as usize, part.len(), 0, 0, 0]);
        }
        for taken in [errors, process].into_iter().flatten() {
            let _ = call(raw::__NR_close, [taken, 0, 0, 0, 0, 0]);
        }
    }
}

/// Writes the epitaph to standard error and ends the process with `SIGABRT`.
///
/// # Context
/// Any.
pub fn die(epitaph: &str) -> ! {
    tell(&["selfpage: ", epitaph, "\n"]);
    end()
}

/// Ends the process with `SIGABRT`, which no handler of the program's meets.
///
/// # Context
/// Any.
pub fn end() -> ! {
    // The default, whatever the program made of it, and not blocked, as it is on pager threads.
    let (default, mask) = ([0usize; 4], 1u64 << (raw::SIGABRT - 1));
    let (default, mask) = (default.as_ptr() as usize, &raw const mask as usize);
    loop {
        // SAFETY: syscall-contract: an action of four words and a mask of one, both alive; the other calls take no pointer.
        unsafe {
            let own = call(raw::__NR_getpid, [0; 6]).unwrap_or(0);
            let thread = call(raw::__NR_gettid, [0; 6]).unwrap_or(0);
            let _ = call(raw::__NR_rt_sigaction, [raw::SIGABRT as usize, default, 0, size_of::<u64>(), 0, 0]);
            let _ = call(raw::__NR_rt_sigprocmask, [raw::SIG_UNBLOCK as usize, mask, 0, size_of::<u64>(), 0, 0]);
            let _ = call(raw::__NR_tgkill, [own, thread, raw::SIGABRT as usize, 0, 0, 0]);
            let _ = call(raw::__NR_exit_group, [134, 0, 0, 0, 0, 0]);
        }
    }
}
