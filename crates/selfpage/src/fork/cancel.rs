//! Cancellation of a thread that forks.
#![allow(unsafe_code)]

use std::ffi::c_int;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// As glibc and musl have it.
const DISABLED: c_int = 1;

/// The calling thread is not cancelled (`pthread_cancel`) until this is dropped. fork(2) is no point of cancellation, but what its handlers
/// do has some: `close`, a sleep.
pub(super) struct Uncancelled(c_int);

impl Uncancelled {
    pub(super) fn begin() -> Uncancelled {
        let mut before = 0;
        // SAFETY: c-library: a state, and a place for the one before.
        unsafe { pthread_setcancelstate(DISABLED, &raw mut before) };
        Uncancelled(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: c-library: a state that it gave.
        unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
    }
}
