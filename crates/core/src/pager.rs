//! What backs a region: the contents of its pages.
//!
//! # Source
//! Nemesis §6.6 (stretch drivers: nailed, physical, paged). Ours hands a pager frames that hold complete contents before
//! they are mapped, several at a time, where a stretch driver maps one page itself.

use crate::addr::PageBytes;
use crate::frame::FrameBytes;

/// Where a piece of code runs, and so what it may do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Context {
    /// On a thread that is stopped on a fault: no allocation, no lock, no managed memory; it may read from a store. Of the stack a pager may
    /// use 16 KiB: one that goes through its end, where a guard is, ends the process.
    Trap,
    /// On a thread of the domain's own: may block on a store or a deadline.
    PagerThread,
    /// In a call that the program made; perhaps on a thread of the domain's own, which makes it for the program and leaves nothing to another.
    Normal,
}

/// Why a pager could not give or take a page's contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PagerError {
    /// The device or file system refused, with this errno.
    Io(i32),
    /// What came back is not what was saved.
    Corrupt,
    /// The file ends before the page.
    Truncated,
    /// The store has no room.
    Full,
    /// The pager's own code panicked.
    Panicked,
    /// The pager has nowhere to save to.
    NoStore,
    /// This cannot be done in this context; ask again on a pager thread.
    WrongContext,
    /// What the region is a clone of went before the page could be copied.
    Orphaned,
}

/// What numbers that no error has are taken for: [`crate::linux::Errno::IO`], without which models for loom are built.
const EIO: i32 = 5;
const MOST_ERRNO: i32 = 4095;

impl PagerError {
    /// As a small number, for words that have no room for more.
    pub(crate) const fn code(self) -> u32 {
        match self {
            PagerError::Corrupt => 1,
            PagerError::Truncated => 2,
            PagerError::Full => 3,
            PagerError::Panicked => 4,
            PagerError::NoStore => 5,
            PagerError::WrongContext => 6,
            PagerError::Orphaned => 7,
            // A pager or store of the program's own may say anything; a code is not 0, and leaves the high bits of words alone.
            PagerError::Io(errno @ 0..=MOST_ERRNO) => 16 + errno as u32,
            PagerError::Io(_) => 16 + EIO as u32,
        }
    }
    pub(crate) const fn from_code(code: u32) -> PagerError {
        match code {
            1 => PagerError::Corrupt,
            2 => PagerError::Truncated,
            3 => PagerError::Full,
            4 => PagerError::Panicked,
            5 => PagerError::NoStore,
            6 => PagerError::WrongContext,
            7 => PagerError::Orphaned,
            code => PagerError::Io(code.saturating_sub(16) as i32),
        }
    }
}

/// One page to fill.
pub struct FillPage<'a> {
    /// The page's number in its region.
    pub index: u64,
    /// Where the contents go. Not visible to the program yet.
    pub bytes: FrameBytes<'a>,
    /// The frame is known to be all zero.
    pub zeroed: bool,
}

/// One page to save.
pub struct SavePage<'a> {
    /// The page's number in its region.
    pub index: u64,
    /// What to save. Nobody writes it while it is being saved.
    pub bytes: &'a PageBytes,
    /// Set by the pager: whether this page is safe now.
    pub outcome: Result<(), PagerError>,
}

/// What a pager says of a page that has been unmapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// A fill would bring the same bytes back.
    Clean,
    /// It must be saved first.
    Changed,
    /// It cannot be saved anywhere: it must stay.
    Stays,
}

/// Where a pager keeps the contents of a page that it has: its own numbers, which another pager of its kind understands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Kept {
    /// Where; 0: nowhere, the page is as one never touched.
    pub place: u64,
    /// What tells whether they come back as they were.
    pub check: u64,
}

/// Backs a region, answers its faults.
///
/// Pages are named by their number in the region. Core calls `changed`, `save`, `forget`, `hand_out`, `take_in` and `given` for one page by one
/// thread at a time, and never while a `fill` of that page runs.
pub trait Pager: Send + Sync {
    /// The lowest context in which `fill` may run.
    fn fills_in(&self) -> Context;

    /// How many pages from `index` on, at most `want`, one request can fill about as cheaply as one page. At least 1.
    ///
    /// # Context
    /// Trap.
    fn extent(&self, index: u64, want: u32) -> u32;

    /// Whether reading ahead of a sequential pattern pays: pages come from somewhere slow.
    ///
    /// # Context
    /// Trap.
    fn reads_ahead(&self) -> bool {
        false
    }

    /// Whether it saves pages. Those of a pager that does not stay in core, and no policy is told of them.
    ///
    /// # Context
    /// Trap.
    fn saves(&self) -> bool {
        true
    }

    /// Writes the contents of each page. `pages` ascend, and need not be neighbours. Returns how many bytes came from a store
    /// or file. Until a page is saved or forgotten its contents are the same each time, and afterwards those that were saved: the program may
    /// have a slice of the region, whose bytes may not change meanwhile.
    ///
    /// # Context
    /// At least [`Pager::fills_in`].
    ///
    /// # Errors
    /// None of the pages counts as filled.
    fn fill(&self, context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError>;

    /// What must happen with this unmapped page before its frame may be used for another. Unless a pager says otherwise, it stays.
    ///
    /// # Context
    /// PagerThread.
    fn changed(&self, index: u64, bytes: &PageBytes) -> Verdict {
        let _ = (index, bytes);
        Verdict::Stays
    }

    /// Saves the pages and sets each one's outcome. After `Ok` a later fill brings back these bytes. Unless a pager says otherwise, there
    /// is nowhere to save them to.
    ///
    /// # Context
    /// PagerThread.
    fn save(&self, pages: &mut [SavePage<'_>]) {
        for page in pages {
            page.outcome = Err(PagerError::NoStore);
        }
    }

    /// Makes what was saved survive a crash of the machine, where the pager promises that.
    ///
    /// # Context
    /// Normal or PagerThread.
    fn sync(&self) -> Result<(), PagerError> {
        Ok(())
    }

    /// Whether a fork may come in the midst of [`Pager::sync`]: nothing that it has locked or half done stands in a child's way once that
    /// was told by [`Pager::forked`]. Otherwise forks, and all faults beside them, wait for it. Of a domain's pagers that say so, one syncs at a
    /// time: it must not wait for another's.
    ///
    /// # Context
    /// Any.
    fn syncs_over_forks(&self) -> bool {
        false
    }

    /// What it keeps pages in: pagers of one domain with the same answer may hand pages to each other. `None`: it hands out none.
    ///
    /// # Context
    /// Any.
    fn keeps_in(&self) -> Option<usize> {
        None
    }

    /// Whether [`Pager::forget`] would change anything about a page that is not in core.
    ///
    /// # Context
    /// Normal or PagerThread.
    fn keeps(&self, index: u64) -> bool {
        let _ = index;
        true
    }

    /// Whether the pager is told by [`Pager::forget`], when its region ends, of pages too that were never in core: then the end takes as long as
    /// the region has pages, used or not. What is only read, and stays, wherever it is, need not be given back.
    ///
    /// # Context
    /// Any.
    fn keeps_untouched(&self) -> bool {
        true
    }

    /// Whether [`Pager::forget`] drops something of pages that were never in core where the program discards them: then a discard takes as
    /// long as its range has pages, used or not.
    ///
    /// # Context
    /// Any.
    fn forgets_untouched(&self) -> bool {
        self.keeps_untouched()
    }

    /// Parts with a page, for another pager to take in: from now on this one is as never touched.
    ///
    /// # Context
    /// Normal or PagerThread.
    fn hand_out(&self, index: u64) -> Kept {
        let _ = index;
        Kept::default()
    }

    /// Has a page from now on that another pager handed out. What it had of it before is garbage.
    ///
    /// # Context
    /// Normal or PagerThread.
    fn take_in(&self, index: u64, kept: Kept) {
        let _ = kept;
        self.forget(index, 1);
    }

    /// Somebody else gives a page its contents, in place of a fill: what a fill would bring, and what was last saved, says nothing of them.
    /// Called before the program can see them. Where they cannot be mapped the page is absent, and the next use of it is a fill.
    ///
    /// # Context
    /// Trap.
    fn given(&self, index: u64) {
        let _ = index;
    }

    /// This process is a forked child from now on: what it saves must not reach what its parent has too.
    ///
    /// # Context
    /// Normal, while nobody else uses the pager.
    fn forked(&self) {}

    /// The pages `[index, index+count)` are garbage: nothing of them need come back; a later fill gives what a page never
    /// touched would have.
    ///
    /// # Context
    /// Normal or PagerThread.
    fn forget(&self, index: u64, count: u64);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shortage::Shortage;

    #[test]
    fn an_error_of_any_number_is_one_and_has_room_in_words() {
        for errno in [i32::MIN, -4095, -18, -17, -16, -5, -1, 0, 5, 28, 4095, 4096, i32::MAX] {
            let code = PagerError::Io(errno).code();
            assert!((16..1 << 16).contains(&code), "{errno}: {code}");
            let expected = PagerError::Io(if (0..=MOST_ERRNO).contains(&errno) { errno } else { EIO });
            assert_eq!(PagerError::from_code(code), expected);
            let shortage = Shortage::Unsaved(PagerError::Io(errno));
            assert_eq!(Shortage::from_code(shortage.code()), Some(Shortage::Unsaved(expected)));
        }
    }
}
