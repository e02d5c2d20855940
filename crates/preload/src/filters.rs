//! Filters of system calls that the program sets for itself (seccomp). From then on a call that the program does not make itself may be its
//! end, so the library makes none on the program's threads that it can do without.

mod count;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::sys::call;
use crate::{record, rights, watch};

pub use count::count;

/// How many this process has set, or is about to.
static SET: AtomicU32 = AtomicU32::new(0);
/// Whether one of them is set.
static IN_FORCE: AtomicBool = AtomicBool::new(false);
/// How many there were before the program's first line; the largest number where there is no telling.
static INHERITED: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// Whether this thread is about to set one. A child that a handler of a signal forks there goes on and sets it, too.
    static IS_SETTING: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is the process's first, and its filters are not the program's own.
pub fn begin() {
    if mode() > 0 {
        INHERITED.store(count().unwrap_or(u32::MAX), Ordering::SeqCst);
    }
}

/// Whether this process has set one, or is about to: other threads may be under it before the call is back. One that was there when the
/// program was executed lets it be set up, or does not.
pub fn are_set() -> bool {
    SET.load(Ordering::SeqCst) != 0
}

/// Whether one that this process has set holds, and stays.
pub fn are_in_force() -> bool {
    IN_FORCE.load(Ordering::SeqCst)
}

/// Whether there are any that we know of: those of [`are_set`], or some that were there when the program was executed.
fn are_known() -> bool {
    are_set() || INHERITED.load(Ordering::SeqCst) != 0
}

/// What the calling thread's filters answer to a call of the program's that pager threads make for it, for which they may not hold. They are
/// asked by the same call with an address, or an offset, that is no page's, `args[of_page]`: the kernel refuses that (`EINVAL`) before it does
/// anything. `None`: nothing. With no lock held, since an answer may be a signal, or a long time in coming.
pub fn answer(number: i64, mut args: [usize; 6], of_page: usize) -> Option<isize> {
    if !are_known() {
        return None;
    }
    args[of_page] += 1;
    // SAFETY: raw-call: the program asked for such a call, and the kernel does nothing.
    let answer = unsafe { call(number, args) };
    (answer != -libc::EINVAL as isize).then_some(answer)
}

/// Whether there may be one now or in a moment, of whomever: also one that was there when the program was executed may end a thread.
pub fn may_end_threads() -> bool {
    are_known() || IS_SETTING.get()
}

/// In a forked child: what another thread was about to set does not count, unless it is in force here.
pub fn settle_in_child() {
    if are_set() && !are_in_force() {
        let is_in_force = match INHERITED.load(Ordering::SeqCst) {
            0 => mode() != 0,
            inherited => count() != Some(inherited),
        };
        if is_in_force {
            IN_FORCE.store(true, Ordering::SeqCst);
        } else {
            SET.store(0, Ordering::SeqCst);
        }
    }
}

/// Whether the calling thread is under one that it set by an instruction of its own, as far as that can be told.
pub fn one_came_unheard() -> bool {
    !are_known() && mode() != 0
}

/// How system calls of the calling thread are filtered, as the kernel numbers it; 0: they are not.
pub fn mode() -> i32 {
    // SAFETY: raw-call: no memory is passed.
    unsafe { call(libc::SYS_prctl, [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0]) as i32 }
}

/// prctl(2) with `PR_SET_SECCOMP`.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn prctl(args: [usize; 5]) -> isize {
    // SAFETY: raw-call: passed on from our caller.
    let make = || unsafe { call(libc::SYS_prctl, [args[0], args[1], args[2], args[3], args[4], 0]) };
    // Without a filter it is a question.
    if args[1] == libc::SECCOMP_MODE_FILTER as usize && args[2] == 0 { make() } else { set(make, 0) }
}

/// seccomp(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn seccomp(args: [usize; 3]) -> isize {
    let [operation, flags, filter] = args;
    // SAFETY: raw-call: passed on from our caller.
    let make = || unsafe { call(libc::SYS_seccomp, [args[0], args[1], args[2], 0, 0, 0]) };
    match operation as u32 {
        libc::SECCOMP_SET_MODE_STRICT => set(make, flags),
        libc::SECCOMP_SET_MODE_FILTER if filter != 0 => set(make, flags),
        _ => make(),
    }
}

/// Whether none has been set: for all threads (TSYNC) the kernel may answer with the number of one that cannot have it, where it has no
/// descriptor to answer with.
fn has_failed(result: isize, flags: usize) -> bool {
    result < 0 || result > 0 && flags & libc::SECCOMP_FILTER_FLAG_NEW_LISTENER as usize == 0
}

/// Sets one by a call of the kernel.
fn set(make: impl FnOnce() -> isize, flags: usize) -> isize {
    // A child after vfork is filtered by itself, and the memory is its parent's. Under a filter nothing is asked.
    if !are_in_force() && !rights::is_own_process() {
        return make();
    }
    let count = || {
        SET.fetch_add(1, Ordering::SeqCst);
        let result = make();
        if has_failed(result, flags) {
            // In a child that a handler of a signal has forked here it counts no more.
            let _ = SET.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |set| set.checked_sub(1));
        } else {
            // In such a child it did not count yet.
            SET.fetch_max(1, Ordering::SeqCst);
            IN_FORCE.store(true, Ordering::SeqCst);
        }
        result
    };
    if are_in_force() {
        return count();
    }
    // A handler may set one in between.
    let was_setting = IS_SETTING.replace(true);
    watch::begin();
    let result = record::on_record(count, |result| has_failed(*result, flags));
    IS_SETTING.set(was_setting);
    result
}
