//! Packed slots: where much is live, small blocks lie side by side in huge pages, which cost a fraction of as many single pages.
//!
//! A huge page is begun only where its rest stays within the retention's bound. Its slots go into the cache as *spare*: they count as
//! kept, serve blocks of their class without another look at the kernel, and can be dropped like all that is kept.

use super::class;
use super::pages::{Given, Pages};
use super::reservation::{CHUNK_BYTES, Reservation};
use super::slot::{Slot, SlotId};

impl Pages {
    /// Allocates in a packed slot that lacks frames, or in the first of a huge page more. `None`: the block is none for packed slots,
    /// or too little is live for them.
    pub(super) fn allocate_packed(&mut self, len_bytes: usize, align_bytes: usize) -> Option<Given> {
        let rank = class::class_for(len_bytes)?;
        let (reservation, cache) = self.ready()?;
        let (chunk_bytes, cached_bytes) = (reservation.next_chunk(rank).len() * Reservation::room(rank), cache.bytes);
        if Reservation::alignment(rank) < align_bytes
            || !self.retention.allows_chunk(chunk_bytes, cached_bytes, len_bytes)
        {
            return None;
        }
        let (_, cache) = self.ready()?;
        let chunk = if cache.any_packed(rank).is_none() { Some(self.add_chunk(rank)?) } else { None };
        let (reservation, cache) = self.ready()?;
        let id = cache.any_packed(rank)?;
        cache.remove(reservation, id);
        self.counts.cold += 1;
        let given = self.hand_out(id, len_bytes);
        Some(chunk.map_or(given, |chunk| Given { absent: chunk, absent_bytes: CHUNK_BYTES, ..given }))
    }

    /// Puts the slots of a huge page more into the cache. Returns where it is; it has no frames yet.
    fn add_chunk(&mut self, rank: usize) -> Option<usize> {
        let (reservation, cache) = self.ready()?;
        let (chunk, slots) = reservation.open_chunk(rank)?;
        let slot_bytes = Reservation::room(rank);
        let bytes = slots.len() * slot_bytes;
        // The first comes last, so that it is taken first.
        for index in slots.rev() {
            let id = SlotId::new(rank, index);
            let slot = reservation.slot_mut(id);
            (slot.framed_bytes, slot.freed_at) = (slot_bytes, Slot::SPARE);
            cache.put(reservation, id);
        }
        self.retention.framed_bytes += bytes;
        self.retention.spare_bytes += bytes;
        self.counts.cold_bytes += bytes as u64;
        Some(chunk)
    }
}
