//! Signals that this thread has blocked: by whoever started this program, and for a moment; and one that ends it, blocked or not.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;

/// Lets these signals come to this thread from here on, and those of them that wait already.
pub fn let_come(signals: impl IntoIterator<Item = c_int>) {
    let set = set(signals);
    // SAFETY: plain-old-data, out-pointer: the set is filled in, and outlives the call.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut()) };
}

/// Blocks these signals, which are about to have handlers, until they are let come; and has what `command` starts begin as if neither were so.
pub fn hold_back(command: &mut Command, signals: &[c_int]) {
    let set = set(signals.iter().copied());
    // SAFETY: plain-old-data, out-pointer: the sets are filled in, and outlive the call.
    let before = unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before);
        before
    };
    let signals = signals.to_vec();
    let restore = move || {
        // SAFETY: signal-safe: signal(2) and sigprocmask(2) alone are called between fork and exec.
        unsafe {
            signals.iter().for_each(|signal| _ = libc::signal(*signal, libc::SIG_DFL));
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        }
        Ok(())
    };
    // SAFETY: signal-safe: as above.
    unsafe { command.pre_exec(restore) };
}

/// Sends this thread a signal that waits until it is let come, or forgotten.
pub fn hold(signal: c_int) {
    let set = set([signal]);
    // SAFETY: plain-old-data, out-pointer: the set is filled in, and outlives the call.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
        libc::raise(signal);
    }
}

/// Has a signal that is held never come.
pub fn forget(signal: c_int) {
    let set = set([signal]);
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: plain-old-data, out-pointer: the set is filled in, and outlives the call, as the time does.
    unsafe { libc::sigtimedwait(&raw const set, ptr::null_mut(), &raw const at_once) };
    let_come([signal]);
}

/// Ends this process by a signal that has ended another in its stead, with no core of its own. If that does not, as in process 1 of a container,
/// the status that a shell has for it.
pub fn end_by(signal: c_int) -> i32 {
    // SAFETY: no-pointers: plain numbers. Without it a program that takes cores would get one, whatever the limit is.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::signal(signal, libc::SIG_DFL);
    }
    let_come([signal]);
    // SAFETY: no-pointers: a number.
    unsafe { libc::raise(signal) };
    128 + signal
}

fn set(signals: impl IntoIterator<Item = c_int>) -> libc::sigset_t {
    // SAFETY: plain-old-data, out-pointer: the set is filled in, and outlives the calls.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}
