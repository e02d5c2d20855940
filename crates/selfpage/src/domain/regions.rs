//! A domain's regions, held against changes.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, MutexGuard, PoisonError};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::signal;

use super::Inner;
use crate::region::Bound;

/// A domain's regions, held. Meanwhile the gate may be closed, and no handler of a signal is let in: one that met the gate, or
/// forked, would wait for its own thread.
pub(crate) struct Regions<'a> {
    held: MutexGuard<'a, BTreeMap<u64, Arc<Bound>>>,
    _quiet: signal::Quiet,
}

impl Deref for Regions<'_> {
    type Target = BTreeMap<u64, Arc<Bound>>;
    fn deref(&self) -> &Self::Target {
        &self.held
    }
}

impl DerefMut for Regions<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.held
    }
}

impl Inner {
    pub(crate) fn regions(&self) -> Regions<'_> {
        let quiet = signal::Quiet::begin();
        Regions { held: self.regions.lock().unwrap_or_else(PoisonError::into_inner), _quiet: quiet }
    }

    /// The tracked region that a range has a page in.
    pub(crate) fn find_tracked(&self, range: &Range<usize>) -> Option<Arc<Bound>> {
        let regions = self.regions();
        let mut before = regions.range(..range.end.div_ceil(PAGE_BYTES) as u64).map(|(_, bound)| bound);
        let last = before.rfind(|bound| bound.core().trap.is_tracked())?;
        (last.core().range.end().addr().0 > range.start).then(|| last.clone())
    }
}
