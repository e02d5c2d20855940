//! What the allocator has, and what it has done.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::pages::Pages;

/// What the page allocator has at this moment, and what it has done since the process began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes of blocks.
    pub live_bytes: usize,
    /// Bytes that may have frames: those of blocks, as if all had been touched, and those that are kept for later.
    pub retained_bytes: usize,
    /// The most that was live lately. The cache is given back until [`Stats::retained_bytes`] is within 1.25 times that.
    pub peak_bytes: usize,
    /// The most that was live since the process began.
    pub most_live_bytes: usize,
    /// And since when: counts.
    pub counts: Counts,
}

/// Counts since the process began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Blocks that got a slot that had all its frames.
    pub warm: u64,
    /// Blocks that did not.
    pub cold: u64,
    /// Bytes of those that had no frames, and of what blocks grew by where they were.
    pub cold_bytes: u64,
    /// Blocks that were resized where they were.
    pub in_place: u64,
    /// Blocks that moved because they grew.
    pub moved: u64,
    /// Bytes of frames that moved from a free slot to a block.
    pub lent_bytes: u64,
    /// Bytes given back to the kernel.
    pub dropped_bytes: u64,
}

impl Counts {
    pub(super) const NONE: Counts =
        Counts { warm: 0, cold: 0, cold_bytes: 0, in_place: 0, moved: 0, lent_bytes: 0, dropped_bytes: 0 };
}

/// What is asked around each block, as it was when the last one came or went. It is written under the allocator's lock, and read without:
/// frames move under that, which others need not wait for.
#[derive(Debug)]
pub(super) struct Noted {
    /// [`Counts::cold_bytes`].
    pub(super) cold_bytes: AtomicU64,
    /// What the process's control groups may have; the most that there is: they have no limit.
    pub(super) limit_bytes: AtomicUsize,
    /// [`Pages::is_worth_a_look`].
    pub(super) is_worth_a_look: AtomicBool,
    /// A block has found no mappings left for it. From then on some may have come from elsewhere.
    pub(super) lacked_mappings: AtomicBool,
}

pub(super) static NOTED: Noted = Noted {
    cold_bytes: AtomicU64::new(0),
    limit_bytes: AtomicUsize::new(usize::MAX),
    is_worth_a_look: AtomicBool::new(false),
    lacked_mappings: AtomicBool::new(false),
};

impl Noted {
    #[inline]
    pub(super) fn note(&self, pages: &Pages) {
        self.cold_bytes.store(pages.counts.cold_bytes, Ordering::Relaxed);
        self.limit_bytes.store(pages.retention.limit_bytes, Ordering::Relaxed);
        self.is_worth_a_look.store(pages.is_worth_a_look(), Ordering::Relaxed);
    }
}
