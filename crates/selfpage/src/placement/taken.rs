//! The addresses of all regions of all domains, also where the program has unmapped a part: no region and no frames come there. And the parts
//! of files that they are: a page of a file is saved whole, so two regions would undo each other's changes to it.
//!
//! Whoever looks here waits for no domain: one may be at a disk, or in code of the program's, with its regions held.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};

use crate::FileAccess;
use crate::error::{Error, Kind, Result};
use crate::fork::lineage::Process;
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
    part: Option<FilePart>,
    /// Whose region it is: a child has a copy of this, and its parent's regions write no more to their files there.
    process: Process,
}

/// Whole pages of a file that are a region.
#[derive(Clone)]
pub(crate) struct FilePart {
    pub(crate) path: PathBuf,
    /// Device and inode: whatever name leads to it.
    pub(crate) file: (u64, u64),
    pub(crate) bytes: Range<u64>,
    pub(crate) access: FileAccess,
}

impl FilePart {
    /// Whether one of the two would be undone by the other, or see what it has no more.
    fn disturbs(&self, other: &FilePart) -> bool {
        let writes = [self, other].iter().any(|part| part.access == FileAccess::ReadWrite);
        writes && self.file == other.file && self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end
    }
}

/// That the addresses stay as they are noted.
pub(crate) struct Held {
    _taken: Locked<'static, BTreeMap<usize, Taken>>,
}

/// For a fork, before it holds policies and gates: whoever has these may touch an absent page as it allocates.
pub(crate) fn hold() -> Held {
    Held { _taken: undisturbed::lock(&TAKEN) }
}

/// They are this region's from now on, and so is its part of a file.
///
/// # Errors
/// Another region of this process has pages of that, and one of the two may be written. Or this process cannot be told from its parent.
pub(crate) fn insert(bound: &Arc<Bound>, part: Option<&FilePart>) -> Result<()> {
    let process = Process::this()?;
    let mut taken = undisturbed::lock(&TAKEN);
    let is_disturbed = |other: &&Taken| {
        other.process == process && matches!((part, &other.part), (Some(part), Some(other)) if part.disturbs(other))
    };
    if let (Some(part), Some(other)) = (part, taken.values().find(is_disturbed)) {
        let Range { start, end } = other.part.as_ref().map_or(0..0, |part| part.bytes.clone());
        let cause = format!(
            "its bytes {start}..{end} are region {} already, and one of the two may be written: a page is saved whole, over what the other has saved of it; drop that region first, or take pages that are not in it",
            other.name
        );
        return Err(Error::new(Kind::Held, "map", part.path.display().to_string(), cause));
    }
    let tracked = if bound.core().trap.is_tracked() { Arc::downgrade(bound) } else { Weak::new() };
    let addresses = bound.addresses();
    taken.insert(addresses.start, Taken { addresses, name: bound.name.clone(), tracked, part: part.cloned(), process });
    Ok(())
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
