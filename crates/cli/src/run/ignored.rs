//! Signals that were ignored when this program began, and that it would not pass on so: Rust's runtime ignores SIGPIPE before `main`, and
//! has programs that it starts not ignore it; SIGCHLD has a handler here.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

const SIGNALS: [c_int; 2] = [libc::SIGPIPE, libc::SIGCHLD];
static IGNORED: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_THE_RUNTIME: extern "C" fn() = look;

extern "C" fn look() {
    for (signal, ignored) in SIGNALS.into_iter().zip(&IGNORED) {
        // SAFETY: plain-old-data, out-pointer: the structure is filled in, and outlives the call, which changes nothing.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, ptr::null(), &raw mut action);
            action
        };
        ignored.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    }
}

/// Has the program that `command` starts ignore them as well.
pub fn pass_on(command: &mut Command) {
    let ignored = SIGNALS.into_iter().zip(&IGNORED).filter(|(_, ignored)| ignored.load(Ordering::Relaxed));
    for (signal, _) in ignored {
        let ignore = move || {
            // SAFETY: signal-safe: signal(2) alone is called between fork and exec.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
            Ok(())
        };
        // SAFETY: signal-safe: as above.
        unsafe { command.pre_exec(ignore) };
    }
}
