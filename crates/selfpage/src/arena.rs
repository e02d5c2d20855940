//! Memory for core's tables, and for what lives as long: mapped, zeroed, never swapped in by surprise on the heap of the program,
//! and given back as a whole.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::AtomicU16;

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::frame::{FrameRecord, Table};
use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::page::PageWord;
use selfpage_core::policy::Link;
use selfpage_core::region::Line;
use selfpage_core::ring::Slot;
use selfpage_core::sync::{AtomicU8, AtomicU32, AtomicU64};

use crate::error::{Error, Result};

/// Types for which zeroed memory is a valid value, and which are only ever changed through atomics.
///
/// # Safety
/// *zeroed-valid*: all zero bytes are a valid value.
pub unsafe trait Zeroed {}

macro_rules! zeroed {
    ($($type:ty),*) => {
        $(
            // SAFETY: zeroed-valid: a structure of atomics (or their absence of a value), for which zero is a value.
            unsafe impl Zeroed for $type {}
        )*
    };
}
zeroed!(AtomicU8, AtomicU16, AtomicU32, AtomicU64, PageWord, FrameRecord, Line, Slot, Link);

/// A mapping that tables are carved from. Memory is used only where a table has been written to.
#[derive(Debug)]
pub struct Arena {
    start: usize,
    len_bytes: usize,
    used_bytes: usize,
}

impl Arena {
    /// Reserves room for tables of `len_bytes` in all, each rounded up to whole pages.
    ///
    /// # Errors
    /// No address space.
    pub fn new(len_bytes: usize) -> Result<Arena> {
        let len_bytes = len_bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        // SAFETY: owned-range: a fresh mapping replaces nothing.
        let start = unsafe { memory::map_anonymous(Place::Anywhere, len_bytes, Access::ReadWrite) }
            .map_err(|errno| Error::system("map", format!("{len_bytes} bytes of tables"), errno))?;
        // SAFETY: owned-range: just mapped. Huge pages would give untouched parts of a table memory.
        let _ = unsafe { memory::advise(start, len_bytes, Advice::NoHugePages) };
        // They say where pages are, which are in no core dump with them, and are as long as all regions could be.
        // SAFETY: owned-range: just mapped.
        let _ = unsafe { memory::advise(start, len_bytes, Advice::NotInDump) };
        Ok(Arena { start, len_bytes, used_bytes: 0 })
    }

    /// What a table of `len` entries takes.
    pub const fn bytes_for<T>(len: usize) -> usize {
        (size_of::<T>() * len).next_multiple_of(PAGE_BYTES)
    }

    /// Carves out a zeroed table.
    ///
    /// # Panics
    /// The arena was made too small: a mistake of ours.
    ///
    /// # Safety
    /// *table-memory*: the table is not used after the arena is dropped.
    pub unsafe fn table<T: Zeroed>(&mut self, len: usize) -> Table<T> {
        // SAFETY: table-memory: fresh zeroed memory, aligned to a page, carved out once; zeroed-valid by the bound.
        unsafe { Table::new(self.carve(len), len) }
    }

    /// Puts a value beside the tables; it takes as much as a table of one entry.
    ///
    /// # Panics
    /// The arena was made too small: a mistake of ours.
    ///
    /// # Safety
    /// *table-memory*: the value is not used after the arena is dropped.
    pub unsafe fn put<T>(&mut self, value: T) -> &'static T {
        const { assert!(!std::mem::needs_drop::<T>(), "nobody drops it") };
        let place = self.carve(1);
        // SAFETY: table-memory: fresh memory, aligned to a page, carved out once.
        unsafe {
            place.write(value);
            place.as_ref()
        }
    }

    /// Room for `len` entries, which nobody else gets.
    fn carve<T>(&mut self, len: usize) -> NonNull<T> {
        let bytes = Self::bytes_for::<T>(len);
        assert!(self.used_bytes + bytes <= self.len_bytes, "an arena was made too small");
        let first = NonNull::new((self.start + self.used_bytes) as *mut T).expect("mappings are not at zero");
        self.used_bytes += bytes;
        first
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: table-memory: no table is used any more.
        let _ = unsafe { memory::unmap(self.start, self.len_bytes) };
    }
}
