//! The malloc family, as C sees it.

use std::arch::naked_asm;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::heap::{self, Asker};
use crate::space::PAGE;
use crate::sys;

/// Where the C library and the dynamic loader have their code: start and end of each.
static CODE: [(AtomicUsize, AtomicUsize); 2] = [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; 2];

/// Finds the C library's code, and the loader's.
pub fn find_libraries() {
    let mut found = 0usize;
    // SAFETY: c-library: the callback matches, and `found` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(see_library), (&raw mut found).cast()) };
}

unsafe extern "C" fn see_library(info: *mut libc::dl_phdr_info, _size: usize, found: *mut c_void) -> c_int {
    // SAFETY: c-library: the loader passes a description that is valid during the call, and what `find_libraries` passed.
    let (info, found) = unsafe { (&*info, &mut *found.cast::<usize>()) };
    // SAFETY: c-library: a name is a string, or null.
    let name = unsafe { if info.dlpi_name.is_null() { return 0 } else { std::ffi::CStr::from_ptr(info.dlpi_name) } };
    let last = name.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    if !(last == b"libc.so.6" || last.starts_with(b"ld-linux")) || *found >= CODE.len() {
        return 0;
    }
    // SAFETY: c-library: as many headers as it says.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let code = headers.iter().filter(|one| one.p_type == libc::PT_LOAD && one.p_flags & libc::PF_X != 0);
    for header in code {
        let start = info.dlpi_addr as usize + header.p_vaddr as usize;
        CODE[*found].1.store(start + header.p_memsz as usize, Ordering::Relaxed);
        CODE[*found].0.store(start, Ordering::Relaxed);
    }
    *found += 1;
    0
}

/// Who called, by the address that the call returns to.
fn asker(returns_to: usize) -> Asker {
    let inside = |(start, end): &(AtomicUsize, AtomicUsize)| {
        (start.load(Ordering::Relaxed)..end.load(Ordering::Relaxed)).contains(&returns_to)
    };
    if CODE.iter().any(inside) { Asker::Library } else { Asker::Program }
}

fn or_enomem(block: *mut u8) -> *mut c_void {
    if block.is_null() {
        sys::set_errno(libc::ENOMEM);
    }
    block.cast()
}

extern "C" fn malloc_for(size: usize, returns_to: usize) -> *mut c_void {
    or_enomem(heap::allocate(size, 1, asker(returns_to)))
}

extern "C" fn calloc_for(count: usize, size: usize, returns_to: usize) -> *mut c_void {
    or_enomem(match count.checked_mul(size) {
        Some(size) => heap::allocate_zeroed(size, asker(returns_to)),
        None => std::ptr::null_mut(),
    })
}

unsafe extern "C" fn realloc_for(block: *mut c_void, size: usize, returns_to: usize) -> *mut c_void {
    if block.is_null() {
        return malloc_for(size, returns_to);
    }
    // SAFETY: heap-block: C promises what we need.
    unsafe {
        if size == 0 {
            heap::free(block.cast());
            return std::ptr::null_mut();
        }
        or_enomem(heap::reallocate(block.cast(), size, asker(returns_to)))
    }
}

unsafe extern "C" fn reallocarray_for(block: *mut c_void, count: usize, size: usize, returns_to: usize) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: heap-block: C promises what we need.
        Some(size) => unsafe { realloc_for(block, size, returns_to) },
        None => or_enomem(std::ptr::null_mut()),
    }
}

extern "C" fn memalign_for(align: usize, size: usize, returns_to: usize) -> *mut c_void {
    // As the C library: what is no power of two is rounded up to one.
    match align.checked_next_power_of_two() {
        Some(align) => or_enomem(heap::allocate(size, align, asker(returns_to))),
        None => or_enomem(std::ptr::null_mut()),
    }
}

unsafe extern "C" fn posix_memalign_for(out: *mut *mut c_void, align: usize, size: usize, returns_to: usize) -> c_int {
    if !align.is_power_of_two() || align % size_of::<usize>() != 0 {
        return libc::EINVAL;
    }
    let block = heap::allocate(size, align, asker(returns_to));
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: c-library: C promises a place for the result.
    unsafe { out.write(block.cast()) };
    0
}

extern "C" fn valloc_for(size: usize, returns_to: usize) -> *mut c_void {
    memalign_for(PAGE, size, returns_to)
}

extern "C" fn pvalloc_for(size: usize, returns_to: usize) -> *mut c_void {
    match size.checked_next_multiple_of(PAGE) {
        Some(size) => memalign_for(PAGE, size, returns_to),
        None => or_enomem(std::ptr::null_mut()),
    }
}

/// An exported function that passes the address it returns to on, as one more argument in `$register`.
macro_rules! exports {
    ($($name:ident($($type:ty),*) -> $result:ty, $register:literal, $to:ident;)*) => {
        $(
            /// As in the C library.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name($(_: $type),*) -> $result {
                naked_asm!(concat!("mov ", $register, ", [rsp]"), "jmp {to}", to = sym $to)
            }
        )*
    };
}

exports! {
    malloc(usize) -> *mut c_void, "rsi", malloc_for;
    calloc(usize, usize) -> *mut c_void, "rdx", calloc_for;
    realloc(*mut c_void, usize) -> *mut c_void, "rdx", realloc_for;
    reallocarray(*mut c_void, usize, usize) -> *mut c_void, "rcx", reallocarray_for;
    memalign(usize, usize) -> *mut c_void, "rdx", memalign_for;
    aligned_alloc(usize, usize) -> *mut c_void, "rdx", memalign_for;
    posix_memalign(*mut *mut c_void, usize, usize) -> c_int, "rcx", posix_memalign_for;
    valloc(usize) -> *mut c_void, "rsi", valloc_for;
    pvalloc(usize) -> *mut c_void, "rsi", pvalloc_for;
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    if !block.is_null() {
        // SAFETY: heap-block: C promises what we need.
        unsafe { heap::free(block.cast()) };
    }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> usize {
    // SAFETY: heap-block: C promises what we need.
    if block.is_null() { 0 } else { unsafe { heap::usable_bytes(block.cast()) } }
}

/// As in the C library. There is nothing to trim that is not trimmed already.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(_pad: usize) -> c_int {
    0
}
