//! Memory whose first contents come from a snapshot.

use std::io::IoSliceMut;
use std::sync::Arc;

use arrayvec::ArrayVec;
use rustix::io::{Errno, preadv};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::{Context, FillPage, Pager, PagerError, SavePage, Verdict};
use selfpage_core::pageset::PageSet;
use xxhash_rust::xxh3::xxh3_128;

use super::{Stored, is_zero};
use crate::snapshot::{Index, Placed};
use crate::store::Descriptor;

/// Pages in one request, at most (IOV_MAX is 1024).
const MOST: usize = 512;

/// Anonymous memory that a snapshot fills: a page comes from there, verified, until it has changed, and from the store from then
/// on. The snapshot file is only read.
///
/// # Source
/// Nemesis §6.6: the paged stretch driver, over two places.
pub struct Restored {
    file: Descriptor,
    index: Arc<Index>,
    /// The number of the region's first page in the snapshot.
    first: u64,
    /// The pages that are [`Stored`]'s.
    changed: PageSet,
    stored: Stored,
}

impl Restored {
    /// A pager of which no page has changed yet.
    pub(crate) fn new(file: Descriptor, index: Arc<Index>, first: u64, changed: PageSet, stored: Stored) -> Restored {
        Restored { file, index, first, changed, stored }
    }

    fn placed(&self, index: u64) -> Option<Placed> {
        self.index.find(self.first + index)
    }

    /// Fills pages that have not changed since the snapshot.
    fn fill_from_snapshot(&self, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        let mut rest = pages;
        let mut read = 0;
        while let Some(page) = rest.first_mut() {
            let Some(placed) = self.placed(page.index) else {
                if !page.zeroed {
                    page.bytes.clear();
                }
                rest = &mut rest[1..];
                continue;
            };
            let follows = |(step, page): &(usize, &FillPage<'_>)| {
                self.placed(page.index).is_some_and(|next| next.place == placed.place + (step * PAGE_BYTES) as u64)
            };
            let run = rest.iter().enumerate().take(MOST).take_while(follows).count().max(1);
            let (now, later) = rest.split_at_mut(run);
            self.read_run(placed.place, now)?;
            read += (now.len() * PAGE_BYTES) as u64;
            rest = later;
        }
        Ok(read)
    }

    fn read_run(&self, place: u64, pages: &mut [FillPage<'_>]) -> Result<(), PagerError> {
        let mut slices: ArrayVec<IoSliceMut<'_>, MOST> =
            pages.iter_mut().map(|page| IoSliceMut::new(page.bytes.get_mut())).collect();
        let whole: usize = slices.iter().map(|slice| slice.len()).sum();
        let read = loop {
            match preadv(self.file.borrow(), &mut slices, place) {
                Err(Errno::INTR) => {}
                other => break other.map_err(|errno| PagerError::Io(errno.raw_os_error()))?,
            }
        };
        drop(slices);
        if read < whole {
            return Err(PagerError::Truncated);
        }
        for page in pages {
            let bytes = page.bytes.get();
            if self.placed(page.index).is_none_or(|placed| xxh3_128(bytes) != placed.hash) {
                return Err(PagerError::Corrupt);
            }
            self.stored.noted.note(page.index, bytes);
        }
        Ok(())
    }

    /// Whether the page is as it came from the snapshot. The hash in the file has no secret: other contents could be made to have it.
    fn is_as_filled(&self, index: u64, bytes: &PageBytes) -> bool {
        if self.placed(index).is_some() { self.stored.noted.is_as_noted(index, bytes) } else { is_zero(bytes) }
    }
}

impl Pager for Restored {
    fn fills_in(&self) -> Context {
        Context::PagerThread
    }

    fn extent(&self, index: u64, want: u32) -> u32 {
        if self.changed.contains(index) {
            return self.stored.extent(index, want);
        }
        let place = self.placed(index).map(|placed| placed.place);
        let follows = |step: &u32| {
            let next = index + u64::from(*step);
            let wanted = place.map(|place| place + u64::from(*step) * PAGE_BYTES as u64);
            !self.changed.contains(next) && self.placed(next).map(|placed| placed.place) == wanted
        };
        1 + (1..want).take_while(follows).count() as u32
    }

    fn reads_ahead(&self) -> bool {
        true
    }

    fn fill(&self, context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        let mut rest = pages;
        let mut filled = 0;
        while let Some(stored) = rest.first().map(|page| self.changed.contains(page.index)) {
            let alike = rest.iter().take_while(|page| self.changed.contains(page.index) == stored).count();
            let (now, later) = rest.split_at_mut(alike);
            filled += if stored { self.stored.fill(context, now)? } else { self.fill_from_snapshot(now)? };
            rest = later;
        }
        Ok(filled)
    }

    fn changed(&self, index: u64, bytes: &PageBytes) -> Verdict {
        if self.changed.contains(index) {
            return self.stored.changed(index, bytes);
        }
        if self.is_as_filled(index, bytes) {
            return Verdict::Clean;
        }
        if is_zero(bytes) {
            // The store gives zeros for what it was never given.
            self.changed.insert(index);
            return Verdict::Clean;
        }
        Verdict::Changed
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        self.stored.save(pages);
        pages.iter().filter(|page| page.outcome.is_ok()).for_each(|page| self.changed.insert(page.index));
    }

    /// The snapshot's file keeps what it has, whoever ends.
    fn keeps_untouched(&self) -> bool {
        false
    }

    /// What the program has discarded does not come from there any more.
    fn forgets_untouched(&self) -> bool {
        true
    }

    fn keeps(&self, index: u64) -> bool {
        if self.changed.contains(index) { self.stored.keeps(index) } else { self.placed(index).is_some() }
    }

    fn forget(&self, index: u64, count: u64) {
        self.stored.forget(index, count);
        (index..index + count).for_each(|index| self.changed.insert(index));
    }
}
