//! What works on a range of a region a batch of pages at a time: with all of them in one errand, whoever handed a fault over to the pager threads
//! would wait for all of it.

use selfpage_core::addr::PageRange;
use selfpage_core::fault::evict::Evicted;
use selfpage_core::fault::{Failure, flush, range};

use super::{Bound, Region};
use crate::domain::Inner;
use crate::error::{Error, Kind, Result};

impl Region {
    /// Takes the frames of `[offset, offset+len)` back; changed pages are on their way to the store. Returns how many pages
    /// went.
    ///
    /// # Errors
    /// As for [`Region::prefetch`]. None of its resident pages could go: they are pinned, or held by the kernel.
    pub fn evict(&self, offset_bytes: usize, len_bytes: usize) -> Result<u32> {
        let range = self.range("evict", offset_bytes, len_bytes)?;
        let (inner, bound) = (&*self.life.inner, &*self.bound);
        let state = inner.state();
        let (mut evicted, mut left) = (Evicted::default(), (PageRange { count: 0, ..range }, range));
        while left.0.count + left.1.count > 0 {
            // The wait for the saver is in no errand at all.
            let batch = move || {
                let (part, rest) = bound.next_part(inner, left)?;
                let mut evicted = evicted;
                let part = range::evict(state, part, &mut evicted);
                Some((evicted, (part, rest)))
            };
            let Some(now) = inner.on_pager_thread(batch) else { break };
            (evicted, left) = now;
            range::await_room(state);
        }
        let Evicted { ready, queued, kept, .. } = evicted;
        let gone = ready + queued;
        if gone == 0 && kept > 0 {
            let cause = "none of its pages in core can go: each is pinned, by the program, the kernel or a device, or its pager has \
                         nowhere to save it; unpin them, or make the region with a store";
            return Err(Error::new(Kind::Held, "evict", self.bound.range_name(range), cause));
        }
        Ok(gone)
    }

    /// Saves what has changed in `[offset, offset+len)`, and returns when it is saved; for a file, when it would survive a
    /// crash of the machine. In a forked child nothing is written to a file, nor made to last that its parent has written.
    ///
    /// # Errors
    /// As for [`Region::prefetch`]. A page could not be saved; it stays in core, changed. What a page held was given up to refuse an access;
    /// all others are saved. [`Kind::Held`]: in a forked child pages of the file's region have been changed.
    pub fn flush(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.range("flush", offset_bytes, len_bytes)?;
        let (inner, bound) = (&*self.life.inner, &*self.bound);
        let state = inner.state();
        let mut left = (PageRange { count: 0, ..range }, range);
        while left.0.count + left.1.count > 0 {
            let batch = move || {
                let found = bound.next_part(inner, left);
                found.map(|(part, rest)| Ok((flush::flush(state, part)?, rest))).transpose()
            };
            left = match inner.on_pager_thread(batch) {
                Ok(Some(left)) => left,
                Ok(None) => break,
                Err((page, failure)) => return Err(Error::failure("flush", bound.page_name(page), failure)),
            };
        }
        let all = || bound.has_all("flush", range);
        let pager = &bound.pager;
        // Here, for what may take as long as a disk: on pager threads those of several flushes would leave none for anything else.
        let _turn = pager.syncs_over_forks().then(|| inner.syncing.begin());
        let sync = move || {
            // A child that is forked meanwhile would find the pager's locks taken. It waits for its own I/O only.
            let _inside = (!pager.syncs_over_forks()).then(|| state.gate.enter(state.mmu));
            pager.sync()
        };
        (inner.on_pager_thread(sync))
            .map_err(|error| Error::failure("flush", bound.range_name(range), Failure::Pager(error)))
            .and_then(|()| all())
    }
}

impl Bound {
    /// What is left of a part that one is at, or the next, and what is behind it.
    ///
    /// # Context
    /// As for [`Bound::next_touched`].
    fn next_part(&self, inner: &Inner, (part, rest): (PageRange, PageRange)) -> Option<(PageRange, PageRange)> {
        if part.count > 0 { Some((part, rest)) } else { self.next_touched(inner, rest) }
    }
}
