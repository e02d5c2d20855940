//! Loans: a block that finds no free slot with its frames gets those of several, as page tables, which move whole.
//!
//! Everything moves by page tables: a mapping that was cut anywhere else would stay so, and after a while each page would be one of its
//! own. The last table of a slot may be begun only, and moves with what it has.
//!
//! # Source
//! Douglas §4.2: a block gets what is free of pages, wherever that lies; here as tables of 512 pages.

use std::ops::Range;

use super::{MOST_PIECES, Pages};
use crate::alloc::frames::{self, TABLE_BYTES, whole_tables};
use crate::alloc::reservation::{FIRST_LARGE, Reservation};
use crate::alloc::slot::SlotId;

/// Slots that whole tables are taken from for one block.
const LENDERS: usize = 8;
/// Slots that are looked at for its last table.
const OFFERS: usize = 32;

impl Pages {
    /// Moves frames of free slots into one that is open and in no list, for a new block, as far as there are.
    pub(super) fn borrow_frames(&mut self, id: SlotId, len_bytes: usize) {
        let Some(reservation) = self.reservation.as_mut().filter(|_| id.rank() >= FIRST_LARGE) else { return };
        let own = reservation.slot(id).framed_bytes;
        let (whole, last) = (whole_tables(own), whole_tables(len_bytes));
        let mut have = own.next_multiple_of(TABLE_BYTES);
        if own == whole {
            self.borrow_last(id, last, len_bytes - last);
        } else if whole < last && last < len_bytes && self.lend(id, whole..have, id, last) {
            have = whole;
        }
        self.borrow(id, have..last);
    }

    /// The same for one that grows: whole tables. The next growth would find the last one begun.
    pub(super) fn borrow_tables(&mut self, id: SlotId, len_bytes: usize) {
        let Some(reservation) = self.reservation.as_mut().filter(|_| id.rank() >= FIRST_LARGE) else { return };
        let have = reservation.slot(id).framed_bytes.next_multiple_of(TABLE_BYTES);
        self.borrow(id, have..whole_tables(len_bytes));
    }

    /// Fills a range of whole tables, as far as there are.
    fn borrow(&mut self, id: SlotId, wanted: Range<usize>) {
        let mut have = wanted.start;
        for _ in 0..LENDERS {
            let Some(reservation) = &mut self.reservation else { return };
            if have >= wanted.end {
                return;
            }
            let Some(lender) = self.cache.largest(reservation, usize::MAX, Reservation::room(FIRST_LARGE)) else {
                break;
            };
            let whole = whole_tables(reservation.slot(lender).framed_bytes);
            let len = whole.min(wanted.end - have);
            if len == 0 || !self.take(lender, whole - len..whole, id, have) {
                break;
            }
            have += len;
        }
        // What is missing before a last table that is there is not seen by whoever counts what the block lacks.
        let Some(reservation) = &mut self.reservation else { return };
        if reservation.slot(id).framed_bytes > wanted.end {
            self.counts.cold_bytes += wanted.end.saturating_sub(have) as u64;
        }
    }

    /// Finds a table to be the `last` of a block that needs `bytes` of it: the begun one that wastes least, or a whole one.
    fn borrow_last(&mut self, id: SlotId, last: usize, bytes: usize) {
        let Some(reservation) = self.reservation.as_mut().filter(|_| bytes > 0) else { return };
        let offers = self.cache.large(reservation).take(OFFERS).flat_map(|lender| {
            let framed = reservation.slot(lender).framed_bytes;
            let whole = whole_tables(framed);
            let begun = (framed > whole).then_some((framed - whole, lender, whole));
            begun.into_iter().chain(whole.checked_sub(TABLE_BYTES).map(|at| (TABLE_BYTES, lender, at)))
        });
        let Some((_, lender, at)) = offers.min_by_key(|(has, ..)| (*has < bytes, has.abs_diff(bytes))) else { return };
        if !self.take(lender, at..at + TABLE_BYTES, id, last) {
            // One that consists of several mappings does not move; those before it may.
            self.borrow(id, last..last + TABLE_BYTES);
        }
    }

    /// Takes tables from a slot of the cache.
    fn take(&mut self, lender: SlotId, tables: Range<usize>, id: SlotId, to: usize) -> bool {
        let Some(reservation) = &mut self.reservation else { return false };
        self.cache.remove(reservation, lender);
        let lent = self.lend(lender, tables, id, to);
        let Some(reservation) = &mut self.reservation else { return false };
        // One that has lent everything keeps its mappings as long as there are enough for others.
        if reservation.slot(lender).framed_bytes == 0 && self.pieces > MOST_PIECES / 2 {
            self.mend(lender);
        }
        self.shut_begun(lender);
        self.put_away(lender);
        lent
    }

    /// Has the last table of a slot, where it is begun, become no huge page, which would have frames that are counted nowhere. To be moved
    /// it was open whole.
    pub(super) fn shut_begun(&mut self, id: SlotId) {
        let Some(reservation) = &mut self.reservation else { return };
        if self.huge_pages != Some(false) && reservation.slot(id).is_begun_open() {
            reservation.shut_behind(id);
        }
    }

    /// Moves tables of one slot, the last one of which may be begun, to `to` in another one, or in itself; both are in no list. False: they
    /// stay.
    pub(super) fn lend(&mut self, lender: SlotId, tables: Range<usize>, id: SlotId, to: usize) -> bool {
        let Some(reservation) = &mut self.reservation else { return false };
        let framed = reservation.slot(lender).framed_bytes;
        // All of what is moved and of where it goes is open: then the kernel counts no more for the process than it did.
        let open = reservation.open_to(id, to + tables.len())
            && (tables.end <= framed || reservation.has_table(lender, tables.end));
        if self.pieces >= MOST_PIECES || !open {
            return false;
        }
        let (from, target) = (reservation.addr(lender) + tables.start, reservation.addr(id) + to);
        // SAFETY: slot-held: frames that nobody needs the contents of, and addresses that have none, of a slot that nobody has yet or
        // behind its block.
        if !unsafe { frames::lend(from, target, tables.len()) } {
            let slot = reservation.slot_mut(id);
            slot.dirty_bytes = slot.dirty_bytes.max(to + tables.len());
            return false;
        }
        let left = self.move_down(lender, &tables);
        let Some(reservation) = &mut self.reservation else { return false };
        let slot = reservation.slot_mut(lender);
        let dirty_bytes = slot.dirty_bytes.min(tables.end).saturating_sub(tables.start);
        let lent_bytes = tables.end.min(framed) - tables.start;
        slot.framed_bytes = left;
        slot.clear(left, framed.max(tables.end));
        self.retention.framed_bytes -= framed - left;
        let slot = reservation.slot_mut(id);
        self.retention.framed_bytes += (to + lent_bytes).saturating_sub(slot.framed_bytes);
        slot.framed_bytes = slot.framed_bytes.max(to + lent_bytes);
        if dirty_bytes > 0 {
            slot.dirty_bytes = slot.dirty_bytes.max(to + dirty_bytes);
        }
        self.counts.lent_bytes += lent_bytes as u64;
        self.add_piece(id);
        true
    }

    /// Moves the begun table behind `tables`, which have gone, down to their place. Returns how far the slot has frames then.
    fn move_down(&mut self, id: SlotId, tables: &Range<usize>) -> usize {
        let Some(reservation) = &mut self.reservation else { return tables.start };
        let (addr, framed) = (reservation.addr(id), reservation.slot(id).framed_bytes);
        let Some(rest) = framed.checked_sub(tables.end).filter(|rest| *rest > 0) else { return tables.start };
        let whole = reservation.has_table(id, tables.end + TABLE_BYTES);
        // SAFETY: slot-held: a free slot's frames, and addresses of it that have none.
        if whole && unsafe { frames::lend(addr + tables.end, addr + tables.start, TABLE_BYTES) } {
            self.add_piece(id);
            return tables.start + rest;
        }
        // SAFETY: slot-held: what is left of a free slot.
        if unsafe { frames::drop_frames(addr + tables.end, rest) } { tables.start } else { framed }
    }

    /// Notes that a slot has a mapping more: at most each of its tables is one.
    fn add_piece(&mut self, id: SlotId) {
        let Some(reservation) = &mut self.reservation else { return };
        let slot = reservation.slot_mut(id);
        if (slot.pieces as usize) < slot.open_bytes / TABLE_BYTES {
            (slot.pieces, self.pieces) = (slot.pieces + 1, self.pieces + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use selfpage_core::linux::memory::{self, Access, Advice, Place};

    use super::*;
    use crate::alloc::reservation::RANKS;
    use crate::alloc::slot::Holder;
    use crate::child;

    const T: usize = TABLE_BYTES;

    /// What slots count must be what is counted of all, and nothing may be resident that is not counted.
    fn check(pages: &Pages) {
        let reservation = pages.reservation.as_ref().unwrap();
        let slots = (0..RANKS).flat_map(|rank| (0..reservation.used(rank)).map(move |index| SlotId::new(rank, index)));
        let (mut framed, mut cached, mut tails) = (0, 0, 0);
        for id in slots {
            let slot = reservation.slot(id);
            framed += slot.framed_bytes;
            cached += if slot.holder == Holder::Nobody { slot.framed_bytes } else { 0 };
            tails += if slot.holder == Holder::Block { slot.framed_bytes - slot.len_bytes } else { 0 };
            let behind = (slot.framed_bytes..slot.open_bytes.next_multiple_of(T)).step_by(4096);
            let resident = behind.filter(|at| is_resident(reservation.addr(id) + at)).count();
            assert_eq!(resident, 0, "{id:?} {slot:?}");
        }
        assert_eq!((pages.retention.framed_bytes, pages.cache.bytes, pages.tails.bytes), (framed, cached, tails));
    }

    fn is_resident(addr: usize) -> bool {
        let mut vector = 0;
        // SAFETY: out-pointer: one byte for one page.
        unsafe { libc::mincore(addr as *mut libc::c_void, 4096, &raw mut vector) == 0 && vector & 1 == 1 }
    }

    /// A new block, all of which is written; what is said to be zero is.
    fn written(pages: &mut Pages, len_bytes: usize) -> SlotId {
        let given = pages.allocate(len_bytes, 1).unwrap();
        // SAFETY: slot-held: a new block, this long.
        let bytes = unsafe { std::slice::from_raw_parts_mut(given.addr as *mut u8, len_bytes) };
        assert!(bytes.iter().skip(given.dirty_bytes).all(|byte| *byte == 0));
        bytes.fill(7);
        pages.block(given.addr).unwrap()
    }

    fn freed(pages: &mut Pages, lens: &[usize]) {
        let blocks: Vec<_> = lens.iter().map(|len| written(pages, *len)).collect();
        blocks.into_iter().for_each(|id| pages.free(id));
    }

    fn give_back_excess(pages: &mut Pages) {
        loop {
            let excess = pages.retention.excess_bytes();
            if pages.give_tail(excess, frames::drop_frames).is_some() {
                continue;
            }
            let Some(surplus) = pages.surplus(excess) else { return };
            // SAFETY: slot-held: the end of a free slot.
            let gone = unsafe { frames::drop_frames(surplus.addr, surplus.len_bytes) };
            pages.dropped(surplus, gone);
        }
    }

    #[test]
    fn a_block_gets_all_its_frames_from_freed_ones_of_other_lengths() {
        let mut pages = Pages::new();
        freed(&mut pages, &[3 * T + T / 2, 4 * T + T / 4, 5 * T]);
        let (cold_bytes, framed_bytes) = (pages.counts.cold_bytes, pages.retention.framed_bytes);
        written(&mut pages, 11 * T + T / 8);
        check(&pages);
        assert_eq!((pages.counts.cold_bytes, pages.retention.framed_bytes), (cold_bytes, framed_bytes));
    }

    #[test]
    fn a_begun_table_goes_to_the_block_that_wastes_least_of_it() {
        let mut pages = Pages::new();
        freed(&mut pages, &[2 * T + T / 2, 4 * T + T / 4, 5 * T]);
        let id = written(&mut pages, 8 * T + T / 8 * 3);
        let slot = pages.reservation.as_ref().unwrap().slot(id);
        assert_eq!(slot.framed_bytes, 8 * T + T / 2);
        check(&pages);
    }

    /// Whether the kernel makes a huge page of a table that is begun and open, where it is asked to: whatever the settings say.
    fn may_collapse() -> bool {
        // SAFETY: owned-range: a fresh mapping replaces nothing, and nobody else knows of it.
        unsafe {
            let start = memory::map_anonymous(Place::Anywhere, 2 * T, Access::ReadWrite).unwrap();
            let table = start.next_multiple_of(T);
            (table as *mut u8).write(1);
            // It may have to try again where others are at the same page, or no 2 MiB are free.
            let made = memory::advise(table, T, Advice::HugePages).is_ok()
                && (0..100).any(|_| libc::madvise(table as *mut libc::c_void, T, libc::MADV_COLLAPSE) == 0);
            memory::unmap(start, 2 * T).unwrap();
            made
        }
    }

    /// What `khugepaged` would do in its time, where it may.
    fn collapse_last_table(pages: &Pages, id: SlotId) {
        if !may_collapse() {
            return crate::skip::skip(
                "thp",
                "no huge page is made of what is begun: boot Linux 6.1 with transparent huge pages",
            );
        }
        let reservation = pages.reservation.as_ref().unwrap();
        let last = reservation.addr(id) + whole_tables(reservation.slot(id).framed_bytes.saturating_sub(1));
        // SAFETY: slot-held: contents stay as they are.
        unsafe { libc::madvise(last as *mut libc::c_void, T, libc::MADV_COLLAPSE) };
    }

    /// The free slot that has the most frames.
    fn largest(pages: &Pages) -> SlotId {
        pages.cache.largest(pages.reservation.as_ref().unwrap(), usize::MAX, 0).unwrap()
    }

    #[test]
    fn a_begun_table_of_a_block_becomes_no_huge_page_that_is_not_counted() {
        let mut pages = Pages::new();
        freed(&mut pages, &[2 * T + T / 2, 4 * T + T / 4, 5 * T]);
        let id = written(&mut pages, 8 * T + T / 8 * 3);
        collapse_last_table(&pages, id);
        check(&pages);
    }

    #[test]
    fn nor_does_one_that_a_lender_has_left() {
        let mut pages = Pages::new();
        freed(&mut pages, &[2 * T + T / 4]);
        let lender = largest(&pages);
        // Too long for that slot: it gets the whole tables.
        written(&mut pages, 20 * T);
        let framed_bytes = pages.reservation.as_ref().unwrap().slot(lender).framed_bytes;
        assert_eq!(framed_bytes, T / 4);
        collapse_last_table(&pages, lender);
        check(&pages);
    }

    #[test]
    fn nor_one_that_a_block_lost_that_became_shorter() {
        let mut pages = Pages::new();
        let id = written(&mut pages, 6 * T + T / 2);
        assert!(pages.resize_in_place(id, 3 * T));
        let heir = largest(&pages);
        collapse_last_table(&pages, heir);
        check(&pages);
    }

    #[test]
    fn nor_that_of_a_block_that_grows_which_is_counted_whole() {
        let mut pages = Pages::new();
        let given = pages.allocate(3 * T + T / 4, 1).unwrap();
        let id = pages.block(given.addr).unwrap();
        assert!(pages.resize_in_place(id, 3 * T + T / 2));
        // SAFETY: slot-held: it is this long now.
        unsafe { (given.addr as *mut u8).write_bytes(1, 3 * T + T / 2) };
        collapse_last_table(&pages, id);
        check(&pages);
    }

    #[test]
    fn nor_those_of_blocks_that_change_places() {
        let mut pages = Pages::new();
        let [long, short] = [10 * T, 9 * T + T / 2].map(|len| {
            let id = written(&mut pages, len);
            assert!(pages.resize_in_place(id, 9 * T + T / 4));
            id
        });
        // Of the one a part of the last table is kept, and the rest shut.
        assert_eq!(pages.give_tail(T / 8, frames::drop_frames), Some(T / 8));
        assert!(pages.exchange(long, short));
        for id in [long, short] {
            collapse_last_table(&pages, id);
            check(&pages);
        }
    }

    #[test]
    fn nor_one_that_a_part_of_is_given_back_of_far_behind_a_block() {
        let mut pages = Pages::new();
        freed(&mut pages, &[24 * T]);
        let id = written(&mut pages, 20 * T);
        assert_eq!(pages.give_tail(T / 4, frames::drop_frames), Some(T / 4));
        collapse_last_table(&pages, id);
        check(&pages);
    }

    #[test]
    fn what_an_exchange_had_to_copy_is_left_nowhere() {
        child::forked(|| {
            let mut pages = Pages::new();
            let blocks = [9 * T; 3].map(|len| written(&mut pages, len));
            // It lends all, and stays open.
            pages.free(blocks[2]);
            written(&mut pages, 80 * T);
            let slot = pages.reservation.as_ref().unwrap().slot(blocks[2]);
            assert_eq!((slot.framed_bytes, slot.open_bytes), (0, 9 * T));
            // Nothing may be mapped any more, nor moved, and so no mapping be made of several.
            let before = set_addresses(1 << 20);
            assert!(pages.exchange(blocks[0], blocks[1]));
            set_addresses(before);
            check(&pages);
        });
    }

    /// How many bytes of addresses the process may have, from now on. Returns how many that were.
    fn set_addresses(bytes: libc::rlim_t) -> libc::rlim_t {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: test: the limit outlives the calls.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &raw mut limit), 0);
            let before = std::mem::replace(&mut limit.rlim_cur, bytes);
            assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &raw const limit), 0);
            before
        }
    }

    #[test]
    fn what_was_left_to_the_kernel_is_dirty_wherever_it_goes() {
        // Alone: while a fork waits nothing is dropped.
        child::forked(|| {
            let mut pages = Pages::new();
            freed(&mut pages, &[2 * T + T / 2]);
            let left = pages.surplus(T / 4).unwrap();
            // Not dropped: what lies behind has what was written, for as long as the kernel likes.
            pages.dropped(left, false);
            // Too long for the slot that has it.
            let given = pages.allocate(20 * T + T / 2, 1).unwrap();
            assert_eq!(given.dirty_bytes, 21 * T);
        });
    }

    #[test]
    fn what_is_taken_from_behind_a_block_does_not_come_back_with_a_huge_page() {
        // Alone: while a fork waits nothing is dropped.
        child::forked(|| {
            let mut pages = Pages::new();
            freed(&mut pages, &[2 * T]);
            pages.retention.keep_bytes = Some(0);
            give_back_excess(&mut pages);
            let given = pages.allocate(T + T / 4, 1).unwrap();
            assert_eq!(pages.retention.excess_bytes(), T / 4 * 3, "the second table is open");
            give_back_excess(&mut pages);
            // SAFETY: slot-held: a new block, this long.
            unsafe { (given.addr as *mut u8).write_bytes(1, T + T / 4) };
            check(&pages);
            let id = pages.block(given.addr).unwrap();
            assert!(pages.resize_in_place(id, 2 * T));
            // SAFETY: slot-held: it is this long now.
            unsafe { (given.addr as *mut u8).write_bytes(1, 2 * T) };
        });
    }

    #[test]
    fn blocks_that_come_and_go_cost_the_kernel_next_to_nothing() {
        let mut pages = Pages::new();
        let mut state = 88_172_645_463_325_252u64;
        let mut below = |end: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 16) as usize % end
        };
        let (mut blocks, mut live, mut cold_bytes) = (Vec::new(), 0, 0);
        for round in 0..600 {
            let least = (1 << 20) << below(4);
            let len_bytes = (least + below(least)) / 4096 * 4096 + 4096;
            while live + len_bytes > 48 * T {
                let id = blocks.swap_remove(below(blocks.len()));
                live -= pages.len_bytes(id);
                pages.free(id);
            }
            let given = pages.allocate(len_bytes, 1).unwrap();
            live += len_bytes;
            // SAFETY: slot-held: a new block, this long.
            unsafe { (given.addr as *mut u8).write_bytes(1, len_bytes) };
            blocks.push(pages.block(given.addr).unwrap());
            give_back_excess(&mut pages);
            assert_eq!(pages.retention.excess_bytes(), 0);
            if round % 50 == 0 {
                check(&pages);
            }
            if round == 300 {
                cold_bytes = pages.counts.cold_bytes;
            }
        }
        let cold_bytes = (pages.counts.cold_bytes - cold_bytes) as usize / 300;
        assert!(cold_bytes < 128 << 10, "{cold_bytes} bytes a block");
    }

    #[test]
    fn what_was_closed_behind_a_block_is_cleared_with_its_slot() {
        const GIB: usize = 1 << 30;
        let mut pages = Pages::new();
        pages.huge_pages = Some(false);
        let given = pages.allocate(GIB + T - 4096, 1).unwrap();
        // SAFETY: slot-held: a new block, longer than this.
        unsafe { (given.addr as *mut u8).add(GIB).write_bytes(7, T - 4096) };
        let id = pages.block(given.addr).unwrap();
        assert!(pages.resize_in_place(id, GIB - 4096));
        assert_eq!(pages.give_tail(GIB, frames::free_frames), Some(T));
        pages.begin_quarantine();
        pages.free(id);
        assert!(pages.release());
        let again = pages.allocate(GIB + T - 4096, 1).unwrap();
        assert_eq!((again.addr, again.dirty_bytes), (given.addr, 0));
        // SAFETY: slot-held: as above.
        assert_eq!(unsafe { (again.addr as *const u8).add(GIB).read() }, 0);
    }

    #[test]
    fn an_exchange_takes_along_what_is_known_of_the_last_table() {
        // As long as they are; with frames behind the one, the other, or both of them; and closed there.
        for (longer_a, longer_b, closed) in
            [(0, 0, 0), (T / 8, 0, 0), (0, T + T / 8, 0), (T / 4, T / 8, 0), (T / 4, 0, 1), (T, T / 4, 2)]
        {
            let mut pages = Pages::new();
            let len_bytes = 9 * T + T / 4;
            let blocks = [longer_a, longer_b].map(|longer| {
                let id = written(&mut pages, len_bytes + longer);
                assert!(pages.resize_in_place(id, len_bytes));
                id
            });
            (0..closed).for_each(|_| _ = pages.give_tail(8 * T, frames::drop_frames));
            for _ in 0..3 {
                assert!(pages.exchange(blocks[0], blocks[1]));
                check(&pages);
            }
            let reservation = pages.reservation.as_ref().unwrap();
            for addr in blocks.map(|id| reservation.addr(id)) {
                // SAFETY: slot-held: a block, this long.
                unsafe { (addr as *mut u8).write_bytes(1, len_bytes) };
            }
            check(&pages);
            blocks.into_iter().for_each(|id| pages.free(id));
            // What is said to be zero is.
            blocks.iter().for_each(|_| _ = written(&mut pages, 10 * T));
        }
    }

    #[test]
    fn what_a_block_lost_that_became_shorter_can_be_lent_to_its_last_page() {
        let mut pages = Pages::new();
        let id = written(&mut pages, 6 * T + T / 2);
        assert!(pages.resize_in_place(id, 3 * T));
        let cold_bytes = pages.counts.cold_bytes;
        written(&mut pages, 20 * T + T / 2);
        check(&pages);
        assert_eq!(pages.counts.cold_bytes, cold_bytes + 17 * T as u64);
    }

    #[test]
    fn mappings_come_back_before_there_are_none_left_to_lend_by() {
        for (pieces, left) in [(0, 1), (MOST_PIECES / 2, 0)] {
            let mut pages = Pages::new();
            pages.pieces = pieces;
            freed(&mut pages, &[2 * T]);
            let lender = written(&mut pages, 10 * T);
            pages.free(lender);
            // Too long for that slot.
            written(&mut pages, 80 * T);
            let slot = pages.reservation.as_ref().unwrap().slot(lender);
            assert_eq!((slot.framed_bytes, slot.pieces), (0, left));
        }
    }
}
