//! Signals that whoever started this program has blocked.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr;

/// Lets these signals come to this thread from here on, and those of them that wait already.
pub fn let_come(signals: impl IntoIterator<Item = c_int>) {
    // SAFETY: plain-old-data, out-pointer: the set is filled in, and outlives the calls.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut());
    }
}
