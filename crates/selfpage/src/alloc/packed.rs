//! Packed slots: where much is live, small blocks lie side by side in huge pages, which cost a fraction of as many single pages. Before
//! that, short ones have their pages in common calls.
//!
//! No more is begun than stays within the retention's bound. Its slots go into the cache as *spare*: they count as kept, serve blocks of
//! their class without another look at the kernel, and can be dropped like all that is kept.

use std::ops::Range;

use super::class;
use super::frames;
use super::pages::{Given, Pages};
use super::reservation::{Chunk, Reservation};
use super::slot::{Holder, Slot, SlotId};

impl Pages {
    /// Allocates in a packed slot that lacks frames, or in the first of some more. `None`: the block is none for packed slots, or too
    /// little is live for them.
    pub(super) fn allocate_packed(&mut self, len_bytes: usize, align_bytes: usize) -> Option<Given> {
        let rank = class::class_for(len_bytes)?;
        let (_, cache) = self.ready()?;
        let (cached_bytes, lacks) = (cache.bytes, cache.any_packed(rank).is_none());
        let most_bytes = self.retention.spare_allowed(cached_bytes, len_bytes);
        if Reservation::alignment(rank) < align_bytes || most_bytes < Reservation::room(rank) {
            return None;
        }
        let chunk = if lacks { Some(self.add_chunk(rank, most_bytes)?) } else { None };
        let (reservation, cache) = self.ready()?;
        let id = cache.any_packed(rank)?;
        cache.remove(reservation, id);
        self.counts.cold += 1;
        let given = self.hand_out(id, len_bytes);
        Some(chunk.map_or(given, |chunk| Given { absent: chunk.addr, absent_bytes: chunk.len_bytes, ..given }))
    }

    /// Puts more slots into the cache, which have no frames yet.
    fn add_chunk(&mut self, rank: usize, most_bytes: usize) -> Option<Chunk> {
        let (reservation, cache) = self.ready()?;
        let chunk = reservation.open_chunk(rank, most_bytes)?;
        let slot_bytes = Reservation::room(rank);
        let bytes = chunk.slots.len() * slot_bytes;
        // The first comes last, so that it is taken first.
        for index in chunk.slots.clone().rev() {
            let id = SlotId::new(rank, index);
            let slot = reservation.slot_mut(id);
            (slot.framed_bytes, slot.freed_at) = (slot_bytes, Slot::SPARE);
            cache.put(reservation, id);
        }
        self.retention.framed_bytes += bytes;
        self.retention.spare_bytes += bytes;
        // What of it no slot has yet, less what it completes of the one that was begun before.
        self.retention.begun_bytes += chunk.len_bytes;
        self.retention.begun_bytes -= bytes;
        self.counts.cold_bytes += bytes as u64;
        Some(chunk)
    }

    /// What was begun has got its frames without the lock. Meanwhile others may have dropped some of its slots, before those came: what no slot counts
    /// goes again.
    #[cold]
    pub(super) fn drop_again(&mut self, addr: usize, len_bytes: usize) {
        self.each_uncounted(addr, len_bytes, |range| {
            // SAFETY: slot-held: behind blocks, or in free slots, and nobody needs what is there.
            unsafe { frames::drop_frames(range.start, range.len()) };
        });
    }

    /// Tells `see` what no slot counts of a range of packed slots: of neighbours in one, which the kernel then drops in one call.
    fn each_uncounted(&mut self, addr: usize, len_bytes: usize, mut see: impl FnMut(Range<usize>)) {
        let Some((reservation, _)) = self.ready() else { return };
        let mut see = |range: Range<usize>| {
            if !range.is_empty() {
                see(range);
            }
        };
        let (mut next, mut gap) = (addr, addr..addr);
        while next < addr + len_bytes
            && let Some(id) = reservation.find(next)
        {
            let (slot, start, room) = (reservation.slot(id), reservation.addr(id), Reservation::room(id.rank()));
            // Who is at one may have dropped it already.
            let from = if slot.holder == Holder::Worker { 0 } else { slot.framed_bytes };
            let uncounted = start + from..start + room;
            if !uncounted.is_empty() {
                if uncounted.start != gap.end {
                    see(std::mem::replace(&mut gap, uncounted.start..uncounted.start));
                }
                gap.end = uncounted.end;
            }
            next = start + room;
        }
        see(gap);
    }
}

#[cfg(test)]
mod tests {
    use selfpage_core::addr::PAGE_BYTES;
    use selfpage_core::linux::memory;

    use super::*;
    use crate::child;

    const LEN: usize = 64 << 10;

    /// The first block that begins a huge page of others.
    fn beginner(pages: &mut Pages) -> Given {
        while pages.retention.spare_bytes == 0 {
            pages.allocate(LEN, 1).unwrap();
        }
        pages.allocate(LEN, 1).unwrap();
        loop {
            let given = pages.allocate(LEN, 1).unwrap();
            if given.absent_bytes > LEN {
                return given;
            }
        }
    }

    fn resident_bytes(addr: usize, len_bytes: usize) -> usize {
        let mut pages = vec![0; len_bytes / PAGE_BYTES];
        memory::residency(addr, &mut pages).unwrap();
        pages.iter().filter(|page| **page & 1 == 1).count() * PAGE_BYTES
    }

    #[test]
    fn what_others_drop_before_it_has_come_is_not_there_for_nobody() {
        // Alone: while a fork waits nothing is dropped.
        child::forked(|| {
            let mut pages = Pages::new();
            let given = beginner(&mut pages);
            let begun = given.absent_bytes;
            // Another thread drops all that is spare, and is not through with the last.
            let mut last = None;
            while pages.retention.spare_bytes > 0 {
                let surplus = pages.surplus(usize::MAX).unwrap();
                // SAFETY: slot-held: a free slot, which is ours until `dropped`.
                assert!(unsafe { frames::drop_frames(surplus.addr, surplus.len_bytes) });
                if let Some(before) = last.replace(surplus) {
                    pages.dropped(before, true);
                }
            }
            frames::populate(given.absent, begun);
            assert_eq!(resident_bytes(given.absent, begun), begun);
            let mut uncounted = Vec::new();
            pages.each_uncounted(given.absent, begun, |range| uncounted.push(range));
            let [range] = &uncounted[..] else { panic!("a call for each slot: {uncounted:?}") };
            assert_eq!(range.len(), begun - LEN);
            pages.drop_again(given.absent, begun);
            assert_eq!(resident_bytes(given.absent, begun), LEN, "the block's own");
            pages.dropped(last.unwrap(), true);
        });
    }
}
