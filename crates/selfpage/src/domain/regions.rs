//! A domain's regions, held against changes.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, MutexGuard, PoisonError};

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
}
