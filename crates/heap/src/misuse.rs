//! Programs that free what they do not have: one line that names the pointer and what it is, and the end of the process.

use std::ffi::{CStr, c_char, c_void};

use selfpage::alloc::{self, Culprit};

/// The name of a call, as `heap.c` has it.
///
/// # Safety
/// *c-library*: it is a literal of `heap.c`.
unsafe fn name(call: *const c_char) -> &'static str {
    // SAFETY: c-library: passed on from our caller.
    unsafe { CStr::from_ptr(call) }.to_str().unwrap_or("free")
}

/// The program passed `call` what is no block.
#[unsafe(no_mangle)]
unsafe extern "C" fn selfpage_foreign(call: *const c_char, block: *const c_void) -> ! {
    let addr = block.addr();
    // What another thread has made a block meanwhile was none.
    let culprit = alloc::culprit(addr).unwrap_or(Culprit::Freed);
    // SAFETY: c-library: a literal of `heap.c`.
    culprit.die(unsafe { name(call) }, addr)
}

/// The program passed `call` an object that it had freed.
#[unsafe(no_mangle)]
unsafe extern "C" fn selfpage_freed_already(call: *const c_char, block: *const c_void) -> ! {
    // SAFETY: c-library: a literal of `heap.c`.
    Culprit::Freed.die(unsafe { name(call) }, block.addr())
}

/// The program passed `call` a pointer into an object, or into memory for one.
#[unsafe(no_mangle)]
unsafe extern "C" fn selfpage_within(call: *const c_char, at: *const c_void, block: *const c_void, len: usize) -> ! {
    let culprit = Culprit::Inside { block: block.addr(), len_bytes: len };
    // SAFETY: c-library: a literal of `heap.c`.
    culprit.die(unsafe { name(call) }, at.addr())
}

/// mimalloc found one of its lists changed by somebody else.
#[unsafe(no_mangle)]
extern "C" fn selfpage_damaged() -> ! {
    let line = b"selfpage: free: a block was freed twice, or written to after it was freed\n";
    // SAFETY: raw-call: the bytes outlive the call.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    std::process::abort()
}
