//! What a program asks of a range of its pages: pin, discard, evict, fetch ahead.
//!
//! # Source
//! Cichlid §3.4 and AVM §3: the application states what it knows of its pages.

use core::num::NonZeroU32;

use super::claim::{drop_claimed, drop_unmovable};
use super::evict::{Evicted, Room, decide, list_standby, move_out};
use super::presence::not_away;
use super::{Failure, Fault, Outcome, PAUSE_US, Request, Step, copy_first, fill, refused, request, resolve, save};
use crate::addr::{Frame, PageBytes, PageNo, PageRange};
use crate::cut::CutWait;
use crate::domain::DomainState;
use crate::frame::{Use, Zeroed};
use crate::mmu::{Partial, Refusal};
use crate::page::{State, Word};
use crate::pager::Context;
use crate::region::{Access, Region};
use crate::shortage::FrameWait;
use crate::stack;
use crate::sync::Ordering;
use crate::trace::Counters;
use crate::tracer::Kind;

/// Pages worked on between two visits of the gate.
const STRETCH: usize = 256;
/// Pages looked at between two visits of the gate: less than a millisecond's worth where nothing is to be done about them.
pub(super) const MOST_LOOKS: u64 = 1 << 15;

/// Does `work` on `page` inside the gate until it is done, waiting outside where it asks for it.
pub(super) fn settle_step(domain: &DomainState, page: PageNo, work: impl FnMut(&Region) -> Step) -> Outcome {
    settle_step_waiting(domain, &mut FrameWait::default(), page, work)
}

/// What `is` says of `page` once nobody is at it. A page of no region is nothing.
pub(super) fn settled(domain: &DomainState, page: PageNo, mut is: impl FnMut(&Region, Word) -> bool) -> bool {
    let mut found = false;
    settle_step(domain, page, |region| {
        let Some(word) = region.word(page) else { return Step::Done(Outcome::NotOurs) };
        let seen = word.load();
        if seen.state() == State::Busy {
            return word.await_change(seen).map_or(Step::Again, Step::AwaitPage);
        }
        found = is(region, seen);
        Step::Done(Outcome::Resolved)
    });
    found
}

fn settle_step_waiting(
    domain: &DomainState,
    frame_wait: &mut FrameWait,
    page: PageNo,
    mut work: impl FnMut(&Region) -> Step,
) -> Outcome {
    loop {
        let inside = domain.gate.enter(domain.mmu);
        let Some(region) = domain.regions.find(page) else {
            return Outcome::NotOurs;
        };
        let word = region.word(page);
        let step = work(region);
        drop(inside);
        match (step, word) {
            (Step::Done(outcome), _) => return outcome,
            (Step::AwaitPage(seen), Some(word)) => domain.mmu.sleep(word.low_half(), seen.low(), 0),
            (Step::AwaitFrame(seen), _) => {
                if let Err(shortage) = frame_wait.sleep(&domain.stack.demand, domain.mmu, seen) {
                    return Outcome::Failed(Failure::Shortage(shortage));
                }
            }
            (Step::AwaitCut(seen), _) => domain.cut.moved.wait(domain.mmu, seen, 0),
            (Step::Pause, _) => domain.cut.moved.wait(domain.mmu, domain.cut.moved.count(), PAUSE_US),
            // The caller knows of other threads.
            (Step::HandOver, _) => return Outcome::Failed(Failure::Machine(Refusal::NoDescriptor)),
            _ => {}
        }
    }
}

/// The same for work that drops what pages hold. `Err`: the image of a snapshot needs it first, and this is a pager thread.
pub(super) fn settle_drop(
    domain: &DomainState,
    context: Context,
    frame_wait: &mut FrameWait,
    page: PageNo,
    mut work: impl FnMut(&Region) -> Step,
) -> Result<Outcome, CutWait> {
    let mut cut = None;
    let outcome = settle_step_waiting(domain, frame_wait, page, |region| match work(region) {
        Step::AwaitCut(seen) if context == Context::Normal => {
            cut = Some(CutWait::from(seen));
            Step::Done(Outcome::Retry)
        }
        step => step,
    });
    cut.map_or(Ok(outcome), Err)
}

/// Brings `page` in and keeps it in core until it is unpinned as often.
///
/// # Context
/// Normal. On a thread of the program's `context` is a trap's: the program may have closed the descriptors that this thread had, and
/// opened others at their numbers. On a pager thread it is not, since that must not wait for a pager thread.
pub fn pin(domain: &DomainState, context: Context, page: PageNo) -> Outcome {
    let mut tries = 0;
    loop {
        let outcome = settle_step(domain, page, |region| {
            let Some(word) = region.word(page) else {
                return Step::Done(Outcome::NotOurs);
            };
            let seen = word.load();
            match seen.state() {
                // Dropped behind our back: it is met as an access meets it.
                State::Resident if !domain.mmu.present(page) => Step::Done(Outcome::Retry),
                State::Resident if word.pin(seen) => Step::Done(Outcome::Resolved),
                State::Resident if seen.pins() == MOST_PINS => Step::Done(Outcome::Violation),
                State::Resident => Step::Again,
                State::Busy => word.await_change(seen).map_or(Step::Again, Step::AwaitPage),
                _ => Step::Done(Outcome::Retry),
            }
        });
        if outcome != Outcome::Retry {
            return outcome;
        }
        match resolve(domain, context, Fault { addr: page.addr(), access: Access::Read, thread: 0 }) {
            Outcome::Resolved => {}
            // What is there is not the region's, and tells nobody when that changes.
            Outcome::Retry if tries == MOST_TRIES => return Outcome::Failed(Failure::Machine(Refusal::Foreign)),
            Outcome::Retry => tries += 1,
            other => return other,
        }
    }
}

/// How often a mapping that the program changed is tried before that is an error.
const MOST_TRIES: u32 = 100;

/// A page can be pinned this often at once.
pub const MOST_PINS: u32 = 4095;

/// Takes one pin back. `false`: the page is not pinned.
///
/// # Context
/// Normal.
pub fn unpin(domain: &DomainState, page: PageNo) -> bool {
    let _inside = domain.gate.enter(domain.mmu);
    let Some(word) = domain.regions.find(page).and_then(|region| region.word(page)) else {
        return false;
    };
    loop {
        let seen = word.load();
        if seen.pins() == 0 {
            return false;
        }
        if word.unpin(seen) {
            return true;
        }
    }
}

/// Gives an absent page its contents, in its pager's place, and maps it. [`Outcome::Violation`]: it is not absent, or nobody may
/// access it.
///
/// # Context
/// Normal; `context` as for [`pin`]. Where a pager thread must do it, it fails with [`Refusal::NoDescriptor`], and the page is as it was.
///
/// # Errors
/// As for [`Undone::AwaitCut`]; the page is as it was.
pub fn supply(domain: &DomainState, context: Context, page: PageNo, contents: &PageBytes) -> Result<Outcome, CutWait> {
    settle_drop(domain, context, &mut FrameWait::default(), page, |region| {
        let fill = |frame| {
            *domain.lease(frame).get_mut() = *contents;
            Ok(())
        };
        supply_at(domain, context, region, page, fill, |frame, why| refused(domain, region, page, frame, why))
    })
}

/// Has the domain own a page that the program has used where its region did not hear of it: what was written there stays.
/// [`Outcome::Violation`]: the domain owns it already, or nobody may access it.
///
/// # Context
/// Normal, on a pager thread.
///
/// # Errors
/// As for [`supply`].
pub fn take_up(domain: &DomainState, page: PageNo) -> Result<Outcome, CutWait> {
    settle_drop(domain, Context::Normal, &mut FrameWait::default(), page, |region| {
        if !domain.mmu.present(page) {
            return Step::Done(Outcome::Resolved);
        }
        let unmap = |frame| {
            // The slot of a frame that was free has memory, and what moves there needs an empty one.
            domain.mmu.release(frame, 1);
            domain.mmu.unmap(page, frame, 1).map_err(|partial| partial.why)
        };
        let keep = |frame, why| keep_aside(domain, region, page, frame, why);
        match supply_at(domain, Context::Normal, region, page, unmap, keep) {
            // It has been dropped since: there is nothing to take up.
            Step::Done(Outcome::Failed(Failure::Machine(Refusal::Hole))) => Step::Done(Outcome::Resolved),
            step => step,
        }
    })
}

/// The machine would not map a claimed page back, and `frame` has the only copy of it: whoever uses the page meets what is the matter.
fn keep_aside(domain: &DomainState, region: &Region, page: PageNo, frame: Frame, why: Refusal) -> Step {
    if why == Refusal::Hole {
        return refused(domain, region, page, frame, why);
    }
    region.sets.inherited.remove(region.index(page));
    domain.stack.joins_sampled();
    domain.settle(region, page, Word::new(State::Aside, frame));
    domain.admit(region, frame, Use::First);
    Step::Done(Outcome::Resolved)
}

/// Gives an absent page a frame with what `fill` puts there. `unmapped` settles it where the machine would not map that.
fn supply_at(
    domain: &DomainState,
    context: Context,
    region: &Region,
    page: PageNo,
    fill: impl FnOnce(Frame) -> Result<(), Refusal>,
    unmapped: impl FnOnce(Frame, Refusal) -> Step,
) -> Step {
    let Some(word) = region.word(page) else { return Step::Done(Outcome::NotOurs) };
    let seen = word.load();
    match seen.state() {
        State::Busy => return word.await_change(seen).map_or(Step::Again, Step::AwaitPage),
        State::Absent if !seen.wishes().unmapped() && !region.guarded.contains(region.index(page)) => {}
        _ => return Step::Done(Outcome::Violation),
    }
    // What the page reads as now is dropped: an image or a clone that needs it has it first.
    let _dropping = match copy_first::begin_drop(domain, context, region, page, seen) {
        Ok(dropping) => dropping,
        Err(wait) => return wait,
    };
    let frames_seen = domain.stack.demand.available.count();
    let Some(run) = stack::take(domain, NonZeroU32::MIN) else {
        return Step::AwaitFrame(frames_seen);
    };
    let frame = run.first;
    if !word.claim(seen) {
        domain.stack.give(domain.mmu, frame, 1);
        return Step::Again;
    }
    if region.guarded.contains(region.index(page)) {
        // Given up since the look: a page that is given up is absent before and after.
        domain.settle_absent(region, page, frame);
        return Step::Again;
    }
    domain.frames.set_zeroed(frame, Zeroed::Unknown);
    domain.frames.set_owner(frame, Some(page));
    if let Err(why) = fill(frame) {
        domain.frames.set_owner(frame, None);
        let _ = domain.settle(region, page, Word::ABSENT);
        domain.renew(frame);
        return Step::Done(Outcome::Failed(Failure::Machine(why)));
    }
    if let Some(pager) = region.pager() {
        // Before the map, which lets the program go on; and nobody can evict a page that is claimed.
        pager.given(region.index(page));
    }
    if let Err(partial) = domain.map(region, page, frame, 1) {
        return unmapped(frame, partial.why);
    }
    // What a clone would have had from its source it has no more.
    region.sets.inherited.remove(region.index(page));
    domain.trace(page, Kind::Ahead);
    domain.settle(region, page, Word::new(State::Resident, frame));
    domain.admit(region, frame, Use::First);
    Counters::add(&domain.counters.fills_total, 1);
    region.fetched.fetch_add(1, Ordering::Relaxed);
    Step::Done(Outcome::Resolved)
}

/// Why a page was not dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undone {
    /// A clone still needs it, and cannot have it.
    Failed(Failure),
    /// The image of a snapshot needs it first, for which a pager thread does not wait.
    AwaitCut(CutWait),
}

/// Drops the contents of `range`, which must lie in one region: they are garbage and are never saved. Pins on it go too.
///
/// # Context
/// Normal; `context` as for [`pin`].
///
/// # Errors
/// The first page that is as it was, and why; those before it are dropped. Where a pager thread must give it to a clone, that is
/// [`Refusal::NoDescriptor`].
pub fn discard(domain: &DomainState, context: Context, range: PageRange) -> Result<(), (PageNo, Undone)> {
    discard_waiting(domain, context, range, &mut FrameWait::default())
}

/// The same for whoever goes on behind a page that failed: where there is no frame for one page's clone there is none for the next, and it
/// is not waited for anew.
///
/// # Context
/// As for [`discard`].
///
/// # Errors
/// As for [`discard`].
pub fn discard_waiting(
    domain: &DomainState,
    context: Context,
    range: PageRange,
    frame_wait: &mut FrameWait,
) -> Result<(), (PageNo, Undone)> {
    let mut at = range.first;
    while at < range.end() {
        let mut next = at;
        let outcome = settle_drop(domain, context, frame_wait, at, |region| {
            let rest = PageRange { first: at, count: range.end().0 - at.0 };
            let step;
            (next, step) = discard_stretch(domain, context, region, rest);
            step
        });
        if let Outcome::Failed(failure) = outcome.map_err(|wait| (next, Undone::AwaitCut(wait)))? {
            return Err((next, Undone::Failed(failure)));
        }
        // Outside of any region nothing is done, and there is nothing to wait for.
        at = if next == at { at.plus(1) } else { next };
    }
    Ok(())
}

/// Whether no page of `range` is in core, on its way, or on its way out.
///
/// # Context
/// Any; the answer lasts only with the gate closed.
pub fn is_absent(domain: &DomainState, range: PageRange) -> bool {
    not_away(domain, range).next().is_none()
}

/// Discards pages from the front of `range` on, until there are many of them, or one must be waited for or left to a pager thread. How far it
/// came.
fn discard_stretch(domain: &DomainState, context: Context, region: &Region, range: PageRange) -> (PageNo, Step) {
    let mut resident = [(PageNo(0), Frame(0)); STRETCH];
    let mut len = 0;
    let mut next = range.first;
    let mut step = Step::Done(Outcome::Resolved);
    let end = range.end().min(range.first.plus(MOST_LOOKS));
    while next < end
        && let Some(entry) = resident.get_mut(len)
    {
        let (Some(word), Some(pager)) = (region.word(next), region.pager()) else { break };
        // Before the word: what a clone has from its source is in a frame before it is with the pager.
        let is_inherited = region.sets.inherited.contains(region.index(next));
        let seen = word.load();
        if seen.state() == State::Busy || seen.in_save() {
            if next == range.first {
                step = word.await_change(seen).map_or(Step::Again, Step::AwaitPage);
            }
            break;
        }
        // Most of a large region's pages are such: nothing is written to their part of its tables, which takes no memory.
        if seen.state() == State::Absent && !is_inherited && !pager.keeps(region.index(next)) {
            region.disarm(next);
            next = next.plus(1);
            continue;
        }
        let dropping = match seen.state() {
            // What takes the poison away would take what the program has mapped over it, which only a pager thread tells for sure.
            State::Poisoned if context == Context::Trap => Err(Step::HandOver),
            _ => copy_first::begin_drop(domain, context, region, next, seen),
        };
        let _dropping = match dropping {
            Ok(dropping) => dropping,
            Err(wait) => {
                if next == range.first {
                    step = wait;
                }
                break;
            }
        };
        if !word.claim(seen) {
            continue;
        }
        region.disarm(next);
        // What a clone would have had from its source goes too.
        region.sets.inherited.remove(region.index(next));
        if seen.state() == State::Resident {
            *entry = (next, seen.frame());
            len += 1;
        } else {
            drop_claimed(domain, region, pager, next, seen);
            domain.settle(region, next, Word::ABSENT);
        }
        next = next.plus(1);
    }
    match drop_resident(domain, region, resident.get(..len).unwrap_or(&[])) {
        None => (next, step),
        Some(page) => (page, Step::HandOver),
    }
}

/// Drops claimed resident pages, in as few calls as their neighbourhood allows. `Some`: this thread has no descriptors to do it by, nor to
/// tell whether a page is the region's still; this one and those behind it are as they were.
fn drop_resident(domain: &DomainState, region: &Region, pages: &[(PageNo, Frame)]) -> Option<PageNo> {
    let pager = region.pager()?;
    let mut at = 0;
    while let Some(rest) = pages.get(at..)
        && let Some(&(page, frame)) = rest.first()
    {
        let run = fill::neighbours(rest);
        let (done, refusal) = Partial::split(domain.mmu.unmap(page, frame, run as u32), run);
        pager.forget(region.index(page), done as u64);
        for &(page, frame) in rest.get(..done).unwrap_or(&[]) {
            domain.frames.set_owner(frame, None);
            // Before it is settled, and others note what they do with it.
            domain.trace(page, Kind::Discard);
            let _ = domain.settle(region, page, Word::ABSENT);
        }
        if done > 0 {
            domain.stack.give(domain.mmu, frame, done as u32);
        }
        at += done;
        if let (Some(why), Some(&(page, frame))) = (refusal, pages.get(at)) {
            if why == Refusal::NoDescriptor {
                for &(page, frame) in pages.get(at..).unwrap_or(&[]) {
                    domain.put_back(region, page, Word::new(State::Resident, frame));
                }
                return Some(page);
            }
            drop_unmovable(domain, page, frame, why);
            pager.forget(region.index(page), 1);
            domain.trace(page, Kind::Discard);
            let _ = domain.settle(region, page, Word::ABSENT);
            at += 1;
        }
    }
    None
}

/// Takes back the frames of as many pages from the front of `range` on as make a batch, and adds them to `evicted`; changed pages are on
/// their way to the store when it returns. Returns the rest: all of it where [no more may be on the way](await_room).
///
/// # Context
/// Normal, outside the gate. On a pager thread no more than this in one errand: others wait for that thread.
pub fn evict(domain: &DomainState, range: PageRange, evicted: &mut Evicted) -> PageRange {
    let room = save::room(domain).min(STRETCH);
    if room == 0 || range.count == 0 {
        return range;
    }
    let mut at = range.first;
    // A page that somebody is at, perhaps to finish the very fault that the caller just took, is waited for; and one that is in core
    // again while it is being saved.
    settle_step(domain, at, |region| match region.word(at).map(|word| (word, word.load())) {
        Some((word, seen)) if seen.is_busy_or_saved_in_core() => {
            word.await_change(seen).map_or(Step::Again, Step::AwaitPage)
        }
        _ => Step::Done(Outcome::Resolved),
    });
    let _inside = domain.gate.enter(domain.mmu);
    let mut claimed = [(PageNo(0), Frame(0)); STRETCH];
    let (queued, mut len) = (evicted.queued, 0);
    let end = range.end().min(at.plus(MOST_LOOKS));
    while len + ((evicted.queued - queued) as usize) < room && at < end {
        let word = domain.regions.find(at).and_then(|region| region.word(at));
        if at > range.first && word.is_some_and(|word| word.load().is_busy_or_saved_in_core()) {
            break;
        }
        if let Some(frame) = claim_for_eviction(domain, at, evicted)
            && let Some(entry) = claimed.get_mut(len)
        {
            *entry = (at, frame);
            len += 1;
        }
        at = at.plus(1);
    }
    // The evictor queues no page more while there is no room, and the queue has a batch to spare beyond that.
    let claimed = claimed.get(..len).unwrap_or(&[]);
    move_out(domain, claimed, Room::Promised, evicted);
    list_standby(domain, claimed);
    PageRange { first: at, count: range.end().0 - at.0 }
}

/// Waits a moment for the saver, where there are as many changed pages on their way to the store as may be at once.
///
/// # Context
/// Normal, outside the gate.
pub fn await_room(domain: &DomainState) {
    let seen = domain.stack.demand.available.count();
    if save::room(domain) == 0 {
        domain.to_save.signal(domain.mmu);
        domain.stack.demand.available.wait(domain.mmu, seen, 1000);
    }
}

/// Claims a resident page to evict it. A standby page loses its frame at once.
fn claim_for_eviction(domain: &DomainState, page: PageNo, evicted: &mut Evicted) -> Option<Frame> {
    let region = domain.regions.find(page)?;
    let word = region.word(page)?;
    let seen = word.load();
    match seen.state() {
        State::Resident if seen.pins() == 0 && !seen.in_save() && word.claim(seen) => return Some(seen.frame()),
        State::Resident => evicted.kept += 1,
        State::Standby if word.claim(seen) => {
            domain.stack.leaves_standby();
            domain.settle_absent(region, page, seen.frame());
            Counters::add(&domain.counters.evictions_total, 1);
            evicted.ready += 1;
        }
        State::Aside if word.claim(seen) => {
            domain.leaves_aside(seen);
            decide(domain, region, page, seen.frame(), Room::Promised, evicted);
            list_standby(domain, &[(page, seen.frame())]);
        }
        _ => {}
    }
    None
}

/// How many pages the frames can hold beside the reserve: to fetch more than that drops what was just fetched.
///
/// # Context
/// Any.
pub fn room(domain: &DomainState) -> u32 {
    domain.stack.budget().saturating_sub(domain.stack.reserve.load(Ordering::Relaxed))
}

/// Has `range` of `region` brought in by pager threads: as much of it as there is [`room`] for. `false`: they have too much advice
/// already.
///
/// # Context
/// Normal.
pub fn prefetch(domain: &DomainState, region: &Region, range: PageRange) -> bool {
    let count = range.count.min(room(domain).into()) as u32;
    count == 0 || request(domain, Request::Prefetch(range.first, region.serial(), count))
}

/// Takes `count` frames out of the domain and gives their memory back to the system, as far as they can be freed.
///
/// # Source
/// Nemesis §6.2, revocation: the frames on top of the stack go first, the evictor makes room for the rest.
///
/// # Context
/// Normal, outside the gate; one at a time.
///
/// # Errors
/// No more can be freed. Those that were are gone, and the contract is smaller by as many.
pub fn give_up(domain: &DomainState, count: u32) -> Result<(), Failure> {
    let mut left = domain.stack.cut_unclaimed(count);
    let mut frame_wait = FrameWait::default();
    while let Some(want) = NonZeroU32::new(left) {
        let seen = domain.stack.demand.available.count();
        let inside = domain.gate.enter(domain.mmu);
        if let Some(run) = stack::take(domain, want) {
            let some = run.count.get();
            domain.mmu.release(run.first, some);
            domain.stack.retire(run.first, some);
            left -= some;
            continue;
        }
        drop(inside);
        frame_wait.sleep(&domain.stack.demand, domain.mmu, seen).map_err(Failure::Shortage)?;
    }
    Ok(())
}
