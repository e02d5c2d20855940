//! An access that may fail, from which the program comes back.
#![allow(clippy::missing_safety_doc, dead_code)]

use std::cell::Cell;
use std::sync::Once;

use selfpage::{PAGE_BYTES, Region};

/// The first word of a page.
pub fn word(region: &Region, page: usize) -> *mut u64 {
    region.as_ptr().wrapping_add(page * PAGE_BYTES).cast()
}

thread_local! {
    static TRYING: Cell<*mut JumpBuffer> = const { Cell::new(std::ptr::null_mut()) };
}

/// Room for any C library's `sigjmp_buf`.
#[repr(C, align(16))]
struct JumpBuffer([u64; 64]);

unsafe extern "C" {
    #[link_name = "__sigsetjmp"]
    fn sigsetjmp(buffer: *mut JumpBuffer, save_mask: libc::c_int) -> libc::c_int;
    fn siglongjmp(buffer: *mut JumpBuffer, value: libc::c_int) -> !;
}

extern "C" fn jump(signal: libc::c_int) {
    let buffer = TRYING.get();
    if buffer.is_null() {
        // SAFETY: test: an async-signal-safe end.
        unsafe { libc::_exit(99) };
    }
    // SAFETY: test: `read` on this thread is waiting for it.
    unsafe { siglongjmp(buffer, signal) }
}

/// Has `SIGBUS` and `SIGSEGV` come to tries. Before the first domain with an upcall region, whose handler then hands on to
/// ours.
pub fn catch() {
    static ONCE: Once = Once::new();
    // SAFETY: test: installs a handler.
    ONCE.call_once(|| unsafe {
        for signal in [libc::SIGBUS, libc::SIGSEGV] {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = jump as *const () as usize;
            action.sa_flags = libc::SA_ONSTACK;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    });
}

/// Reads a word, or says which signal that ended in.
#[inline(never)]
pub fn read(at: *const u64) -> Result<u64, libc::c_int> {
    let mut buffer = JumpBuffer([0; 64]);
    // SAFETY: test: nothing with a destructor lives between set and jump.
    unsafe {
        TRYING.set(&mut buffer);
        let result = match sigsetjmp(&mut buffer, 1) {
            0 => Ok(at.read_volatile()),
            signal => Err(signal),
        };
        TRYING.set(std::ptr::null_mut());
        result
    }
}

/// Writes a word, or says which signal that ended in.
#[inline(never)]
pub fn write(at: *mut u64, word: u64) -> Result<(), libc::c_int> {
    let mut buffer = JumpBuffer([0; 64]);
    // SAFETY: test: nothing with a destructor lives between set and jump.
    unsafe {
        TRYING.set(&mut buffer);
        let result = match sigsetjmp(&mut buffer, 1) {
            0 => {
                at.write_volatile(word);
                Ok(())
            }
            signal => Err(signal),
        };
        TRYING.set(std::ptr::null_mut());
        result
    }
}

/// Jumps out of whatever the access that is being tried led to; it ends in `why`.
pub fn out(why: libc::c_int) -> ! {
    jump(why);
    unreachable!("jumps")
}
