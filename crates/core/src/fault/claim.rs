//! A page that is claimed: dropped, or for the moment in which somebody outside of this crate changes what stands in its place.

use super::copy_first::begin_drop;
use super::range::{Undone, settle_drop, settle_step};
use super::{Absent, Outcome, Step, asked};
use crate::addr::{Frame, PageNo};
use crate::domain::DomainState;
use crate::mmu::Refusal;
use crate::page::{State, Word};
use crate::pager::{Context, Pager};
use crate::region::{Access, Region};
use crate::shortage::FrameWait;
use crate::trace::Counters;
use crate::tracer::Kind;

/// Does `work` while nobody else is at `page`, and tells it what it found there; the word says the same afterwards. `None`: the page is in
/// no region.
///
/// # Context
/// Normal or PagerThread, outside the gate; `work` runs inside, and waits for nobody.
pub fn with_claim<T>(domain: &DomainState, page: PageNo, work: impl FnOnce(State) -> T) -> Option<T> {
    let (mut work, mut result) = (Some(work), None);
    settle_step(domain, page, |region| {
        let Some(word) = region.word(page) else { return Step::Done(Outcome::NotOurs) };
        let seen = word.load();
        // Whoever ends a save leaves what it saved from to the owner of a claimed page.
        if seen.state() == State::Busy || seen.in_save() {
            return word.await_change(seen).map_or(Step::Again, Step::AwaitPage);
        }
        if !word.claim(seen) {
            return Step::Again;
        }
        result = work.take().map(|work| work(seen.state()));
        domain.put_back(region, page, seen);
        Step::Done(Outcome::Resolved)
    });
    result
}

/// What [`super::still_asked`] says of a page whose word is `seen`.
///
/// # Context
/// As for what [`with_emptied`] asks.
pub fn still_asked(region: &Region, seen: Word, access: Access) -> Option<Outcome> {
    asked(region, seen, access, Absent::Ask)
}

/// Drops what `page` holds, as a discard does, and does `work` before anybody else may find it empty. `None`: the page is in no region, or
/// `still` says no of it and its word, inside the gate and before anything is done: it stays as it was.
///
/// # Context
/// As for [`with_claim`], on a thread that has the domain's descriptors.
///
/// # Errors
/// As for [`super::range::discard`]: the page is as it was, and `work` has not run.
pub fn with_emptied<T>(
    domain: &DomainState,
    page: PageNo,
    still: impl Fn(&Region, Word) -> bool,
    work: impl FnOnce() -> T,
) -> Result<Option<T>, Undone> {
    let (mut work, mut result) = (Some(work), None);
    let outcome = settle_drop(domain, Context::Normal, &mut FrameWait::default(), page, |region| {
        let (Some(word), Some(pager)) = (region.word(page), region.pager()) else {
            return Step::Done(Outcome::NotOurs);
        };
        let seen = word.load();
        if seen.state() == State::Busy || seen.in_save() {
            return word.await_change(seen).map_or(Step::Again, Step::AwaitPage);
        }
        if !still(region, seen) {
            return Step::Done(Outcome::Resolved);
        }
        let _dropping = match begin_drop(domain, Context::Normal, region, page, seen) {
            Ok(dropping) => dropping,
            Err(wait) => return wait,
        };
        if !word.claim(seen) {
            return Step::Again;
        }
        // A page that has come and gone again meanwhile has the same word.
        if !still(region, seen) {
            domain.put_back(region, page, seen);
            return Step::Again;
        }
        region.disarm(page);
        region.sets.inherited.remove(region.index(page));
        drop_claimed(domain, region, pager, page, seen);
        result = work.take().map(|work| work());
        domain.settle(region, page, Word::ABSENT);
        Step::Done(Outcome::Resolved)
    });
    match outcome.map_err(Undone::AwaitCut)? {
        Outcome::Failed(failure) => Err(Undone::Failed(failure)),
        _ => Ok(result),
    }
}

/// Drops what a claimed page holds, which stays claimed.
pub(super) fn drop_claimed(domain: &DomainState, region: &Region, pager: &dyn Pager, page: PageNo, seen: Word) {
    let frame = seen.frame();
    match seen.state() {
        State::Resident => {
            match domain.mmu.unmap(page, frame, 1) {
                Ok(()) => {
                    domain.frames.set_owner(frame, None);
                    domain.stack.give(domain.mmu, frame, 1);
                }
                Err(partial) => drop_unmovable(domain, page, frame, partial.why),
            }
            domain.trace(page, Kind::Discard);
        }
        State::Standby | State::Aside => {
            if seen.state() == State::Standby {
                domain.stack.leaves_standby();
            } else {
                domain.leaves_aside(seen);
            }
            domain.frames.set_owner(frame, None);
            domain.stack.give(domain.mmu, frame, 1);
            domain.trace(page, Kind::Discard);
        }
        State::Poisoned => domain.mmu.drop_pages(page, 1),
        State::Absent | State::Busy | State::Saving => {}
    }
    pager.forget(region.index(page), 1);
}

/// Drops a claimed page that the machine would not unmap: a device that holds it is left the memory, and what the program dropped or replaced
/// itself is counted. The frame, which is given new memory, is nobody's.
pub(super) fn drop_unmovable(domain: &DomainState, page: PageNo, frame: Frame, why: Refusal) {
    if matches!(why, Refusal::Hole | Refusal::Foreign) {
        Counters::add(&domain.counters.lost_total, 1);
    }
    domain.mmu.drop_pages(page, 1);
    domain.frames.set_owner(frame, None);
    domain.renew(frame);
}
