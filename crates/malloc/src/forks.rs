//! Handlers of forks, as libraries and programs register them: the heap's are there before the first of them.
//!
//! What a fork runs first is the handler that came last. The heap's, the first, takes its locks after all others have theirs: whoever has one
//! of those may wait for memory, and must not wait for a fork that waits for him.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::sys;

type Handler = Option<unsafe extern "C" fn()>;
type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;

/// The C library's own function, or that of somebody between.
fn next() -> Register {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let mut found = FOUND.load(Ordering::Relaxed);
    if found.is_null() {
        // For the heap's own handlers, as a rule: later it could be between the program's `dlopen` and its `dlerror`.
        // SAFETY: c-library: the name ends with NUL.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"__register_atfork".as_ptr()) };
        if found.is_null() {
            sys::say(format_args!("selfpage: this C library lacks __register_atfork, which every glibc has\n"));
            std::process::abort();
        }
        FOUND.store(found, Ordering::Relaxed);
    }
    // SAFETY: c-library: the function of that name has that type.
    unsafe { std::mem::transmute::<*mut c_void, Register>(found) }
}

/// As in the C library, where `pthread_atfork` comes here, also for the heap's own handlers.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    library: *mut c_void,
) -> c_int {
    selfpage_heap::attend_forks();
    // SAFETY: c-library: passed on from our caller.
    unsafe { next()(prepare, parent, child, library) }
}
