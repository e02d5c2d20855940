//! Two blocks swap what they hold.

use super::Pages;
use crate::alloc::frames::{self, ENTRY_BYTES, TABLE_BYTES};
use crate::alloc::reservation::{FIRST_LARGE, RANKS, Reservation};
use crate::alloc::slot::SlotId;

/// Blocks shorter than this swap table by table: opening their slots and closing them again costs more than it spares.
const WHOLE_FROM_BYTES: usize = 96 << 20;

impl Pages {
    /// Swaps what two blocks of one length hold. False: there is nothing to swap by.
    pub(in crate::alloc) fn exchange(&mut self, a: SlotId, b: SlotId) -> bool {
        let len = self.len_bytes(a);
        let Some(reservation) = &mut self.reservation else { return false };
        let (first, second) = (reservation.addr(a), reservation.addr(b));
        if a.rank().min(b.rank()) < FIRST_LARGE {
            // SAFETY: slot-held: two blocks of one owner, each this long.
            unsafe { std::ptr::swap_nonoverlapping(first as *mut u64, second as *mut u64, len / size_of::<u64>()) };
            return true;
        }
        let Some(between) = self.place_between(a.rank().max(b.rank()), len) else { return false };
        (len >= WHOLE_FROM_BYTES && self.exchange_entries(a, b, between))
            || self.exchange_tables(a, b, between)
            // As for a block that finds no memory.
            || (self.close_free() && self.exchange_tables(a, b, between))
    }

    /// A free slot without frames, to put down `len_bytes` of them in: best one of `rank`, or with more room, so that they can be whole entries. It
    /// stays in the cache.
    fn place_between(&mut self, rank: usize, len_bytes: usize) -> Option<SlotId> {
        loop {
            let (reservation, cache) = self.ready()?;
            let least = reservation.rank_for(len_bytes)?.max(FIRST_LARGE);
            for rank in (rank..RANKS).chain((least..rank).rev()) {
                if let Some(id) = cache.bare(rank) {
                    return Some(id);
                }
                if let Some(id) = reservation.fresh(rank) {
                    cache.put(reservation, id);
                    return Some(id);
                }
            }
            if let Some(id) = cache.largest(reservation, usize::MAX, Reservation::room(least)) {
                cache.remove(reservation, id);
                self.mend(id);
                let (reservation, cache) = self.ready()?;
                cache.put(reservation, id);
                return (reservation.slot(id).framed_bytes == 0).then_some(id);
            }
            // Where addresses are used up, those that are kept closed have to do.
            if !self.release() {
                return None;
            }
        }
    }

    /// By whole page tables. False: there is no memory.
    fn exchange_tables(&mut self, a: SlotId, b: SlotId, between: SlotId) -> bool {
        let len = self.len_bytes(a);
        let Some(reservation) = &mut self.reservation else { return false };
        // With all of the last table, where that can be: a mapping that was cut within one would stay so, and after a while each page would
        // be one of its own.
        let whole = len.next_multiple_of(TABLE_BYTES);
        let was_open = [a, b].map(|id| reservation.slot(id).open_bytes);
        let opened = [a, b, between].iter().all(|id| reservation.open_to(*id, whole));
        let end = if opened { whole } else { len };
        let may_swap = reservation.open(between, end);
        if may_swap {
            let [first, second, third] = [a, b, between].map(|id| reservation.addr(id));
            // SAFETY: slot-held: two blocks of one owner, with what lies behind them in their slots, and a free slot, under the lock.
            unsafe { frames::swap(first, second, third, end) };
            let slot = reservation.slot_mut(between);
            slot.dirty_bytes = slot.dirty_bytes.max(end);
            if slot.pieces == 0 {
                (slot.pieces, self.pieces) = (1, self.pieces + 1);
            }
            self.swap_records_below(a, b, end);
            self.leave(between);
        }
        for (id, open) in [a, b].into_iter().zip(was_open) {
            match &mut self.reservation {
                Some(reservation) if open < whole => reservation.shut_behind(id),
                _ => self.shut_begun(id),
            }
        }
        may_swap
    }

    /// Leaves nothing in a place between: what was copied from there is still there, and what the program has advised for a block that was
    /// moved there.
    fn leave(&mut self, between: SlotId) {
        self.mend(between);
        let Some(reservation) = &mut self.reservation else { return };
        let addr = reservation.addr(between);
        let slot = reservation.slot_mut(between);
        let end = slot.dirty_bytes;
        // Where nothing may be mapped it stays several mappings, and would have what nobody counts.
        // SAFETY: slot-held: a free slot, which nobody needs anything of.
        if end > 0 && unsafe { frames::drop_frames(addr, end) } {
            slot.clear(0, end);
        } else if end > 0 {
            self.lapsed = true;
        }
    }

    /// Swaps what is known of the first `end` bytes of two slots, whose frames have changed places. Behind, each has what it had.
    fn swap_records_below(&mut self, a: SlotId, b: SlotId, end: usize) {
        let Some(reservation) = &mut self.reservation else { return };
        let [was_a, was_b] = [a, b].map(|id| {
            let slot = reservation.slot(id);
            (slot.framed_bytes, slot.dirty_bytes, slot.pieces)
        });
        let reach = |own: usize, others: usize| if own > end { own } else { others.min(end) };
        for (id, own, others) in [(a, was_a, was_b), (b, was_b, was_a)] {
            self.tails.remove(reservation, id);
            let slot = reservation.slot_mut(id);
            (slot.framed_bytes, slot.dirty_bytes, slot.pieces) =
                (reach(own.0, others.0), reach(own.1, others.1), others.2);
            self.retention.framed_bytes += slot.framed_bytes;
            self.retention.framed_bytes -= own.0;
            // Where it ends there may be a boundary that was not there before.
            if slot.pieces == 0 || slot.reached() > end && (slot.pieces as usize) < slot.open_bytes / TABLE_BYTES {
                (slot.pieces, self.pieces) = (slot.pieces + 1, self.pieces + 1);
            }
            self.tails.put(reservation, id);
        }
    }

    /// By whole entries, each for 1 GiB of addresses, with all that lies in the slots behind the blocks. The kernel moves an entry
    /// where one mapping covers it, so what is closed of the slots is opened, and stays so for the next time where nobody would notice. False:
    /// it may not be, and nothing has changed.
    fn exchange_entries(&mut self, a: SlotId, b: SlotId, between: SlotId) -> bool {
        // Closing would not take back what was counted.
        if !frames::overcommits() {
            return false;
        }
        let Some(reservation) = &mut self.reservation else { return false };
        let span = reservation.slot(a).reached().max(reservation.slot(b).reached()).next_multiple_of(ENTRY_BYTES);
        // A mapping that is longer than the machine has memory the kernel does not move.
        if [a, b, between].iter().any(|id| Reservation::room(id.rank()) < span) || !frames::machine_has(span) {
            return false;
        }
        let slots = [a, b, between].map(|id| (reservation.addr(id), reservation.slot(id).open_bytes));
        let [(first, _), (second, _), (third, _)] = slots;
        // SAFETY: slot-held: two blocks of one owner and a free slot, under the lock, with room for this.
        let opened =
            unsafe { slots.iter().all(|(addr, open)| frames::open_empty(addr + open, span.saturating_sub(*open))) };
        if opened {
            // SAFETY: slot-held: as above.
            unsafe { frames::swap(first, second, third, span) };
            // All of it is open now.
            let slot = reservation.slot_mut(between);
            slot.dirty_bytes = slot.dirty_bytes.max(span);
            let open_bytes = slot.open_bytes.max(span);
            reservation.note_open(between, open_bytes);
            self.leave(between);
            self.swap_records(a, b);
        }
        // A huge page would reach behind a block that ends within one; limits count what is open; and who has blocks checked wants to be
        // stopped behind them.
        let is_whole = self.len_bytes(a).is_multiple_of(TABLE_BYTES);
        let stays_open = opened && is_whole && !self.quarantine.is_on() && frames::has_no_limits();
        for id in [a, b] {
            let Some(reservation) = &mut self.reservation else { return false };
            let open = reservation.slot(id).open_bytes;
            if stays_open {
                reservation.note_open(id, span);
                self.shut_begun(id);
                continue;
            }
            // SAFETY: slot-held: as above; blocks end before what was never opened. Nobody relies on it that this is closed.
            let _ = unsafe { frames::shut(reservation.addr(id) + open, span - open) };
        }
        opened
    }

    /// Swaps what is known of two slots whose frames have changed places.
    fn swap_records(&mut self, a: SlotId, b: SlotId) {
        let Some(reservation) = &mut self.reservation else { return };
        let [was_a, was_b] = [a, b].map(|id| {
            let slot = reservation.slot(id);
            (slot.framed_bytes, slot.dirty_bytes, slot.open_bytes, slot.pieces)
        });
        for (id, was) in [(a, was_b), (b, was_a)] {
            self.tails.remove(reservation, id);
            let slot = reservation.slot_mut(id);
            (slot.framed_bytes, slot.dirty_bytes, slot.open_bytes, slot.pieces) = was;
            if slot.pieces == 0 {
                (slot.pieces, self.pieces) = (1, self.pieces + 1);
            }
            self.tails.put(reservation, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::reservation::tests::mapping_bytes;

    /// As where a block ends in the middle of what was touched: a core dump looks through all of the mapping behind it.
    #[test]
    fn what_was_open_for_a_moment_stays_apart_from_the_rest_of_its_rank() {
        const LEN: usize = (256 << 20) + 4096;
        let mut pages = Pages::new();
        let blocks = [(); 2].map(|()| {
            let addr = pages.allocate(LEN, 1).unwrap().addr;
            // SAFETY: slot-held: a new block.
            unsafe { (addr as *mut u8).write(7) };
            pages.block(addr).unwrap()
        });
        // The second time all comes back to where it was first touched.
        for _ in 0..2 {
            assert!(pages.exchange(blocks[0], blocks[1]));
            for id in blocks {
                let Some(reservation) = &pages.reservation else { unreachable!() };
                let end = reservation.addr(id) + reservation.slot(id).open_bytes;
                assert!(mapping_bytes(end) <= ENTRY_BYTES, "{} bytes", mapping_bytes(end));
            }
        }
    }
}
