//! The addresses of all blocks: one reservation, cut into ranks of slots that are alike in size.
//!
//! A slot is a range of addresses for one block. Those of the first ranks are *packed*: just as long as their class, side by side in
//! huge pages. The others are *roomy*: each rank has twice the room of the one before, so that blocks can grow. Nothing may be
//! touched before it was opened, so what was only reserved costs nothing, is not counted by a strict overcommit, and is no work for
//! `mlockall`.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::limit::{self, Resource};
use selfpage_core::linux::memory::{self, Access, Advice, HUGE_PAGE_BYTES, Place};

use super::class::{self, CLASSES};
use super::frames::{self, TABLE_BYTES};
use super::slot::{Slot, SlotId};

/// What a slot of the first roomy rank has room for; each has twice as much as the one before.
pub(super) const LEAST_ROOM: usize = 64 << 10;
/// From this rank on slots are roomy; below, each rank is a class of packed slots.
pub(super) const FIRST_ROOMY: usize = CLASSES;
const ROOMY_RANKS: usize = 26;
/// How many ranks there are: the last is for blocks of 2 TiB.
pub(super) const RANKS: usize = FIRST_ROOMY + ROOMY_RANKS;
/// Slots of one rank, at most.
pub(super) const SLOTS_OF_RANK: usize = 1 << SlotId::INDEX_BITS;
/// From this rank on a slot has memory of its own to open, and huge pages; below, slots are opened many at a time.
pub(super) const FIRST_LARGE: usize = FIRST_ROOMY + 7;
/// What is opened of packed slots at a time, where so much may be: a huge page.
const CHUNK_BYTES: usize = TABLE_BYTES;
/// Where it may not, slots up to this length are opened ahead, which have their pages in fewer calls then. Longer ones have enough in one.
const LONGEST_AHEAD: usize = LEAST_ROOM;
/// And no less than this, and two: one alone would have no room to grow, and its pages in no fewer calls.
const LEAST_AHEAD: usize = 64 << 10;

const LARGEST_RANK_BYTES: usize = 1 << 41;
const LEAST_RANK_BYTES: usize = 8 << 20;
/// Of the addresses that a process may have, the reservation is one part in so many at most: what is reserved is of no use to stacks of threads, nor to
/// anybody else.
const SHARE: usize = 8;
/// The kernel counts what mlockall(2) locks of one mapping in an `int`: all pages but one of so much are the most that it counts right.
const MAPPED_BYTES: usize = PAGE_BYTES << 31;
/// Packed slots have a share of as many addresses as a roomy rank has: each class one of these parts.
const PARTS_SHIFT: u32 = 5;
/// Roomy slots are aligned to their room, up to this.
pub(super) const ALIGNMENT: usize = 1 << 30;
/// A page of them.
const RECORDS_AT_ONCE: usize = PAGE_BYTES / size_of::<Slot>();
const OPENED_AT_ONCE: usize = 4 << 20;
/// Of a large slot, where no huge page is to end behind the block.
const LITTLE_AHEAD: usize = 16 * PAGE_BYTES;

/// From the first address to the last of all reservations: a process has one, and its children have that. Who was given a block sees them right for
/// it, so that they are read like any other numbers.
static FIRST: AtomicUsize = AtomicUsize::new(usize::MAX);
static END: AtomicUsize = AtomicUsize::new(0);

/// Whether the address may be of the reservation, for who does not have the allocator's lock: elsewhere there is certainly no block.
#[inline]
pub(super) fn may_contain(addr: usize) -> bool {
    FIRST.load(Ordering::Relaxed) <= addr && addr < END.load(Ordering::Relaxed)
}

#[cfg(test)]
impl Drop for Reservation {
    /// A process has one until its end. Of tests each has its own: a few of them had all addresses that there are, and others found none.
    fn drop(&mut self) {
        let records_len = RANKS * self.slots_of_rank * size_of::<Slot>();
        // SAFETY: owned-range: the blocks go with the test that had them.
        unsafe {
            memory::unmap(self.start, self.rank_bytes() * (1 + ROOMY_RANKS)).unwrap();
            memory::unmap(self.records as usize, records_len).unwrap();
        }
    }
}

/// Addresses of packed slots that were opened together, and the slots that they complete.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) addr: usize,
    pub(super) len_bytes: usize,
    pub(super) slots: Range<usize>,
}

/// The reservation, and the records of its slots.
#[derive(Debug)]
pub(super) struct Reservation {
    start: usize,
    rank_shift: u32,
    records: *mut Slot,
    /// Records kept for each rank.
    slots_of_rank: usize,
    /// Where each rank begins, and what its slots have room for.
    ranks: [(usize, usize); RANKS],
    /// Slots of each rank that were ever used.
    used: [u32; RANKS],
    /// Records of each rank that may be touched.
    recorded: [u32; RANKS],
    /// Bytes from the start of each small rank that may be touched.
    opened: [usize; RANKS],
    /// Of which the kernel gives no more huge pages, in packed ranks.
    plain: [usize; CLASSES],
    /// Large slots of which something may be touched: each is two mappings, with what is closed behind.
    pub(super) open_slots: usize,
}

// SAFETY: slot-record: the records belong to the reservation, which is reached under the allocator's lock.
unsafe impl Send for Reservation {}

impl Reservation {
    /// Reserves all ranks, as long as the process may have them. `None`: a part of what it may have would be too short.
    pub(super) fn new() -> Option<Reservation> {
        Reservation::of(LARGEST_RANK_BYTES).or_else(Reservation::of_limited)
    }

    #[cold]
    fn of_limited() -> Option<Reservation> {
        let limit_bytes = limit::of_this_process(Resource::Addresses).ok().flatten();
        let most_bytes = limit_bytes.map_or(usize::MAX, |bytes| bytes as usize / SHARE);
        let shorter = |rank_bytes: &usize| Some(rank_bytes / 8).filter(|rank_bytes| *rank_bytes >= LEAST_RANK_BYTES);
        std::iter::successors(shorter(&LARGEST_RANK_BYTES), shorter)
            .filter(|rank_bytes| Reservation::len_bytes(*rank_bytes) <= most_bytes)
            .find_map(Reservation::of)
    }

    /// All ranks, and what aligns the first.
    fn len_bytes(rank_bytes: usize) -> usize {
        rank_bytes * (1 + ROOMY_RANKS) + ALIGNMENT.min(rank_bytes)
    }

    fn of(rank_bytes: usize) -> Option<Reservation> {
        let slack = ALIGNMENT.min(rank_bytes);
        let slots_of_rank = (rank_bytes / LEAST_ROOM).min(SLOTS_OF_RANK);
        let (len, records_len) = (Reservation::len_bytes(rank_bytes), RANKS * slots_of_rank * size_of::<Slot>());
        // SAFETY: owned-range: fresh mappings replace nothing; the first is given back where the second cannot be had.
        let (reserved, records) = unsafe {
            // A core dump has all of a mapping that was touched anywhere, and the kernel looks at each page of it. Of what is closed that is only
            // what was open before: the rest of a rank stays a mapping of its own.
            let reserved = memory::reserve(Place::Anywhere, len).ok()?;
            let Ok(records) = memory::map_anonymous(Place::Anywhere, records_len, Access::None) else {
                let _ = memory::unmap(reserved, len);
                return None;
            };
            (reserved, records)
        };
        let start = reserved.next_multiple_of(slack);
        FIRST.fetch_min(reserved, Ordering::Relaxed);
        END.fetch_max(reserved + len, Ordering::Relaxed);
        let (small, large) = ((FIRST_LARGE - FIRST_ROOMY) * rank_bytes, (RANKS - FIRST_LARGE) * rank_bytes);
        // SAFETY: owned-range: just reserved.
        let _ = unsafe { memory::advise(start, rank_bytes, Advice::HugePages) };
        // SAFETY: owned-range: just reserved. A huge page in a small slot would be memory that its block did not ask for.
        let _ = unsafe { memory::advise(start + rank_bytes, small, Advice::NoHugePages) };
        // SAFETY: owned-range: just reserved.
        let _ = unsafe { memory::advise(start + rank_bytes + small, large, Advice::HugePages) };
        // A page that stays a mapping of its own, and is like others otherwise.
        for end in (start..start + (1 + ROOMY_RANKS) * rank_bytes).step_by(MAPPED_BYTES).skip(1) {
            // SAFETY: owned-range: just reserved.
            let _ = unsafe { memory::advise(end - PAGE_BYTES, PAGE_BYTES, Advice::NotInDump) };
        }
        Some(Reservation {
            start,
            rank_shift: rank_bytes.trailing_zeros(),
            records: records as *mut Slot,
            slots_of_rank,
            ranks: std::array::from_fn(|rank| (start + Reservation::offset(rank, rank_bytes), Reservation::room(rank))),
            used: [0; RANKS],
            recorded: [0; RANKS],
            opened: [0; RANKS],
            plain: [0; CLASSES],
            open_slots: 0,
        })
    }

    /// Whether it has as many addresses as there ever are.
    pub(super) fn is_whole(&self) -> bool {
        self.rank_bytes() == LARGEST_RANK_BYTES
    }

    /// Addresses of a roomy rank, and of all packed ones together.
    fn rank_bytes(&self) -> usize {
        1 << self.rank_shift
    }

    fn class_shift(&self) -> u32 {
        self.rank_shift - PARTS_SHIFT
    }

    /// What a slot of this rank has room for.
    pub(super) fn room(rank: usize) -> usize {
        if rank < FIRST_ROOMY { class::class_bytes(rank) } else { LEAST_ROOM << (rank - FIRST_ROOMY) }
    }

    /// What slots of this rank are aligned to.
    pub(super) fn alignment(rank: usize) -> usize {
        (1 << Reservation::room(rank).trailing_zeros()).min(ALIGNMENT)
    }

    /// The lowest roomy rank whose slots have room for `len_bytes`, if there is one.
    pub(super) fn rank_for(&self, len_bytes: usize) -> Option<usize> {
        let rooms = len_bytes.div_ceil(LEAST_ROOM).checked_next_power_of_two()?;
        let rank = FIRST_ROOMY + rooms.trailing_zeros() as usize;
        (rank < RANKS && Reservation::room(rank) <= self.rank_bytes()).then_some(rank)
    }

    /// Where a rank begins.
    const fn offset(rank: usize, rank_bytes: usize) -> usize {
        if rank < FIRST_ROOMY { rank * (rank_bytes >> PARTS_SHIFT) } else { (1 + rank - FIRST_ROOMY) * rank_bytes }
    }

    fn start_of(&self, rank: usize) -> usize {
        self.ranks[rank].0
    }

    /// Where the slot's block lies.
    pub(super) fn addr(&self, id: SlotId) -> usize {
        let (start, room) = self.ranks[id.rank()];
        start + id.index() * room
    }

    /// The slot that has this address, if it was ever used.
    pub(super) fn find(&self, addr: usize) -> Option<SlotId> {
        let offset = addr.checked_sub(self.start)?;
        let (part, within) = (offset >> self.rank_shift, offset & (self.rank_bytes() - 1));
        let (rank, index) = if part == 0 {
            let class = within >> self.class_shift();
            if class >= CLASSES {
                return None;
            }
            (class, class::index(class, within & ((1 << self.class_shift()) - 1)))
        } else {
            (FIRST_ROOMY + part - 1, within / (LEAST_ROOM << (part - 1).min(ROOMY_RANKS)))
        };
        (index < *self.used.get(rank)? as usize).then(|| SlotId::new(rank, index))
    }

    /// Whether the address is of the reservation.
    pub(super) fn contains(&self, addr: usize) -> bool {
        addr.wrapping_sub(self.start) < (1 + ROOMY_RANKS) << self.rank_shift
    }

    /// A page of the reservation that no slot has: it is behind the last, since what aligns the first leaves something there.
    pub(super) fn nobodys(&self) -> usize {
        self.start_of(RANKS - 1) + self.rank_bytes()
    }

    fn record(&self, rank: usize, index: usize) -> *mut Slot {
        self.records.wrapping_add(rank * self.slots_of_rank + index)
    }

    pub(super) fn slot(&self, id: SlotId) -> &Slot {
        // SAFETY: slot-record: a `SlotId` names a record that was opened, and zero is a value of it.
        unsafe { &*self.record(id.rank(), id.index()) }
    }

    pub(super) fn slot_mut(&mut self, id: SlotId) -> &mut Slot {
        // SAFETY: slot-record: as above, and `self` is borrowed alone.
        unsafe { &mut *self.record(id.rank(), id.index()) }
    }

    /// How many slots of this rank were ever used.
    pub(super) fn used(&self, rank: usize) -> usize {
        self.used[rank] as usize
    }

    /// A slot of this roomy rank that was never used.
    pub(super) fn fresh(&mut self, rank: usize) -> Option<SlotId> {
        let most = (self.rank_bytes() / Reservation::room(rank)).min(self.slots_of_rank);
        let used = self.used[rank] as usize;
        if used == most {
            return None;
        }
        self.keep_records(rank, used + 1)?;
        self.used[rank] += 1;
        Some(SlotId::new(rank, used))
    }

    /// Lets the records of the first `count` slots of this rank be touched.
    fn keep_records(&mut self, rank: usize, count: usize) -> Option<()> {
        let before = self.recorded[rank] as usize;
        if count <= before {
            return Some(());
        }
        let first = self.record(rank, before) as usize;
        let count = count.next_multiple_of(RECORDS_AT_ONCE).min(self.slots_of_rank);
        // SAFETY: owned-range: records that nobody has touched yet.
        unsafe { memory::protect(first, (count - before) * size_of::<Slot>(), Access::ReadWrite) }.ok()?;
        self.recorded[rank] = count as u32;
        Some(())
    }

    /// Opens more packed slots, with at most `most_bytes` more open: a huge page of them, or the rest of one that was begun; or of short
    /// ones as many as may be. `None`: those would be too few, or there is no memory for their records.
    pub(super) fn open_chunk(&mut self, rank: usize, most_bytes: usize) -> Option<Chunk> {
        let (room, opened, used) = (Reservation::room(rank), self.opened[rank], self.used(rank));
        let most = opened.saturating_add(most_bytes);
        let mut end = (opened + 1).next_multiple_of(CHUNK_BYTES);
        if end > most {
            end = most / room * room;
            if room > LONGEST_AHEAD || end < used * room + LEAST_AHEAD.max(2 * room) {
                return None;
            }
        }
        let slots = used..end / room;
        if end > 1 << self.class_shift() || slots.end > self.slots_of_rank {
            return None;
        }
        self.keep_records(rank, slots.end)?;
        let (addr, len_bytes) = (self.start_of(rank) + opened, end - opened);
        // SAFETY: owned-range: addresses that no block has had yet.
        unsafe { memory::protect(addr, len_bytes, Access::ReadWrite) }.ok()?;
        (self.opened[rank], self.used[rank]) = (end, slots.end as u32);
        Some(Chunk { addr, len_bytes, slots })
    }

    /// Has the kernel give slots of this rank that were opened so far, if they are packed, single pages from now on. Otherwise the next
    /// touch around a slot whose frames were dropped, or `khugepaged`, could bring all of a huge page back.
    pub(super) fn forbid_huge(&mut self, rank: usize) {
        let (Some(&plain), opened) = (self.plain.get(rank), self.opened[rank]) else { return };
        if plain < opened {
            // SAFETY: owned-range: contents stay as they are.
            let _ = unsafe { memory::advise(self.start_of(rank) + plain, opened - plain, Advice::NoHugePages) };
            self.plain[rank] = opened;
        }
    }

    /// Lets the first `len_bytes` of the slot be touched. False: no memory or mappings for it.
    pub(super) fn open(&mut self, id: SlotId, len_bytes: usize) -> bool {
        let (addr, rank) = (self.addr(id), id.rank());
        if rank < FIRST_ROOMY {
            return len_bytes <= Reservation::room(rank);
        }
        if rank < FIRST_LARGE {
            let end = id.index() * Reservation::room(rank) + len_bytes;
            if end <= self.opened[rank] {
                return true;
            }
            let end = end.next_multiple_of(OPENED_AT_ONCE).min(self.rank_bytes());
            let first = addr - id.index() * Reservation::room(rank) + self.opened[rank];
            // SAFETY: owned-range: addresses that no block has had yet.
            let opened = unsafe { memory::protect(first, end - self.opened[rank], Access::ReadWrite) }.is_ok();
            if opened {
                self.opened[rank] = end;
            }
            return opened;
        }
        self.open_ahead(id, len_bytes, Reservation::open_at_once(self.slot(id).open_bytes, len_bytes))
    }

    /// The same of a large slot, as for a new block, although it is of one that grows.
    pub(super) fn open_little_ahead(&mut self, id: SlotId, len_bytes: usize) -> bool {
        self.open_ahead(id, len_bytes, len_bytes.next_multiple_of(LITTLE_AHEAD))
    }

    fn open_ahead(&mut self, id: SlotId, len_bytes: usize, ahead: usize) -> bool {
        let (before, room) = (self.slot(id).open_bytes, Reservation::room(id.rank()));
        // Where a limit leaves no room for what is opened ahead, it may for the block.
        len_bytes <= before || self.open_to(id, ahead.min(room)) || self.open_to(id, len_bytes)
    }

    /// Lets the first `end` bytes of a large slot be touched, and nothing ahead. False: no memory or mappings for it.
    pub(super) fn open_to(&mut self, id: SlotId, end: usize) -> bool {
        let addr = self.addr(id);
        let slot = self.slot_mut(id);
        let before = slot.open_bytes;
        if std::mem::take(&mut slot.plain) {
            // SAFETY: owned-range: the slot's own addresses. A kernel without huge pages goes on with small ones.
            let _ = unsafe { memory::advise(addr, Reservation::room(id.rank()), Advice::HugePages) };
        }
        // SAFETY: owned-range: the slot's own addresses.
        let open = end <= before || unsafe { memory::protect(addr + before, end - before, Access::ReadWrite) }.is_ok();
        if open {
            self.note_open(id, before.max(end));
        }
        open
    }

    /// Notes how far a large slot may be touched.
    pub(super) fn note_open(&mut self, id: SlotId, open_bytes: usize) {
        let before = std::mem::replace(&mut self.slot_mut(id).open_bytes, open_bytes);
        self.open_slots = self.open_slots + usize::from(open_bytes > 0) - usize::from(before > 0);
    }

    /// Has nobody touch what lies behind the frames of a large slot, or a touch of the block could bring a whole huge page, and `khugepaged`
    /// make one. Not done where there are no mappings left for it.
    pub(super) fn shut_behind(&mut self, id: SlotId) {
        let addr = self.addr(id);
        let slot = self.slot_mut(id);
        let from = slot.framed_bytes;
        // SAFETY: slot-held: behind a block, in its slot.
        if from < slot.open_bytes && unsafe { frames::shut(addr + from, slot.open_bytes - from) } {
            self.note_open(id, from);
        }
    }

    /// Whether the slot has a page table of its own that ends at `end`, as one mapping that may be touched: what is not open of it yet is
    /// opened.
    pub(super) fn has_table(&mut self, id: SlotId, end: usize) -> bool {
        id.rank() >= FIRST_LARGE
            && self.open_to(id, end)
            && frames::is_one_mapping(self.addr(id) + end - TABLE_BYTES, TABLE_BYTES)
    }

    /// How far to open for `len_bytes`: a small block ends soon behind its end, so that no huge page goes beyond it; one that
    /// grows is opened ahead.
    fn open_at_once(before: usize, len_bytes: usize) -> usize {
        match (before, len_bytes) {
            (0, ..0x0100_0000) => len_bytes.next_multiple_of(LITTLE_AHEAD),
            (0, _) => len_bytes.next_multiple_of(HUGE_PAGE_BYTES),
            _ => (len_bytes + len_bytes / 8).next_multiple_of(HUGE_PAGE_BYTES),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// How long the mapping is that has this address.
    pub(in crate::alloc) fn mapping_bytes(addr: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        let mappings = maps.lines().filter_map(|line| line.split_once(' ')?.0.split_once('-'));
        let mut ranges = mappings.map(|(start, end)| number(start)..number(end));
        ranges.find(|range| range.contains(&addr)).unwrap().len()
    }

    /// A core dump has all of a mapping that was touched anywhere: with the rest of a rank that would be terabytes to look through.
    #[test]
    fn what_was_touched_and_is_closed_stays_apart_from_the_rest_of_its_rank() {
        let mut reservation = Reservation::new().unwrap();
        let id = reservation.fresh(FIRST_LARGE + 2).unwrap();
        let addr = reservation.addr(id);
        assert!(reservation.open_to(id, 10 * MIB));
        // SAFETY: slot-held: a slot of our own, this far open.
        unsafe { (addr as *mut u8).write_bytes(7, 10 * MIB) };
        reservation.slot_mut(id).framed_bytes = 9 * MIB;
        reservation.shut_behind(id);
        assert_eq!([addr, addr + 9 * MIB].map(mapping_bytes), [9 * MIB, MIB]);
        // And is one mapping with what lies before it when it is open again.
        assert!(reservation.open_to(id, 12 * MIB));
        assert_eq!(mapping_bytes(addr), 12 * MIB);
    }
}
