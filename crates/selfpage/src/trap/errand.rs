//! Errands: calls that a program's thread has a pager thread make, because only that one has the descriptors.

use std::sync::atomic::{AtomicU32, Ordering};

use selfpage_core::domain::DomainState;
use selfpage_core::ring::Ring;

/// A call in the making, on the stack of the thread that waits for it.
struct Errand<'a> {
    work: &'a mut (dyn FnMut() + Send),
    done: AtomicU32,
}

/// Has a pager thread do `work`, and waits until it is done.
///
/// # Context
/// Normal, outside the gate, and undisturbed ([`crate::domain::Inner::undisturbed`]): a handler of a signal that forked meanwhile would leave
/// the child's copy of this thread waiting for a thread that the child does not have; and the pager thread, which must not touch managed
/// memory, whichever domain has it, uses what is on this stack.
pub(crate) fn send<T: Send>(state: &DomainState, errands: &Ring, work: impl FnOnce() -> T + Send) -> T {
    let mut work = Some(work);
    let mut result = None;
    let mut run = || result = work.take().map(|work| work());
    let errand = Errand { work: &mut run, done: AtomicU32::new(0) };
    let at = &raw const errand;
    while !errands.push(at as u64, 0) {
        std::thread::yield_now();
    }
    state.requested.signal(state.mmu);
    while errand.done.load(Ordering::Acquire) == 0 {
        state.mmu.sleep(&errand.done, 0, 0);
    }
    result.unwrap_or_else(|| crate::die("an errand came back without its result"))
}

/// Does one errand. `false`: there is none.
///
/// # Context
/// PagerThread.
pub(crate) fn serve(state: &DomainState, errands: &Ring) -> bool {
    let Some((at, _)) = errands.pop() else { return false };
    let errand = at as *mut Errand<'_>;
    // SAFETY: errand-waits: the sender keeps the errand in place, and does not touch its work, until `done` is set. The word
    // is read by address afterwards only to be woken on, which a futex allows whatever is there.
    unsafe {
        ((*errand).work)();
        let done = &raw const (*errand).done;
        (*done).store(1, Ordering::Release);
        state.mmu.rouse(&*done, 1);
    }
    true
}
