//! The release of mimalloc that `selfpage-heap` keeps, without our pages, checks and large blocks: `selfpage bench objects` preloads it
//! to tell what those cost.

use std::ffi::{c_int, c_void};

// Linked for its C functions only.
use libmimalloc_sys as _;

unsafe extern "C" {
    fn mi_malloc(size: usize) -> *mut c_void;
    fn mi_calloc(count: usize, size: usize) -> *mut c_void;
    fn mi_realloc(block: *mut c_void, size: usize) -> *mut c_void;
    fn mi_free(block: *mut c_void);
    fn mi_malloc_aligned(size: usize, align: usize) -> *mut c_void;
    fn mi_usable_size(block: *const c_void) -> usize;
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    // SAFETY: heap-block: any size may be asked for.
    unsafe { mi_malloc(size) }
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    // SAFETY: heap-block: any size may be asked for.
    unsafe { mi_calloc(count, size) }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: heap-block: C promises what is needed.
    unsafe { mi_realloc(block, size) }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    // SAFETY: heap-block: C promises what is needed.
    unsafe { mi_free(block) }
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    // SAFETY: heap-block: any size and alignment may be asked for.
    unsafe { mi_malloc_aligned(size, align) }
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    memalign(align, size)
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    let block = memalign(align, size);
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: c-library: C promises a place for the result.
    unsafe { out.write(block) };
    0
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> usize {
    // SAFETY: heap-block: C promises what is needed.
    unsafe { mi_usable_size(block) }
}
