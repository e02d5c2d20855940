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
    /// How many there are.
    pub const SETS: usize = 13;

    pub(super) fn sets(&self) -> [&Ranges; Maps::SETS] {
        // Each by its name, so that none is forgotten.
        let Maps {
            taken,
            foreign,
            closed,
            read_only,
            executable,
            guarded,
            locked,
            kept,
            not_for_child,
            empty_in_child,
            sealed,
            unmanaged,
            reserved,
            unmanaged_max_bytes: _,
            next_aside: _,
            forking: _,
        } = self;
        [
            taken,
            foreign,
            closed,
            read_only,
            executable,
            guarded,
            locked,
            kept,
            not_for_child,
            empty_in_child,
            sealed,
            unmanaged,
            reserved,
        ]
    }

    /// An error where what is to be said of so many parts of a range may not fit: asked before anything is changed.
    pub(super) fn has_room(&self, parts: usize) -> Result<(), Errno> {
        let fits = self.sets().iter().all(|set| set.has_room(2 * parts + 2));
        if fits { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// The same where each thing that is said of a part of a range is to be said of another place, too.
    pub(super) fn has_room_for_copies(&self, range: &Range<usize>) -> Result<(), Errno> {
        let fits = self.sets().iter().all(|set| set.has_room(set.count_within(range) + 4));
        if fits { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// The same where a range is to go.
    pub(super) fn may_lose(&self, range: &Range<usize>) -> Result<(), Errno> {
        if self.sets().iter().all(|set| set.may_lose(range)) { Ok(()) } else { Err(libc::ENOMEM) }
    }
}
