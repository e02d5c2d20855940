//! A domain's regions, held against changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use selfpage_core::addr::PageNo;

use super::Inner;
use crate::region::Bound;
use crate::undisturbed::{self, Locked};

/// A domain's regions, held. Meanwhile the gate may be closed: a handler of a signal that met it would wait for its own thread.
pub(crate) type Regions<'a> = Locked<'a, BTreeMap<u64, Arc<Bound>>>;

impl Inner {
    pub(crate) fn regions(&self) -> Regions<'_> {
        undisturbed::lock(&self.regions)
    }

    /// Whether a page is in none of the regions; no while the gate is closed, and it cannot be told.
    pub(crate) fn has_not(&self, page: PageNo) -> bool {
        let state = self.state();
        state.gate.try_enter(state.mmu).is_some_and(|_inside| state.regions.find(page).is_none())
    }
}
