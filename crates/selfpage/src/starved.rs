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
        let next = || &self.pages[self.next.fetch_add(1, Ordering::Relaxed) % MOST];
        // Where somebody is at every one of them, one is forgotten.
        let known = (0..MOST).map(|_| next()).find(|known| let_go(state, known)).unwrap_or_else(next);
        // In one visit of the gate: a child that is forked in between would not know of the page.
        let told = poison::poison(state, page, || known.store(page.0, Ordering::SeqCst));
        // The evictor has said that there is no frame, and would look again only for whoever asks.
        state.stack.demand.wanted.signal(state.mmu);
        told
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pages.iter().all(|known| known.load(Ordering::SeqCst) == 0)
    }

    /// Frames can be had again. A page that somebody is at stays known, to be tried again.
    ///
    /// # Context
    /// PagerThread, outside the gate.
    pub(crate) fn end(&self, state: &DomainState) {
        for known in &self.pages {
            let_go(state, known);
        }
    }
}

/// Lets a page fail no more that is known here, if there is one. `false`: somebody is at it.
fn let_go(state: &DomainState, known: &AtomicU64) -> bool {
    let page = known.load(Ordering::SeqCst);
    if page == 0 {
        return true;
    }
    let is_done = poison::try_anew(state, PageNo(page));
    if is_done {
        // In this order: a child that is forked in between looks at the page once more.
        let _ = known.compare_exchange(page, 0, Ordering::SeqCst, Ordering::Relaxed);
    }
    is_done
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use selfpage_core::addr::{Frame, PAGE_BYTES};
    use selfpage_core::page::{PageWord, State, Word};
    use selfpage_core::shortage::Shortage;

    use crate::domain::Domain;
    use crate::region::Region;

    use super::*;

    const PAUSE: Duration = Duration::from_millis(10);

    /// A domain whose frames are all pinned but few, and a page of its region that fails for it.
    struct Short {
        domain: Domain,
        region: Region,
        /// Pages of the region that are pinned, from the first one on.
        held: usize,
        page: PageNo,
    }

    impl Short {
        fn new() -> Short {
            let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
            let region = domain.region(32 * PAGE_BYTES).zero().unwrap();
            let held = (0..).find(|page| region.pin(page * PAGE_BYTES, PAGE_BYTES).is_err()).unwrap();
            let page = region.bound.core().range.first.plus(held as u64);
            let short = Short { domain, region, held, page };
            let (inner, failure) = (&short.domain.life().inner, Failure::Shortage(Shortage::AllHeld));
            assert!(inner.on_pager_thread(|| inner.starved.poison(inner.state(), page, failure)));
            assert!(short.fails() && !inner.starved.is_empty());
            short
        }

        fn word(&self) -> &PageWord {
            self.region.bound.core().word(self.page).unwrap()
        }

        fn fails(&self) -> bool {
            self.word().load().state() == State::Poisoned
        }
    }

    /// A child that is forked meanwhile gets the list as it is then.
    #[test]
    fn a_page_is_known_until_it_fails_no_more() {
        let short = Short::new();
        let inner = &short.domain.life().inner;
        let state = inner.state();
        inner.close_gate();
        let known = std::thread::scope(|scope| {
            scope.spawn(|| inner.starved.end(state));
            // Time for it to come to the gate.
            std::thread::sleep(Duration::from_millis(200));
            let known = short.fails() && !inner.starved.is_empty();
            state.gate.open(state.mmu);
            known
        });
        assert!(known);
        assert!(!short.fails() && inner.starved.is_empty());
    }

    /// As the image of a snapshot and a clone do, which try whether they can have it, and leave it as they found it.
    #[test]
    fn a_page_that_somebody_is_at_when_frames_come_is_tried_anew_afterwards() {
        let mut short = Short::new();
        let state = short.domain.life().inner.state();
        assert!(short.word().claim(short.word().load()));
        let held_bytes = short.held * PAGE_BYTES;
        short.region.unpin(0, held_bytes).and_then(|()| short.region.discard(0, held_bytes)).unwrap();
        let reserve = state.stack.reserve.load(Ordering::Relaxed);
        let until = |is_so: &dyn Fn() -> bool| (0..500).any(|_| is_so() || (std::thread::sleep(PAUSE), false).1);
        let has_frames = until(&|| state.stack.ready() >= reserve);
        // Time for the evictor to see that, and to sleep.
        std::thread::sleep(20 * PAUSE);
        let _ = state.settle(short.region.bound.core(), short.page, Word::new(State::Poisoned, Frame(0)));
        assert!(has_frames);
        assert!(until(&|| !short.fails()), "it fails for good");
    }
}
