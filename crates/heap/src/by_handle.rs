//! `dlsym` of a preloaded library of ours: whoever asks for the C library's functions by its handle, as foreign-function interfaces do, gets
//! those that the rest of the program has. Else it would have two of a kind: what `strdup` gives is ours, and the C library's `free` ends
//! the process at it.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::next::Next;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The C library's own `dlsym`. It may be asked for before our constructors have run.
#[doc(hidden)]
pub extern "C" fn next_dlsym() -> Dlsym {
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let mut next = NEXT.load(Ordering::Relaxed);
    // By its version, of 2.34 or before: ours has none, and `dlsym` cannot be asked for itself.
    for version in [c"GLIBC_2.34", c"GLIBC_2.2.5"] {
        if next.is_null() {
            // SAFETY: c-library: both names end with NUL. An error is forgotten with the call of `dlsym` that follows.
            next = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        }
    }
    if next.is_null() {
        crate::next::is_lacking();
    }
    NEXT.store(next, Ordering::Relaxed);
    // SAFETY: c-library: the function of that name has that type.
    unsafe { std::mem::transmute(next) }
}

/// As `dlsym` with the handle of a library; in place of a function of the C library's that `ours` has by name, that one. Neither allocates nor
/// locks more than `dlsym` itself.
///
/// # Safety
/// *c-library*: as C has it.
#[doc(hidden)]
pub unsafe fn look_up(ours: &[(&str, *const c_void)], handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: c-library: passed on from our caller.
    let found = unsafe { next_dlsym()(handle, name) };
    if found.is_null() {
        return found;
    }
    // SAFETY: c-library: a string, which `dlsym` has read.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    match ours.iter().find(|(one, _)| one.as_bytes() == name) {
        // Another library has its own under that name.
        Some((_, function)) if is_the_c_librarys(found) => function.cast_mut(),
        _ => found,
    }
}

/// A function that is the C library's in any case. It is looked for past the program, which may have an address of its own for it.
static VERSION: Next = Next::new(c"gnu_get_libc_version");

fn is_the_c_librarys(function: *const c_void) -> bool {
    let there = library_of(function);
    there.is_some() && there == library_of(VERSION.get())
}

/// Where the library is loaded that has a function.
fn library_of(function: *const c_void) -> Option<*mut c_void> {
    // SAFETY: plain-old-data: the structure is addresses, which may be null.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: out-pointer: it outlives the call.
    let is_known = unsafe { libc::dladdr(function, &raw mut found) };
    (is_known != 0).then_some(found.dli_fbase)
}

/// Exports `dlsym`, for functions that are exported too, by the module that each is in.
#[doc(hidden)]
#[macro_export]
macro_rules! by_handle {
    ($($module:ident: $($name:ident)*;)*) => {
        const OURS: &[(&str, *const c_void)] = &[
            $($((stringify!($name), $module::$name as *const c_void),)*)*
            ("dlsym", dlsym as *const c_void),
        ];

        unsafe extern "C" fn look_up(handle: *mut c_void, name: *const c_char) -> *mut c_void {
            // SAFETY: c-library: passed on from our caller.
            unsafe { $crate::look_up(OURS, handle, name) }
        }

        /// As in the C library, but for its own functions by a handle. `RTLD_NEXT` (-1) and `RTLD_DEFAULT` (0) mean what they do to our caller,
        /// which the C library tells by the address that its function returns to: so there it is jumped to.
        ///
        /// # Safety
        /// As C has it.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
            // Who unwinds through a naked function finds no more than is said here.
            std::arch::naked_asm!(
                ".cfi_startproc",
                "lea rax, [rdi + 1]",
                "cmp rax, 1",
                "ja {look_up}",
                "push rdi",
                ".cfi_adjust_cfa_offset 8",
                "push rsi",
                ".cfi_adjust_cfa_offset 8",
                "sub rsp, 8",
                ".cfi_adjust_cfa_offset 8",
                "call {next}",
                "add rsp, 8",
                ".cfi_adjust_cfa_offset -8",
                "pop rsi",
                ".cfi_adjust_cfa_offset -8",
                "pop rdi",
                ".cfi_adjust_cfa_offset -8",
                "jmp rax",
                ".cfi_endproc",
                look_up = sym look_up,
                next = sym $crate::next_dlsym,
            )
        }
    };
}

/// Exports functions under further names, each after the function that it jumps to: so that is ours, whatever the program has under the first name.
/// A caller's address stays the one to return to, and its arguments where they are.
#[doc(hidden)]
#[macro_export]
macro_rules! second_names {
    ($($function:path: $($name:ident)*;)*) => {
        $($(
            /// As the function without the prefix.
            ///
            /// # Safety
            /// As C has it.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name() {
                std::arch::naked_asm!("jmp {}", sym $function)
            }
        )*)*
    };
}
