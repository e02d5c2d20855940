//! Whether what a call says of mappings fits the sets: asked before anything is changed, so that nothing is half done.

use std::ops::Range;

use super::{Errno, Maps};
use crate::ranges::Ranges;

/// Why there is no managed mapping.
pub(super) enum NoRoom {
    /// The region has no such stretch any more.
    InRegion,
    /// The kernel has no room for one more mapping, or the frames do not hold it.
    InKernel,
}

impl Maps {
    pub(super) fn sets(&self) -> [&Ranges; 13] {
        [
            &self.taken,
            &self.foreign,
            &self.closed,
            &self.read_only,
            &self.executable,
            &self.guarded,
            &self.locked,
            &self.kept,
            &self.not_for_child,
            &self.empty_in_child,
            &self.sealed,
            &self.unmanaged,
            &self.reserved,
        ]
    }

    /// An error where what is to be said of so many parts of a range may not fit: asked before anything is changed.
    pub(super) fn has_room(&self, parts: usize) -> Result<(), Errno> {
        let fits = self.sets().iter().all(|set| set.has_room(2 * parts + 2));
        if fits { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// The same where a range is to go.
    pub(super) fn may_lose(&self, range: &Range<usize>) -> Result<(), Errno> {
        if self.sets().iter().all(|set| set.may_lose(range)) { Ok(()) } else { Err(libc::ENOMEM) }
    }
}
