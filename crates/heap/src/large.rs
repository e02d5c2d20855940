//! Large blocks, as the C side asks for them.

use std::ffi::c_void;

pub fn stats() -> (usize, usize, usize) {
    (0, 0, 0)
}
pub fn trim() -> bool {
    false
}
pub fn begin(_retain_bytes: Option<usize>) {}

#[unsafe(no_mangle)]
extern "C" fn selfpage_large_allocate(_size: usize, _align: usize, _zeroed: bool) -> *mut c_void {
    // SAFETY: x
    unsafe { *libc::__errno_location() = libc::ENOMEM };
    std::ptr::null_mut()
}
#[unsafe(no_mangle)]
extern "C" fn selfpage_large_reallocate(_block: *mut c_void, _size: usize) -> *mut c_void {
    std::ptr::null_mut()
}
#[unsafe(no_mangle)]
extern "C" fn selfpage_large_free(_block: *mut c_void) -> bool {
    false
}
#[unsafe(no_mangle)]
extern "C" fn selfpage_large_usable(_block: *const c_void) -> usize {
    0
}
#[unsafe(no_mangle)]
extern "C" fn selfpage_foreign(_block: *const c_void, _damaged: bool) -> ! {
    std::process::abort()
}
