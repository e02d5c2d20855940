//! What a service manager (systemd) says to the process that it has started, by that process's number: here are your sockets, send a sign of
//! life, it is you whom I have started. It has started `run`, and whoever finds another number there takes it for somebody else's.

use std::ffi::{CStr, CString};

use crate::sys;

/// Has that name this process, where it names `run`: then the program is whom it is meant for. Those that it executes or forks find its number,
/// and leave it. The kernel is not asked whose child this is: a filter may forbid what no domain takes.
pub fn answer_for(run: u32) {
    if takes_over(c"LISTEN_PID", run) {
        // The same once more, by a number that the program does not have: with it `LISTEN_PID` alone would not do.
        // SAFETY: c-library: the name ends with NUL, and nobody else looks before the program's first line.
        unsafe { libc::unsetenv(c"LISTEN_PIDFDID".as_ptr()) };
    }
    takes_over(c"WATCHDOG_PID", run);
    takes_over(c"SYSTEMD_EXEC_PID", run);
}

fn takes_over(variable: &CStr, run: u32) -> bool {
    // SAFETY: c-library: the name ends with NUL, and so does what it stands for, which nobody changes before the program's first line.
    let named = unsafe { libc::getenv(variable.as_ptr()).as_ref().map(|named| CStr::from_ptr(named).to_bytes()) };
    if named != Some(run.to_string().as_bytes()) {
        return false;
    }
    let Ok(own) = CString::new(sys::pid().to_string()) else { return false };
    // SAFETY: c-library: both end with NUL, and the C library copies them.
    unsafe { libc::setenv(variable.as_ptr(), own.as_ptr(), 1) == 0 }
}
