//! Fetching pages: claim their words, take frames, let the pager fill them, map them.

use core::array;
use core::num::NonZeroU32;

use super::{Failure, Outcome, Step, refused};
use crate::addr::{Frame, PageNo};
use crate::domain::{DomainState, MOST_AHEAD};
use crate::frame::{Use, Zeroed};
use crate::mmu::Partial;
use crate::page::{State, Word};
use crate::pager::{Context, FillPage, Pager, PagerError};
use crate::region::Region;
use crate::stack;
use crate::stream::{Chunk, Plan};
use crate::sync::Ordering;
use crate::trace::Counters;
use crate::tracer::Kind;

/// Pages that one trap fetches, at most: its stack may be small.
pub const MOST_IN_TRAP: u32 = 16;
/// Pages that a pager thread fetches for one fault, at most.
pub const MOST_NOW: u32 = 32;

/// Pages claimed for a fetch, ascending, with their frames.
struct Batch<const N: usize> {
    pages: [(PageNo, Frame); N],
    len: usize,
}

impl<const N: usize> Batch<N> {
    fn new() -> Self {
        Batch { pages: [(PageNo(0), Frame(0)); N], len: 0 }
    }

    fn push(&mut self, page: PageNo) -> bool {
        match self.pages.get_mut(self.len) {
            Some(entry) => {
                *entry = (page, Frame(0));
                self.len += 1;
                true
            }
            None => false,
        }
    }

    fn pages(&self) -> &[(PageNo, Frame)] {
        self.pages.get(..self.len).unwrap_or(&[])
    }

    fn pages_mut(&mut self) -> &mut [(PageNo, Frame)] {
        self.pages.get_mut(..self.len).unwrap_or(&mut [])
    }

    /// Claims absent pages from `first` on, `stride` apart, within the region.
    fn claim(&mut self, domain: &DomainState, region: &Region, first: PageNo, stride: i64, count: u32, at_gap: AtGap) {
        for step in 0..u64::from(count) {
            let page = PageNo(first.0.wrapping_add((stride as u64).wrapping_mul(step)));
            let claimed = claim_unasked(domain, region, page);
            if (!claimed && at_gap == AtGap::Stop) || (claimed && !self.push(page)) {
                return;
            }
        }
    }

    /// Gives each page a frame, as far as there are frames; drops the claims of the rest.
    fn take_frames(&mut self, domain: &DomainState, region: &Region, keep: PageNo) {
        if self.pages().first().is_some_and(|(first, _)| self.pages().last().is_some_and(|(last, _)| last < first)) {
            self.pages_mut().reverse();
        }
        let want = domain.affordable(self.len as u32);
        let mut left = want.get();
        // The page that somebody waits for comes first when frames are few.
        if (left as usize) < self.len
            && let Some(at) = self.pages().iter().position(|(page, _)| *page == keep)
        {
            self.shrink(domain, region, at, left as usize);
        }
        let mut given = 0;
        while let Some(want) = NonZeroU32::new(left)
            && let Some(run) = stack::take(domain, want)
        {
            let frames = (0..run.count.get()).map(|step| run.first.plus(step));
            for (entry, frame) in self.pages_mut().iter_mut().skip(given).zip(frames) {
                entry.1 = frame;
            }
            given += run.count.get() as usize;
            left -= run.count.get();
        }
        if given < self.len {
            let at = self.pages().iter().position(|(page, _)| *page == keep).unwrap_or(0);
            // Frames were given from the front: the kept page takes over one of them.
            if at >= given
                && let Some(last) = given.checked_sub(1)
                && let Some(frame) = self.pages().get(last).map(|entry| entry.1)
            {
                let kept = (keep, frame);
                let displaced = self.pages().get(last).map_or(PageNo(0), |entry| entry.0);
                for (index, entry) in [(last, kept), (at, (displaced, Frame(0)))] {
                    if let Some(place) = self.pages_mut().get_mut(index) {
                        *place = entry;
                    }
                }
            }
            for (page, _) in self.pages().iter().skip(given) {
                domain.settle(region, *page, Word::ABSENT);
            }
            self.len = given;
        }
    }

    /// Keeps `count` pages, the one at `at` among them.
    fn shrink(&mut self, domain: &DomainState, region: &Region, at: usize, count: usize) {
        let from = (at + 1).saturating_sub(count);
        for (index, (page, _)) in self.pages().iter().enumerate() {
            if index < from || index >= from + count {
                domain.settle(region, *page, Word::ABSENT);
            }
        }
        for index in 0..count {
            if let Some(&kept) = self.pages().get(from + index)
                && let Some(entry) = self.pages_mut().get_mut(index)
            {
                *entry = kept;
            }
        }
        self.len = count;
    }

    fn drop_entry(&mut self, at: usize) {
        for index in at + 1..self.len {
            if let Some(&entry) = self.pages.get(index)
                && let Some(before) = self.pages.get_mut(index - 1)
            {
                *before = entry;
            }
        }
        self.len -= 1;
    }

    /// Gives the frames back and drops the claims.
    fn abandon(&self, domain: &DomainState, region: &Region) {
        for (page, frame) in self.pages() {
            domain.settle_absent(region, *page, *frame);
        }
    }

    fn fill(
        &self,
        domain: &DomainState,
        context: Context,
        region: &Region,
        pager: &dyn Pager,
    ) -> Result<u64, PagerError> {
        let mut fills: [FillPage<'_>; N] = array::from_fn(|at| {
            let (page, frame) = self.pages().get(at).copied().unwrap_or((PageNo(0), Frame(0)));
            FillPage { index: region.index(page), bytes: domain.lease(frame), zeroed: domain.frames.zeroed(frame) }
        });
        for (page, frame) in self.pages() {
            domain.frames.set_zeroed(*frame, Zeroed::Unknown);
            domain.frames.set_owner(*frame, Some(*page));
        }
        ask(domain, context, pager, fills.get_mut(..self.len).unwrap_or(&mut []))
    }

    /// Maps the pages in as few calls as their neighbourhood allows, and settles them.
    fn map(&self, domain: &DomainState, region: &Region, waited_for: Option<PageNo>) -> Result<(), Step> {
        let mut result = Ok(());
        let mut at = 0;
        while let Some(rest) = self.pages().get(at..)
            && let Some(&(page, frame)) = rest.first()
        {
            let run = neighbours(rest);
            let (done, refusal) = Partial::split(domain.map(region, page, frame, run as u32), run);
            for &(page, frame) in rest.get(..done).unwrap_or(rest) {
                if waited_for != Some(page) {
                    // Before it is settled, and others note what they do with it.
                    domain.trace(page, Kind::Ahead);
                }
                domain.settle(region, page, Word::new(State::Resident, frame));
                domain.admit(region, frame, Use::First);
            }
            at += done;
            if let Some(why) = refusal
                && let Some(&(page, frame)) = self.pages().get(at)
            {
                let step = refused(domain, region, page, frame, why);
                if waited_for == Some(page) {
                    result = Err(step);
                }
                at += 1;
            }
        }
        result
    }
}

/// Has a pager give pages their contents, whoever wants them, and counts where it cannot. How many bytes came from elsewhere.
pub(super) fn ask(
    domain: &DomainState,
    context: Context,
    pager: &dyn Pager,
    pages: &mut [FillPage<'_>],
) -> Result<u64, PagerError> {
    let filled = pager.fill(context, pages);
    // Of another context it is asked again in that.
    if filled.is_err_and(|error| error != PagerError::WrongContext) {
        Counters::add(&domain.counters.fill_errors_total, 1);
    }
    filled
}

/// How many entries at the front are neighbours in both address and slot.
pub(super) fn neighbours(pages: &[(PageNo, Frame)]) -> usize {
    let mut count = 1;
    for ((page, frame), (next_page, next_frame)) in pages.iter().zip(pages.iter().skip(1)) {
        if next_page.0 != page.0 + 1 || next_frame.0 != frame.0 + 1 {
            break;
        }
        count += 1;
    }
    count
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AtGap {
    Stop,
    Skip,
}

/// Claims an absent page that nobody has asked for, if it may be brought in.
fn claim_unasked(domain: &DomainState, region: &Region, page: PageNo) -> bool {
    let index = region.index(page);
    let claimed = region.word(page).is_some_and(|word| {
        let seen = word.load();
        seen.state() == State::Absent
            && region.reaches(page)
            && !region.sets.inherited.contains(index)
            && !seen.wishes().unmapped()
            && word.claim(seen)
    });
    // Only now: a page that is given up is absent before and after.
    let guarded = claimed && region.guarded.contains(index);
    if guarded {
        domain.settle(region, page, Word::ABSENT);
    }
    claimed && !guarded
}

/// Fetches a claimed page, and with it those of `plan` that are cheap to have. How many bytes came from elsewhere; `Err`: what is to be done
/// where the page did not come.
pub(super) fn fetch<const N: usize>(
    domain: &DomainState,
    context: Context,
    region: &Region,
    pager: &dyn Pager,
    page: PageNo,
    plan: Plan,
) -> Result<u64, Step> {
    let mut batch = Batch::<N>::new();
    batch.push(page);
    if plan.count > 1 {
        let next = PageNo(page.0.wrapping_add(plan.stride as u64));
        let more = match plan.stride {
            1 => pager.extent(region.index(page), plan.count).saturating_sub(1).min(plan.count - 1),
            _ => plan.count - 1,
        };
        batch.claim(domain, region, next, plan.stride, more, AtGap::Stop);
    }
    let frames_seen = domain.stack.demand.available.count();
    batch.take_frames(domain, region, page);
    if batch.len == 0 {
        return Err(Step::AwaitFrame(frames_seen));
    }
    let _in_hand = domain.stack.in_hand();
    let mut filled = batch.fill(domain, context, region, pager);
    if filled.is_err() && batch.len > 1 {
        // It may be a neighbour that cannot be had.
        for &(other, frame) in batch.pages() {
            if other != page {
                domain.settle_absent(region, other, frame);
            }
        }
        if let Some(&entry) = batch.pages().iter().find(|entry| entry.0 == page) {
            batch.pages = [entry; N];
            batch.len = 1;
        }
        filled = batch.fill(domain, context, region, pager);
    }
    let bytes = match filled {
        Ok(bytes) => bytes,
        Err(PagerError::WrongContext) if context == Context::Trap => {
            batch.abandon(domain, region);
            return Err(Step::HandOver);
        }
        Err(error) => {
            // The page itself: the others are abandoned.
            for &(page, frame) in batch.pages() {
                domain.settle_failed(region, page, frame);
            }
            return Err(Step::Done(Outcome::Failed(Failure::Pager(error))));
        }
    };
    Counters::add(&domain.counters.bytes_filled, bytes);
    Counters::add(&domain.counters.fills_total, batch.len as u64);
    Counters::add(&domain.counters.fills_ahead_total, batch.len as u64 - 1);
    region.fetched.fetch_add(1, Ordering::Relaxed);
    batch.map(domain, region, Some(page)).map(|()| bytes)
}

/// Whether somebody wants to know that a chunk was reached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tripwire {
    Set,
    None,
}

/// Reads a chunk ahead of its use. Nobody waits for it: it takes only frames that are ready, and its errors are met again by
/// whoever needs the page. Returns the page that there was no frame for, in a chunk that goes forward.
pub(super) fn read_ahead(
    domain: &DomainState,
    region: &Region,
    pager: &dyn Pager,
    first: PageNo,
    chunk: Chunk,
    tripwire: Tripwire,
) -> Option<PageNo> {
    let mut batch = Batch::<{ MOST_AHEAD as usize }>::new();
    batch.claim(domain, region, first, chunk.stride, chunk.count, AtGap::Skip);
    let claimed = batch.len;
    let &(nearest, _) = batch.pages().first()?;
    batch.take_frames(domain, region, nearest);
    let last = match batch.pages().last() {
        Some(&(last, _)) => last,
        None => return Some(nearest),
    };
    let short = (batch.len < claimed).then_some(last.plus(1));
    let _in_hand = domain.stack.in_hand();
    match batch.fill(domain, Context::PagerThread, region, pager) {
        Ok(bytes) => Counters::add(&domain.counters.bytes_filled, bytes),
        Err(_) => {
            batch.abandon(domain, region);
            return None;
        }
    }
    Counters::add(&domain.counters.fills_total, batch.len as u64);
    Counters::add(&domain.counters.fills_ahead_total, batch.len as u64);
    // The page that the program reaches first stays unmapped, to say that it was reached.
    let at = if chunk.stride < 0 { batch.len - 1 } else { 0 };
    if tripwire == Tripwire::Set
        && let Some(&(page, frame)) = batch.pages().get(at)
    {
        domain.trace(page, Kind::Ahead);
        domain.settle_standby(region, page, Word::new(State::Standby, frame).with_trip());
        batch.drop_entry(at);
    }
    let _ = batch.map(domain, region, None);
    short
}
