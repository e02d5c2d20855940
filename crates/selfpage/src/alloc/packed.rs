//! Packed slots: where much is live, small blocks lie side by side in huge pages, which cost a fraction of as many single pages. Before
//! that, short ones have their pages in common calls.
//!
//! No more is begun than stays within the retention's bound. Its slots go into the cache as *spare*: they count as kept, serve blocks of
//! their class without another look at the kernel, and can be dropped like all that is kept.

use super::class;
use super::pages::{Given, Pages};
use super::reservation::{Chunk, Reservation};
use super::slot::{Slot, SlotId};

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
}
