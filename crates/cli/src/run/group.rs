//! Process groups, by number, and sessions. Outside of this PID namespace they have none: whoever lives in one that began there is in group 0.
#![allow(unsafe_code)]

use rustix::process::{Pid, getpid};

/// The group of another process.
pub fn of(process: Pid) -> Option<i32> {
    // SAFETY: no-pointers: a number.
    let group = unsafe { libc::getpgid(process.as_raw_pid()) };
    (group >= 0).then_some(group)
}

/// This process's group.
pub fn own() -> i32 {
    // SAFETY: no-pointers: nothing is handed over.
    unsafe { libc::getpgrp() }
}

/// Whether this process leads its group.
pub fn is_led() -> bool {
    own() == getpid().as_raw_pid()
}

/// Whether this process leads its session.
pub fn leads_session() -> bool {
    // SAFETY: no-pointers: a number.
    unsafe { libc::getsid(0) == getpid().as_raw_pid() }
}
