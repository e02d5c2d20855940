//! Contents that move from pages to other pages: the frame goes, or the place where the pager keeps them. No byte is copied, and nothing is
//! read from a store.
//!
//! Whoever moves a page owns both pages, the old one and the new one, from before its contents leave the one until they are in the
//! other. The new one keeps what it has until the old one has let go: where that stays, so does this. What is unmapped and cannot be mapped at the new page is aside there: whoever uses the page has it mapped, or is told why not.
//!
//! # Source
//! Nemesis §6.3: an application maps its frames where it wants them. Douglas's user-mode page allocator: a block that outgrows its place
//! moves by its page tables.

use super::claim::drop_claimed;
use super::range::{settle_drop, settle_step};
use super::{Failure, Outcome, Step, copy_first, fill, inherit, lost};
use crate::addr::{Frame, PageNo, PageRange};
use crate::cut::CutWait;
use crate::domain::DomainState;
use crate::frame::Use;
use crate::mmu::{Partial, Refusal};
use crate::page::{PageWord, State, Word};
use crate::pager::{Context, Pager};
use crate::region::Region;
use crate::shortage::FrameWait;
use crate::trace::Counters;
use crate::tracer::Kind;

/// Pages worked on between two visits of the gate.
const STRETCH: usize = 256;

/// Why the contents of a page have not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmoved {
    /// The pagers of the two regions do not keep pages in the same place.
    Apart,
    /// What the page held was given up: an access to it is to be refused, and not to find zeros at its new place.
    GivenUp,
    /// The same of the new page. What came there would be given up with it, or look as if it were.
    Closed,
    /// The machine would not unmap the page, or a clone needs one of the two and cannot have it.
    Failed(Failure),
    /// The image of a snapshot needs one of the two pages first: as for [`super::range::Undone::AwaitCut`].
    AwaitCut(CutWait),
}

/// Moves the contents of `from` to as many pages from `to` on. The ranges do not meet, and each lies in one region. What was at the new
/// pages is dropped; the old ones are then as pages that were never touched. Pins on either go, as in a [`discard`](super::range::discard).
///
/// # Context
/// Normal; `context` as for [`super::range::pin`].
///
/// # Errors
/// The first page that is as it was, and why; those before it have moved, those after it have not. Where a pager thread must do it, that is
/// [`Refusal::NoDescriptor`].
pub fn relocate(domain: &DomainState, context: Context, from: PageRange, to: PageNo) -> Result<(), (PageNo, Unmoved)> {
    let mut at = from.first;
    while at < from.end() {
        let there = to.plus(at.0 - from.first.0);
        make_way(domain, there).map_err(|why| (at, why))?;
        let rest = PageRange { first: at, count: from.end().0 - at.0 };
        let mut next = at;
        let outcome = settle_drop(domain, context, &mut FrameWait::default(), at, |region| {
            let step;
            (next, step) = relocate_stretch(domain, context, region, rest, there);
            step
        });
        match outcome.map_err(|wait| (next, Unmoved::AwaitCut(wait)))? {
            Outcome::Failed(failure) => return Err((next, Unmoved::Failed(failure))),
            Outcome::NotOurs | Outcome::Violation => return Err((next, Unmoved::Apart)),
            Outcome::Protected => return Err((next, Unmoved::GivenUp)),
            _ => at = next,
        }
    }
    Ok(())
}

/// Waits until nobody is at `page`, which contents are to come to.
fn make_way(domain: &DomainState, page: PageNo) -> Result<(), Unmoved> {
    let outcome = settle_step(domain, page, |region| {
        let Some(word) = region.word(page) else { return Step::Done(Outcome::NotOurs) };
        let seen = word.load();
        if seen.state() == State::Busy || seen.in_save() {
            return word.await_change(seen).map_or(Step::Again, Step::AwaitPage);
        }
        let closed = region.given_up.contains(region.index(page));
        Step::Done(if closed { Outcome::Protected } else { Outcome::Resolved })
    });
    match outcome {
        Outcome::NotOurs => Err(Unmoved::Apart),
        Outcome::Protected => Err(Unmoved::Closed),
        _ => Ok(()),
    }
}

/// Where contents come from, and where they go.
#[derive(Clone, Copy)]
struct Way<'a> {
    domain: &'a DomainState,
    from: &'a Region,
    to: &'a Region,
    old: &'a dyn Pager,
    new: &'a dyn Pager,
    /// How much higher the number of a new page is than that of the old one, around the end of all numbers.
    shift: u64,
}

/// Moves pages from the front of `range` on, until there are many of them or one must be waited for. How far it came.
fn relocate_stretch(
    domain: &DomainState,
    context: Context,
    from: &Region,
    range: PageRange,
    there: PageNo,
) -> (PageNo, Step) {
    let Some(to) = domain.regions.find(there) else { return (range.first, Step::Done(Outcome::NotOurs)) };
    let (Some(old), Some(new)) = (from.pager(), to.pager()) else {
        return (range.first, Step::Done(Outcome::NotOurs));
    };
    if old.keeps_in().is_none() || old.keeps_in() != new.keeps_in() {
        return (range.first, Step::Done(Outcome::Violation));
    }
    let way = Way { domain, from, to, old, new, shift: there.0.wrapping_sub(range.first.0) };
    let mut resident = [(PageNo(0), Frame(0)); STRETCH];
    let mut replaced = [Word::ABSENT; STRETCH];
    let mut len = 0;
    let mut next = range.first;
    let mut step = Step::Done(Outcome::Resolved);
    while next < range.end()
        && let (Some(entry), Some(was)) = (resident.get_mut(len), replaced.get_mut(len))
    {
        match way.claim(context, next) {
            Ok(None) => continue,
            Ok(Some((seen, seen_there))) if seen.state() == State::Resident => {
                (*entry, *was) = ((next, seen.frame()), seen_there);
                len += 1;
            }
            Ok(Some((seen, seen_there))) => {
                // In order: where one stays, so do all after it.
                if let Err((page, why)) = way.move_frames(upto(&resident, len), upto(&replaced, len)) {
                    way.put_back(next, seen, seen_there);
                    return (page, Step::Done(Outcome::Failed(Failure::Machine(why))));
                }
                len = 0;
                way.take_along(next, seen, seen_there);
            }
            Err(wait) => {
                if next == range.first {
                    step = wait;
                }
                break;
            }
        }
        next = next.plus(1);
    }
    match way.move_frames(upto(&resident, len), upto(&replaced, len)) {
        Ok(()) => (next, step),
        Err((page, why)) => (page, Step::Done(Outcome::Failed(Failure::Machine(why)))),
    }
}

fn upto<T>(entries: &[T], len: usize) -> &[T] {
    entries.get(..len).unwrap_or(&[])
}

impl Way<'_> {
    fn there(&self, page: PageNo) -> PageNo {
        PageNo(page.0.wrapping_add(self.shift))
    }

    /// Claims a page and its new place: nobody finds that empty before the contents come. What the two were; `None`: look
    /// again. `Err`: what must be done or waited for first, with neither claimed; [`Outcome::Retry`]: somebody is at the new place,
    /// or it was given up, [`Outcome::Protected`]: the old one was.
    fn claim(&self, context: Context, page: PageNo) -> Result<Option<(Word, Word)>, Step> {
        let (domain, there) = (self.domain, self.there(page));
        let (Some(word), Some(word_there)) = (self.from.word(page), self.to.word(there)) else {
            return Err(Step::Done(Outcome::NotOurs));
        };
        let (seen, seen_there) = (word.load(), word_there.load());
        if seen.state() == State::Busy || seen.in_save() {
            return Err(word.await_change(seen).map_or(Step::Again, Step::AwaitPage));
        }
        if seen_there.state() == State::Busy || seen_there.in_save() {
            return Err(Step::Done(Outcome::Retry));
        }
        if matches!(seen.state(), State::Absent | State::Poisoned)
            && self.from.sets.inherited.contains(self.from.index(page))
        {
            // Its contents are another's still.
            return match inherit::inherit_ahead(domain, context, self.from, page) {
                Step::Done(Outcome::Resolved) => Err(Step::Again),
                step => Err(step),
            };
        }
        let _leaving = copy_first::begin_drop(domain, context, self.from, page, seen)?;
        let _coming = copy_first::begin_drop(domain, context, self.to, there, seen_there)?;
        if !word.claim(seen) {
            return Ok(None);
        }
        if !word_there.claim(seen_there) {
            domain.put_back(self.from, page, seen);
            return Ok(None);
        }
        if self.from.given_up.contains(self.from.index(page)) {
            self.put_back(page, seen, seen_there);
            return Err(Step::Done(Outcome::Protected));
        }
        if self.to.given_up.contains(self.to.index(there)) {
            self.put_back(page, seen, seen_there);
            return Err(Step::Done(Outcome::Retry));
        }
        self.from.disarm(page);
        self.to.disarm(there);
        Ok(Some((seen, seen_there)))
    }

    /// Drops what a claimed new page holds, which stays claimed.
    fn drop_there(&self, there: PageNo, seen: Word) {
        // Pins would be on the contents that come, and what a clone would have had from its source goes.
        self.to.word(there).into_iter().for_each(PageWord::drop_pins);
        self.to.sets.inherited.remove(self.to.index(there));
        // What the pager has of an absent page it replaces.
        if seen.state() != State::Absent {
            drop_claimed(self.domain, self.to, self.new, there, seen);
        }
    }

    /// A claimed page and its new place stay as they were.
    fn put_back(&self, page: PageNo, seen: Word, seen_there: Word) {
        self.domain.put_back(self.from, page, seen);
        self.domain.put_back(self.to, self.there(page), seen_there);
    }

    /// The pager has the new page where it had the old one.
    fn hand_on(&self, page: PageNo) {
        let kept = self.old.hand_out(self.from.index(page));
        self.new.take_in(self.to.index(self.there(page)), kept);
    }

    /// Moves a claimed page that is not mapped, and its frame, if it has one.
    fn take_along(&self, page: PageNo, seen: Word, seen_there: Word) {
        let (domain, there, frame) = (self.domain, self.there(page), seen.frame());
        self.drop_there(there, seen_there);
        match seen.state() {
            State::Standby => {
                domain.stack.leaves_standby();
                self.leave(page, frame);
                domain.trace(there, Kind::Ahead);
                domain.settle_standby(self.to, there, Word::new(State::Standby, frame));
            }
            State::Aside => {
                domain.leaves_aside(seen);
                if domain.mmu.holds(frame) {
                    self.leave(page, frame);
                    self.arrive(&[(there, frame)]);
                } else {
                    self.lose(page, frame);
                }
            }
            state => {
                if state == State::Poisoned {
                    // Whoever asks for it by its new name tries anew.
                    domain.mmu.drop_pages(page, 1);
                }
                self.hand_on(page);
                domain.settle(self.from, page, Word::ABSENT);
                domain.settle(self.to, there, Word::ABSENT);
            }
        }
    }

    /// Unmaps claimed resident pages, ascending, and maps them at their new places, which were `replaced`, in as few calls as their
    /// neighbourhood allows.
    ///
    /// # Errors
    /// The first that the machine would not unmap: it and those after it are as they were, and so are their new places.
    fn move_frames(&self, pages: &[(PageNo, Frame)], replaced: &[Word]) -> Result<(), (PageNo, Refusal)> {
        let domain = self.domain;
        let (mut rest, mut there) = (pages, replaced.iter());
        while let Some(&(first, frame)) = rest.first() {
            let run = fill::neighbours(rest);
            let (done, refusal) = Partial::split(domain.mmu.unmap(first, frame, run as u32), run);
            let (moved, left) = rest.split_at_checked(done).unwrap_or((rest, &[]));
            rest = left;
            let mut arriving = [(PageNo(0), Frame(0)); STRETCH];
            for ((&(page, frame), place), seen_there) in moved.iter().zip(arriving.iter_mut()).zip(there.by_ref()) {
                self.drop_there(self.there(page), *seen_there);
                self.leave(page, frame);
                *place = (self.there(page), frame);
            }
            self.arrive(arriving.get(..moved.len()).unwrap_or(&[]));
            match (refusal, rest.first()) {
                // Dropped behind our back, or no longer the region's: it is zero.
                (Some(Refusal::Hole | Refusal::Foreign), Some(&(page, frame))) => {
                    there.next().into_iter().for_each(|seen_there| self.drop_there(self.there(page), *seen_there));
                    self.lose(page, frame);
                    rest = rest.get(1..).unwrap_or(&[]);
                }
                (Some(why), Some(&(stays, _))) => {
                    for (&(page, frame), seen_there) in rest.iter().zip(there) {
                        self.put_back(page, Word::new(State::Resident, frame), *seen_there);
                    }
                    return Err((stays, why));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The frame of a page is in its slot, and the new page's from now on: nobody claims it before that is settled.
    fn leave(&self, page: PageNo, frame: Frame) {
        self.hand_on(page);
        self.domain.frames.set_owner(frame, Some(self.there(page)));
        self.domain.trace(page, Kind::Discard);
        self.domain.settle(self.from, page, Word::ABSENT);
        Counters::add(&self.domain.counters.moved_total, 1);
    }

    /// What was at a page is gone, and nothing comes to the new one.
    fn lose(&self, page: PageNo, frame: Frame) {
        lost(self.domain, self.from, self.old, page, frame);
        self.new.forget(self.to.index(self.there(page)), 1);
        self.domain.settle(self.to, self.there(page), Word::ABSENT);
    }

    /// Maps frames at claimed new pages, ascending, as far as they may be mapped, and settles them.
    fn arrive(&self, pages: &[(PageNo, Frame)]) {
        let domain = self.domain;
        let unmapped = |page| self.to.word(page).is_some_and(|word| word.load().wishes().unmapped());
        let mut rest = pages;
        while let Some(&(first, frame)) = rest.first() {
            if unmapped(first) {
                domain.settle(self.to, first, Word::new(State::Aside, frame));
                domain.admit(self.to, frame, Use::First);
                rest = rest.get(1..).unwrap_or(&[]);
                continue;
            }
            let run = rest.iter().take(fill::neighbours(rest)).take_while(|entry| !unmapped(entry.0)).count();
            let (done, refusal) = Partial::split(domain.map(self.to, first, frame, run as u32), run);
            let (mapped, left) = rest.split_at_checked(done).unwrap_or((rest, &[]));
            for &(page, frame) in mapped {
                domain.trace(page, Kind::Ahead);
                domain.settle(self.to, page, Word::new(State::Resident, frame));
                domain.admit(self.to, frame, Use::First);
            }
            rest = left;
            let (Some(why), Some(&(page, frame))) = (refusal, rest.first()) else { continue };
            rest = rest.get(1..).unwrap_or(&[]);
            if why == Refusal::Hole {
                lost(domain, self.to, self.new, page, frame);
            } else {
                // Whoever uses the page meets what is the matter.
                domain.stack.joins_sampled();
                domain.settle(self.to, page, Word::new(State::Aside, frame));
                domain.admit(self.to, frame, Use::First);
            }
        }
    }
}
