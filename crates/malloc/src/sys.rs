//! What this library needs of the system beside memory.

use std::io::Write;

/// The calling thread's errno.
pub fn errno() -> i32 {
    // SAFETY: thread-local-c: the C library's own location.
    unsafe { *libc::__errno_location() }
}

/// Sets it.
pub fn set_errno(errno: i32) {
    // SAFETY: thread-local-c: the C library's own location.
    unsafe { *libc::__errno_location() = errno };
}

/// Writes to standard error, in one piece; what does not fit is cut off. Where a program begins and ends, nothing is allocated for it.
pub fn say(text: std::fmt::Arguments<'_>) {
    let mut lines = [0; 2048];
    let mut rest = &mut lines[..];
    let _ = rest.write_fmt(text);
    let len = 2048 - rest.len();
    // SAFETY: raw-call: the bytes outlive the call.
    unsafe { libc::write(2, lines.as_ptr().cast(), len) };
}
