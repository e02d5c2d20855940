//! Handlers of forks, as libraries and programs register them: the heap's are there before the first of them.
//!
//! What a fork runs first is the handler that came last. The heap's, the first, takes its locks after all others have theirs: whoever has one
//! of those may wait for memory, and must not wait for a fork that waits for him.

use std::ffi::{c_int, c_void};

use selfpage_heap::next;

type Handler = Option<unsafe extern "C" fn()>;

// Looked for when the heap registers its own, as a rule: later it could be between the program's `dlopen` and its `dlerror`.
next!(NEXT: c"__register_atfork" as fn(Handler, Handler, Handler, *mut c_void) -> c_int, next_register);

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
    unsafe { next_register()(prepare, parent, child, library) }
}
