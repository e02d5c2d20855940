//! System calls that pager threads make because a thread of the program's asks: for rights, which each thread has for itself, and for
//! descriptors in the table of their own.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI64, AtomicIsize, AtomicU32, AtomicUsize, Ordering};

use selfpage::trap::pager_threads;
use selfpage_core::linux::futex;

use crate::lock::Lock;
use crate::sys::{self, Quiet, call};
use crate::{heap, threads, watch};

/// The C library's signal for setuid(3) and its like: the one that pager threads have open, since it has them follow too.
const SIGNAL: c_int = 33;

/// How long one who asks sleeps before he looks whether the pager thread has ended.
const LOOK_US: u32 = 100_000;

/// Who asks, one at a time.
static ASKING: Lock<()> = Lock::new(());

/// The call that a pager thread is to make.
static NUMBER: AtomicI64 = AtomicI64::new(0);
static ARGS: [AtomicUsize; 5] = [const { AtomicUsize::new(0) }; 5];
/// Whether it has, and what came of it.
static MADE: AtomicU32 = AtomicU32::new(0);
static RESULT: AtomicIsize = AtomicIsize::new(0);
/// The C library's handler, before ours.
static NEXT: AtomicUsize = AtomicUsize::new(0);

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

/// Has each pager thread make a call that takes plain numbers, or addresses in memory of our own: no pager thread may touch managed
/// memory.
pub fn all_make(number: i64, args: [usize; 5]) {
    // The watch is no pager thread, and has rights as they have.
    ask(number, args, pager_threads().chain(watch::tid()), |tid| {
        makes(tid);
        None::<()>
    });
}

/// Has some pager thread make such a call: its result. They have one table of descriptors.
pub fn one_makes(number: i64, args: [usize; 5]) -> Option<isize> {
    ask(number, args, pager_threads(), makes)
}

/// Nobody asks from here to [`let_go`]: over a fork, with signals blocked.
pub fn hold() {
    ASKING.hold();
}

/// Ends that.
///
/// # Safety
/// *lock-word*: the calling thread, or in a child the thread it is a copy of, called [`hold`].
pub unsafe fn let_go() {
    // SAFETY: lock-word: passed on from our caller.
    unsafe { ASKING.let_go() };
}

/// Offers the call to one thread after the other, until something comes of it.
fn ask<R>(
    number: i64,
    args: [usize; 5],
    mut threads: impl Iterator<Item = u32>,
    offer: impl FnMut(u32) -> Option<R>,
) -> Option<R> {
    // A handler that came here meanwhile would wait for its own thread; and a pager thread would wait for itself.
    let _quiet = Quiet::begin();
    if heap::is_pager() || !stand_in_front() {
        return None;
    }
    let _alone = ASKING.take();
    NUMBER.store(number, Ordering::SeqCst);
    ARGS.iter().zip(args).for_each(|(place, arg)| place.store(arg, Ordering::SeqCst));
    threads.find_map(offer)
}

/// Has pager thread `tid` make the call. `None`: it has ended, or this is a child after vfork, which has no threads.
fn makes(tid: u32) -> Option<isize> {
    let pid = sys::pid();
    let value = MADE.as_ptr() as usize;
    let info = Info { signal: SIGNAL, errno: 0, code: libc::SI_QUEUE, pad: 0, pid, user: 0, value, rest: [0; 12] };
    MADE.store(0, Ordering::SeqCst);
    let args = [pid as usize, tid as usize, SIGNAL as usize, &raw const info as usize, 0, 0];
    // SAFETY: raw-call: the kernel copies `info`; what it has that thread run is `on_signal`.
    let sent = unsafe { call(libc::SYS_rt_tgsigqueueinfo, args) } == 0;
    while sent && MADE.load(Ordering::SeqCst) == 0 && threads::is_own(tid) {
        // It is told when the call has been made; now and then it looks whether the thread still is.
        let _ = futex::wait(&MADE, 0, LOOK_US);
    }
    (MADE.load(Ordering::SeqCst) == 1).then(|| RESULT.load(Ordering::SeqCst))
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
    // SAFETY: raw-call: passed on from who waits, and so does what it points to.
    let result = unsafe { call(NUMBER.load(Ordering::SeqCst), [arg(0), arg(1), arg(2), arg(3), arg(4), 0]) };
    RESULT.store(result, Ordering::SeqCst);
    MADE.store(1, Ordering::SeqCst);
    futex::wake(&MADE, 1);
}
