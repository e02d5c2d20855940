//! Demand paging to a backing store.

use std::ops::Range;
use std::sync::Arc;

use arrayvec::ArrayVec;
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::frame::Table;
use selfpage_core::pager::{Context, FillPage, Kept, Pager, PagerError, SavePage, Verdict};
use selfpage_core::sync::{AtomicU32, AtomicU64, Ordering};

use super::{Noted, is_zero};
use crate::error::unless_it_panics;
use crate::store::{BackingStore, Blok, ReadBlok, WriteBlok, has_no_room};

/// Pages read or written at once, at most.
const MOST: usize = 512;
const MOST_IN_TRAP: usize = 16;

/// Anonymous memory larger than its frames. A page never written to is zero; one that was evicted is in the store, with its
/// hash kept here, and is checked when it comes back.
///
/// Saved pages go to fresh bloks, neighbours next to each other, and the old bloks are given back: one sequential request
/// where writing in place takes many.
///
/// # Source
/// Nemesis §6.6, the paged stretch driver; bloks are §6.7's.
pub struct Stored {
    /// May be the program's own: where a call of it panics, that goes no further than here. Pages are claimed meanwhile, and who went on
    /// from there would leave them so.
    store: Arc<dyn BackingStore>,
    /// Where each page is saved; 0: nowhere, it is zero.
    bloks: Table<AtomicU32>,
    /// How many are saved: the end of a large region of which none is looks at no more of them.
    saved: AtomicU64,
    /// What is saved there, and for [`super::Restored`] what is not.
    pub(super) noted: Noted,
}

impl Stored {
    /// A pager over a zeroed table of one entry a page.
    pub(crate) fn new(store: Arc<dyn BackingStore>, bloks: Table<AtomicU32>, noted: Noted) -> Stored {
        Stored { store, bloks, saved: AtomicU64::new(0), noted }
    }

    fn blok(&self, index: u64) -> u32 {
        self.bloks.get(index as usize).map_or(0, |blok| blok.load(Ordering::Acquire))
    }

    fn keep(&self, index: u64, blok: u32, hash: u64) {
        if let Some(kept) = self.bloks.get(index as usize) {
            self.noted.note_hash(index, hash);
            if blok != 0 {
                self.saved.fetch_add(1, Ordering::Relaxed);
            }
            let old = kept.swap(blok, Ordering::AcqRel);
            if old != 0 {
                self.saved.fetch_sub(1, Ordering::Relaxed);
                self.release(Blok(old));
            }
        }
    }

    /// Gives a blok back. Where the store panics it has it still, for good.
    fn release(&self, blok: Blok) {
        let _ = unless_it_panics(|| self.store.release(blok, 1));
    }

    /// Fills `N` pages at a time. Never a part of its caller: a trap's stack has no room for the many of a pager thread.
    #[inline(never)]
    fn fill_up_to<const N: usize>(&self, context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        let mut filled = 0;
        for part in pages.chunks_mut(N) {
            let mut reads = ArrayVec::<ReadBlok<'_>, N>::new();
            for page in part.iter_mut() {
                match self.blok(page.index) {
                    0 if page.zeroed => {}
                    0 => page.bytes.clear(),
                    blok => reads.push(ReadBlok { blok: Blok(blok), bytes: page.bytes.get_mut() }),
                }
            }
            if reads.is_empty() {
                continue;
            }
            filled += (reads.len() * PAGE_BYTES) as u64;
            unless_it_panics(|| self.store.read(context, &mut reads)).unwrap_or(Err(PagerError::Panicked))?;
            drop(reads);
            for page in part.iter() {
                if self.blok(page.index) != 0 && !self.noted.is_as_noted(page.index, page.bytes.get()) {
                    // In a trap the descriptor may be somebody else's by now; a pager thread knows.
                    return Err(if context == Context::Trap { PagerError::WrongContext } else { PagerError::Corrupt });
                }
            }
        }
        Ok(filled)
    }
}

impl Pager for Stored {
    fn fills_in(&self) -> Context {
        if unless_it_panics(|| self.store.reads_in_trap()) == Some(true) { Context::Trap } else { Context::PagerThread }
    }

    fn extent(&self, index: u64, want: u32) -> u32 {
        let first = self.blok(index);
        let follows = |step: &u32| {
            let blok = self.blok(index + u64::from(*step));
            if first == 0 { blok == 0 } else { Some(blok) == first.checked_add(*step) }
        };
        1 + (1..want).take_while(follows).count() as u32
    }

    fn reads_ahead(&self) -> bool {
        true
    }

    fn fill(&self, context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        match context {
            Context::Trap => self.fill_up_to::<MOST_IN_TRAP>(context, pages),
            _ => self.fill_up_to::<MOST>(context, pages),
        }
    }

    fn changed(&self, index: u64, bytes: &PageBytes) -> Verdict {
        if is_zero(bytes) {
            self.keep(index, 0, 0);
            return Verdict::Clean;
        }
        if self.blok(index) != 0 && self.noted.is_as_noted(index, bytes) { Verdict::Clean } else { Verdict::Changed }
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        for part in pages.chunks_mut(MOST) {
            self.save_some(part.iter_mut().collect());
            // Where the disk is full, the store knows by now, and names bloks that have space. And each page that was saved has given a
            // blok back, for one that was refused.
            let mut before = usize::MAX;
            loop {
                let refused: ArrayVec<_, MOST> = part.iter_mut().filter(|page| has_no_room(page.outcome)).collect();
                if refused.is_empty() || refused.len() >= before {
                    break;
                }
                before = refused.len();
                self.save_some(refused);
            }
        }
    }

    fn keeps_in(&self) -> Option<usize> {
        unless_it_panics(|| self.store.identity())
    }

    fn keeps_untouched(&self) -> bool {
        false
    }

    fn keeps(&self, index: u64) -> bool {
        self.blok(index) != 0
    }

    fn hand_out(&self, index: u64) -> Kept {
        // A page that was never saved has no entry: reading it takes no memory, writing it would.
        match self.bloks.get(index as usize).filter(|blok| blok.load(Ordering::Acquire) != 0) {
            Some(blok) => {
                self.saved.fetch_sub(1, Ordering::Relaxed);
                Kept { place: blok.swap(0, Ordering::AcqRel).into(), check: self.noted.noted_hash(index) }
            }
            None => Kept::default(),
        }
    }

    fn take_in(&self, index: u64, kept: Kept) {
        if kept.place != 0 || self.blok(index) != 0 {
            self.keep(index, kept.place as u32, kept.check);
        }
    }

    fn forget(&self, index: u64, count: u64) {
        for index in index..index + count {
            if self.blok(index) != 0 {
                self.keep(index, 0, 0);
            }
        }
    }
}

impl Stored {
    /// Saves pages to fresh bloks.
    fn save_some(&self, mut pages: ArrayVec<&mut SavePage<'_>, MOST>) {
        let mut bloks = ArrayVec::<Blok, MOST>::new();
        while bloks.len() < pages.len() {
            match self.claim(pages.len() - bloks.len()) {
                Ok(run) => bloks.extend(run.map(Blok)),
                Err(error) => {
                    pages.drain(bloks.len()..).for_each(|page| page.outcome = Err(error));
                }
            }
        }
        if bloks.is_empty() {
            return;
        }
        let mut writes = ArrayVec::<WriteBlok<'_>, MOST>::new();
        for (page, &blok) in pages.iter().zip(&bloks) {
            writes.push(WriteBlok { blok, bytes: page.bytes, outcome: Err(PagerError::NoStore) });
        }
        if unless_it_panics(|| self.store.write(&mut writes)).is_none() {
            // Who knows what it wrote.
            writes.iter_mut().for_each(|write| write.outcome = Err(PagerError::Panicked));
        }
        let outcomes: ArrayVec<_, MOST> = writes.iter().map(|write| (write.blok, write.outcome)).collect();
        drop(writes);
        for (page, (blok, outcome)) in pages.into_iter().zip(outcomes) {
            page.outcome = outcome;
            match outcome {
                Ok(()) => self.keep(page.index, blok.0, self.noted.hash_of(page.bytes)),
                Err(_) => self.release(blok),
            }
        }
    }

    /// Claims some neighbouring bloks, `most` at most.
    fn claim(&self, most: usize) -> Result<Range<u32>, PagerError> {
        let claimed = unless_it_panics(|| self.store.claim(most as u32));
        let (first, count) = claimed.unwrap_or(Err(PagerError::Panicked))?;
        // There is no blok behind the last number, whatever a store says: it would be another page's, or none.
        let count = count.min(most as u32).min(u32::MAX - first.0);
        // Blok 0 stands for none, and no bloks are no progress.
        if first.0 == 0 || count == 0 { Err(PagerError::Full) } else { Ok(first.0..first.0 + count) }
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        if self.saved.load(Ordering::Relaxed) == 0 {
            return;
        }
        for blok in self.bloks.iter().map(|blok| blok.load(Ordering::Relaxed)).filter(|blok| *blok != 0) {
            self.release(Blok(blok));
        }
    }
}
