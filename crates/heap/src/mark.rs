//! A mark that each thread can have, and that an allocator can look at.

unsafe extern "C" {
    fn selfpage_mark_thread();
    fn selfpage_is_thread_marked() -> bool;
}

/// The calling thread has it from now on.
pub fn set() {
    // SAFETY: thread-local-c: plain memory of the thread's own.
    unsafe { selfpage_mark_thread() };
}

/// Whether it has.
pub fn is_set() -> bool {
    // SAFETY: thread-local-c: as above.
    unsafe { selfpage_is_thread_marked() }
}
