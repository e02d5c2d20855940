//! Clones: a page of a clone has the contents of its source's page of the same number until one of the two is written to.
//!
//! A page in [`crate::cut::PageSets::inherited`] of a clone is absent there, and armed in the source. Whoever takes it out of the set
//! owns the clone's page, and has given it a frame with a copy of the contents. No frame is mapped twice: private memory cannot be.
//!
//! # Source
//! AVM §2.1: copy-on-write by the application. There both regions map one frame; here the clone has none before it needs one.

use core::num::NonZeroU32;

use super::evict::is_mapped_over;
use super::fill::ask;
use super::image::copy_resident;
use super::poison::{cure, settle_refused};
use super::{Failure, Outcome, Step};
use crate::addr::{Frame, PageNo};
use crate::domain::DomainState;
use crate::frame::{Use, Zeroed};
use crate::mmu::Refusal;
use crate::page::{State, Word};
use crate::pager::{Context, FillPage, PagerError};
use crate::region::Region;
use crate::stack;
use crate::sync::race;
use crate::trace::Counters;
use crate::tracer::Kind;

/// Gives a page of `clone` that it inherits a frame of its own, where no fault on that page asks for it.
///
/// # Context
/// As for [`inherit`].
pub(super) fn inherit_ahead(domain: &DomainState, context: Context, clone: &Region, page: PageNo) -> Step {
    match inherit(domain, context, clone, page) {
        Step::Brought(_) => {
            domain.trace(page, Kind::Ahead);
            Step::Done(Outcome::Resolved)
        }
        step => step,
    }
}

/// Gives a page of `clone` that it inherits a frame of its own.
///
/// # Context
/// Trap or PagerThread, inside the gate, as the owner of neither page.
pub(super) fn inherit(domain: &DomainState, context: Context, clone: &Region, page: PageNo) -> Step {
    let Some(word) = clone.word(page) else { return Step::Again };
    let index = clone.index(page);
    let Some(source) = clone.source() else {
        let seen = word.load();
        if !clone.sets.inherited.contains(index) {
            // It got the page since its caller looked, and the source has another clone by now.
            return Step::Again;
        }
        // It went with pages that could not be had.
        return match seen.state() == State::Absent && !word.fail(seen) {
            true => Step::Again,
            false => Step::Done(Outcome::Failed(Failure::Pager(PagerError::Orphaned))),
        };
    };
    race();
    let moved = domain.cut.moved.count();
    if !clone.is_linked() {
        // After the count: whoever parts the two, or gives the clone up, has it lack nothing before, and signals afterwards, or not at all.
        if !clone.sets.inherited.contains(index) {
            return Step::Again;
        }
        // What it is to have is known at the cut, for which whoever makes it may need a pager thread.
        return Step::AwaitCut(moved);
    }
    let seen = word.load();
    match seen.state() {
        State::Absent => {}
        State::Poisoned => return cure(domain, context, clone, page, seen),
        _ => return Step::Pause,
    }
    let available = domain.stack.demand.available.count();
    let Some(run) = stack::take(domain, NonZeroU32::MIN) else { return Step::AwaitFrame(available) };
    let (frame, _in_hand) = (run.first, domain.stack.in_hand());
    if !word.claim(seen) {
        domain.stack.give(domain.mmu, frame, 1);
        return Step::Again;
    }
    let copied = match clone.sets.inherited.contains(index) {
        true => copy(domain, context, source, source.range.first.plus(index), frame),
        false => Err(Step::Again),
    };
    if let Err(step) = copied {
        match step {
            Step::Done(Outcome::Failed(_)) => domain.settle_failed(clone, page, frame),
            _ => domain.settle_absent(clone, page, frame),
        }
        return step;
    }
    domain.frames.set_owner(frame, Some(page));
    let state = if seen.wishes().unmapped() { State::Aside } else { State::Resident };
    if state == State::Resident
        && let Err(partial) = domain.map(clone, page, frame, 1)
    {
        if is_mapped_over(partial.why) {
            // The program has mapped something of its own there: what was there is lost, and the source need not wait for it.
            Counters::add(&domain.counters.lost_total, 1);
            clone.sets.inherited.remove(index);
            clone.sets.changed.insert(index);
        }
        settle_refused(domain, clone, page, frame, partial.why);
        return super::refused_whole(domain, clone, page, partial.why);
    }
    clone.sets.inherited.remove(index);
    domain.settle(clone, page, Word::new(state, frame));
    domain.admit(clone, frame, Use::First);
    match state {
        // Nobody may access it since the caller looked, who has to be told so: a thread that waits for the page is not woken.
        State::Aside => Step::Again,
        _ => Step::Brought(Kind::First),
    }
}

/// Copies what a page of `source` holds, wherever that is. `Err`: what must be done or waited for first.
fn copy(domain: &DomainState, context: Context, source: &Region, page: PageNo, into: Frame) -> Result<(), Step> {
    let (Some(word), Some(pager)) = (source.word(page), source.pager()) else { return Err(Step::Again) };
    let seen = word.load();
    if seen.state() == State::Busy || seen.in_save() {
        return Err(Step::Pause);
    }
    if matches!(seen.state(), State::Absent | State::Poisoned) && context < pager.fills_in() {
        return Err(Step::HandOver);
    }
    if !word.claim(seen) {
        return Err(Step::Again);
    }
    let zeroed = domain.frames.zeroed(into);
    domain.frames.set_zeroed(into, Zeroed::Unknown);
    let copied = match seen.state() {
        State::Resident => copy_resident(domain, page, into).map_err(|why| match why {
            Refusal::NoDescriptor => Step::HandOver,
            why => Step::Done(Outcome::Failed(Failure::Machine(why))),
        }),
        State::Absent | State::Poisoned => {
            let mut fill = [FillPage { index: source.index(page), bytes: domain.lease(into), zeroed }];
            ask(domain, context, pager, &mut fill).map(drop).map_err(|error| match error {
                PagerError::WrongContext if context == Context::Trap => Step::HandOver,
                error => Step::Done(Outcome::Failed(Failure::Pager(error))),
            })
        }
        State::Standby | State::Aside => {
            *domain.lease(into).get_mut() = *domain.lease(seen.frame()).get();
            Ok(())
        }
        _ => Err(Step::Done(Outcome::Failed(Failure::Pager(PagerError::Corrupt)))),
    };
    domain.put_back(source, page, seen);
    copied
}

/// Ends what `region` is to its clone, or as one. What its clone lacks and `region` never had is zero, as the clone's own pager has it;
/// all else that it lacks is lost.
///
/// # Context
/// Normal, with the gate closed.
pub fn part(region: &Region) {
    if let (Some(heir), Some(pager)) = (region.heir(), region.pager()) {
        let mut next = heir.sets.inherited.next(0);
        while let Some(index) = next {
            if region.word(region.range.first.plus(index)).is_some_and(|word| word.load().is_away())
                && !region.sets.inherited.contains(index)
                && !pager.keeps(index)
            {
                heir.sets.inherited.remove(index);
            }
            next = heir.sets.inherited.next(index + 1);
        }
    }
    region.part();
}

/// Ends what `clone` is before its cut, which will not be made: a region of its own, and nobody looks at its source any more, which may leave
/// the map before it does. Then [`go_on`].
///
/// # Context
/// Normal; the source is in the map.
pub fn give_up(clone: &Region) {
    // In this order: without a source, a page that it lacks were lost.
    clone.sets.inherited.clear();
    clone.part();
}

/// Has those look again who wait for the cut of `clone`: it was made, or will not be.
///
/// # Context
/// Normal or PagerThread, outside the gate. The region's memory outlives the call.
pub fn go_on(domain: &DomainState, clone: &Region) {
    domain.cut.moved.signal(domain.mmu);
    domain.wake_stopped(clone.trap, clone.range);
}

/// A page of `source` is about to change: its clone, if it has one, gets the contents first. `Some`: what must be done or waited
/// for before that, or a new look.
pub(super) fn give(domain: &DomainState, context: Context, source: &Region, page: PageNo) -> Option<Step> {
    let heir = source.heir()?;
    let index = source.index(page);
    if !heir.sets.inherited.contains(index) {
        return None;
    }
    let step = inherit_ahead(domain, context, heir, heir.range.first.plus(index));
    // It has the page, or has lost it.
    Some(if heir.sets.inherited.contains(index) { step } else { Step::Again })
}
