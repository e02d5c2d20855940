//! A store in plain memory: for tests, for compressors to stand on, and where a page out of the program's sight is enough.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::pager::{Context, PagerError};

use super::bloks::Bloks;
use super::linux::mapping::{Mapping, Sharing};
use super::{BackingStore, Blok, ReadBlok, StoreError, WriteBlok, blok_count};

/// A release of this many bloks gives their memory back at once, at one system call for all of them.
const DISCARD_BLOKS: u32 = 64;
/// Memory under bloks released one by one is given back when they may be this many more than those taken: most are claimed again before.
const STALE_BLOKS: u64 = (2 << 20) / PAGE_BYTES as u64;

/// Holds pages in memory of its own that nobody pages. A forked child has a copy, as of all private memory.
pub struct MemoryStore {
    bloks: Bloks,
    pages: Mapping,
    taken: AtomicU64,
    /// How many bloks were released, since the last sweep, without giving their memory back.
    stale: AtomicU64,
}

impl MemoryStore {
    /// A store for `capacity_bytes`. It takes at most twice as much memory as pages are saved, and a few MiB: what was
    /// released is kept for a while for the pages that come next.
    ///
    /// # Errors
    /// A capacity of less than a page or of more than 16 TiB - 8 KiB, or no room for it in the address space.
    pub fn new(capacity_bytes: u64) -> Result<MemoryStore, StoreError> {
        let count = blok_count("in memory", capacity_bytes)?;
        let no_room = |cause| StoreError {
            object: "in memory".to_owned(),
            cause,
            remedy: "ask for less, or raise the limit on address space (ulimit -v)",
        };
        let bloks = Bloks::private(count).map_err(no_room)?;
        let pages = Mapping::new(count as usize, Sharing::Private).map_err(no_room)?;
        Ok(MemoryStore { bloks, pages, taken: 0.into(), stale: 0.into() })
    }

    /// Gives the memory under these bloks back. Where the kernel refuses, it is there for the next that are claimed.
    fn discard(&self, first: Blok, count: u32) {
        let _ = self.pages.discard(first.0 as usize, count as usize);
    }

    /// How many bloks are taken.
    ///
    /// # Context
    /// Normal.
    pub fn taken_bloks(&self) -> u64 {
        self.bloks.taken_count()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryStore({} of {} bloks taken)", self.taken_bloks(), self.bloks.count())
    }
}

impl BackingStore for MemoryStore {
    fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError> {
        let (first, count) = self.bloks.claim(want)?;
        self.taken.fetch_add(count.into(), Ordering::Relaxed);
        Ok((first, count))
    }

    fn release(&self, first: Blok, count: u32) {
        let taken = self.taken.fetch_sub(count.into(), Ordering::Relaxed) - u64::from(count);
        if count >= DISCARD_BLOKS {
            self.discard(first, count);
            return self.bloks.release(first, count);
        }
        self.bloks.release(first, count);
        let stale = self.stale.fetch_add(count as u64, Ordering::Relaxed) + count as u64;
        if stale > taken + STALE_BLOKS && self.stale.swap(0, Ordering::Relaxed) != 0 {
            self.bloks.sweep(|first, len| self.discard(first, len));
        }
    }

    fn reads_in_trap(&self) -> bool {
        true
    }

    fn read(&self, _: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        for read in bloks {
            self.pages.read(read.blok.0 as usize, read.bytes);
        }
        Ok(())
    }

    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        for write in bloks {
            self.pages.write(write.blok.0 as usize, write.bytes);
            write.outcome = Ok(());
        }
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
