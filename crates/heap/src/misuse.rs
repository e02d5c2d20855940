//! Programs that free what they do not have: one line that names the pointer and what it is, and the end of the process.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

use selfpage::alloc;

/// The program freed or resized what is no block: the page allocator knows what it is, says so in one line, and ends the process.
#[unsafe(no_mangle)]
unsafe extern "C" fn selfpage_foreign(block: *const c_void) -> ! {
    // SAFETY: heap-block: it is no block of the page allocator, which is what makes it end.
    unsafe { alloc::free(NonNull::new(block.cast_mut().cast()).unwrap_or(NonNull::dangling())) };
    std::process::abort()
}

/// The program passed `call` an object that it had freed.
#[unsafe(no_mangle)]
unsafe extern "C" fn selfpage_freed_already(call: *const c_char, block: *const c_void) -> ! {
    // SAFETY: c-library: the name is a literal of `heap.c`.
    let call = unsafe { CStr::from_ptr(call) }.to_str().unwrap_or("free");
    alloc::end_for_freed_already(call, block.addr())
}

/// mimalloc found one of its lists changed by somebody else.
#[unsafe(no_mangle)]
extern "C" fn selfpage_damaged() -> ! {
    let line = b"selfpage: free: a block was freed twice, or written to after it was freed\n";
    // SAFETY: raw-call: the bytes outlive the call.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    std::process::abort()
}
