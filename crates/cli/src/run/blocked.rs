//! Signals that this thread has blocked: by whoever started this program, and for a moment.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr;

/// Lets these signals come to this thread from here on, and those of them that wait already.
pub fn let_come(signals: impl IntoIterator<Item = c_int>) {
    let set = set(signals);
    // SAFETY: plain-old-data, out-pointer: the set is filled in, and outlives the call.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut()) };
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
