//! The malloc family, as C sees it. C++'s `new` and `delete` of the standard library call it, and so do the C library's `reallocarray`,
//! `free_sized` and `free_aligned_sized`: ours would not know that a program has a `realloc` and a `free` of its own, and no more.

use std::ffi::{c_int, c_void};

use crate::sys;

const PAGE: usize = 4096;
/// No program has an address that is a multiple of more.
const MOST_ALIGNED: usize = 1 << 47;

/// As in the C library. One jump: a call would go by way of the table of addresses that other libraries may change.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn malloc(_size: usize) -> *mut c_void {
    std::arch::naked_asm!("jmp {}", sym selfpage_heap::selfpage_heap_malloc)
}

/// As in the C library.
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    selfpage_heap::allocate(size)
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    selfpage_heap::allocate_zeroed(count, size)
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn free(_block: *mut c_void) {
    std::arch::naked_asm!("jmp {}", sym selfpage_heap::selfpage_heap_free)
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    // SAFETY: heap-block: C promises what we need.
    unsafe { selfpage_heap::free(block) }
}

/// As in the C library: of size 0 it frees.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: heap-block: C promises what we need.
    unsafe {
        if size == 0 && !block.is_null() {
            selfpage_heap::free(block);
            return std::ptr::null_mut();
        }
        selfpage_heap::reallocate(block, size)
    }
}

fn out_of_memory() -> *mut c_void {
    refused(libc::ENOMEM)
}

fn refused(errno: c_int) -> *mut c_void {
    sys::set_errno(errno);
    std::ptr::null_mut()
}

/// A block at a multiple of `align`, a power of two.
fn aligned(align: usize, size: usize) -> *mut c_void {
    if align > MOST_ALIGNED { out_of_memory() } else { selfpage_heap::allocate_aligned(align, size) }
}

/// As in the C library: an alignment that is no power of two is rounded up to one.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    match align.checked_next_power_of_two() {
        Some(align) => aligned(align, size),
        None => refused(libc::EINVAL),
    }
}

/// As in C17, and in the C library from 2.38 on: the alignment is a power of two; the size need not be a multiple of it.
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    if align.is_power_of_two() { aligned(align, size) } else { refused(libc::EINVAL) }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<usize>()) {
        return libc::EINVAL;
    }
    let before = sys::errno();
    let block = aligned(align, size);
    if block.is_null() {
        sys::set_errno(before);
        return libc::ENOMEM;
    }
    // SAFETY: c-library: C promises a place for the result.
    unsafe { out.write(block) };
    0
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn valloc(size: usize) -> *mut c_void {
    selfpage_heap::allocate_aligned(PAGE, size)
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(size: usize) -> *mut c_void {
    match size.checked_next_multiple_of(PAGE) {
        Some(size) => selfpage_heap::allocate_aligned(PAGE, size),
        None => out_of_memory(),
    }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> usize {
    // SAFETY: heap-block: C promises what we need.
    unsafe { selfpage_heap::usable_bytes(block) }
}

/// As in the C library: 1 if memory went back to the kernel that larger blocks had left. Of objects nobody can tell.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(_pad: usize) -> c_int {
    c_int::from(selfpage_heap::trim())
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo2() -> libc::mallinfo2 {
    let stats = selfpage_heap::stats();
    let kept_bytes = stats.large_retained_bytes.saturating_sub(stats.large_bytes);
    selfpage_heap::mallinfo2(stats.object_bytes, stats.large_bytes, kept_bytes)
}
