//! Where saved pages live.
//!
//! # Source
//! Nemesis §6.7 (the user-safe backing store; extents and bloks).

use selfpage_core::addr::PageBytes;
use selfpage_core::pager::{Context, PagerError};

/// A place for one page in a store: its number. The byte offset is the number times the page size. Blok 0 is never given
/// out, so that 0 may stand for "none".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Blok(pub u32);

/// One page to read.
pub struct ReadBlok<'a> {
    /// Where it is in the store.
    pub blok: Blok,
    /// Where it goes; page-aligned.
    pub bytes: &'a mut PageBytes,
}

/// One page to write.
pub struct WriteBlok<'a> {
    /// Where it goes in the store.
    pub blok: Blok,
    /// What; page-aligned.
    pub bytes: &'a PageBytes,
    /// Set by the store.
    pub outcome: Result<(), PagerError>,
}

/// Holds pages by blok.
pub trait BackingStore: Send + Sync {
    /// Claims up to `want` free bloks with neighbouring numbers, fewer where there is no such run.
    ///
    /// # Errors
    /// [`PagerError::Full`].
    fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError>;

    /// Gives `count` bloks from `first` on back.
    fn release(&self, first: Blok, count: u32);

    /// Whether `read` may run in a trap: it neither allocates nor locks.
    fn reads_in_trap(&self) -> bool;

    /// Reads every blok, runs of neighbouring bloks in one request, separate runs in parallel.
    ///
    /// # Context
    /// Trap where `reads_in_trap`, else PagerThread.
    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError>;

    /// Writes every blok and sets each outcome, runs of neighbouring bloks in one request, separate runs in parallel.
    ///
    /// # Context
    /// PagerThread.
    fn write(&self, bloks: &mut [WriteBlok<'_>]);
}
