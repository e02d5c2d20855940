//! Programs that free what they do not have: one line that names the pointer and what it is, and the end of the process.

use std::ffi::{CStr, c_char, c_void};
use std::fmt::Write;
use std::ptr::NonNull;

/// A line of text in place: there is no allocator to take memory from.
struct Line {
    bytes: [u8; 160],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + text.len()).ok_or(std::fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

fn die(said: std::fmt::Arguments<'_>) -> ! {
    let mut line = Line { bytes: [0; 160], len: 0 };
    let _ = line.write_fmt(said);
    // SAFETY: raw-call: the bytes outlive the call.
    unsafe { libc::write(2, line.bytes.as_ptr().cast(), line.len) };
    std::process::abort()
}

/// The program freed or resized what is no block: the page allocator knows what it is, says so in one line, and ends the process.
#[unsafe(no_mangle)]
unsafe extern "C" fn selfpage_foreign(block: *const c_void) -> ! {
    // SAFETY: heap-block: it is no block of the page allocator, which is what makes it end.
    unsafe { selfpage::alloc::free(NonNull::new(block.cast_mut().cast()).unwrap_or(NonNull::dangling())) };
    std::process::abort()
}

/// The program passed `call` an object that it had freed.
#[unsafe(no_mangle)]
unsafe extern "C" fn selfpage_freed_already(call: *const c_char, block: *const c_void) -> ! {
    // SAFETY: c-library: the name is a literal of `heap.c`.
    let call = unsafe { CStr::from_ptr(call) }.to_str().unwrap_or("free");
    die(format_args!("selfpage: {call}({block:p}): a block that was freed already\n"))
}

/// mimalloc found one of its lists changed by somebody else.
#[unsafe(no_mangle)]
extern "C" fn selfpage_damaged() -> ! {
    die(format_args!("selfpage: free: a block was freed twice, or written to after it was freed\n"))
}
