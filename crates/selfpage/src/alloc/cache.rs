//! The free slots, by how many frames each has kept.

use super::class::{self, CLASSES};
use super::reservation::{FIRST_LARGE, FIRST_ROOMY, RANKS, Reservation};
use super::slot::{Slot, SlotId, SlotLink};
use selfpage_core::addr::PAGE_SHIFT;

/// Lists of roomy slots, by frames.
const ROOMY_BINS: usize = 128;
/// After them one for each class of packed slots, which serve that class and no other.
const PACKED_BINS: usize = ROOMY_BINS;
/// And one for those of each class that were begun with others and never used: they serve, and are dropped, after all that was.
const SPARE_BINS: usize = PACKED_BINS + CLASSES;
const BINS: usize = SPARE_BINS + CLASSES;
const WORDS: usize = BINS.div_ceil(64);
/// Slots that are looked at in one list.
const LOOKS: usize = 8;

/// Lists of free slots: by frames kept, or by class; and by rank those that kept none.
#[derive(Debug)]
pub(super) struct Cache {
    framed: [List; BINS],
    filled: [u64; WORDS],
    bare: [List; RANKS],
    /// Bytes of frames of all of them.
    pub(super) bytes: usize,
}

#[derive(Clone, Copy, Debug)]
struct List {
    first: SlotLink,
    last: SlotLink,
}

impl List {
    const EMPTY: List = List { first: SlotLink::to(SlotId::NONE), last: SlotLink::to(SlotId::NONE) };
}

/// The list for roomy slots with this many bytes of frames.
fn bin(framed_bytes: usize) -> usize {
    class::step(framed_bytes >> PAGE_SHIFT).min(ROOMY_BINS - 1)
}

/// The list for a slot that has frames.
fn bin_of(id: SlotId, slot: &Slot) -> usize {
    match id.rank() {
        rank if rank >= FIRST_ROOMY => bin(slot.framed_bytes),
        rank if slot.freed_at == Slot::SPARE => SPARE_BINS + rank,
        rank => PACKED_BINS + rank,
    }
}

impl Cache {
    pub(super) const fn new() -> Cache {
        Cache { framed: [List::EMPTY; BINS], filled: [0; WORDS], bare: [List::EMPTY; RANKS], bytes: 0 }
    }

    /// Puts a free slot first into its list.
    pub(super) fn put(&mut self, reservation: &mut Reservation, id: SlotId) {
        let slot = reservation.slot(id);
        self.bytes += slot.framed_bytes;
        let list = if slot.framed_bytes == 0 {
            &mut self.bare[id.rank()]
        } else {
            let bin = bin_of(id, slot);
            self.filled[bin / 64] |= 1 << (bin % 64);
            &mut self.framed[bin]
        };
        let next = list.first;
        list.first = SlotLink::to(id);
        if next.id().is_some() {
            reservation.slot_mut(next.id()).previous = SlotLink::to(id);
        } else {
            list.last = SlotLink::to(id);
        }
        let slot = reservation.slot_mut(id);
        (slot.previous, slot.next) = (SlotLink::to(SlotId::NONE), next);
    }

    /// Takes a free slot out of its list.
    pub(super) fn remove(&mut self, reservation: &mut Reservation, id: SlotId) {
        let slot = reservation.slot(id);
        let (framed, previous, next) = (slot.framed_bytes, slot.previous, slot.next);
        self.bytes -= framed;
        let bin = bin_of(id, slot);
        let list = if framed == 0 { &mut self.bare[id.rank()] } else { &mut self.framed[bin] };
        if previous.id().is_some() {
            reservation.slot_mut(previous.id()).next = next;
        } else {
            list.first = next;
        }
        if next.id().is_some() {
            reservation.slot_mut(next.id()).previous = previous;
        } else {
            list.last = previous;
        }
        if framed != 0 && !list.first.id().is_some() {
            self.filled[bin / 64] &= !(1 << (bin % 64));
        }
    }

    /// The free roomy slot with the fewest frames that has `least..=most` bytes of them.
    pub(super) fn fitting(&self, reservation: &Reservation, least: usize, most: usize) -> Option<SlotId> {
        let mut from = bin(least);
        while let Some(bin) = self.filled_from(from) {
            let fits = |slot: &SlotId| (least..=most).contains(&reservation.slot(*slot).framed_bytes);
            if bin >= ROOMY_BINS {
                return None;
            }
            if let Some(id) = self.list(reservation, bin).take(LOOKS).find(fits) {
                return Some(id);
            }
            if bin > self::bin(most) {
                return None;
            }
            from = bin + 1;
        }
        None
    }

    /// The free roomy slot with the most frames that has less than `below` bytes of them and room for `room` bytes.
    pub(super) fn largest(&self, reservation: &Reservation, below: usize, room: usize) -> Option<SlotId> {
        let mut until = bin(below) + 1;
        while let Some(bin) = self.filled_below(until) {
            let fits = |id: &SlotId| reservation.slot(*id).framed_bytes < below && Reservation::room(id.rank()) >= room;
            if let Some(id) = self.list(reservation, bin).take(LOOKS).find(fits) {
                return Some(id);
            }
            until = bin;
        }
        None
    }

    /// Free large slots that have frames, those with the most first.
    pub(super) fn large<'a>(&'a self, reservation: &'a Reservation) -> impl Iterator<Item = SlotId> + 'a {
        let bins = std::iter::successors(self.filled_below(ROOMY_BINS), |bin| self.filled_below(*bin));
        let slots = bins.flat_map(|bin| self.list(reservation, bin).take(LOOKS));
        slots.filter(|id| id.rank() >= FIRST_LARGE)
    }

    /// A free packed slot of the class for `len_bytes` that has as many bytes of frames.
    pub(super) fn packed(&self, reservation: &Reservation, len_bytes: usize) -> Option<SlotId> {
        let fits = |id: &SlotId| reservation.slot(*id).framed_bytes >= len_bytes;
        let class = class::class_for(len_bytes)?;
        let freed = self.list(reservation, PACKED_BINS + class).take(LOOKS).find(fits);
        freed.or_else(|| self.first(SPARE_BINS + class))
    }

    /// A free packed slot of this rank, whatever frames it has.
    pub(super) fn any_packed(&self, rank: usize) -> Option<SlotId> {
        self.first(PACKED_BINS + rank).or_else(|| self.first(SPARE_BINS + rank)).or_else(|| self.bare(rank))
    }

    fn first(&self, bin: usize) -> Option<SlotId> {
        Some(self.framed[bin].first.id()).filter(|id| id.is_some())
    }

    /// A free slot of this rank without frames.
    pub(super) fn bare(&self, rank: usize) -> Option<SlotId> {
        let first = self.bare[rank].first.id();
        first.is_some().then_some(first)
    }

    /// Of the slots that were freed first in their lists, the one that was freed first.
    pub(super) fn oldest(&self, reservation: &Reservation) -> Option<SlotId> {
        let lasts = self.framed.iter().map(|list| list.last.id()).filter(|last| last.is_some());
        lasts.min_by_key(|last| reservation.slot(*last).freed_at)
    }

    fn list<'a>(&self, reservation: &'a Reservation, bin: usize) -> impl Iterator<Item = SlotId> + 'a {
        let next = |id: &SlotId| Some(reservation.slot(*id).next.id()).filter(|id| id.is_some());
        std::iter::successors(self.first(bin), next)
    }

    fn filled_from(&self, bin: usize) -> Option<usize> {
        let mut mask = !0u64 << (bin % 64);
        for word in bin / 64..WORDS {
            let here = self.filled[word] & mask;
            if here != 0 {
                return Some(word * 64 + here.trailing_zeros() as usize);
            }
            mask = !0;
        }
        None
    }

    fn filled_below(&self, bin: usize) -> Option<usize> {
        (0..bin.min(BINS)).rev().find(|bin| self.filled[bin / 64] >> (bin % 64) & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_rise_with_frames() {
        let bins: Vec<usize> = (1..5000).map(|pages| bin(pages << PAGE_SHIFT)).collect();
        assert!(bins.is_sorted());
        assert_eq!(bin(8 << 12), bin(9 << 12));
        assert_ne!(bin(8 << 12), bin(10 << 12));
        assert!(bin(1 << 41) < BINS);
    }
}
