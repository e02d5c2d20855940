//! The functions of the C library that a preloaded library of ours stands in front of.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function that the library exports too.
#[doc(hidden)]
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    /// By its name; looked for when it is first called.
    pub const fn new(name: &'static CStr) -> Next {
        Next { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The one after ours.
    pub fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: c-library: the name ends with NUL.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if found.is_null() {
            is_lacking();
        }
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Ends the process.
pub fn is_lacking() -> ! {
    let line = b"selfpage: this C library lacks a function that every glibc has\n";
    // SAFETY: raw-call: the bytes outlive the call.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    std::process::abort();
}

/// Declares a function of the C library under another name, with its type.
#[doc(hidden)]
#[macro_export]
macro_rules! next {
    ($static:ident: $name:literal as fn($($type:ty),*) $(-> $result:ty)?, $call:ident) => {
        static $static: $crate::Next = $crate::Next::new($name);
        /// The C library's own function.
        fn $call() -> unsafe extern "C-unwind" fn($($type),*) $(-> $result)? {
            // SAFETY: c-library: the function of that name has that type.
            unsafe { std::mem::transmute($static.get()) }
        }
    };
}
