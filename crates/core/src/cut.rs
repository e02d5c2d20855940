//! The cut: the instant that a snapshot is of.
//!
//! Before it every page is *armed*: protected, so that its first write is told. While the cut is made nobody who is told goes
//! on; the pages that were written to since they were armed are armed anew; then all pages are protected at one instant, and
//! memory as it is then is the image. After it a page that the image still needs is copied before its first write.
//!
//! # Source
//! AVM §2.1 (copy-on-write by the application, on its own faults). The papers have no snapshots; fork(2) is what this stands
//! beside.

use crate::addr::{Frame, PageNo};
use crate::mmu::Mmu;
use crate::pageset::PageSet;
use crate::ring::Ring;
use crate::sync::{AtomicU32, AtomicU64, Event, Gate, Inside, Ordering};

/// What a region's pages are to snapshots. Empty sets: the region takes no part.
pub struct PageSets {
    /// 1: it has taken part, so that pages may be armed.
    pub joined: AtomicU32,
    /// Not armed: writes go through without being told.
    pub unarmed: PageSet,
    /// Written to, or dropped, since the last cut.
    pub changed: PageSet,
    /// What the image of the last cut still needs: nobody has copied the page yet.
    pub pending: PageSet,
    /// In a clone: the source's page of the same number has the contents.
    pub inherited: PageSet,
}

impl PageSets {
    /// A region that takes no part.
    pub fn none() -> PageSets {
        PageSets {
            joined: AtomicU32::new(0),
            unarmed: PageSet::none(),
            changed: PageSet::none(),
            pending: PageSet::none(),
            inherited: PageSet::none(),
        }
    }
}

/// A domain's part in snapshots.
pub struct Cut {
    /// Whoever takes a page's protection off, or drops its contents, is inside. Closed while a cut is made.
    writes: Gate,
    /// Pages that were copied before their first write, each with the frame of the copy.
    images: Ring,
    /// The most copies that there were at a time.
    most: AtomicU32,
    /// 1: the image lacks a page, since no frame was to be had for its copy.
    lacks: AtomicU32,
    /// A page, by its number in the process, that somebody waits for the image to have.
    hurry: AtomicU64,
    /// The cut was made, or copies were taken out, or pages were read, or the snapshot was given up.
    pub moved: Event,
}

/// A wait for the image of a snapshot, which needs a page before that may go. No pager thread waits so: it may be the one that reads the
/// image, and others that do may be few. Whoever sent it to the page waits in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CutWait {
    /// The count of [`Cut::moved`] from before the look at the page.
    seen: u32,
}

impl CutWait {
    pub(crate) const fn from(seen: u32) -> CutWait {
        CutWait { seen }
    }

    /// Sleeps until the page is worth another look.
    ///
    /// # Context
    /// Normal on a thread of the program's, outside the gate.
    pub fn sleep(self, cut: &Cut, mmu: &dyn Mmu) {
        cut.moved.wait(mmu, self.seen, 0);
    }
}

impl Cut {
    /// No snapshot is taken.
    pub fn new(images: Ring) -> Cut {
        Cut {
            writes: Gate::default(),
            images,
            most: AtomicU32::new(0),
            lacks: AtomicU32::new(0),
            hurry: AtomicU64::new(0),
            moved: Event::default(),
        }
    }

    /// Lets a thread write to a page that is armed. `None`: a cut is being made.
    ///
    /// # Context
    /// Trap, as the owner of no page: whoever is inside is waited for.
    pub fn begin_write<'a>(&'a self, mmu: &'a dyn Mmu) -> Option<Inside<'a>> {
        self.writes.try_enter(mmu)
    }

    /// Keeps writers to armed pages waiting from now on, and waits for those who are at it.
    ///
    /// # Context
    /// Normal or PagerThread, outside the gate; one thread at a time.
    pub fn close(&self, mmu: &dyn Mmu) {
        while self.writes.close(mmu, 20_000).is_err() {}
    }

    /// Lets them go on.
    ///
    /// # Context
    /// As for [`Cut::close`].
    pub fn open(&self, mmu: &dyn Mmu) {
        self.writes.open(mmu);
        self.moved.signal(mmu);
    }

    /// Keeps the copy of a page for the image. `false`: there are as many copies as there may be.
    ///
    /// # Context
    /// Trap.
    #[must_use]
    pub fn keep(&self, page: PageNo, copy: Frame) -> bool {
        let kept = self.images.push(page.0, u64::from(copy.0));
        if kept {
            self.most.fetch_max(self.images.len() as u32, Ordering::Relaxed);
        }
        kept
    }

    /// How many copies there are, about.
    pub fn copies(&self) -> u32 {
        self.images.len() as u32
    }

    /// The image lacks a page.
    pub(crate) fn lack(&self) {
        self.lacks.store(1, Ordering::Release);
    }

    /// Whether the image lacks a page that was to be copied. The next one starts anew.
    pub fn lacks(&self) -> bool {
        self.lacks.swap(0, Ordering::AcqRel) != 0
    }

    /// The most copies that there were at a time since this was last asked.
    pub fn most_copies(&self) -> u32 {
        self.most.swap(0, Ordering::Relaxed)
    }

    /// Has whoever reads the image read this page next.
    pub fn hurry(&self, page: PageNo) {
        self.hurry.store(page.0, Ordering::Relaxed);
    }

    /// The page that somebody waits for most.
    pub fn hurried(&self) -> Option<PageNo> {
        Some(PageNo(self.hurry.swap(0, Ordering::Relaxed))).filter(|page| page.0 != 0)
    }

    /// Takes a copy out; the frame is the caller's.
    pub fn take(&self) -> Option<(PageNo, Frame)> {
        self.images.pop().map(|(page, frame)| (PageNo(page), Frame(frame as u32)))
    }

    /// In a forked child: no snapshot is taken here, and nobody is at a write. Who waited for one, and forked in a handler of a signal, looks
    /// again when that returns.
    ///
    /// # Context
    /// Normal, with the domain's gate closed.
    pub fn forget(&self, mmu: &dyn Mmu) {
        self.writes.forget();
        self.moved.signal(mmu);
    }
}
