//! The pages that a forked child has changed of a file, which is its parent's to write.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::pager::{FillPage, SavePage};

use super::Noted;
use crate::store::{Mapping, Sharing};

/// The pages that one bit each of a page tells of.
const PAGES_A_PAGE: usize = PAGE_BYTES * 8;

/// Pages in memory that nobody pages, by their numbers: as a child has those of a [`crate::store::MemoryStore`]. A child of its own has a copy.
pub(super) struct Apart {
    /// The pages, and behind them a bit for each that is here.
    memory: Mapping,
    pages: usize,
    count: AtomicU64,
}

impl Apart {
    /// Room for the pages of a region; it takes memory for those that are kept.
    pub(super) fn new(pages: usize) -> io::Result<Apart> {
        let memory = Mapping::new(pages + pages.div_ceil(PAGES_A_PAGE), Sharing::Private)?;
        Ok(Apart { memory, pages, count: 0.into() })
    }

    fn bit(&self, index: u64) -> (&AtomicU64, u64) {
        let index = index as usize;
        (&self.memory.page(self.pages + index / PAGES_A_PAGE)[index % PAGES_A_PAGE / 64], 1 << (index % 64))
    }

    /// Whether a page is here.
    pub(super) fn has(&self, index: u64) -> bool {
        let (word, bit) = self.bit(index);
        word.load(Ordering::Acquire) & bit != 0
    }

    /// Whether any is.
    pub(super) fn has_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Gives a page what is kept of it here. `false`: nothing is.
    pub(super) fn fill(&self, page: &mut FillPage<'_>, noted: &Noted) -> bool {
        let has = self.has(page.index);
        if has {
            self.memory.read(page.index as usize, page.bytes.get_mut());
            noted.note(page.index, page.bytes.get());
        }
        has
    }

    /// Keeps pages.
    pub(super) fn save(&self, pages: &mut [SavePage<'_>], noted: &Noted) {
        for page in pages {
            self.memory.write(page.index as usize, page.bytes.get());
            noted.note(page.index, page.bytes.get());
            let (word, bit) = self.bit(page.index);
            if word.fetch_or(bit, Ordering::AcqRel) & bit == 0 {
                self.count.fetch_add(1, Ordering::Relaxed);
            }
            page.outcome = Ok(());
        }
    }

    /// They are what the file has, from now on.
    pub(super) fn forget(&self, index: u64, count: u64) {
        if !self.has_any() {
            return;
        }
        for index in (index..index + count).filter(|index| self.has(*index)) {
            let (word, bit) = self.bit(index);
            word.fetch_and(!bit, Ordering::AcqRel);
            self.count.fetch_sub(1, Ordering::Relaxed);
            // Where the kernel refuses, the memory is there for the page's next contents.
            let _ = self.memory.discard(index as usize, 1);
        }
    }
}
