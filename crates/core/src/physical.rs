//! Physical memory as the rules of capabilities see it: words at physical addresses, some of which tables and CNodes live in.

use core::ptr::NonNull;

use crate::addr::{PAGE_BYTES, PageBytes};
use crate::frame::Table;
use crate::sync::{AtomicU64, Ordering};

/// A physical address of the machine that capabilities speak of; in a virtual machine, what it takes for one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PhysAddr(pub u64);

impl PhysAddr {
    /// The address so many bytes further on.
    pub const fn plus(self, len_bytes: u64) -> PhysAddr {
        PhysAddr(self.0.wrapping_add(len_bytes))
    }

    /// Whether it is a multiple of two to the `size_bits`.
    pub const fn is_aligned(self, size_bits: u8) -> bool {
        self.0.trailing_zeros() >= size_bits as u32 || self.0 == 0
    }
}

/// Physical memory. The CPU walks tables in it and sets bits there at any time, so every word is an atomic.
pub struct PhysMemory {
    first: PhysAddr,
    words: Table<AtomicU64>,
}

impl PhysMemory {
    /// Memory whose first byte has the physical address `first`, a multiple of 4,096.
    pub const fn new(first: PhysAddr, words: Table<AtomicU64>) -> PhysMemory {
        PhysMemory { first, words }
    }

    /// Its first address.
    pub const fn first(&self) -> PhysAddr {
        self.first
    }

    /// How long it is, in bytes.
    pub const fn len_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// The word at an address, if there is memory.
    pub fn word(&self, at: PhysAddr) -> Option<&AtomicU64> {
        self.words.get((at.0.wrapping_sub(self.first.0) / 8) as usize)
    }

    /// The page of 4,096 bytes that begins at an address, if all of it is there. Whose it is, and so who may touch it, capabilities
    /// say.
    pub(crate) fn page(&self, at: PhysAddr) -> Option<NonNull<PageBytes>> {
        let first = (at.0.wrapping_sub(self.first.0) / 8) as usize;
        self.words.place(first, PAGE_BYTES / 8).map(NonNull::cast)
    }

    /// What a read finds: where there is no memory all bits are set, as on a bus.
    pub fn load(&self, at: PhysAddr) -> u64 {
        self.word(at).map_or(u64::MAX, |word| word.load(Ordering::Relaxed))
    }

    /// Writes a word; where there is no memory, nothing.
    pub fn store(&self, at: PhysAddr, value: u64) {
        if let Some(word) = self.word(at) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Clears `len_bytes`, a multiple of 8.
    pub fn clear(&self, at: PhysAddr, len_bytes: u64) {
        for offset in (0..len_bytes).step_by(8) {
            self.store(at.plus(offset), 0);
        }
    }
}
