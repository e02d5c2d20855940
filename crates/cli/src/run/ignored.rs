//! Signals that were ignored when this program began. Two of them it would not pass on so: Rust's runtime ignores SIGPIPE before `main`,
//! and has programs that it starts not ignore it; SIGCHLD has a handler here.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// A bit for each, the first for signal 1.
static IGNORED: AtomicU32 = AtomicU32::new(0);

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_THE_RUNTIME: extern "C" fn() = look;

extern "C" fn look() {
    for signal in 1..32 {
        // SAFETY: plain-old-data, out-pointer: the structure is filled in, and outlives the call, which changes nothing.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, ptr::null(), &raw mut action);
            action
        };
        if action.sa_sigaction == libc::SIG_IGN {
            IGNORED.fetch_or(1 << (signal - 1), Ordering::Relaxed);
        }
    }
}

/// Whether this signal was.
pub fn is(signal: c_int) -> bool {
    IGNORED.load(Ordering::Relaxed) >> (signal - 1) & 1 == 1
}

/// Has the program that `command` starts ignore the two as well.
pub fn pass_on(command: &mut Command) {
    for signal in [libc::SIGPIPE, libc::SIGCHLD].into_iter().filter(|signal| is(*signal)) {
        let ignore = move || {
            // SAFETY: signal-safe: signal(2) alone is called between fork and exec.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
            Ok(())
        };
        // SAFETY: signal-safe: as above.
        unsafe { command.pre_exec(ignore) };
    }
}
