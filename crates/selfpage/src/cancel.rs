//! Cancellation of threads of the program's that are in a call of ours, whose frames nobody may unwind.
//!
//! For this library, and `selfpage run`.
#![allow(unsafe_code)]

use std::ffi::c_int;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// As glibc and musl have it.
const DISABLED: c_int = 1;

/// The calling thread is not cancelled (`pthread_cancel`) until this is dropped. What C calls no point of cancellation, as fork(2) and
/// mremap(2), does things here that are some: `open`, `close`, a sleep.
pub struct Uncancelled(c_int);

impl Uncancelled {
    /// From now on.
    ///
    /// # Context
    /// Any.
    #[must_use]
    pub fn begin() -> Uncancelled {
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
