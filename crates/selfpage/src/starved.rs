//! Pages whose last access failed because no frame could be had. They fail no longer than that is so.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use selfpage_core::addr::PageNo;
use selfpage_core::domain::DomainState;
use selfpage_core::fault::{Failure, poison};

/// How many are known at a time: of more, the one known longest is let go early, and its next access finds out anew.
const MOST: usize = 64;

/// Which pages they are. Without a lock, for a fork may come at any time.
pub(crate) struct Starved {
    /// Numbers of pages; 0: none, since nobody's region begins at address 0.
    pages: [AtomicU64; MOST],
    next: AtomicUsize,
}

impl Starved {
    pub(crate) const fn new() -> Starved {
        Starved { pages: [const { AtomicU64::new(0) }; MOST], next: AtomicUsize::new(0) }
    }

    /// Makes every access to a page fail whose contents could not be had for this reason, as [`poison::poison`] does. `false`: as there.
    ///
    /// # Context
    /// PagerThread, outside the gate.
    pub(crate) fn poison(&self, state: &DomainState, page: PageNo, failure: Failure) -> bool {
        let Failure::Shortage(_) = failure else { return poison::poison(state, page, || ()) };
        let known = &self.pages[self.next.fetch_add(1, Ordering::Relaxed) % MOST];
        let_go(state, known);
        // In one visit of the gate: a child that is forked in between would not know of the page.
        let told = poison::poison(state, page, || known.store(page.0, Ordering::SeqCst));
        // The evictor has said that there is no frame, and would look again only for whoever asks.
        state.stack.demand.wanted.signal(state.mmu);
        told
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pages.iter().all(|known| known.load(Ordering::SeqCst) == 0)
    }

    /// Frames can be had again.
    ///
    /// # Context
    /// PagerThread, outside the gate.
    pub(crate) fn end(&self, state: &DomainState) {
        self.pages.iter().for_each(|known| let_go(state, known));
    }
}

/// Lets a page fail no more that is known here, if there is one.
fn let_go(state: &DomainState, known: &AtomicU64) {
    let page = known.load(Ordering::SeqCst);
    if page != 0 {
        poison::try_anew(state, PageNo(page));
        // In this order: a child that is forked in between looks at the page once more.
        let _ = known.compare_exchange(page, 0, Ordering::SeqCst, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use selfpage_core::addr::PAGE_BYTES;
    use selfpage_core::page::State;
    use selfpage_core::shortage::Shortage;

    use crate::domain::Domain;

    use super::*;

    /// A child that is forked meanwhile gets the list as it is then.
    #[test]
    fn a_page_is_known_until_it_fails_no_more() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let inner = &domain.life().inner;
        let state = inner.state();
        let region = domain.region(32 * PAGE_BYTES).zero().unwrap();
        let held = (0..).find(|page| region.pin(page * PAGE_BYTES, PAGE_BYTES).is_err()).unwrap();
        let page = region.bound.core().range.first.plus(held as u64);
        let failure = Failure::Shortage(Shortage::AllHeld);
        assert!(inner.on_pager_thread(move || inner.starved.poison(state, page, failure)));
        let is_poisoned = || region.bound.core().word(page).unwrap().load().state() == State::Poisoned;
        assert!(is_poisoned() && !inner.starved.is_empty());
        inner.close_gate();
        let known = std::thread::scope(|scope| {
            scope.spawn(|| inner.starved.end(state));
            // Time for it to come to the gate.
            std::thread::sleep(Duration::from_millis(200));
            let known = is_poisoned() && !inner.starved.is_empty();
            state.gate.open(state.mmu);
            known
        });
        assert!(known);
        assert!(!is_poisoned() && inner.starved.is_empty());
    }
}
