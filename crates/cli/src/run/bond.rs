//! That the program ends where this process is killed: nobody would be left to pass signals on to it, nor to tell of its end.
#![allow(unsafe_code)]

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// Has the kernel kill what `command` starts at the end of the thread that starts it: that has to be this process's first.
pub fn tie(command: &mut Command) {
    let own = getpid();
    let bind = move || {
        // A filter may refuse it: then the program is on its own, as it would be without us.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        if is_orphan(own) {
            // Who was to hear of an error is gone.
            // SAFETY: signal-safe: _exit(2) alone is called between fork and exec.
            unsafe { libc::_exit(1) };
        }
        Ok(())
    };
    // SAFETY: signal-safe: system calls alone are made between fork and exec.
    unsafe { command.pre_exec(bind) };
}

/// Whether that process was gone before the kernel was told. One in another namespace of numbers has none here.
fn is_orphan(parent: Pid) -> bool {
    getppid().is_some_and(|now| now != parent)
}
