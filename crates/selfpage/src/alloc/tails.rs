//! Tails: frames that lie behind a block, in its slot. They are nobody's, and in no list of the cache.

use super::reservation::Reservation;
use super::slot::{Slot, SlotId, SlotLink};

/// The slots of blocks that have tails, in a list; a slot that has a block needs its links for nothing else.
#[derive(Debug)]
pub(super) struct Tails {
    first: SlotLink,
    /// What all of them have together.
    pub(super) bytes: usize,
}

fn tail_bytes(slot: &Slot) -> usize {
    slot.framed_bytes.saturating_sub(slot.len_bytes)
}

impl Tails {
    pub(super) const fn new() -> Tails {
        Tails { first: SlotLink::to(SlotId::NONE), bytes: 0 }
    }

    /// Notes the tail of a block, if it has one.
    #[inline]
    pub(super) fn put(&mut self, reservation: &mut Reservation, id: SlotId) {
        let bytes = tail_bytes(reservation.slot(id));
        if bytes != 0 {
            self.link(reservation, id, bytes);
        }
    }

    fn link(&mut self, reservation: &mut Reservation, id: SlotId, bytes: usize) {
        let next = self.first;
        if next.id().is_some() {
            reservation.slot_mut(next.id()).previous = SlotLink::to(id);
        }
        let slot = reservation.slot_mut(id);
        (slot.previous, slot.next) = (SlotLink::to(SlotId::NONE), next);
        self.first = SlotLink::to(id);
        self.bytes += bytes;
    }

    /// Forgets the tail of a block, before its length or its frames change, or it is freed.
    #[inline]
    pub(super) fn remove(&mut self, reservation: &mut Reservation, id: SlotId) {
        let bytes = tail_bytes(reservation.slot(id));
        if bytes != 0 {
            self.unlink(reservation, id, bytes);
        }
    }

    fn unlink(&mut self, reservation: &mut Reservation, id: SlotId, bytes: usize) {
        let slot = reservation.slot(id);
        let (previous, next) = (slot.previous, slot.next);
        if previous.id().is_some() {
            reservation.slot_mut(previous.id()).next = next;
        } else {
            self.first = next;
        }
        if next.id().is_some() {
            reservation.slot_mut(next.id()).previous = previous;
        }
        self.bytes -= bytes;
    }

    /// The block that got its tail last.
    pub(super) fn first(&self) -> Option<SlotId> {
        Some(self.first.id()).filter(|id| id.is_some())
    }
}
