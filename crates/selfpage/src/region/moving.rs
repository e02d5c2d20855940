//! Contents that move from one place to another, of one region or of two: by their frames and by where the store has them.
#![allow(unsafe_code)]

use selfpage_core::addr::{PAGE_BYTES, PageNo, PageRange};
use selfpage_core::fault::Failure;
use selfpage_core::fault::relocate::{Unmoved, relocate};
use selfpage_core::mmu::Refusal;
use selfpage_core::pager::Context;

use super::Region;
use crate::domain::Inner;
use crate::error::{Error, Kind, Result};

/// Pages that one errand moves, at most: whoever else needs a pager thread waits no longer than that takes.
const MOST_PAGES: u64 = 4096;

/// Pages that are copied at a time, at most, once some in a row could not move.
const MOST_COPIED: u64 = 256;

impl Region {
    /// Moves the contents of `[offset, offset+len)` to `to_offset` of `to`, which may be the same region. What was there is dropped, and
    /// what is left in the old place is garbage.
    ///
    /// Where both regions are of one domain and kept in the same store, or in none, neither the program nor the store sees a byte of it:
    /// frames go along, and what is in the store stays where it is there. A page that the kernel holds, or that is not to be written where
    /// it is, is copied, and so is every page of other regions.
    ///
    /// # Errors
    /// A range is not in its region, or does not begin and end with a page; the two meet. Then nothing has moved.
    ///
    /// # Safety
    /// *region-contents*: nobody holds a reference into either range, and the program has mapped nothing of its own over them: that would not
    /// be seen. The program may read all of the one and write all of the other: what
    /// is copied is copied as by the program itself, and a page that cannot be had is a `SIGBUS`.
    pub unsafe fn move_contents(
        &self,
        offset_bytes: usize,
        len_bytes: usize,
        to: &Region,
        to_offset_bytes: usize,
    ) -> Result<()> {
        let refused =
            |cause: &str| Err(Error::new(Kind::Invalid, "move", format!("region {}", self.bound.name), cause));
        if [offset_bytes, len_bytes, to_offset_bytes].iter().any(|bytes| !bytes.is_multiple_of(PAGE_BYTES)) {
            return refused("only whole pages move");
        }
        let (from, new) = (self.range("move", offset_bytes, len_bytes)?, to.range("move", to_offset_bytes, len_bytes)?);
        if from.first < new.end() && new.first < from.end() {
            return refused("the two places have pages in common");
        }
        let inner = self.inner();
        self.bound.take_refusals_back(inner, from);
        to.bound.take_refusals_back(to.inner(), new);
        let is_one_domain = std::ptr::eq(inner, to.inner());
        let mut at = from.first;
        // Where one page has to be copied, the next ones may have to be, too.
        let mut copied = 1;
        while at < from.end() {
            let there = new.first.plus(at.0 - from.first.0);
            let rest = PageRange { first: at, count: from.end().0 - at.0 };
            at = match if is_one_domain { inner.relocate(rest, there) } else { Err((at, Unmoved::Apart)) } {
                Ok(next) => {
                    copied = 1;
                    next
                }
                // SAFETY: region-contents: passed on from our caller.
                Err((page, Unmoved::Apart)) => unsafe { copy(page, there.plus(page.0 - at.0), from.end().0 - page.0) },
                Err((page, _)) => {
                    let count = copied.min(from.end().0 - page.0);
                    copied = (2 * copied).min(MOST_COPIED);
                    // SAFETY: region-contents: as above.
                    unsafe { copy(page, there.plus(page.0 - at.0), count) }
                }
            };
        }
        Ok(())
    }
}

/// Copies pages. The first one behind them.
unsafe fn copy(from: PageNo, to: PageNo, count: u64) -> PageNo {
    let (old, new) = (from.addr().0 as *const u8, to.addr().0 as *mut u8);
    // SAFETY: region-contents: passed on from our caller, and the two do not meet.
    unsafe { std::ptr::copy_nonoverlapping(old, new, count as usize * PAGE_BYTES) };
    from.plus(count)
}

impl Inner {
    /// Moves as many pages from the front of `from` as one errand does. The first one behind them.
    ///
    /// # Errors
    /// The first page that has not moved, and why; those after it have not either.
    fn relocate(&self, from: PageRange, to: PageNo) -> std::result::Result<PageNo, (PageNo, Unmoved)> {
        let state = self.state();
        let some = PageRange { count: from.count.min(MOST_PAGES), ..from };
        let (page, why) = match self.on_table(move |context| relocate(state, context, some, to)) {
            Ok(()) => return Ok(some.end()),
            Err(unmoved) => unmoved,
        };
        let one = PageRange { first: page, count: 1 };
        let there = to.plus(page.0 - from.first.0);
        match why {
            Unmoved::AwaitCut(seen) => {
                // Here, since pager threads read the image.
                state.cut.moved.wait(state.mmu, seen, 0);
                Ok(page)
            }
            // The program has closed this thread's descriptors.
            Unmoved::Failed(Failure::Machine(Refusal::NoDescriptor)) => {
                match self.on_pager_thread(move || relocate(state, Context::Normal, one, there)) {
                    Err((_, Unmoved::AwaitCut(seen))) => {
                        state.cut.moved.wait(state.mmu, seen, 0);
                        Ok(page)
                    }
                    done => done.map(|()| one.end()),
                }
            }
            why => Err((page, why)),
        }
    }
}
