//! Where memory with rights lies, for a handler of a signal to ask, which must not wait for the table.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A stretch of memory. It ends at 0 where there is none.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
}

/// Slots, and more of them where they are all taken. They stay: somebody may be looking.
struct Chunk {
    slots: [Slot; 64],
    next: OnceLock<Box<Chunk>>,
}

impl Chunk {
    const fn new() -> Chunk {
        Chunk {
            slots: [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; 64],
            next: OnceLock::new(),
        }
    }
}

static FIRST: Chunk = Chunk::new();

/// A stretch that is found as long as this lives.
pub(super) struct Place(&'static Slot);

impl Place {
    /// # Context
    /// Normal, with the table held.
    pub(super) fn new(range: Range<usize>) -> Place {
        let mut chunk = &FIRST;
        loop {
            if let Some(slot) = chunk.slots.iter().find(|slot| slot.end.load(Ordering::Relaxed) == 0) {
                slot.start.store(range.start, Ordering::Relaxed);
                slot.end.store(range.end, Ordering::Release);
                return Place(slot);
            }
            chunk = chunk.next.get_or_init(|| Box::new(Chunk::new()));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.end.store(0, Ordering::Release);
    }
}

/// Whether memory with rights lies at an address.
///
/// # Context
/// A handler of a signal.
pub(super) fn any_at(addr: usize) -> bool {
    let chunks = std::iter::successors(Some(&FIRST), |chunk| chunk.next.get().map(|next| &**next));
    chunks.flat_map(|chunk| &chunk.slots).any(|slot| {
        let end = slot.end.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Acquire);
        // Of one stretch, not of two that came one after the other.
        start <= addr && addr < end && slot.end.load(Ordering::Acquire) == end
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_as_long_as_its_place_lives() {
        let table = super::super::table::hold();
        // No program has memory there.
        let at = |index: usize| 16 + index * 32;
        let places: Vec<Place> = (0..150).map(|index| Place::new(at(index)..at(index) + 16)).collect();
        let found = |index: usize| [at(index) - 1, at(index), at(index) + 15, at(index) + 16].map(any_at);
        assert!((0..150).all(|index| found(index) == [false, true, true, false]));
        drop(places);
        assert!((0..150).all(|index| found(index) == [false; 4]));
        drop(table);
    }
}
