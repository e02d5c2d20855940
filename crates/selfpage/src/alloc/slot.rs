//! What is known of a slot: a range of addresses for one block, and the frames at its beginning.

use super::frames::TABLE_BYTES;
use super::reservation::SLOTS_OF_RANK;

/// The number of a slot: its rank, and which of the rank it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SlotId(u32);

impl SlotId {
    pub(super) const INDEX_BITS: u32 = 20;
    pub(super) const NONE: SlotId = SlotId(u32::MAX);

    pub(super) const fn new(rank: usize, index: usize) -> SlotId {
        SlotId(((rank << Self::INDEX_BITS) | index) as u32)
    }
    pub(super) const fn rank(self) -> usize {
        (self.0 >> Self::INDEX_BITS) as usize
    }
    pub(super) const fn index(self) -> usize {
        self.0 as usize & (SLOTS_OF_RANK - 1)
    }
    pub(super) fn is_some(self) -> bool {
        self != SlotId::NONE
    }
}

/// Who has the slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub(super) enum Holder {
    /// Nobody: it is in the cache, or was never used.
    #[default]
    Nobody = 0,
    /// The program: a block.
    Block,
    /// The program: items of a batch.
    Run,
    /// Whoever works on its frames outside of the lock.
    Worker,
}

/// The record of a slot. All lengths are from its beginning, in whole pages; all zeros is a slot that was never used.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Slot {
    /// Of the block; 0 while the slot is free.
    pub(super) len_bytes: usize,
    /// What may have frames: nothing beyond has any but those that were left to the kernel.
    pub(super) framed_bytes: usize,
    /// What may hold other bytes than zeros: more than what may have frames, where the kernel was left some to take when it likes.
    pub(super) dirty_bytes: usize,
    /// What may be touched, in large ranks.
    pub(super) open_bytes: usize,
    /// When it was freed, counted in frees; or [`Slot::SPARE`].
    pub(super) freed_at: u64,
    /// Neighbours in a list of the cache, as numbers.
    pub(super) next: SlotLink,
    pub(super) previous: SlotLink,
    pub(super) holder: Holder,
    /// Frames were moved into it: it consists of several mappings.
    pub(super) pieces: u16,
    /// It was made one mapping again, which has no huge pages until it is opened.
    pub(super) plain: bool,
}

impl Slot {
    /// Stands for when it was freed, in a packed slot that was begun with others and never used: such count as freed last.
    pub(super) const SPARE: u64 = u64::MAX;

    /// Whether the block may come to have a huge page that ends behind it: all of its last table is open. A touch brings one where that is
    /// empty, and `khugepaged` makes one where it is begun.
    pub(super) fn may_get_huge_page(&self) -> bool {
        let end = self.len_bytes.next_multiple_of(TABLE_BYTES);
        end > self.len_bytes && self.open_bytes >= end
    }

    /// Whether `khugepaged` may make a huge page that ends behind its frames: of the table that they end in, all of which is open.
    pub(super) fn is_begun_open(&self) -> bool {
        let end = self.framed_bytes.next_multiple_of(TABLE_BYTES);
        end > self.framed_bytes && self.open_bytes >= end
    }

    /// How far anything was ever left in it: what was closed may still hold something that was left to the kernel.
    pub(super) fn reached(&self) -> usize {
        self.open_bytes.max(self.dirty_bytes)
    }

    /// `from..end` reads as zeros now. What was left to the kernel behind `end` may hold something for as long as the kernel likes.
    pub(super) fn clear(&mut self, from: usize, end: usize) {
        if self.dirty_bytes <= end {
            self.dirty_bytes = self.dirty_bytes.min(from);
        }
    }
}

/// A link of a list. Zero, as in a fresh record, is no slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct SlotLink(u32);

impl SlotLink {
    pub(super) const fn to(id: SlotId) -> SlotLink {
        SlotLink(id.0.wrapping_add(1))
    }
    pub(super) const fn id(self) -> SlotId {
        SlotId(self.0.wrapping_sub(1))
    }
}
