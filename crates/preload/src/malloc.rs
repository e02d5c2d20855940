//! The malloc family, as C sees it. The C library's `reallocarray`, `free_sized` and `free_aligned_sized` call it, or what the program has of its own;
//! the first jumps to `realloc`, so that who called it stays the one who asks.

use std::arch::naked_asm;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::heap::{self, Asker};
use crate::space::PAGE;
use crate::sys;

/// Where a library has its code.
struct Code {
    start: AtomicUsize,
    end: AtomicUsize,
}

impl Code {
    const fn unknown() -> Code {
        Code { start: AtomicUsize::new(0), end: AtomicUsize::new(0) }
    }

    fn holds(&self, address: usize) -> bool {
        (self.start.load(Ordering::Relaxed)..self.end.load(Ordering::Relaxed)).contains(&address)
    }
}

static C_LIBRARY: Code = Code::unknown();
static LOADER: Code = Code::unknown();
/// This library.
static OURS: Code = Code::unknown();

/// Finds the code of the C library, of the loader, and our own.
pub fn find_libraries() {
    // SAFETY: c-library: the callback matches.
    unsafe { libc::dl_iterate_phdr(Some(see_library), std::ptr::null_mut()) };
}

unsafe extern "C" fn see_library(info: *mut libc::dl_phdr_info, _size: usize, _: *mut c_void) -> c_int {
    // SAFETY: c-library: the loader passes a description that is valid during the call.
    let info = unsafe { &*info };
    // SAFETY: c-library: a name is a string, or null.
    let name = unsafe { if info.dlpi_name.is_null() { return 0 } else { std::ffi::CStr::from_ptr(info.dlpi_name) } };
    let last = name.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    // SAFETY: c-library: as many headers as it says.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    for header in headers.iter().filter(|one| one.p_type == libc::PT_LOAD && one.p_flags & libc::PF_X != 0) {
        let start = info.dlpi_addr as usize + header.p_vaddr as usize;
        let end = start + header.p_memsz as usize;
        let code = match last {
            _ if (start..end).contains(&(find_libraries as *const () as usize)) => &OURS,
            b"libc.so.6" => &C_LIBRARY,
            last if last.starts_with(b"ld-linux") => &LOADER,
            _ => continue,
        };
        code.start.store(start, Ordering::Relaxed);
        code.end.store(end, Ordering::Relaxed);
    }
    0
}

/// Who called, by the address that the call returns to.
fn asker(returns_to: usize) -> Asker {
    if C_LIBRARY.holds(returns_to) {
        Asker::Library
    } else if LOADER.holds(returns_to) {
        Asker::Loader
    } else if OURS.holds(returns_to) {
        Asker::Ourselves
    } else {
        Asker::Program
    }
}

fn or_enomem(block: *mut u8) -> *mut c_void {
    if block.is_null() {
        sys::set_errno(libc::ENOMEM);
    }
    block.cast()
}

/// There is no such alignment.
fn no_alignment() -> *mut c_void {
    sys::set_errno(libc::EINVAL);
    std::ptr::null_mut()
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

extern "C" fn memalign_for(align: usize, size: usize, returns_to: usize) -> *mut c_void {
    // As the C library: what is no power of two is rounded up to one.
    match align.checked_next_power_of_two() {
        Some(align) => or_enomem(heap::allocate(size, align, asker(returns_to))),
        None => no_alignment(),
    }
}

extern "C" fn aligned_alloc_for(align: usize, size: usize, returns_to: usize) -> *mut c_void {
    // As the C library from 2.38 on: what is no power of two is refused.
    if align.is_power_of_two() { memalign_for(align, size, returns_to) } else { no_alignment() }
}

unsafe extern "C" fn posix_memalign_for(out: *mut *mut c_void, align: usize, size: usize, returns_to: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<usize>()) {
        return libc::EINVAL;
    }
    let before = sys::errno();
    let block = heap::allocate(size, align, asker(returns_to));
    if block.is_null() {
        sys::set_errno(before);
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
    memalign(usize, usize) -> *mut c_void, "rdx", memalign_for;
    aligned_alloc(usize, usize) -> *mut c_void, "rdx", aligned_alloc_for;
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

/// As in the C library: 1 if memory went back to the kernel, which a domain's does not. What is free is dropped.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(_pad: usize) -> c_int {
    heap::trim();
    0
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn mallinfo2() -> libc::mallinfo2 {
    let (objects, large) = heap::used_bytes();
    selfpage_heap::mallinfo2(objects + heap::unmanaged_bytes(), large, 0)
}
