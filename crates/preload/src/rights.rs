//! The rights of the process's first thread, which pager threads share. With setuid(3) and its like the C library has every thread
//! follow, and ends the process where one of them may and another may not. What changes the rights of the calling thread alone
//! (capset, prctl, and setuid as a system call) is therefore made on pager threads too: to the program they are not there.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use crate::sys::{self, Quiet, call};

/// The C library's signal for setuid(3) and its like: the one that pager threads have open, since it has them follow too.
const SIGNAL: c_int = 33;

/// The thread that pager threads follow; 0 without a domain. Other threads may have rights of their own, as they may without us.
static FIRST: AtomicU32 = AtomicU32::new(0);

/// The call that a pager thread is to make.
static NUMBER: AtomicI64 = AtomicI64::new(0);
static ARGS: [AtomicUsize; 5] = [const { AtomicUsize::new(0) }; 5];
/// Whether it has.
static MADE: AtomicU32 = AtomicU32::new(0);
/// The C library's handler, before ours.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// What capset reads: version and thread, and three sets in two halves. The program's own may be in managed memory.
static CAPABILITIES: [AtomicU32; 8] = [const { AtomicU32::new(0) }; 8];

/// As the kernel has it where a signal is queued.
#[repr(C)]
struct Info {
    signal: i32,
    errno: i32,
    code: i32,
    pad: i32,
    pid: u32,
    user: u32,
    value: usize,
    rest: [u64; 12],
}

/// As the kernel has it on x86-64.
#[repr(C)]
struct Action {
    handler: usize,
    flags: usize,
    restorer: usize,
    mask: u64,
}

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
        pagers_follow(libc::SYS_capset, [header, data, 0, 0, 0]);
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
        pagers_follow(libc::SYS_setgroups, [count, copied.as_ptr() as usize, 0, 0, 0]);
    }
    result
}

/// Any call that changes rights of the calling thread, and takes no pointer.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn change(number: i64, args: [usize; 5]) -> isize {
    // SAFETY: raw-call: passed on from our caller.
    let result = unsafe { call(number, [args[0], args[1], args[2], args[3], args[4], 0]) };
    if result >= 0 && is_first() {
        pagers_follow(number, args);
    }
    result
}

/// A child after vfork is not: its rights are its own, and the memory its parent's.
fn is_first() -> bool {
    sys::tid() == FIRST.load(Ordering::SeqCst)
}

/// Has each pager thread make a call, as the first thread just did. What it points to is in memory of our own.
fn pagers_follow(number: i64, args: [usize; 5]) {
    // A handler that came here meanwhile would change the call.
    let _quiet = Quiet::begin();
    if !stand_in_front() {
        return;
    }
    NUMBER.store(number, Ordering::SeqCst);
    ARGS.iter().zip(args).for_each(|(place, arg)| place.store(arg, Ordering::SeqCst));
    let pid = sys::pid();
    let value = MADE.as_ptr() as usize;
    let info = Info { signal: SIGNAL, errno: 0, code: libc::SI_QUEUE, pad: 0, pid, user: 0, value, rest: [0; 12] };
    for tid in selfpage::trap::pager_threads() {
        MADE.store(0, Ordering::SeqCst);
        let args = [pid as usize, tid as usize, SIGNAL as usize, &raw const info as usize, 0, 0];
        // SAFETY: raw-call: the kernel copies `info`; what it has that thread run is `on_signal`.
        let sent = unsafe { call(libc::SYS_rt_tgsigqueueinfo, args) } == 0;
        while sent && MADE.load(Ordering::SeqCst) == 0 && selfpage::trap::is_pager_thread(tid) {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// Puts our handler before the C library's, which it has had since it started the first pager thread. Whether ours is there.
fn stand_in_front() -> bool {
    let mut action = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };
    let ours = on_signal as *const () as usize;
    let size = size_of_val(&action.mask);
    // SAFETY: raw-call, signal-handler: the C library's own action but for the function, which passes on what is not ours.
    unsafe {
        let read = [SIGNAL as usize, 0, &raw mut action as usize, size, 0, 0];
        if call(libc::SYS_rt_sigaction, read) < 0 || action.handler <= libc::SIG_IGN {
            return false;
        }
        if action.handler == ours {
            return true;
        }
        NEXT.store(action.handler, Ordering::SeqCst);
        action.handler = ours;
        call(libc::SYS_rt_sigaction, [SIGNAL as usize, &raw const action as usize, 0, size, 0, 0]) == 0
    }
}

/// On a pager thread, where it is ours; on any thread, where it is the C library's.
unsafe extern "C" fn on_signal(signal: c_int, info: *const Info, context: *mut c_void) {
    // SAFETY: signal-handler: the kernel passes what was queued.
    let (code, value) = unsafe { ((*info).code, (*info).value) };
    if code != libc::SI_QUEUE || value != MADE.as_ptr() as usize {
        // SAFETY: c-library: its handler, with what the kernel passed.
        unsafe {
            let next: unsafe extern "C" fn(c_int, *const Info, *mut c_void) =
                std::mem::transmute(NEXT.load(Ordering::SeqCst));
            next(signal, info, context);
        }
        return;
    }
    let arg = |index: usize| ARGS[index].load(Ordering::SeqCst);
    // SAFETY: raw-call: the first thread made the same call and waits, and so does what it points to.
    unsafe { call(NUMBER.load(Ordering::SeqCst), [arg(0), arg(1), arg(2), arg(3), arg(4), 0]) };
    MADE.store(1, Ordering::SeqCst);
}
