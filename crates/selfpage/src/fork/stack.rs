//! The stack of a thread that forks, where it lies in a region.

use std::sync::Arc;

use selfpage_core::addr::{PageNo, VirtAddr};
use selfpage_core::fault::protect::{self, Protection};
use selfpage_core::fault::{Fault, Outcome, copy_first, range, resolve};
use selfpage_core::region::Access;

use crate::domain::Inner;

/// What the handlers of a fork use, and the C library between them.
const KEPT_PAGES: u64 = 16;

/// Pages of the calling thread's stack that stay in core until it is let go, and may be written to: while gates are closed, and in a
/// child that has no pager threads yet, nobody would bring them in, or answer the first write to one that is armed.
pub(super) struct KeptStack {
    inner: Arc<Inner>,
    pages: Vec<PageNo>,
}

impl KeptStack {
    /// Keeps the stack from here down, and the page above, which callers use. As many pages as can be had: it may end before, at the end of the
    /// region, or at a page that must not be read. `None`: it is nobody's region.
    pub(super) fn keep(domains: &[Arc<Inner>]) -> Option<KeptStack> {
        let here = VirtAddr(&raw const domains as usize).page();
        let find = |inner: &Arc<Inner>| {
            let state = inner.state();
            let _inside = state.gate.enter(state.mmu);
            let range = state.regions.find(here)?.range;
            Some((inner.clone(), range))
        };
        let (inner, range) = domains.iter().find_map(find)?;
        let state = inner.state();
        // Others need frames too.
        let count = KEPT_PAGES.min(u64::from(inner.pool.frames()) / 4);
        let mut pages: Vec<_> = inner.on_table(move |context| {
            let is_of_stack = |page| range.contains(page) && protect::protection(state, page) != Some(Protection::None);
            let is_kept = |page: &PageNo| is_of_stack(*page) && range::pin(state, context, *page) == Outcome::Resolved;
            // What is used for certain comes first: there may be no frames for the rest.
            let down = (1..count).map(|pages| PageNo(here.0.saturating_sub(pages)));
            [here, here.plus(1)].into_iter().filter(is_kept).chain(down.take_while(is_kept)).collect()
        });
        loop {
            // Without the turn: whoever makes room for copies may need it to end.
            pages = inner.on_table(move |context| {
                let write = |page: &PageNo| Fault { addr: page.addr(), access: Access::Write, thread: 0 };
                let is_written =
                    |page: &PageNo| matches!(resolve(state, context, write(page)), Outcome::Resolved | Outcome::Retry);
                let (written, unwritten): (Vec<_>, Vec<_>) = pages.into_iter().partition(is_written);
                // There may be no frame for the copy of one: to ask again would be to ask for ever.
                for page in unwritten {
                    range::unpin(state, page);
                }
                written
            });
            let turn = inner.cutting.begin();
            if !pages.iter().any(|page| copy_first::is_armed(state, *page)) {
                // The turn is kept as well: nobody arms pages anew.
                std::mem::forget(turn);
                break;
            }
        }
        Some(KeptStack { inner, pages })
    }

    /// In the parent.
    pub(super) fn let_go(self) {
        self.unpin();
        self.inner.cutting.end();
    }

    /// In a forked child, where the turn has ended already: code of the program's has run since, and the next may be its own.
    pub(super) fn let_go_in_child(self) {
        self.unpin();
    }

    fn unpin(&self) {
        for page in &self.pages {
            // A child that did not get the domain has no such page.
            range::unpin(self.inner.state(), *page);
        }
    }
}
