//! Freed blocks that nobody can touch: in the checked mode, so that whoever uses one after it was freed is stopped there.

use super::Pages;
use crate::alloc::frames;
use crate::alloc::reservation::{FIRST_LARGE, Reservation};
use crate::alloc::slot::{SlotId, SlotLink};

/// So many blocks that were freed last stay closed. A small one may cost two mappings, of the 65,530 that a process may have.
const MOST_BLOCKS: usize = 4 << 10;

/// Closed slots, in no list of the cache, the one that was freed first at the front.
#[derive(Debug)]
pub(super) struct Quarantine {
    on: bool,
    first: SlotLink,
    last: SlotLink,
    count: usize,
}

impl Quarantine {
    pub(super) const fn new() -> Quarantine {
        let none = SlotLink::to(SlotId::NONE);
        Quarantine { on: false, first: none, last: none, count: 0 }
    }

    /// Whether freed blocks are to go here.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    fn push(&mut self, reservation: &mut Reservation, id: SlotId) {
        reservation.slot_mut(id).next = SlotLink::to(SlotId::NONE);
        if self.last.id().is_some() {
            reservation.slot_mut(self.last.id()).next = SlotLink::to(id);
        } else {
            self.first = SlotLink::to(id);
        }
        self.last = SlotLink::to(id);
        self.count += 1;
    }

    fn pop(&mut self, reservation: &Reservation) -> Option<SlotId> {
        let id = Some(self.first.id()).filter(|id| id.is_some())?;
        self.first = reservation.slot(id).next;
        if !self.first.id().is_some() {
            self.last = SlotLink::to(SlotId::NONE);
        }
        self.count -= 1;
        Some(id)
    }
}

impl Pages {
    /// From now on blocks are closed when they are freed.
    pub(in crate::alloc) fn begin_quarantine(&mut self) {
        self.quarantine.on = true;
    }

    /// Closes a free slot that is in no list, and keeps it closed for a while. False: it cannot be closed.
    #[cold]
    pub(super) fn quarantine(&mut self, id: SlotId) -> bool {
        if !self.shut(id) {
            return false;
        }
        let Some(reservation) = &mut self.reservation else { return false };
        self.quarantine.push(reservation, id);
        if self.quarantine.count > MOST_BLOCKS {
            self.release();
        }
        true
    }

    /// Takes frames and access away from a free slot.
    fn shut(&mut self, id: SlotId) -> bool {
        if id.rank() >= FIRST_LARGE {
            self.mend(id);
            return self.reservation.as_ref().is_some_and(|reservation| reservation.slot(id).open_bytes == 0);
        }
        let Some(reservation) = &mut self.reservation else { return false };
        let (addr, room) = (reservation.addr(id), Reservation::room(id.rank()));
        reservation.forbid_huge(id.rank());
        // SAFETY: slot-held: a free slot, which nobody needs anything of.
        if !unsafe { frames::shut(addr, room) } {
            return false;
        }
        let slot = reservation.slot_mut(id);
        self.retention.framed_bytes -= slot.framed_bytes;
        self.counts.dropped_bytes += slot.framed_bytes as u64;
        slot.framed_bytes = 0;
        // SAFETY: slot-held: as above.
        if unsafe { frames::drop_frames(addr, room) } {
            slot.dirty_bytes = 0;
        }
        true
    }

    /// Lets the block be used again that was freed first. False: there is none.
    #[cold]
    pub(super) fn release(&mut self) -> bool {
        let Some(reservation) = &mut self.reservation else { return false };
        let Some(id) = self.quarantine.pop(reservation) else { return false };
        let small = id.rank() < FIRST_LARGE;
        // SAFETY: slot-held: a free slot, closed as a whole. One that cannot be opened again stays closed for good.
        if !small || unsafe { frames::reopen(reservation.addr(id), Reservation::room(id.rank())) } {
            self.cache.put(reservation, id);
        }
        true
    }
}
