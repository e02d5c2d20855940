//! Frames that are made ready ahead of need, or given back: of free slots outside of the lock, behind blocks under it.

use selfpage_core::addr::PAGE_BYTES;

use super::Pages;
use crate::alloc::frames::{self, TABLE_BYTES, whole_tables};
use crate::alloc::reservation::{FIRST_LARGE, RANKS};
use crate::alloc::slot::{Holder, SlotId};
use crate::alloc::workers::{WORKERS, Work};

/// What is dropped at once under the lock: nobody can allocate meanwhile.
const MOST_AT_ONCE: usize = 8 << 20;
/// Slots that a sweep looks at under one lock.
const SLOTS_AT_ONCE: usize = 4 << 10;

/// A part of a free slot, whose frames are to be made ready or dropped outside of the lock.
#[derive(Clone, Copy, Debug)]
pub(in crate::alloc) struct Surplus {
    id: SlotId,
    pub(in crate::alloc) addr: usize,
    pub(in crate::alloc) len_bytes: usize,
    work: Work,
}

/// How far a sweep over all slots has come.
#[derive(Debug, Default)]
pub(in crate::alloc) struct Sweep {
    rank: usize,
    index: usize,
}

impl Pages {
    /// A free slot to fill with frames, at most `bytes` of them and no more than the bound leaves. [`Pages::end_reserve`] must follow.
    pub(in crate::alloc) fn begin_reserve(&mut self, bytes: usize) -> Option<Surplus> {
        let bound = self.retention.bound_bytes().saturating_sub(self.retention.framed_bytes);
        let len_bytes = whole_tables(bytes.min(bound));
        let (reservation, cache) = self.ready()?;
        let rank = reservation.rank_for(len_bytes)?.max(FIRST_LARGE);
        let id = match cache.bare(rank) {
            Some(id) => {
                cache.remove(reservation, id);
                id
            }
            None => reservation.fresh(rank)?,
        };
        let open = len_bytes > 0 && reservation.open(id, len_bytes);
        let Some(work) = open.then(|| WORKERS.begin()).flatten() else {
            cache.put(reservation, id);
            return None;
        };
        reservation.slot_mut(id).holder = Holder::Worker;
        let addr = reservation.addr(id);
        self.retention.framed_bytes += len_bytes;
        Some(Surplus { id, addr, len_bytes, work })
    }

    /// Puts the slot into the cache that was filled with frames, up to `filled_bytes`, whole tables.
    pub(in crate::alloc) fn end_reserve(&mut self, reserve: Surplus, filled_bytes: usize) {
        let Some(reservation) = &mut self.reservation else { return };
        WORKERS.end(reserve.work);
        self.retention.framed_bytes -= reserve.len_bytes - filled_bytes;
        let slot = reservation.slot_mut(reserve.id);
        (slot.holder, slot.framed_bytes, slot.freed_at) = (Holder::Nobody, filled_bytes, self.frees);
        self.cache.put(reservation, reserve.id);
    }

    /// Gives at most `bytes` of a tail back, by `give`, which says whether they read as zeros afterwards, if tails have more than the
    /// cache does. Returns how many bytes. It is done under the lock: the block may grow into its tail at any other time.
    #[cold]
    pub(in crate::alloc) fn give_tail(&mut self, bytes: usize, give: unsafe fn(usize, usize) -> bool) -> Option<usize> {
        let reservation = self.reservation.as_mut()?;
        let id = self.tails.first().filter(|_| bytes > 0 && self.tails.bytes > self.cache.bytes)?;
        self.tails.remove(reservation, id);
        let (addr, nobodys) = (reservation.addr(id), reservation.nobodys());
        reservation.forbid_huge(id.rank());
        let slot = reservation.slot_mut(id);
        let len = bytes.next_multiple_of(PAGE_BYTES).min(slot.framed_bytes - slot.len_bytes).min(MOST_AT_ONCE);
        slot.framed_bytes -= len;
        // Nobody would look for a lock behind what is open.
        frames::end_lock(addr + slot.framed_bytes, len, nobodys);
        // SAFETY: slot-held: behind a block, in its slot.
        if unsafe { give(addr + slot.framed_bytes, len) } {
            slot.clear(slot.framed_bytes, slot.framed_bytes + len);
        } else {
            self.lapsed = true;
        }
        self.retention.framed_bytes -= len;
        self.counts.dropped_bytes += len as u64;
        if !slot.framed_bytes.is_multiple_of(TABLE_BYTES) {
            reservation.shut_behind(id);
        }
        self.tails.put(reservation, id);
        Some(len)
    }

    /// The next frames that are to be dropped, if `bytes` of them are too many. [`Pages::dropped`] must follow.
    pub(in crate::alloc) fn surplus(&mut self, bytes: usize) -> Option<Surplus> {
        let Some(reservation) = &mut self.reservation else { return None };
        if bytes == 0 {
            return None;
        }
        let id = self.cache.oldest(reservation)?;
        let work = WORKERS.begin()?;
        self.cache.remove(reservation, id);
        let addr = reservation.addr(id);
        reservation.forbid_huge(id.rank());
        let slot = reservation.slot_mut(id);
        self.retention.begin_use(slot);
        slot.holder = Holder::Worker;
        // Whole tables stay: they serve any block.
        let unit = if id.rank() < FIRST_LARGE { PAGE_BYTES } else { TABLE_BYTES };
        let len_bytes = slot.framed_bytes - slot.framed_bytes.saturating_sub(bytes) / unit * unit;
        // At once: who looks meanwhile must not take them for too many again.
        self.retention.framed_bytes -= len_bytes;
        Some(Surplus { id, addr: addr + slot.framed_bytes - len_bytes, len_bytes, work })
    }

    /// Puts the slot back whose frames were dropped.
    pub(in crate::alloc) fn dropped(&mut self, surplus: Surplus, gone: bool) {
        let Some(reservation) = &mut self.reservation else { return };
        WORKERS.end(surplus.work);
        let slot = reservation.slot_mut(surplus.id);
        slot.holder = Holder::Nobody;
        // What the kernel would not drop is forgotten all the same, or it would be asked for ever; it stays dirty.
        slot.framed_bytes -= surplus.len_bytes;
        self.counts.dropped_bytes += surplus.len_bytes as u64;
        if gone {
            slot.clear(slot.framed_bytes, slot.framed_bytes + surplus.len_bytes);
        } else {
            self.lapsed = true;
        }
        // A block that was locked in memory, and freed so, is not to count as that for ever.
        let locked = |len_bytes| surplus.id.rank() >= FIRST_LARGE && frames::is_locked(surplus.addr, len_bytes);
        if slot.framed_bytes == 0 && (slot.pieces > 0 || locked(slot.open_bytes)) {
            self.mend(surplus.id);
        }
        self.put_away(surplus.id);
    }

    /// Closes free large slots, with what they have, and what is open behind blocks. False: there was nothing to close.
    #[cold]
    pub(super) fn close_free(&mut self) -> bool {
        let mut closed = false;
        for rank in FIRST_LARGE..RANKS {
            let used = self.reservation.as_ref().map_or(0, |reservation| reservation.used(rank));
            for id in (0..used).map(|index| SlotId::new(rank, index)) {
                closed |= self.close_slot(id);
            }
        }
        closed
    }

    /// Closes the free large slot with the fewest frames. False: there is none.
    #[cold]
    pub(super) fn close_least(&mut self) -> bool {
        let Some(reservation) = &self.reservation else { return false };
        let least = self.cache.large(reservation).last();
        least.is_some_and(|id| self.close_slot(id))
    }

    fn close_slot(&mut self, id: SlotId) -> bool {
        let Some(reservation) = &mut self.reservation else { return false };
        let (holder, open_bytes) = (reservation.slot(id).holder, reservation.slot(id).open_bytes);
        match holder {
            Holder::Nobody if open_bytes > 0 => {
                self.cache.remove(reservation, id);
                self.mend(id);
                let Some(reservation) = &mut self.reservation else { return false };
                self.cache.put(reservation, id);
                reservation.slot(id).open_bytes == 0
            }
            Holder::Block => {
                reservation.shut_behind(id);
                reservation.slot(id).open_bytes < open_bytes
            }
            _ => false,
        }
    }

    /// Closes the next free large slot that has no frames. False: that was all.
    pub(in crate::alloc) fn close_bare(&mut self, sweep: &mut Sweep) -> bool {
        let Some(reservation) = self.reservation.as_mut().filter(|reservation| reservation.open_slots > 0) else {
            return false;
        };
        sweep.rank = sweep.rank.max(FIRST_LARGE);
        for _ in 0..SLOTS_AT_ONCE {
            while sweep.index == reservation.used(sweep.rank) {
                *sweep = Sweep { rank: sweep.rank + 1, index: 0 };
                if sweep.rank == RANKS {
                    return false;
                }
            }
            let id = SlotId::new(sweep.rank, sweep.index);
            sweep.index += 1;
            let slot = reservation.slot(id);
            if slot.holder == Holder::Nobody && slot.framed_bytes == 0 && slot.open_bytes > 0 {
                self.close_slot(id);
                break;
            }
        }
        true
    }

    /// Whether frames were left to the kernel since this was asked last.
    pub(in crate::alloc) fn begin_sweep(&mut self) -> Option<Sweep> {
        std::mem::take(&mut self.lapsed).then(Sweep::default)
    }

    /// Drops what was left to the kernel and may still be there, in some slots more. False: that was all. Under the lock, and little at
    /// once: it lies behind what slots count as theirs, so no list changes.
    pub(in crate::alloc) fn sweep(&mut self, sweep: &mut Sweep) -> bool {
        let Some(reservation) = &mut self.reservation else { return false };
        for _ in 0..SLOTS_AT_ONCE {
            if sweep.index == reservation.used(sweep.rank) {
                *sweep = Sweep { rank: sweep.rank + 1, index: 0 };
                if sweep.rank == RANKS {
                    return false;
                }
                continue;
            }
            let id = SlotId::new(sweep.rank, sweep.index);
            let addr = reservation.addr(id);
            let slot = reservation.slot_mut(id);
            let end = slot.dirty_bytes;
            let from = slot.framed_bytes.max(end.saturating_sub(MOST_AT_ONCE));
            if from < end && slot.holder != Holder::Worker {
                // SAFETY: slot-held: behind a block, or in a free slot, and nobody needs what is there.
                if unsafe { frames::drop_frames(addr + from, end - from) } {
                    slot.clear(from, end);
                    return true;
                }
            }
            sweep.index += 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MANY_SLOTS, MOST_PIECES};
    use super::*;
    use crate::alloc::block;
    use crate::child;

    const BYTES: usize = 8 << 20;

    #[test]
    fn frames_are_made_ready_within_the_bound_and_serve_the_next_block() {
        let mut pages = Pages::new();
        assert!(pages.begin_reserve(BYTES).is_none());
        pages.retention.peak_bytes = BYTES;
        pages.retention.most_bytes = BYTES - 1;
        let reserve = pages.begin_reserve(2 * BYTES).unwrap();
        assert_eq!(reserve.len_bytes, BYTES - TABLE_BYTES);
        // What somebody waited for may have been cut short, or not have begun.
        let filled_bytes = BYTES - 3 * TABLE_BYTES;
        pages.end_reserve(reserve, filled_bytes);
        assert_eq!((pages.retention.framed_bytes, pages.cache.bytes), (filled_bytes, filled_bytes));
        let reserve = pages.begin_reserve(2 * BYTES).unwrap();
        assert_eq!(reserve.len_bytes, 2 * TABLE_BYTES);
        pages.end_reserve(reserve, 0);
        assert_eq!((pages.retention.framed_bytes, pages.cache.bytes), (filled_bytes, filled_bytes));
        assert_eq!(WORKERS.own(), 0);
        let mut pages = Pages::new();
        pages.retention.peak_bytes = BYTES;
        let reserve = pages.begin_reserve(2 * BYTES).unwrap();
        assert_eq!((WORKERS.own(), reserve.len_bytes), (1, BYTES + TABLE_BYTES));
        assert!(pages.begin_reserve(BYTES).is_none(), "beyond the bound");
        frames::populate(reserve.addr, reserve.len_bytes);
        pages.end_reserve(reserve, reserve.len_bytes);
        assert_eq!((WORKERS.own(), pages.cache.bytes), (0, reserve.len_bytes));
        let given = pages.allocate(BYTES, 1).unwrap();
        assert_eq!((given.addr, given.dirty_bytes, given.absent_bytes, pages.counts.warm), (reserve.addr, 0, 0, 1));
    }

    #[test]
    fn what_one_thread_drops_is_not_too_much_for_another() {
        // Alone: while a fork waits nothing is dropped.
        child::forked(|| {
            let mut pages = Pages::new();
            let blocks = [(); 4].map(|()| pages.allocate(BYTES, 1).unwrap().addr);
            for addr in blocks {
                let id = pages.block(addr).unwrap();
                pages.free(id);
            }
            pages.retention.keep_bytes = Some(3 * BYTES);
            let dropped = pages.surplus(pages.retention.excess_bytes()).unwrap();
            assert_eq!((dropped.len_bytes, pages.retention.excess_bytes()), (BYTES, 0));
            pages.dropped(dropped, true);
            assert_eq!((pages.retention.framed_bytes, pages.cache.bytes), (3 * BYTES, 3 * BYTES));
        });
    }

    #[test]
    fn nothing_is_dropped_or_made_ready_while_a_fork_waits() {
        // Alone: it is all of the process's threads that wait.
        child::forked(|| {
            let mut pages = Pages::new();
            let addr = pages.allocate(BYTES, 1).unwrap().addr;
            let id = pages.block(addr).unwrap();
            pages.free(id);
            WORKERS.begin_fork();
            let cached_bytes = pages.cache.bytes;
            assert!(pages.surplus(BYTES).is_none() && pages.begin_reserve(BYTES / 8).is_none());
            assert_eq!(pages.cache.bytes, cached_bytes);
            WORKERS.end_fork();
            let reserve = pages.begin_reserve(BYTES / 4).unwrap();
            pages.end_reserve(reserve, reserve.len_bytes);
            assert!(pages.surplus(BYTES).is_some());
        });
    }

    #[test]
    fn what_goes_back_with_its_mapping_counts_once() {
        let dropped = |pages: &Pages| pages.counts.dropped_bytes as usize;
        let freed = |pages: &mut Pages, len_bytes: usize| {
            let addr = pages.allocate(len_bytes, 1).unwrap().addr;
            let id = pages.block(addr).unwrap();
            pages.free(id);
        };
        let mut pages = Pages::new();
        freed(&mut pages, BYTES);
        assert!(pages.close_free() && !pages.close_free());
        assert_eq!(dropped(&pages), BYTES);
        pages.begin_quarantine();
        freed(&mut pages, BYTES);
        assert_eq!(dropped(&pages), 2 * BYTES);
        freed(&mut pages, 64 << 10);
        assert_eq!(dropped(&pages), 2 * BYTES + (64 << 10));
        // Where mappings are used up, a block that becomes shorter lends nothing.
        let mut pages = Pages::new();
        let addr = pages.allocate(BYTES, 1).unwrap().addr;
        let id = pages.block(addr).unwrap();
        pages.pieces = MOST_PIECES;
        assert!(pages.resize_in_place(id, BYTES / 2));
        assert_eq!(dropped(&pages), BYTES / 2);
    }

    #[test]
    fn of_many_slots_those_without_frames_are_closed() {
        // Alone: while a fork waits nothing is dropped.
        child::forked(|| {
            const OTHERS: usize = MANY_SLOTS - 10;
            let mut pages = Pages::new();
            let blocks = [(); 20].map(|()| pages.allocate(BYTES, 1).unwrap().addr);
            let open_slots = |pages: &Pages| pages.reservation.as_ref().unwrap().open_slots;
            assert_eq!(open_slots(&pages), blocks.len());
            pages.reservation.as_mut().unwrap().open_slots += OTHERS;
            pages.retention.keep_bytes = Some(0);
            for addr in blocks {
                let id = pages.block(addr).unwrap();
                pages.free(id);
                let surplus = pages.surplus(pages.retention.excess_bytes()).unwrap();
                pages.dropped(surplus, true);
            }
            assert_eq!(open_slots(&pages), MANY_SLOTS);
            // The last one is taken again.
            assert_eq!(pages.allocate(BYTES, 1).unwrap().addr, blocks[19]);
            let mut sweep = Sweep::default();
            while pages.close_bare(&mut sweep) {}
            assert_eq!(open_slots(&pages), OTHERS + 1);
        });
    }

    #[test]
    fn blocks_leave_mappings_for_others() {
        // Alone: that there were none left is noted for all of the process.
        child::forked(|| {
            const LEN: usize = 5 << 20;
            let mut pages = Pages::new();
            pages.most_mappings = 200;
            let blocks: Vec<_> = std::iter::from_fn(|| Some(pages.allocate(LEN, 1)?.addr)).take(1000).collect();
            assert_eq!((blocks.len(), block::lacked_mappings()), (75, true));
            // In the place of one that was freed there is one more: of its length, or too long for its slot.
            for (addr, len_bytes) in [(blocks[0], LEN), (blocks[1], 16 * LEN), (blocks[2], LEN)] {
                let id = pages.block(addr).unwrap();
                pages.free(id);
                assert!(pages.allocate(len_bytes, 1).is_some() && pages.allocate(len_bytes, 1).is_none());
            }
            assert_eq!(pages.reservation.as_ref().unwrap().open_slots, 75);
        });
    }

    #[test]
    fn what_was_never_used_goes_after_what_was_freed() {
        // Alone: while a fork waits nothing is dropped.
        child::forked(|| {
            let mut pages = Pages::new();
            let mut last = 0;
            while pages.retention.spare_bytes == 0 {
                last = pages.allocate(512 << 10, 1).unwrap().addr;
            }
            let (id, spare_bytes) = (pages.block(last).unwrap(), pages.retention.spare_bytes);
            pages.free(id);
            let dropped = pages.surplus(PAGE_BYTES).unwrap();
            assert_eq!((dropped.id, pages.retention.spare_bytes), (id, spare_bytes));
            pages.dropped(dropped, true);
            let next = pages.surplus(1 << 20).unwrap();
            assert_eq!(next.id, id, "what is left of it");
            pages.dropped(next, true);
            let other = pages.surplus(1).unwrap();
            assert_ne!(other.id, id);
            pages.dropped(other, true);
            assert!(pages.retention.spare_bytes < spare_bytes);
        });
    }

    #[test]
    fn where_a_block_moved_from_is_known_to_be_zero() {
        let mut pages = Pages::new();
        let given = pages.allocate(BYTES, 1).unwrap();
        // SAFETY: slot-held: a new block, this long.
        unsafe { (given.addr as *mut u8).write_bytes(1, BYTES) };
        let id = pages.block(given.addr).unwrap();
        let moved = pages.relocate(id, 5 * BYTES).unwrap();
        assert_ne!(moved, given.addr);
        let again = pages.allocate(BYTES, 1).unwrap();
        assert_eq!((again.addr, again.dirty_bytes), (given.addr, 0));
        // SAFETY: slot-held: as above.
        assert_eq!(unsafe { (again.addr as *const u8).read() }, 0);
    }

    #[test]
    fn what_was_left_to_the_kernel_stays_dirty_until_it_is_swept() {
        // Alone: while a fork waits nothing is dropped.
        child::forked(|| {
            let mut pages = Pages::new();
            let given = pages.allocate(4 * BYTES, 1).unwrap();
            let id = pages.block(given.addr).unwrap();
            pages.free(id);
            let left = pages.surplus(2 * BYTES).unwrap();
            pages.dropped(left, false);
            // What lies before it goes for good; that behind it does not.
            let dropped = pages.surplus(BYTES).unwrap();
            pages.dropped(dropped, true);
            let dirty = |pages: &Pages| pages.reservation.as_ref().unwrap().slot(id).dirty_bytes;
            assert_eq!(dirty(&pages), 4 * BYTES);
            let mut sweep = pages.begin_sweep().unwrap();
            while pages.sweep(&mut sweep) {}
            assert_eq!(dirty(&pages), BYTES);
            assert!(pages.begin_sweep().is_none());
        });
    }
}
