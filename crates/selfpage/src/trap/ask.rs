//! Asking the program's own handler of a region: what both ways of taking a fault have in common.

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use arrayvec::ArrayString;
use selfpage_core::addr::PageNo;
use selfpage_core::fault::{self, Fault, Outcome};
use selfpage_core::region::Region;

use super::handler_stack::Stack;
use super::thread;
use crate::domain::Inner;
use crate::error::{self, MOST_OF_NAME};
use crate::handler::{Answer, FaultKind, MemoryFault, Trouble};
use crate::region::{Bound, InPlace};

/// After so many faults of a thread on one page in a row that its handler says it has handled, while the access meets the same once
/// more, the next is refused: the program would go on like that for ever.
const MOST_REPEATS: u32 = 10_000;

/// What a handler is to be asked, if the outcome says so.
pub(super) fn kind(outcome: Outcome) -> Option<FaultKind> {
    match outcome {
        Outcome::Protected => Some(FaultKind::Protection),
        Outcome::Missing => Some(FaultKind::Missing),
        _ => None,
    }
}

/// What the library keeps with a region of the map; null: nothing yet.
fn keeper(region: &Region) -> *const Bound {
    region.keeper.load(Ordering::Acquire).cast_const().cast()
}

/// What the program calls a region: as much of its end as a line holds.
///
/// # Context
/// Trap, inside the gate in which the region was found.
pub(crate) fn name_of(region: &Region) -> ArrayString<MOST_OF_NAME> {
    // SAFETY: handler-kept: a region in the map is in its domain's list, which holds a count of it.
    let name = unsafe { keeper(region).as_ref() }.map_or("", Bound::given_name);
    ArrayString::from(error::end_of_name(name)).unwrap_or_default()
}

/// A region whose handler is asked, and its domain, kept while it is: nothing else is held then. A thread of the domain's drops it before
/// it lets the stopped thread go on: that one may drop the region at once, and what goes with the last hold of it is better done by a thread
/// that has the program's descriptors, and may wait for those of the domain. (Another one that was stopped on the same page may still be first.)
pub(crate) struct Asked {
    pub(super) inner: Arc<Inner>,
    pub(crate) bound: InPlace,
}

impl Asked {
    /// The region that `page` is in. `None`: none any more, or one that is about to go.
    ///
    /// # Context
    /// Trap.
    pub(crate) fn about(inner: &Inner, page: PageNo) -> Option<Asked> {
        let state = inner.state();
        let _inside = state.gate.enter(state.mmu);
        Asked::of(inner, state.regions.find(page)?)
    }

    /// The same of a region of the map.
    ///
    /// # Context
    /// Trap, inside the gate in which the region was found.
    pub(crate) fn of(inner: &Inner, region: &Region) -> Option<Asked> {
        let keeper = keeper(region);
        if keeper.is_null() {
            return None;
        }
        // SAFETY: handler-kept: a region in the map is in its domain's list, which holds a count of it; and whoever
        // calls us with a domain holds a count of that.
        unsafe {
            Arc::increment_strong_count(keeper);
            let bound = InPlace::keep(Arc::from_raw(keeper))?;
            Arc::increment_strong_count(&raw const *inner);
            Some(Asked { inner: Arc::from_raw(&raw const *inner), bound })
        }
    }

    /// Runs the handler. No handler refuses what is protected, and passes what is missing.
    ///
    /// # Errors
    /// It panicked: what it was to do is half done, and the access must not go on. Other threads may.
    pub(super) fn answer(
        &self,
        fault: Fault,
        kind: FaultKind,
        thread: Option<u32>,
        context: Option<NonNull<libc::c_void>>,
    ) -> Result<Answer, Trouble> {
        let bound = &*self.bound;
        let Some(handler) = bound.handler() else { return Ok(without_handler(kind)) };
        let (addr, access) = (fault.addr.0, fault.access);
        let fault = MemoryFault { addr, access, kind, thread, context, bound, inner: &self.inner };
        match error::unless_it_panics(|| handler.handle(&fault)) {
            Some(Answer::Pass) => Ok(without_handler(kind)),
            Some(answer) => Ok(answer),
            None => Err(Trouble::Panicked),
        }
    }

    /// Whether the handler would be asked of the access once more: no other thread has answered for the page meanwhile.
    ///
    /// # Context
    /// Any, outside the gate.
    pub(super) fn is_still(&self, fault: Fault, asks: FaultKind) -> bool {
        fault::still_asked(self.inner.state(), fault).and_then(kind) == Some(asks)
    }
}

/// What becomes of a fault that no handler has anything to say to.
pub(super) fn without_handler(kind: FaultKind) -> Answer {
    match kind {
        FaultKind::Protection => Answer::Refuse,
        FaultKind::Missing => Answer::Pass,
    }
}

/// Whether the calling thread may be in a handler: it is one of those for handlers, or on one of their stacks.
///
/// # Context
/// Normal or PagerThread.
pub(crate) fn may_be_in_handler() -> bool {
    thread::is_a_domains() || Stack::here().is_some()
}

impl Asked {
    /// Lets go in a trap, where nothing may be freed, not even the block that a count is in: a region that went while its handler ran
    /// leaves its memory behind. `page` is in it, and `inner` is its domain, which has another count of itself until this returns.
    pub(super) fn let_go(self, inner: &Inner, page: PageNo) {
        let Asked { inner: own, bound } = self;
        drop(own);
        let state = inner.state();
        let _inside = state.gate.enter(state.mmu);
        let keeper = state.regions.find(page).map(keeper);
        if keeper == Some(ptr::from_ref(&*bound)) {
            // The domain's list has a count as long as we are inside.
            drop(bound);
        } else {
            std::mem::forget(bound);
        }
    }
}

/// The last fault that a thread's handler has handled: how often in a row.
struct Repeat {
    page: AtomicU64,
    count: AtomicU32,
}

const REPEATS: usize = 1 << 6;
static LAST: [Repeat; REPEATS] = [const { Repeat { page: AtomicU64::new(0), count: AtomicU32::new(0) } }; REPEATS];

/// Notes a fault that was handled. `false`: it has been so too often, and each time the handler would have been asked the same once more.
/// Threads that share a place only make each other start anew.
///
/// # Context
/// Any, outside the gate.
pub(super) fn goes_on(asked: &Asked, fault: Fault, kind: FaultKind, thread: usize) -> bool {
    // Blocks of threads lie at like places of their stacks: all of the number counts.
    let Some(last) = LAST.get(((thread as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize) else {
        return true;
    };
    let page = fault.addr.page();
    let same = last.page.load(Ordering::Relaxed) == page.0 && asked.is_still(fault, kind);
    let count = if same { last.count.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
    last.page.store(page.0, Ordering::Relaxed);
    last.count.store(count, Ordering::Relaxed);
    count < MOST_REPEATS
}
