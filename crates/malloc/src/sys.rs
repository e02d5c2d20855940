//! What this library needs of the system beside memory.

use std::fmt::Write as _;

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

/// Lines on the stack: where a program begins and ends, nothing is allocated for them.
pub struct Lines {
    bytes: [u8; 2048],
    len: usize,
}

impl std::fmt::Write for Lines {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + text.len()).ok_or(std::fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

/// Writes to standard error, in one piece; what does not fit is cut off.
pub fn say(text: std::fmt::Arguments<'_>) {
    let mut lines = Lines { bytes: [0; 2048], len: 0 };
    let _ = lines.write_fmt(text);
    // SAFETY: raw-call: the bytes outlive the call.
    unsafe { libc::write(2, lines.bytes.as_ptr().cast(), lines.len) };
}
