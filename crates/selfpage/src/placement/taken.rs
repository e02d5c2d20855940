//! The addresses of all regions of all domains, also where the program has unmapped a part: no region and no frames come there.
//!
//! Whoever looks here waits for no domain: one may be at a disk, or in code of the program's, with its regions held.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use crate::region::Bound;
use crate::undisturbed::{self, Locked};

/// By where each begins. Held for a moment, last of all locks. A region is here while it is among its domain's, and is put in and taken out
/// with those held: a fork that holds all domains' regions and this finds all of them.
static TAKEN: Mutex<BTreeMap<usize, Taken>> = Mutex::new(BTreeMap::new());

#[derive(Clone)]
pub(super) struct Taken {
    pub(super) addresses: Range<usize>,
    /// The region's name.
    pub(super) name: String,
    /// The region itself, where it is tracked.
    tracked: Weak<Bound>,
}

/// That the addresses stay as they are noted.
pub(crate) struct Held {
    _taken: Locked<'static, BTreeMap<usize, Taken>>,
}

/// For a fork, before it holds policies and gates: whoever has these may touch an absent page as it allocates.
pub(crate) fn hold() -> Held {
    Held { _taken: undisturbed::lock(&TAKEN) }
}

/// They are this region's from now on.
pub(crate) fn insert(bound: &Arc<Bound>) {
    let tracked = if bound.core().trap.is_tracked() { Arc::downgrade(bound) } else { Weak::new() };
    let addresses = bound.addresses();
    let start = addresses.start;
    undisturbed::lock(&TAKEN).insert(start, Taken { addresses, name: bound.name.clone(), tracked });
}

/// They are no region's any more.
pub(crate) fn remove(addresses: &Range<usize>) {
    undisturbed::lock(&TAKEN).remove(&addresses.start);
}

/// The region that has a part of these addresses.
pub(super) fn region_at(addresses: &Range<usize>) -> Option<Taken> {
    let taken = undisturbed::lock(&TAKEN);
    // Regions do not meet: the last of those that begin before the end reaches furthest.
    let (_, last) = taken.range(..addresses.end).next_back()?;
    (last.addresses.end > addresses.start).then(|| last.clone())
}

/// The tracked region that a range has a page in.
///
/// Nothing is allocated: a collector may ask while it has stopped a thread that has the lock of malloc.
pub(crate) fn find_tracked(range: &Range<usize>) -> Option<Arc<Bound>> {
    let taken = undisturbed::lock(&TAKEN);
    let before = taken.range(..range.end).rev().map(|(_, taken)| taken);
    before.take_while(|taken| taken.addresses.end > range.start).find_map(|taken| taken.tracked.upgrade())
}

/// The first tracked region from an address on.
pub(crate) fn next_tracked(from: usize) -> Option<Arc<Bound>> {
    undisturbed::lock(&TAKEN).range(from..).find_map(|(_, taken)| taken.tracked.upgrade())
}

pub(super) fn all() -> Vec<Range<usize>> {
    undisturbed::lock(&TAKEN).values().map(|taken| taken.addresses.clone()).collect()
}
