//! The mmap family, what lends memory, and what changes a thread's rights, or the files that it sees, as C has them; and `syscall(2)`,
//! which reaches the same calls by number.

use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_long, c_ulong, c_void};

use crate::caller::Caller;
use crate::sys::{call, in_c};
use crate::{clone, filters, futex, lending, maps, process, rights, threads};

/// Exported functions that have the kernel's arguments, and report in C's way.
macro_rules! exports {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty = $answer:expr;)*) => {
        $(
            /// As in the C library.
            ///
            /// # Safety
            /// As C has it.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                // SAFETY: raw-call: C promises what the call needs.
                #[allow(unused_unsafe)]
                let result = unsafe { $answer };
                in_c(result) as $result
            }
        )*
    };
}

exports! {
    munmap(at: *mut c_void, len: usize) -> c_int = maps::munmap(at as usize, len);
    mprotect(at: *mut c_void, len: usize, prot: c_int) -> c_int = maps::mprotect(at as usize, len, prot);
    pkey_mprotect(at: *mut c_void, len: usize, prot: c_int, key: c_int) -> c_int
        = if key == -1 { maps::mprotect(at as usize, len, prot) }
          else { maps::pkey_mprotect(at as usize, len, prot, key as usize) };
    mremap(at: *mut c_void, len: usize, new_len: usize, flags: c_int, new: *mut c_void) -> *mut c_void
        = maps::mremap([at as usize, len, new_len, flags as usize, new as usize, 0]);
    madvise(at: *mut c_void, len: usize, advice: c_int) -> c_int = maps::madvise(at as usize, len, advice);
    mlock(at: *const c_void, len: usize) -> c_int = maps::mlock(at as usize, len, 0);
    mlock2(at: *const c_void, len: usize, flags: u32) -> c_int = maps::mlock(at as usize, len, flags as usize);
    munlock(at: *const c_void, len: usize) -> c_int = maps::munlock(at as usize, len);
    mlockall(flags: c_int) -> c_int = maps::mlockall(flags);
    munlockall() -> c_int = maps::munlockall();
    mseal(at: *mut c_void, len: usize, flags: c_ulong) -> c_int = maps::mseal(at as usize, len, flags as usize);
    mincore(at: *mut c_void, len: usize, vector: *mut u8) -> c_int = maps::mincore(at as usize, len, vector);
    process_madvise(pidfd: c_int, vector: *const c_void, count: usize, advice: c_int, flags: u32) -> isize
        = maps::process_madvise([pidfd as usize, vector as usize, count, advice as usize, flags as usize, 0]);
    setsockopt(socket: c_int, level: c_int, name: c_int, value: *const c_void, len: libc::socklen_t) -> c_int
        = lending::setsockopt([socket as usize, level as usize, name as usize, value as usize, len as usize]);
    vmsplice(file: c_int, vector: *const libc::iovec, count: usize, flags: u32) -> isize
        = lending::vmsplice([file as usize, vector as usize, count, flags as usize]);
    capset(header: *mut c_void, data: *const c_void) -> c_int = rights::capset(header as usize, data as usize);
    chroot(path: *const c_char) -> c_int = rights::chroot(path as usize);
    pivot_root(new: *const c_char, old: *const c_char) -> c_int
        = rights::may_hide_records(libc::SYS_pivot_root, [new as usize, old as usize, 0, 0, 0]);
    mount(source: *const c_char, target: *const c_char, kind: *const c_char, flags: c_ulong, data: *const c_void) -> c_int
        = rights::may_hide_records(
            libc::SYS_mount, [source as usize, target as usize, kind as usize, flags as usize, data as usize]);
    move_mount(from: c_int, source: *const c_char, to: c_int, target: *const c_char, flags: u32) -> c_int
        = rights::may_hide_records(
            libc::SYS_move_mount, [from as usize, source as usize, to as usize, target as usize, flags as usize]);
    umount(target: *const c_char) -> c_int = rights::may_hide_records(libc::SYS_umount2, [target as usize, 0, 0, 0, 0]);
    umount2(target: *const c_char, flags: c_int) -> c_int
        = rights::may_hide_records(libc::SYS_umount2, [target as usize, flags as usize, 0, 0, 0]);
    unshare(flags: c_int) -> c_int = rights::may_hide_records(libc::SYS_unshare, [flags as usize, 0, 0, 0, 0]);
    setns(file: c_int, kind: c_int) -> c_int
        = rights::may_hide_records(libc::SYS_setns, [file as usize, kind as usize, 0, 0, 0]);
    prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int = rights::prctl([option as usize, a, b, c, d]);
}

/// Exported functions that pass the address they return to on, as one more argument, behind the six in registers.
macro_rules! mappers {
    ($($name:ident)*) => {
        $(
            /// As in the C library.
            ///
            /// # Safety
            /// As C has it.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name(
                _: *mut c_void, _: usize, _: c_int, _: c_int, _: c_int, _: i64,
            ) -> *mut c_void {
                // Who unwinds through a naked function finds no more than is said here.
                naked_asm!(
                    ".cfi_startproc",
                    "push [rsp]",
                    ".cfi_adjust_cfa_offset 8",
                    "call {to}",
                    "add rsp, 8",
                    ".cfi_adjust_cfa_offset -8",
                    "ret",
                    ".cfi_endproc",
                    to = sym mmap_for,
                )
            }
        )*
    };
}

mappers! { mmap mmap64 }

unsafe extern "C" fn mmap_for(
    at: usize,
    len: usize,
    prot: c_int,
    flags: c_int,
    file: c_int,
    offset: usize,
    returns_to: usize,
) -> isize {
    // SAFETY: raw-call: C promises what the call needs.
    in_c(unsafe { maps::mmap(at, len, prot, flags, file, offset, Caller(returns_to)) })
}

/// As in the C library: the error is what it returns, and `POSIX_MADV_DONTNEED` does nothing.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(at: *mut c_void, len: usize, advice: c_int) -> c_int {
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    // SAFETY: raw-call: C promises what the call needs.
    -unsafe { maps::madvise(at as usize, len, advice) } as c_int
}

/// As in the C library: any system call, of which those that the library answers are answered as by their own functions.
///
/// # Safety
/// As the call has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    // SAFETY: raw-call: the program promises what the call needs.
    let result = unsafe {
        match number {
            libc::SYS_mmap => maps::mmap(a, b, c as i32, d as i32, e as i32, f, Caller::BY_NUMBER),
            libc::SYS_munmap => maps::munmap(a, b),
            libc::SYS_mprotect => maps::mprotect(a, b, c as i32),
            libc::SYS_pkey_mprotect if d as i32 == -1 => maps::mprotect(a, b, c as i32),
            libc::SYS_pkey_mprotect => maps::pkey_mprotect(a, b, c as i32, d),
            libc::SYS_mremap => maps::mremap([a, b, c, d, e, 0]),
            libc::SYS_madvise => maps::madvise(a, b, c as i32),
            libc::SYS_mlock => maps::mlock(a, b, 0),
            libc::SYS_mlock2 => maps::mlock(a, b, c),
            libc::SYS_munlock => maps::munlock(a, b),
            libc::SYS_mlockall => maps::mlockall(a as i32),
            libc::SYS_munlockall => maps::munlockall(),
            libc::SYS_mseal => maps::mseal(a, b, c),
            libc::SYS_mincore => maps::mincore(a, b, c as *mut u8),
            libc::SYS_msync => maps::msync(a, b, c as i32),
            libc::SYS_process_madvise => maps::process_madvise([a, b, c, d, e, 0]),
            libc::SYS_setsockopt => lending::setsockopt([a, b, c, d, e]),
            libc::SYS_vmsplice => lending::vmsplice([a, b, c, d]),
            libc::SYS_futex => futex::futex([a, b, c, d, e, f]),
            libc::SYS_capset => rights::capset(a, b),
            libc::SYS_chroot => rights::chroot(a),
            libc::SYS_pivot_root
            | libc::SYS_mount
            | libc::SYS_move_mount
            | libc::SYS_umount2
            | libc::SYS_unshare
            | libc::SYS_setns => rights::may_hide_records(number, [a, b, c, d, e]),
            libc::SYS_prctl => rights::prctl([a, b, c, d, e]),
            libc::SYS_seccomp => filters::seccomp([a, b, c]),
            libc::SYS_setgroups => rights::setgroups(a, b),
            libc::SYS_setuid
            | libc::SYS_setgid
            | libc::SYS_setreuid
            | libc::SYS_setregid
            | libc::SYS_setresuid
            | libc::SYS_setresgid => rights::change(number, [a, b, c, 0, 0]),
            libc::SYS_fork => return c_long::from(libc::fork()),
            libc::SYS_clone => clone::clone_by_number([a, b, c, d, e]),
            libc::SYS_clone3 => clone::clone3(a, b),
            libc::SYS_set_tid_address => {
                clone::keep_for_end(libc::CLONE_CHILD_CLEARTID as usize, a);
                call(number, [a, b, c, d, e, f])
            }
            libc::SYS_exit => threads::exit(a as c_int),
            libc::SYS_exit_group => process::exit(a as c_int),
            libc::SYS_execve => return c_long::from(process::execve(a as *const c_char, b as _, c as _)),
            libc::SYS_execveat => {
                return c_long::from(process::execveat(a as c_int, b as _, c as _, d as _, e as c_int));
            }
            _ => call(number, [a, b, c, d, e, f]),
        }
    };
    in_c(result) as c_long
}
