//! A bounded queue between threads, without locks: faults on their way to a pager thread, pages on their way to the saver,
//! frames on the standby list.
//!
//! # Source
//! The sequence-numbered array queue of D. Vyukov ("bounded MPMC queue"). Nemesis §6.7 uses the like between client and
//! disk (rbufs).

use crate::frame::Table;
use crate::sync::{AtomicU64, Ordering};

/// One place in a ring: its turn, less its own number, and two words of contents. Zeroed memory is a slot that nobody has used: a ring
/// that is larger than it will ever need costs nothing.
#[derive(Default)]
pub struct Slot {
    turn: AtomicU64,
    a: AtomicU64,
    b: AtomicU64,
}

/// A queue of pairs of words.
pub struct Ring {
    slots: Table<Slot>,
    head: AtomicU64,
    tail: AtomicU64,
}

impl Ring {
    /// An empty ring in `slots`, all zero, whose number must be a power of two, and not one: there, a full slot and the next free one
    /// look the same.
    pub fn new(slots: Table<Slot>) -> Ring {
        debug_assert!(slots.len().is_power_of_two() && slots.len() > 1);
        Ring { slots, head: AtomicU64::new(0), tail: AtomicU64::new(0) }
    }

    /// Empties it, whatever was under way: in a forked child, where nobody else uses it.
    pub fn reset(&self) {
        // The others are as they were.
        let used = self.tail.load(Ordering::Relaxed).min(self.slots.len() as u64);
        for slot in self.slots.iter().take(used as usize) {
            slot.turn.store(0, Ordering::Relaxed);
        }
        self.head.store(0, Ordering::Relaxed);
        self.tail.store(0, Ordering::Relaxed);
    }

    /// A ring without room.
    pub fn none() -> Ring {
        Ring { slots: Table::empty(), head: AtomicU64::new(0), tail: AtomicU64::new(0) }
    }

    /// The slot of a turn, and its number.
    fn slot(&self, at: u64) -> Option<(&Slot, u64)> {
        let number = at & (self.slots.len() as u64).wrapping_sub(1);
        Some((self.slots.get(number as usize)?, number))
    }

    /// Appends. `false`: the ring is full.
    ///
    /// # Context
    /// Trap.
    #[must_use]
    pub fn push(&self, a: u64, b: u64) -> bool {
        let mut at = self.tail.load(Ordering::Relaxed);
        loop {
            let Some((slot, number)) = self.slot(at) else { return false };
            let turn = slot.turn.load(Ordering::Acquire) + number;
            if turn == at {
                match self.tail.compare_exchange_weak(at, at + 1, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => {
                        slot.a.store(a, Ordering::Relaxed);
                        slot.b.store(b, Ordering::Relaxed);
                        slot.turn.store(at + 1 - number, Ordering::Release);
                        return true;
                    }
                    Err(other) => at = other,
                }
            } else if turn < at {
                return false;
            } else {
                at = self.tail.load(Ordering::Relaxed);
            }
        }
    }

    /// Takes the oldest entry. `None`: the ring is empty.
    ///
    /// # Context
    /// Trap.
    pub fn pop(&self) -> Option<(u64, u64)> {
        let mut at = self.head.load(Ordering::Relaxed);
        loop {
            let (slot, number) = self.slot(at)?;
            let turn = slot.turn.load(Ordering::Acquire) + number;
            if turn == at + 1 {
                match self.head.compare_exchange_weak(at, at + 1, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => {
                        let entry = (slot.a.load(Ordering::Relaxed), slot.b.load(Ordering::Relaxed));
                        slot.turn.store(at + self.slots.len() as u64 - number, Ordering::Release);
                        return Some(entry);
                    }
                    Err(other) => at = other,
                }
            } else if turn <= at {
                return None;
            } else {
                at = self.head.load(Ordering::Relaxed);
            }
        }
    }

    /// How many entries it holds, about; exactly, where nobody else takes any or appends. One whose thread has a place for it and is still
    /// putting it there counts.
    pub fn len(&self) -> usize {
        let head = self.head.load(Ordering::Relaxed);
        self.tail.load(Ordering::Relaxed).saturating_sub(head) as usize
    }

    /// Whether it holds none, about.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many entries it can hold.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::frame::table;

    #[test]
    fn what_stands_behind_an_entry_that_is_still_put_down_counts() {
        let ring = Ring::new(table(4));
        ring.tail.fetch_add(1, Ordering::Relaxed);
        assert!(ring.push(2, 2));
        assert_eq!((ring.pop(), ring.len()), (None, 2));
        let (slot, number) = ring.slot(0).unwrap();
        slot.turn.store(1 - number, Ordering::Release);
        assert_eq!((ring.pop(), ring.pop(), ring.len()), (Some((0, 0)), Some((2, 2)), 0));
    }

    #[test]
    fn a_ring_that_others_left_in_the_middle_of_something_is_whole_after_a_reset() {
        let ring = Ring::new(table(4));
        assert!(ring.push(1, 1) && ring.push(2, 2));
        // One has taken a place and filled nothing in, and one has taken an entry and not given its place back.
        ring.tail.fetch_add(1, Ordering::Relaxed);
        ring.head.fetch_add(1, Ordering::Relaxed);
        ring.reset();
        for turn in 0..20 {
            (0..4).for_each(|entry| assert!(ring.push(turn, entry)));
            assert!(!ring.push(turn, 4));
            (0..4).for_each(|entry| assert_eq!(ring.pop(), Some((turn, entry))));
            assert_eq!(ring.pop(), None);
        }
    }
}
