//! The functions that ours stand in front of.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the C library that we export too.
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
            crate::sys::say("selfpage: this C library lacks a function that every glibc has\n");
            std::process::abort();
        }
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Declares a function of the C library under another name, with its type.
macro_rules! next {
    ($static:ident: $name:literal as fn($($type:ty),*) $(-> $result:ty)?, $call:ident) => {
        static $static: $crate::next::Next = $crate::next::Next::new($name);
        /// The C library's own function.
        fn $call() -> unsafe extern "C-unwind" fn($($type),*) $(-> $result)? {
            // SAFETY: c-library: the function of that name has that type.
            unsafe { std::mem::transmute($static.get()) }
        }
    };
}
pub(crate) use next;
