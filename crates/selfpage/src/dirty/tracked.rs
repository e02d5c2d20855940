//! Dirty pages of regions, whose pages come and go while they are armed.
//!
//! The kernel's protection is with the translation, so it ends where a page moves: a page that was moved in counts as written,
//! and of one that was moved out or discarded core keeps that it was ([`selfpage_core::region::Region::is_armed`]).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use selfpage_core::addr::{PageRange, VirtAddr};
use selfpage_core::linux::Errno;
use selfpage_core::linux::pagemap::{Afterwards, Pagemap, Stretch};
use selfpage_core::mmu::Trap;
use selfpage_core::region::Rights;

use super::owner::Id;
use super::protection::STRETCHES;
use super::{Dirty, object};
use crate::error::{Error, Kind, Result};
use crate::placement::taken;
use crate::region::{Bound, Builder};

/// Whether there has been a tracked region: without any, nobody looks for one.
static ANY: AtomicBool = AtomicBool::new(false);

impl Builder<'_> {
    /// The kernel notes which pages are written, for a [`DirtyTracker`](super::DirtyTracker) to tell. Not for regions that may
    /// only be read.
    ///
    /// A page that came into core since it was armed counts as written, and so does one that left.
    ///
    /// A page has one bit that makes writes to it known, and tracking uses it. So a tracked region has no snapshots, clones, handler,
    /// [`Region::protect`](crate::Region::protect), or rights by protection keys. A program that wants those and the written pages leaves `tracked`
    /// out, protects the region with [`Protection::Read`](crate::Protection::Read), and has a [handler](Builder::handler) note the pages.
    pub fn tracked(mut self) -> Self {
        self.trap = self.trap.tracked();
        self
    }
}

/// Whether a region can be tracked, if it is to be: from then on it is looked for.
pub(crate) fn check_tracked(trap: Trap, rights: Rights) -> Result<()> {
    if !trap.is_tracked() {
        return Ok(());
    }
    if rights == Rights::ReadWrite {
        ANY.store(true, Ordering::SeqCst);
        return Ok(());
    }
    let cause = "nobody writes to a region that may only be read; leave `tracked` out";
    Err(Error::new(Kind::Invalid, "track", "writes", cause))
}

/// The tracked region that a range is of, if it is of one.
pub(super) fn region(operation: &'static str, range: &Range<usize>) -> Result<Option<Arc<Bound>>> {
    if !ANY.load(Ordering::SeqCst) {
        return Ok(None);
    }
    let Some(bound) = taken::find_tracked(range) else { return Ok(None) };
    let whole = addresses(&bound);
    if whole.start <= range.start && range.end <= whole.end {
        return Ok(Some(bound));
    }
    let cause = format!("it goes beyond a region, which is {}; name each part by itself", object(&whole));
    Err(Error::new(Kind::Invalid, operation, object(range), cause))
}

/// Its addresses.
pub(super) fn addresses(bound: &Bound) -> Range<usize> {
    let range = bound.core().range;
    range.first.addr().0..range.end().addr().0
}

fn pages(range: &Range<usize>) -> PageRange {
    let (first, end) = (VirtAddr(range.start).page(), VirtAddr(range.end).page());
    PageRange { first, count: end.0 - first.0 }
}

fn disarm(bound: &Bound, range: &Range<usize>) {
    pages(range).pages().for_each(|page| bound.core().let_go(page));
}

/// Disarms a part, and gives up the notes of the region if nothing of it is armed any more.
pub(super) fn disarm_and_release(bound: &Bound, id: Id, range: &Range<usize>) {
    disarm(bound, range);
    let is_watched = || bound.core().range.pages().any(|page| bound.core().is_watched(page));
    if is_watched() {
        return;
    }
    bound.tracker.release(id);
    // Another thread may have armed a part meanwhile, by this tracker; it, too, claims once more when it has armed.
    if is_watched() {
        let _ = bound.tracker.claim(id, "disarm", range);
    }
}

/// Disarms what the tracker has armed.
pub(super) fn release(id: Id) {
    if !ANY.load(Ordering::SeqCst) {
        return;
    }
    let mut from = 0;
    while let Some(bound) = taken::next_tracked(from) {
        let all = addresses(&bound);
        if bound.tracker.is(id) {
            disarm(&bound, &all);
            bound.tracker.release(id);
        }
        from = all.end;
    }
}

pub(super) fn scan(
    pagemap: Pagemap,
    bound: &Bound,
    range: &Range<usize>,
    afterwards: Afterwards,
    found: &mut Dirty,
) -> std::result::Result<(), Errno> {
    let region = bound.core();
    let page_at = |addr: usize| addr..addr + selfpage_core::addr::PAGE_BYTES;
    if afterwards == Afterwards::Protect {
        // Before the kernel is asked: a page that leaves its frame from here on is found below, and next time too.
        for page in pages(range).pages().filter(|page| !region.arm(*page)) {
            found.mark(page_at(page.addr().0));
        }
    }
    fence(Ordering::SeqCst);
    let mut stretches = [Stretch::default(); STRETCHES];
    let mut at = range.start;
    while at < range.end {
        // Never a hole: the domain could not move a page to where the kernel keeps a mark.
        let scanned = pagemap.written(at, range.end, afterwards, &mut stretches)?;
        stretches[..scanned.stretches].iter().for_each(|stretch| found.mark(stretch.start()..stretch.end()));
        at = scanned.end;
    }
    fence(Ordering::SeqCst);
    for page in pages(range).pages().filter(|page| !region.is_armed(*page)) {
        found.mark(page_at(page.addr().0));
    }
    found.end(range);
    Ok(())
}
