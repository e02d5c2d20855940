//! The rights of the process's first thread, which pager threads share. With setuid(3) and its like the C library has every thread
//! follow, and ends the process where one of them may and another may not. What changes the rights of the calling thread alone
//! (capset, prctl, and setuid as a system call) is therefore made on pager threads too: to the program they are not there.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use selfpage_core::linux::thread;
use selfpage_heap::next;

use crate::sys::{self, call};
use crate::{filters, pagers, record, watch};

next!(SETUID: c"setuid" as fn(libc::uid_t) -> c_int, next_setuid);
next!(SETEUID: c"seteuid" as fn(libc::uid_t) -> c_int, next_seteuid);
next!(SETREUID: c"setreuid" as fn(libc::uid_t, libc::uid_t) -> c_int, next_setreuid);
next!(SETRESUID: c"setresuid" as fn(libc::uid_t, libc::uid_t, libc::uid_t) -> c_int, next_setresuid);

/// The thread that pager threads follow; 0 without a domain. Other threads may have rights of their own, as they may without us.
static FIRST: AtomicU32 = AtomicU32::new(0);

/// What capset reads: version and thread, and three sets in two halves. The program's own may be in managed memory.
static CAPABILITIES: [AtomicU32; 8] = [const { AtomicU32::new(0) }; 8];

/// Pager threads follow the process's first thread from now on: they were started with its rights.
pub fn begin() {
    FIRST.store(sys::pid(), Ordering::SeqCst);
}

/// In a forked child the thread that forked is the first, and pager threads were started with its rights.
pub fn settle_in_child() {
    if FIRST.load(Ordering::SeqCst) != 0 {
        begin();
    }
}

/// capset(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn capset(header: usize, data: usize) -> isize {
    record::keep_open();
    // SAFETY: raw-call: passed on from our caller.
    let result = unsafe { call(libc::SYS_capset, [header, data, 0, 0, 0, 0]) };
    if result == 0 && is_first() {
        // SAFETY: raw-call: the kernel has read both: the first version's sets are half as long.
        unsafe {
            let version = (header as *const u32).read_unaligned();
            let words = if version == 0x1998_0330 { 3 } else { 6 };
            CAPABILITIES[0].store(version, Ordering::SeqCst);
            for (index, word) in CAPABILITIES[2..][..words].iter().enumerate() {
                word.store((data as *const u32).add(index).read_unaligned(), Ordering::SeqCst);
            }
        }
        let [header, data] = [0, 2].map(|word: usize| CAPABILITIES[word].as_ptr() as usize);
        pagers::all_make(libc::SYS_capset, [header, data, 0, 0, 0]);
    }
    result
}

/// prctl(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn prctl(args: [usize; 5]) -> isize {
    let is_of_rights = matches!(
        args[0] as c_int,
        libc::PR_SET_KEEPCAPS | libc::PR_SET_SECUREBITS | libc::PR_CAPBSET_DROP | libc::PR_CAP_AMBIENT
    );
    // SAFETY: raw-call: passed on from our caller; those about rights take no pointer.
    unsafe {
        if is_of_rights {
            change(libc::SYS_prctl, args)
        } else if args[0] as c_int == libc::PR_SET_SECCOMP {
            filters::prctl(args)
        } else {
            call(libc::SYS_prctl, [args[0], args[1], args[2], args[3], args[4], 0])
        }
    }
}

/// setgroups(2), not setgroups(3).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn setgroups(count: usize, groups: usize) -> isize {
    // SAFETY: raw-call: passed on from our caller.
    let result = unsafe { call(libc::SYS_setgroups, [count, groups, 0, 0, 0, 0]) };
    if result == 0 && is_first() {
        // SAFETY: raw-call: the kernel has read as many; of none there need not be a list.
        let copied: Vec<u32> = (0..count).map(|i| unsafe { (groups as *const u32).add(i).read_unaligned() }).collect();
        pagers::all_make(libc::SYS_setgroups, [count, copied.as_ptr() as usize, 0, 0, 0]);
    }
    result
}

/// Any call that changes rights of the calling thread, and takes no pointer.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn change(number: i64, args: [usize; 5]) -> isize {
    record::keep_open();
    // SAFETY: raw-call: passed on from our caller.
    let result = unsafe { call(number, [args[0], args[1], args[2], args[3], args[4], 0]) };
    if result >= 0 && is_first() {
        pagers::all_make(number, args);
    }
    result
}

/// Any call after which the file for records may be out of sight: what it is known by lies in /proc.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn may_hide_records(number: i64, args: [usize; 5]) -> isize {
    record::keep_open();
    // SAFETY: raw-call: passed on from our caller.
    unsafe { call(number, [args[0], args[1], args[2], args[3], args[4], 0]) }
}

/// chroot(2). What is known of threads lies in /proc, which a thread of ours is to see from then on, too.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn chroot(path: usize) -> isize {
    // A child after vfork ends, or is another program soon; under a filter there is one.
    if !filters::are_set() && is_own_process() {
        watch::begin();
    }
    // SAFETY: raw-call: passed on from our caller.
    unsafe { may_hide_records(libc::SYS_chroot, [path, 0, 0, 0, 0]) }
}

/// Whether this is the process that has the domain: a child after vfork has its memory alone.
pub fn is_own_process() -> bool {
    sys::pid() == FIRST.load(Ordering::SeqCst)
}

/// A child after vfork is not: its rights are its own, and the memory its parent's.
fn is_first() -> bool {
    thread::id() == FIRST.load(Ordering::SeqCst)
}

/// Functions of the C library that have all threads follow, after which the file for records may be out of reach.
macro_rules! another_user {
    ($($name:ident($($arg:ident),*), $next:ident;)*) => {
        $(
            /// As in the C library.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: libc::uid_t),*) -> c_int {
                record::keep_open();
                // SAFETY: c-library: passed on from our caller.
                unsafe { $next()($($arg),*) }
            }
        )*
    };
}

another_user! {
    setuid(user), next_setuid;
    seteuid(effective), next_seteuid;
    setreuid(real, effective), next_setreuid;
    setresuid(real, effective, saved), next_setresuid;
}
