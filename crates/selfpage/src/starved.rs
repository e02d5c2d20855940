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
        let told = poison::poison(state, page);
        if let Failure::Shortage(_) = failure {
            let place = self.next.fetch_add(1, Ordering::Relaxed) % MOST;
            let before = self.pages.get(place).map_or(0, |known| known.swap(page.0, Ordering::SeqCst));
            cure(state, before);
            // The evictor has said that there is no frame, and would look again only for whoever asks.
            state.stack.demand.wanted.signal(state.mmu);
        }
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
        if !self.is_empty() {
            self.pages.iter().for_each(|known| cure(state, known.swap(0, Ordering::SeqCst)));
        }
    }
}

fn cure(state: &DomainState, page: u64) {
    if page != 0 {
        poison::try_anew(state, PageNo(page));
    }
}
