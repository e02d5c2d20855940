//! Saving what has changed without unmapping it: pages are copied, a batch at a time, and the copies saved together.
//!
//! # Source
//! As for [`super::range`].

use core::num::NonZeroU32;

use super::range::settle_step;
use super::save::{BATCH, save_each};
use super::{Failure, Outcome, Step, lost};
use crate::addr::{Frame, PageNo, PageRange};
use crate::domain::DomainState;
use crate::frame::Zeroed;
use crate::mmu::Refusal;
use crate::page::{State, Word};
use crate::pager::{Pager, PagerError, Verdict};
use crate::region::Region;
use crate::stack;
use crate::sync::Ordering;

/// Pages looked at in one batch.
const MOST_LOOKS: u64 = 1024;
/// Copies take at most one frame in so many.
const MOST_SHARE: u32 = 8;

/// Saves what has changed in as many pages from the front of `range` on as make a batch, without unmapping them, and waits until they
/// are saved. What the program writes meanwhile may or may not be in it. Returns the rest of `range`, which must lie in one region.
///
/// # Context
/// Normal. On a pager thread no more than this in one errand: others wait for that thread.
///
/// # Errors
/// The first page that could not be saved, and why; pages before it are saved.
pub fn flush(domain: &DomainState, range: PageRange) -> Result<PageRange, (PageNo, Failure)> {
    let mut next = range.first;
    let outcome = settle_step(domain, range.first, |region| {
        let step;
        (next, step) = flush_batch(domain, region, range);
        step
    });
    match outcome {
        Outcome::Failed(failure) => Err((next, failure)),
        // Outside of any region there is nothing to save.
        Outcome::NotOurs => Ok(PageRange { first: range.end(), count: 0 }),
        _ => Ok(PageRange { first: next, count: range.end().0 - next.0 }),
    }
}

/// Flushes pages from the front of `range` on, until there are many of them or one must be waited for. How far it came, and at
/// [`Outcome::Failed`] which page failed.
fn flush_batch(domain: &DomainState, region: &Region, range: PageRange) -> (PageNo, Step) {
    let Some(pager) = region.pager() else { return (range.first, Step::Done(Outcome::NotOurs)) };
    let mut claimed = [(PageNo(0), Frame(0)); BATCH];
    let mut found = [Word::ABSENT; BATCH];
    let (mut len, mut next, mut copy) = (0, range.first, None);
    let mut step = Step::Done(Outcome::Resolved);
    let end = range.end().min(range.first.plus(MOST_LOOKS));
    let most = (domain.stack.budget() / MOST_SHARE).max(1) as usize;
    while next < end
        && len < most
        && let (Some(page), Some(word)) = (claimed.get_mut(len), found.get_mut(len))
    {
        match look(domain, region, pager, next, &mut copy) {
            Look::Again => continue,
            Look::Nothing => {}
            Look::Claimed(seen, from) => {
                (*page, *word) = ((next, from), seen);
                len += 1;
            }
            // What is claimed already is saved first: nobody is waited for meanwhile.
            Look::Wait(_) if next > range.first => break,
            Look::Wait(wait) => {
                step = wait;
                break;
            }
            Look::Failed(failure) => {
                step = Step::Done(Outcome::Failed(failure));
                break;
            }
        }
        next = next.plus(1);
        // Half the reserve is for faults, which do not wait for this save.
        if len > 0 && domain.stack.ready() <= domain.stack.reserve.load(Ordering::Relaxed) / 2 {
            break;
        }
    }
    if let Some(copy) = copy {
        domain.stack.give(domain.mmu, copy, 1);
    }
    match save(domain, region, pager, claimed.get(..len).unwrap_or(&[]), &found) {
        Ok(()) => (next, step),
        Err((page, failure)) => (page, Step::Done(Outcome::Failed(failure))),
    }
}

/// What one look at a page comes to.
enum Look {
    /// Once more.
    Again,
    /// It is saved, or not in core.
    Nothing,
    /// It was found so, is claimed, and is to be saved from this frame.
    Claimed(Word, Frame),
    /// Another thread, or a frame, must be waited for.
    Wait(Step),
    Failed(Failure),
}

/// Claims a page that has changed, and copies it. A copy that is not needed is left in `copy` for the next page.
fn look(domain: &DomainState, region: &Region, pager: &dyn Pager, page: PageNo, copy: &mut Option<Frame>) -> Look {
    let Some(word) = region.word(page) else { return Look::Nothing };
    let seen = word.load();
    let from = match seen.state() {
        State::Absent | State::Standby | State::Poisoned => return Look::Nothing,
        // Nobody can change an unmapped page while it is claimed: it is saved from where it is.
        State::Aside => seen.frame(),
        State::Resident if !seen.in_save() => {
            let frames_seen = domain.stack.demand.available.count();
            *copy = copy.or_else(|| stack::take(domain, NonZeroU32::MIN).map(|run| run.first));
            match *copy {
                Some(copy) => copy,
                None => return Look::Wait(Step::AwaitFrame(frames_seen)),
            }
        }
        State::Resident | State::Busy | State::Saving => {
            return Look::Wait(word.await_change(seen).map_or(Step::Again, Step::AwaitPage));
        }
    };
    if !word.claim(seen) {
        return Look::Again;
    }
    if seen.state() == State::Resident {
        domain.frames.set_zeroed(from, Zeroed::Unknown);
        if let Err(why) = domain.mmu.copy_out(page, from) {
            domain.settle(region, page, seen);
            return match why {
                // The program has dropped it behind our back, or mapped over it.
                Refusal::Hole | Refusal::Foreign => Look::Nothing,
                // It is there, and may have changed.
                why => Look::Failed(Failure::Machine(why)),
            };
        }
    }
    let result = match pager.changed(region.index(page), domain.lease(from).get()) {
        Verdict::Changed => {
            // A copy goes with its page.
            copy.take_if(|copy| *copy == from);
            return Look::Claimed(seen, from);
        }
        Verdict::Clean => Ok(()),
        Verdict::Stays => Err(PagerError::NoStore),
    };
    end(domain, region, pager, (page, seen), from, result).map_or_else(Look::Failed, |()| Look::Nothing)
}

/// Saves claimed pages together, and ends their claims. The first that failed, and why.
fn save(
    domain: &DomainState,
    region: &Region,
    pager: &dyn Pager,
    pages: &[(PageNo, Frame)],
    found: &[Word],
) -> Result<(), (PageNo, Failure)> {
    if pages.is_empty() {
        return Ok(());
    }
    let mut result = Ok(());
    let mut found = found.iter();
    let _in_hand = domain.stack.in_hand();
    save_each(domain, region, pages, |page, from, saved| {
        let Some(&seen) = found.next() else { return };
        let ended = end(domain, region, pager, (page, seen), from, saved);
        if seen.state() == State::Resident {
            domain.stack.give(domain.mmu, from, 1);
        }
        result = result.and(ended.map_err(|failure| (page, failure)));
    });
    result
}

/// Ends the claim of a page that was saved, well or not, from this frame: it is as it was found.
fn end(
    domain: &DomainState,
    region: &Region,
    pager: &dyn Pager,
    (page, seen): (PageNo, Word),
    from: Frame,
    saved: Result<(), PagerError>,
) -> Result<(), Failure> {
    // Taken away, perhaps while the pager was at it: who knows what it saved.
    let is_whole = domain.mmu.holds(from);
    if seen.state() == State::Aside && !is_whole {
        domain.leaves_aside(seen);
        lost(domain, region, pager, page, from);
    } else {
        domain.settle(region, page, seen);
    }
    saved.map_err(Failure::Pager).and(if is_whole { Ok(()) } else { Err(Failure::Machine(Refusal::Hole)) })
}
