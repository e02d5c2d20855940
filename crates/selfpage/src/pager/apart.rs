//! The pages that a forked child has changed of a file, which is its parent's to write.

use std::sync::OnceLock;

use selfpage_core::pager::{FillPage, PagerError, SavePage};
use selfpage_core::pageset::PageSet;

use super::Noted;
use crate::store::{Mapping, Sharing};

/// Pages in memory that nobody pages, by their numbers: as a child has those of a [`crate::store::MemoryStore`]. A child of its own has a copy.
pub(super) struct Apart {
    /// Those that are here.
    pages: PageSet,
    /// None in the process that writes the file. Without room for it, what is changed stays in core.
    memory: OnceLock<Option<Mapping>>,
}

impl Apart {
    /// Nothing yet. `pages` is empty.
    pub(super) const fn new(pages: PageSet) -> Apart {
        Apart { pages, memory: OnceLock::new() }
    }

    /// From now on changes of a region of so many pages are kept here; they take memory as they come.
    pub(super) fn begin(&self, pages: usize) {
        self.memory.get_or_init(|| Mapping::new(pages, Sharing::Private).ok());
    }

    /// Whether this is such a child.
    pub(super) fn has_begun(&self) -> bool {
        self.memory.get().is_some()
    }

    /// Whether there is nowhere to keep what such a child changes.
    pub(super) fn has_no_room(&self) -> bool {
        self.memory.get().is_some_and(Option::is_none)
    }

    /// Whether a page is here.
    pub(super) fn has(&self, index: u64) -> bool {
        // Who writes the file has nothing here, and does not look.
        self.memory().is_some() && self.pages.contains(index)
    }

    /// Whether any is.
    pub(super) fn has_any(&self) -> bool {
        self.memory().is_some() && self.pages.next(0).is_some()
    }

    fn memory(&self) -> Option<&Mapping> {
        self.memory.get()?.as_ref()
    }

    /// Gives a page what is kept of it here. `false`: nothing is.
    pub(super) fn fill(&self, page: &mut FillPage<'_>, noted: &Noted) -> bool {
        let Some(memory) = self.memory().filter(|_| self.has(page.index)) else { return false };
        memory.read(page.index as usize, page.bytes.get_mut());
        noted.note(page.index, page.bytes.get());
        true
    }

    /// Keeps pages.
    pub(super) fn save(&self, pages: &mut [SavePage<'_>], noted: &Noted) {
        for page in pages {
            let Some(memory) = self.memory() else {
                page.outcome = Err(PagerError::NoStore);
                continue;
            };
            memory.write(page.index as usize, page.bytes);
            noted.note(page.index, page.bytes);
            self.pages.insert(page.index);
            page.outcome = Ok(());
        }
    }

    /// They are what the file has, from now on.
    pub(super) fn forget(&self, index: u64, count: u64) {
        let Some(memory) = self.memory() else { return };
        for index in (index..index + count).filter(|index| self.has(*index)) {
            self.pages.remove(index);
            // Where the kernel refuses, the memory is there for the page's next contents.
            let _ = memory.discard(index as usize, 1);
        }
    }
}
