//! The page allocator's state: which slot has which block, and what becomes of the frames of those that have none.

use std::sync::atomic::Ordering;

use selfpage_core::addr::PAGE_BYTES;

use super::cache::Cache;
use super::culprit::Culprit;
use super::frames::{self, TABLE_BYTES};
use super::reservation::{ALIGNMENT, FIRST_LARGE, FIRST_ROOMY, RANKS, Reservation};
use super::retention::Retention;
use super::slot::{Holder, SlotId};
use super::stats::{Counts, NOTED};
use super::tails::Tails;

mod exchange;
mod loan;
mod quarantine;
mod surplus;

use quarantine::Quarantine;
pub(super) use surplus::Sweep;

/// How much more room than it has now a block gets that had to move because it grew.
const ROOM_TO_GROW: usize = 16;
/// How much more room than its length a new block gets.
const ROOM_AT_FIRST: usize = 4;
/// How much more than twice its length a small block's slot may have of frames.
const LITTLE: usize = 64 << 10;
/// How many mappings a process may have, where nobody has looked.
pub(super) const MAPPINGS: usize = 65_530;
/// Mappings that moved frames may add.
const MOST_PIECES: usize = 8 << 10;
/// And in one slot, until it is free.
const PIECES_OF_SLOT: u16 = 256;
/// From so many open large slots on, those without frames are closed: nobody misses them, and each takes two mappings.
const MANY_SLOTS: usize = 4 << 10;

/// From this many bytes on that had no frames, since the process began, there may be enough to keep that a limit is felt. What is kept
/// before is less than is left alone of a limit of 80 MiB.
const LOOK_FROM_BYTES: u64 = 4 << 20;

/// All that the allocator knows, under its lock.
#[derive(Debug)]
pub(super) struct Pages {
    reservation: Option<Reservation>,
    cache: Cache,
    tails: Tails,
    quarantine: Quarantine,
    pub(super) retention: Retention,
    pub(super) counts: Counts,
    /// Counts frees: the age of what is in the cache.
    frees: u64,
    pieces: usize,
    /// Frames were left to the kernel since the last sweep, which may still be there.
    lapsed: bool,
    /// Whether it may give huge pages, as the look at the limit has found. `None`: nobody has looked yet, and what may come is counted.
    pub(super) huge_pages: Option<bool>,
    /// How many mappings the process may have, as that look has found.
    pub(super) most_mappings: usize,
}

/// A block, as its owner gets it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Given {
    pub(super) addr: usize,
    /// What may hold other bytes than zeros, from the beginning.
    pub(super) dirty_bytes: usize,
    /// What has no frames yet and could get them at once: the rest of the block, or what was begun with it.
    pub(super) absent: usize,
    pub(super) absent_bytes: usize,
}

impl Pages {
    pub(super) const fn new() -> Pages {
        Pages {
            reservation: None,
            cache: Cache::new(),
            tails: Tails::new(),
            quarantine: Quarantine::new(),
            retention: Retention::new(),
            counts: Counts::NONE,
            frees: 0,
            pieces: 0,
            lapsed: false,
            huge_pages: None,
            most_mappings: MAPPINGS,
        }
    }

    pub(super) fn ready(&mut self) -> Option<(&mut Reservation, &mut Cache)> {
        if self.reservation.is_none() {
            self.reservation = Reservation::new();
        }
        Some((self.reservation.as_mut()?, &mut self.cache))
    }

    /// Allocates `len_bytes`, whole pages, at an address that is a multiple of `align_bytes`, a power of two.
    #[inline]
    pub(super) fn allocate(&mut self, len_bytes: usize, align_bytes: usize) -> Option<Given> {
        // Of a large slot the end can be lent to others; of a small one it cannot, and is little.
        let most = len_bytes + (len_bytes / 4).max(TABLE_BYTES.min(len_bytes + LITTLE));
        let (reservation, cache) = self.ready()?;
        // Roomy slots first: blocks can grow there.
        let id = cache.fitting(reservation, len_bytes, most).or_else(|| cache.packed(reservation, len_bytes));
        if let Some(id) = id
            && (align_bytes <= PAGE_BYTES || Reservation::alignment(id.rank()) >= align_bytes)
        {
            cache.remove(reservation, id);
            self.counts.warm += 1;
            return Some(self.hand_out(id, len_bytes));
        }
        self.allocate_cold(len_bytes, align_bytes)
    }

    #[cold]
    fn allocate_cold(&mut self, len_bytes: usize, align_bytes: usize) -> Option<Given> {
        if let Some(given) = self.allocate_packed(len_bytes, align_bytes) {
            return Some(given);
        }
        let id = self.open_slot(len_bytes, align_bytes, len_bytes.checked_mul(ROOM_AT_FIRST)?)?;
        self.counts.cold += 1;
        self.borrow_frames(id, len_bytes);
        let given = self.hand_out(id, len_bytes);
        self.shut_begun(id);
        Some(given)
    }

    /// Takes a free slot, as [`Pages::free_slot`] does, and opens it. Where there is no memory for that, as under a limit on data, which counts
    /// what is open, others have to be closed; and it is a large one, of which no more is opened than the block needs, and which can be
    /// closed in its turn.
    fn open_slot(&mut self, len_bytes: usize, align_bytes: usize, room_bytes: usize) -> Option<SlotId> {
        let mut rooms = [room_bytes, len_bytes.max(Reservation::room(FIRST_LARGE))];
        loop {
            for room_bytes in rooms {
                let id = self.free_slot(len_bytes, align_bytes, room_bytes)?;
                if self.open(id, len_bytes).is_some() {
                    return Some(id);
                }
            }
            rooms[0] = rooms[1];
            // Where mappings lack one slot is enough, and to close what is open behind blocks would take some more.
            let lacks_mappings = !self.has_mappings();
            if !(if lacks_mappings { self.close_least() } else { self.close_free() }) {
                NOTED.lacked_mappings.fetch_or(lacks_mappings, Ordering::Relaxed);
                return None;
            }
        }
    }

    /// Takes a free roomy slot out of the cache, or a fresh one: with frames if there is one, else with room for `room_bytes` if
    /// there is one.
    fn free_slot(&mut self, len_bytes: usize, align_bytes: usize, room_bytes: usize) -> Option<SlotId> {
        // What no slot is for does not open one that is kept closed.
        if align_bytes > ALIGNMENT || self.ready()?.0.rank_for(len_bytes.max(align_bytes)).is_none() {
            return None;
        }
        loop {
            let id = self.free_slot_now(len_bytes, align_bytes, room_bytes);
            // Where addresses are used up, those that are kept closed have to do.
            if id.is_some() || !self.release() {
                return id;
            }
        }
    }

    fn free_slot_now(&mut self, len_bytes: usize, align_bytes: usize, room_bytes: usize) -> Option<SlotId> {
        let (reservation, cache) = self.ready()?;
        let least = reservation.rank_for(len_bytes.max(align_bytes))?;
        if let Some(id) = cache.largest(reservation, len_bytes, Reservation::room(least)) {
            cache.remove(reservation, id);
            return Some(id);
        }
        let best = reservation.rank_for(room_bytes.max(align_bytes)).unwrap_or(least).max(least);
        for rank in (least..=best).rev().chain(best + 1..RANKS) {
            if let Some(id) = cache.bare(rank) {
                cache.remove(reservation, id);
                return Some(id);
            }
            if let Some(id) = reservation.fresh(rank) {
                return Some(id);
            }
        }
        None
    }

    /// Opens a slot that is in no list as far as `len_bytes`. It goes back into the cache where that fails.
    fn open(&mut self, id: SlotId, len_bytes: usize) -> Option<()> {
        let ahead = id.rank() < FIRST_LARGE || self.may_have_all_of_last_table(id, len_bytes);
        let has_mappings = self.has_mappings();
        let (reservation, cache) = self.ready()?;
        let adds_mappings = id.rank() >= FIRST_LARGE && reservation.slot(id).open_bytes == 0;
        let open = match ahead {
            _ if adds_mappings && !has_mappings => false,
            true => reservation.open(id, len_bytes),
            false => reservation.open_little_ahead(id, len_bytes),
        };
        if !open && reservation.slot(id).len_bytes == 0 {
            cache.put(reservation, id);
        }
        open.then_some(())
    }

    /// Whether the process has mappings for one more large slot: some must be left for what it maps itself, threads among them, and for objects.
    fn has_mappings(&self) -> bool {
        let open_slots = self.reservation.as_ref().map_or(0, |reservation| reservation.open_slots);
        2 * open_slots + self.pieces < self.most_mappings / 4 * 3
    }

    /// Whether a block that grows may have its last table open to the end, and counted so: not where what it does not need of that would have to go
    /// again at once. The next growth would open it anew. What is cached gives way to it, as long as tails are the lesser half of what is kept.
    fn may_have_all_of_last_table(&self, id: SlotId, len_bytes: usize) -> bool {
        let Some(reservation) = &self.reservation else { return true };
        let slot = reservation.slot(id);
        // A new block is opened little ahead, and there may be nothing that fills the table.
        if slot.len_bytes == 0 || self.huge_pages == Some(false) {
            return true;
        }
        let end = len_bytes.next_multiple_of(TABLE_BYTES);
        let (tail_bytes, absent_bytes) = (end - len_bytes, end.saturating_sub(slot.framed_bytes));
        let (bound_bytes, live_bytes) = self.retention.bound_and_live_with(len_bytes.saturating_sub(slot.len_bytes));
        self.retention.framed_bytes + absent_bytes <= bound_bytes
            || 2 * (self.tails.bytes + tail_bytes) <= bound_bytes - live_bytes
    }

    /// Makes a block of a slot that is in no list.
    #[inline]
    pub(super) fn hand_out(&mut self, id: SlotId, len_bytes: usize) -> Given {
        let Some(reservation) = &mut self.reservation else { crate::die("a slot without a reservation") };
        let addr = reservation.addr(id);
        let slot = reservation.slot_mut(id);
        self.retention.begin_use(slot);
        let absent_bytes = len_bytes.saturating_sub(slot.framed_bytes);
        let absent = addr + slot.framed_bytes;
        let given = Given { addr, dirty_bytes: slot.dirty_bytes, absent, absent_bytes };
        slot.len_bytes = len_bytes;
        slot.holder = Holder::Block;
        slot.dirty_bytes = slot.dirty_bytes.max(len_bytes);
        self.retention.grow_live(len_bytes);
        if absent_bytes > 0 {
            self.counts.cold_bytes += absent_bytes as u64;
            self.expect_frames(id);
        }
        if let Some(reservation) = &mut self.reservation {
            self.tails.put(reservation, id);
        }
        given
    }

    /// Counts what a block will have of frames once it is touched: for its last table that may be a huge page. Returns how many bytes that is more
    /// than it has.
    #[cold]
    fn expect_frames(&mut self, id: SlotId) -> usize {
        let Some(reservation) = &mut self.reservation else { return 0 };
        let slot = reservation.slot_mut(id);
        let huge = slot.may_get_huge_page() && self.huge_pages != Some(false);
        let framed = if huge { slot.len_bytes.next_multiple_of(TABLE_BYTES) } else { slot.len_bytes };
        let absent_bytes = framed - slot.framed_bytes;
        self.retention.framed_bytes += absent_bytes;
        slot.framed_bytes = framed;
        absent_bytes
    }

    /// Whether the process has taken enough for what the machine says about memory to be worth reading; where nothing is to be kept, it never
    /// is.
    pub(super) fn is_worth_a_look(&self) -> bool {
        self.counts.cold_bytes >= LOOK_FROM_BYTES && self.retention.keep_bytes != Some(0)
    }

    /// The slot of the block at `addr`.
    #[inline]
    pub(super) fn block(&self, addr: usize) -> Result<SlotId, Culprit> {
        let reservation = self.reservation.as_ref().ok_or(Culprit::Foreign)?;
        let id = reservation.find(addr);
        let Some(id) = id else {
            return Err(if reservation.contains(addr) { Culprit::Freed } else { Culprit::Foreign });
        };
        let (slot, start) = (reservation.slot(id), reservation.addr(id));
        match slot.holder {
            Holder::Block if addr == start => Ok(id),
            Holder::Block if addr < start + slot.len_bytes => {
                Err(Culprit::Inside { block: start, len_bytes: slot.len_bytes })
            }
            Holder::Run if addr < start + slot.len_bytes => Err(Culprit::Item),
            _ => Err(Culprit::Freed),
        }
    }

    /// Makes a run of a block: a range that items of a batch are carved from.
    pub(super) fn make_run(&mut self, addr: usize) {
        if let (Ok(id), Some(reservation)) = (self.block(addr), &mut self.reservation) {
            reservation.slot_mut(id).holder = Holder::Run;
        }
    }

    /// Where the run begins that `addr` is in.
    pub(super) fn run(&self, addr: usize) -> Option<usize> {
        let reservation = self.reservation.as_ref()?;
        let id = reservation.find(addr)?;
        let (slot, start) = (reservation.slot(id), reservation.addr(id));
        (slot.holder == Holder::Run && addr < start + slot.len_bytes).then_some(start)
    }

    /// Takes a run back.
    pub(super) fn free_run(&mut self, start: usize) {
        let id = self.reservation.as_ref().and_then(|reservation| reservation.find(start));
        if let Some(id) = id {
            self.free(id);
        }
    }

    pub(super) fn has_all_addresses(&mut self) -> bool {
        self.ready().is_some_and(|(reservation, _)| reservation.is_whole())
    }

    /// Where the block lies that `addr` is in, and how long it is.
    pub(super) fn around(&self, addr: usize) -> Option<(usize, usize)> {
        match self.block(addr) {
            Ok(id) => Some((addr, self.len_bytes(id))),
            Err(Culprit::Inside { block, len_bytes }) => Some((block, len_bytes)),
            Err(_) => None,
        }
    }

    /// How long a block is.
    pub(super) fn len_bytes(&self, id: SlotId) -> usize {
        self.reservation.as_ref().map_or(0, |reservation| reservation.slot(id).len_bytes)
    }

    /// Takes a block back. Its frames stay.
    #[inline]
    pub(super) fn free(&mut self, id: SlotId) {
        let Some(reservation) = &mut self.reservation else { return };
        self.frees += 1;
        self.tails.remove(reservation, id);
        let slot = reservation.slot_mut(id);
        self.retention.live_bytes -= slot.len_bytes;
        slot.len_bytes = 0;
        slot.holder = Holder::Nobody;
        slot.freed_at = self.frees;
        if self.quarantine.is_on() && self.quarantine(id) {
            return;
        }
        self.put_away(id);
    }

    /// Puts a free slot into the cache: closed, where all that it has is mappings, and there are many such, or too many of its own.
    #[inline]
    fn put_away(&mut self, id: SlotId) {
        let Some(reservation) = &mut self.reservation else { return };
        let slot = reservation.slot(id);
        let is_bare = slot.framed_bytes == 0 && slot.open_bytes > 0;
        if slot.pieces > PIECES_OF_SLOT || is_bare && reservation.open_slots > MANY_SLOTS {
            self.mend(id);
        }
        let Some(reservation) = &mut self.reservation else { return };
        self.cache.put(reservation, id);
    }

    /// Makes one mapping of a free slot that has no frames or is in no list. What it has is lost.
    #[cold]
    fn mend(&mut self, id: SlotId) {
        let Some(reservation) = &mut self.reservation else { return };
        let addr = reservation.addr(id);
        let slot = reservation.slot_mut(id);
        // An exchange of whole entries makes a piece of its own of what was never opened, too.
        let len = slot.reached().next_multiple_of(ALIGNMENT).min(Reservation::room(id.rank()));
        // SAFETY: slot-held: a free slot, which nobody needs anything of.
        if len > 0 && unsafe { frames::close(addr, len) } {
            self.pieces -= slot.pieces as usize;
            self.retention.framed_bytes -= slot.framed_bytes;
            self.counts.dropped_bytes += slot.framed_bytes as u64;
            (slot.pieces, slot.dirty_bytes, slot.framed_bytes) = (0, 0, 0);
            slot.plain = true;
            reservation.note_open(id, 0);
        }
    }

    /// Makes a block longer or shorter, and returns where it is then. `None`: it is as it was.
    pub(super) fn resize(&mut self, id: SlotId, len_bytes: usize) -> Option<usize> {
        let addr = self.reservation.as_ref()?.addr(id);
        if self.resize_in_place(id, len_bytes) {
            return Some(addr);
        }
        // Elsewhere all of it has to be opened; where it is, what it lacks.
        self.relocate(id, len_bytes).or_else(|| self.resize_among_closed(id, len_bytes).then_some(addr))
    }

    /// As [`Pages::resize_in_place`], with all closed first that is open for nobody.
    pub(super) fn resize_among_closed(&mut self, id: SlotId, len_bytes: usize) -> bool {
        if len_bytes > Reservation::room(id.rank()) {
            return false;
        }
        self.close_free();
        self.resize_in_place(id, len_bytes)
    }

    /// Makes a block longer or shorter where it is. What is new holds anything. False: there is no room.
    pub(super) fn resize_in_place(&mut self, id: SlotId, len_bytes: usize) -> bool {
        let before = self.len_bytes(id);
        let Some(reservation) = &mut self.reservation else { return false };
        self.tails.remove(reservation, id);
        let fits =
            len_bytes <= Reservation::room(id.rank()) && (len_bytes <= before || self.open(id, len_bytes).is_some());
        if fits && len_bytes > before {
            self.borrow_tables(id, len_bytes);
        }
        let Some(reservation) = &mut self.reservation else { return false };
        if !fits {
            self.tails.put(reservation, id);
            return false;
        }
        let slot = reservation.slot_mut(id);
        slot.len_bytes = len_bytes;
        slot.dirty_bytes = slot.dirty_bytes.max(len_bytes);
        if slot.framed_bytes < len_bytes {
            // With the rest of the last table: what grows comes to that without being seen here again.
            self.counts.cold_bytes += self.expect_frames(id) as u64;
        }
        self.retention.live_bytes -= before;
        self.retention.grow_live(len_bytes);
        self.counts.in_place += 1;
        if len_bytes < before {
            self.cut(id);
        }
        if let Some(reservation) = &mut self.reservation {
            self.tails.put(reservation, id);
        }
        true
    }

    /// Gives the frames of a block that became shorter to a free slot, where they are many.
    fn cut(&mut self, id: SlotId) {
        let Some(reservation) = &mut self.reservation else { return };
        let slot = reservation.slot(id);
        let (from, end) = (slot.len_bytes.next_multiple_of(TABLE_BYTES), slot.framed_bytes);
        if id.rank() < FIRST_LARGE || end < from + TABLE_BYTES {
            return;
        }
        let (len, addr) = (end - from, reservation.addr(id));
        let Some(rank) = reservation.rank_for(len).map(|rank| rank.max(FIRST_LARGE)) else { return };
        let bare = self.cache.bare(rank);
        let Some(heir) = bare.or_else(|| reservation.fresh(rank)) else { return };
        if bare.is_some() {
            self.cache.remove(reservation, heir);
        }
        let kept = reservation.slot(id).len_bytes;
        frames::end_lock(addr + kept, end - kept, reservation.nobodys());
        let lent = self.lend(id, from..end.next_multiple_of(TABLE_BYTES), heir, 0);
        let Some(reservation) = &mut self.reservation else { return };
        reservation.slot_mut(heir).freed_at = self.frees;
        // SAFETY: slot-held: the end of a block, which is nobody's any more.
        if !lent && unsafe { frames::drop_frames(addr + from, len) } {
            let slot = reservation.slot_mut(id);
            slot.framed_bytes = from;
            slot.clear(from, end);
            self.retention.framed_bytes -= len;
            self.counts.dropped_bytes += len as u64;
        }
        self.shut_begun(heir);
        let Some(reservation) = &mut self.reservation else { return };
        self.cache.put(reservation, heir);
    }

    /// Moves a block that has become too long for its slot to a roomy one. Returns where it is now.
    pub(super) fn relocate(&mut self, id: SlotId, len_bytes: usize) -> Option<usize> {
        let before = self.len_bytes(id);
        let (reservation, cache) = self.ready()?;
        let most = len_bytes.saturating_mul(4 * ROOM_TO_GROW);
        let to = match cache.fitting(reservation, len_bytes, most) {
            Some(to) => {
                cache.remove(reservation, to);
                to
            }
            None => self.open_slot(len_bytes, 1, len_bytes.saturating_mul(ROOM_TO_GROW))?,
        };
        let Some(reservation) = &mut self.reservation else { return None };
        let (source, target) = (reservation.addr(id), reservation.addr(to));
        // To and between small slots contents are copied: what is moved stays a mapping of its own for ever, and a part of a huge
        // page would split it.
        let moved = if to.rank() < FIRST_LARGE || id.rank() < FIRST_ROOMY {
            // SAFETY: slot-held: a block, and a slot that is open for a longer one.
            unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, before) };
            false
        } else {
            // With all of the last table, where that can be: a mapping that ends in it would keep it from ever being lent.
            let whole = before.next_multiple_of(TABLE_BYTES);
            let end = if reservation.has_table(id, whole) && reservation.open(to, whole) { whole } else { before };
            // SAFETY: slot-held: as above; nobody needs what is in the slot.
            let moved = unsafe { frames::shift(source, target, end) };
            let slot = reservation.slot_mut(to);
            if slot.pieces == 0 {
                (slot.pieces, self.pieces) = (1, self.pieces + 1);
            }
            self.retention.framed_bytes += before.saturating_sub(slot.framed_bytes);
            slot.framed_bytes = slot.framed_bytes.max(before);
            slot.dirty_bytes = slot.dirty_bytes.max(end);
            // The frames went along. Those behind the block may not have: then all of the slot counts as before.
            if moved && reservation.slot(id).framed_bytes <= end {
                self.tails.remove(reservation, id);
                let slot = reservation.slot_mut(id);
                self.retention.framed_bytes -= slot.framed_bytes;
                slot.framed_bytes = 0;
            }
            if moved {
                reservation.slot_mut(id).clear(0, end);
            }
            self.borrow_tables(to, len_bytes);
            moved
        };
        self.counts.moved += 1;
        // What was copied is live twice for a moment; frames that have moved are not.
        if moved {
            self.free(id);
        }
        self.hand_out(to, len_bytes);
        if !moved {
            self.shut_begun(id);
            self.free(id);
        }
        Some(target)
    }
}
