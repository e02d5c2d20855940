//! The path of a fault, and of a frame back out of a page. Only this module sequences the others.
//!
//! [`resolve`] is one straight line, the same in every context; [`evict`] and [`save`] are its other half, run by the
//! domain's own threads; [`range`](mod@range) holds what the program asks for by name.
//!
//! # Source
//! Nemesis §6.4 and §6.5: a notification handler that does what it can at once, a worker thread for the rest, one
//! code path for both.

pub mod claim;
pub mod copy_first;
pub mod evict;
mod fill;
pub mod flush;
pub mod handover;
pub mod image;
pub mod inherit;
pub mod poison;
pub mod presence;
pub mod protect;
pub mod range;
pub mod relocate;
mod requests;
pub mod sample;
pub mod save;

use core::num::NonZeroU32;

use crate::addr::{Frame, PageNo, VirtAddr};
use crate::domain::{DomainState, ReadsAhead};
use crate::frame::{Use, Zeroed};
use crate::mmu::Refusal;
use crate::page::{PageWord, State, Word};
use crate::pager::{Context, Pager, PagerError};
use crate::region::{Access, Region, Serial};
use crate::shortage::{FrameWait, Shortage};
use crate::stack;
use crate::stream::{Chunk, Plan};
use crate::sync::Ordering;
use crate::trace::Counters;
use crate::tracer::{Event, Kind};

pub use fill::MOST_IN_TRAP;
pub use requests::{Request, next_request, request, serve};

/// An access that found no translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Where.
    pub addr: VirtAddr,
    /// Which kind.
    pub access: Access,
    /// The kernel's number of the thread; 0 where it is not known, and then the access is not either.
    pub thread: u32,
}

/// What became of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The access will succeed now.
    Resolved,
    /// The access is to be tried again: it meets what is there by then.
    Retry,
    /// Another thread is at the page, for which a pager thread does not wait: that one wakes the faulting thread.
    Busy,
    /// No region of this domain has the address.
    NotOurs,
    /// The region does not allow it: the program's own fault.
    Violation,
    /// The program itself has protected the page: its handler is to be asked.
    Protected,
    /// The page is absent, and the program's handler wants to be asked first.
    Missing,
    /// The contents cannot be had. The program must be told; it must not see anything else in their place.
    Failed(Failure),
}

/// Why a fault failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The pager could not give the contents.
    Pager(PagerError),
    /// There is no frame to be had.
    Shortage(Shortage),
    /// The machine refused the translation.
    Machine(Refusal),
    /// The machine refused to let a page in core be written to.
    Writing(Refusal),
}

/// How long whoever waits for a page sleeps that its own word does not tell of.
const PAUSE_US: u32 = 100;

/// What one look at a page comes to.
enum Step {
    Done(Outcome),
    /// Resolved, in this way.
    Brought(Kind),
    /// Once more.
    Again,
    /// Sleep until the page's word changes from this.
    AwaitPage(Word),
    /// Sleep until frames are available; the count of the event, read before the look.
    AwaitFrame(u32),
    /// The same. The page is being saved, and needs no frame if that fails.
    AwaitFrameInSave(u32),
    /// Sleep until a cut has been made or copies were taken out; the count of [`crate::cut::Cut::moved`], read before the look.
    AwaitCut(u32),
    /// Sleep a moment: another page must be settled first.
    Pause,
    /// Hand the fault to a pager thread.
    HandOver,
}

/// Resolves a fault, in whatever context it arrived.
///
/// # Source
/// Nemesis §6.5. ARCHITECTURE.md walks through it in numbered steps.
///
/// # Context
/// Any; outside the gate. In a trap it may sleep on the page, on frames, and in a read from a store.
pub fn resolve(domain: &DomainState, context: Context, fault: Fault) -> Outcome {
    resolve_with(domain, context, fault, Absent::Fill)
}

/// As [`resolve`], for an access of the program's: where a region asks first, an absent page is [`Outcome::Missing`].
///
/// # Context
/// As for [`resolve`].
pub fn resolve_asking(domain: &DomainState, context: Context, fault: Fault) -> Outcome {
    resolve_with(domain, context, fault, Absent::Ask)
}

/// As [`resolve`], for one that has been here before: handed over, or passed by the program's handler, in the region with this number. It is
/// the same fault still; but where another region is there by now its handler is asked first.
///
/// # Context
/// As for [`resolve`].
pub fn resolve_further(domain: &DomainState, context: Context, fault: Fault, of: Serial) -> Outcome {
    bring(domain, context, fault, Absent::FillIn(of), &mut None)
}

/// As [`resolve`], for one that has failed: it is the same fault still.
///
/// # Context
/// As for [`resolve`].
pub fn resolve_again(domain: &DomainState, context: Context, fault: Fault) -> Outcome {
    bring(domain, context, fault, Absent::Fill, &mut None)
}

/// What a fault on an absent page comes to.
#[derive(Clone, Copy)]
enum Absent {
    /// The pager fills it.
    Fill,
    /// The same in this region only.
    FillIn(Serial),
    /// The program's handler is asked first, where the region has one that wants to be.
    Ask,
}

impl Absent {
    fn asks_first(self, region: &Region) -> bool {
        let passed = match self {
            Absent::Fill => true,
            Absent::FillIn(of) => of == region.serial(),
            Absent::Ask => false,
        };
        !passed && region.asks_first.load(Ordering::Relaxed) != 0
    }
}

fn resolve_with(domain: &DomainState, context: Context, fault: Fault, absent: Absent) -> Outcome {
    // Two looks at the clock are a good part of what it takes to find out that the handler is to be asked.
    let mut began_ns = domain.gate.is_closed().then(|| domain.mmu.now_ns());
    let outcome = bring(domain, context, fault, absent, &mut began_ns);
    // Every domain with upcalls is asked of every signal: what is not its own is not its fault.
    if outcome != Outcome::NotOurs {
        Counters::add(&domain.counters.faults_total, 1);
        if let Some(began_ns) = began_ns {
            domain.counters.fault_ns.record(domain.mmu.now_ns().saturating_sub(began_ns));
        }
    }
    outcome
}

/// An absent page with which it fails has that in its word, for [`poison`](mod@poison).
fn bring(domain: &DomainState, context: Context, fault: Fault, absent: Absent, began_ns: &mut Option<u64>) -> Outcome {
    let page = fault.addr.page();
    let mut frame_wait = FrameWait::default();
    let mut met_others = false;
    loop {
        let inside = domain.gate.enter(domain.mmu);
        let Some(region) = domain.regions.find(page) else {
            break Outcome::NotOurs;
        };
        // Another region may come to its addresses as soon as the gate is left.
        let of = region.serial();
        let Some(word) = region.word(page).filter(|_| region.allows(fault.access)) else {
            break Outcome::Violation;
        };
        let seen = word.load();
        if let Some(outcome) = asked(region, seen, fault.access, absent) {
            break outcome;
        }
        let time_ns = *began_ns.get_or_insert_with(|| domain.mmu.now_ns());
        let step = match met_others && !seen.is_busy_or_saved_in_core() {
            true => Step::HandOver,
            false => look(domain, context, region, word, page, seen, fault.access),
        };
        // Whoever waits for another thread waits outside.
        drop(inside);
        match step {
            Step::Done(outcome) => break outcome,
            Step::Brought(kind) => {
                let Fault { access, thread, .. } = fault;
                let access = (thread != 0).then_some(access);
                domain.tracer.note(Event { time_ns, page, kind, access, thread });
                break Outcome::Resolved;
            }
            Step::AwaitPage(_) if context == Context::PagerThread => break Outcome::Busy,
            Step::AwaitPage(seen) => domain.mmu.sleep(word.low_half(), seen.low(), 0),
            Step::AwaitFrame(seen) => {
                Counters::add(&domain.counters.frame_waits_total, 1);
                if let Err(shortage) = frame_wait.sleep(&domain.stack.demand, domain.mmu, seen)
                    && !copy_first::forgo(domain, page, of)
                {
                    poison::note_failure(domain, page, of);
                    break Outcome::Failed(Failure::Shortage(shortage));
                }
            }
            Step::AwaitFrameInSave(seen) => {
                Counters::add(&domain.counters.frame_waits_total, 1);
                if frame_wait.sleep_at_most(&domain.stack.demand, domain.mmu, seen, save::IN_SAVE_US).is_err()
                    && let Some(marked) = save::await_end(domain, page)
                {
                    if context == Context::PagerThread {
                        break Outcome::Retry;
                    }
                    domain.mmu.sleep(word.low_half(), marked.low(), 0);
                }
            }
            // Whoever moves on wakes those that are stopped.
            Step::AwaitCut(_) if context == Context::PagerThread => break Outcome::Retry,
            Step::AwaitCut(seen) => domain.cut.moved.wait(domain.mmu, seen, 0),
            Step::Pause => domain.cut.moved.wait(domain.mmu, domain.cut.moved.count(), PAUSE_US),
            // A pager thread, or one that makes a call for the program: there is nobody else who could.
            Step::HandOver if context != Context::Trap => {
                poison::note_failure(domain, page, of);
                break Outcome::Failed(Failure::Machine(Refusal::NoDescriptor));
            }
            Step::HandOver => match handover::hand_over(domain, page, of, fault.access) {
                // What is there now may be somebody else's, and no look at the page would tell. A failure the pager thread has noted.
                Some(outcome @ (Outcome::Failed(_) | Outcome::Retry)) => break outcome,
                // Two that claim the page to find out that they cannot bring it in would have the pager threads meet the one whenever
                // they come for the other, for ever: from now on this one only waits for the page.
                Some(outcome) => met_others = outcome == Outcome::Busy,
                None => {
                    // The pager threads have more to do than the ring holds: let them.
                    let seen = domain.requested.count();
                    domain.requested.wait(domain.mmu, seen, 1000);
                }
            },
            Step::Again => {}
        }
    }
}

/// What the program's handler is to be asked of an access now, if anything: [`Outcome::Protected`] or [`Outcome::Missing`].
///
/// # Context
/// Any, outside the gate.
pub fn still_asked(domain: &DomainState, fault: Fault) -> Option<Outcome> {
    let _inside = domain.gate.enter(domain.mmu);
    let page = fault.addr.page();
    let region = domain.regions.find(page)?;
    asked(region, region.word(page)?.load(), fault.access, Absent::Ask)
}

/// What the program's handler is to be asked of a page, if anything. Nobody is asked of one that somebody is at: it is waited for.
fn asked(region: &Region, seen: Word, access: Access, absent: Absent) -> Option<Outcome> {
    match seen.state() {
        State::Busy => None,
        _ if seen.wishes().forbid(access) => Some(Outcome::Protected),
        State::Absent if absent.asks_first(region) => Some(Outcome::Missing),
        _ => None,
    }
}

/// Does what the page's word calls for. A page whose every access traps is not mapped here.
fn look(
    domain: &DomainState,
    context: Context,
    region: &Region,
    word: &PageWord,
    page: PageNo,
    seen: Word,
    access: Access,
) -> Step {
    let Some(pager) = region.pager() else {
        return Step::Done(Outcome::Violation);
    };
    if seen.wishes().unmapped() && seen.state() != State::Busy {
        return Step::Done(Outcome::Protected);
    }
    if access == Access::Write
        && matches!(seen.state(), State::Absent | State::Standby)
        && domain.stack.ready() < 2
        && let Some(step) = inherit::give(domain, context, region, page)
    {
        // The write needs a frame here and one for the clone: where there is one, each of the two would go for the other, for ever.
        return match step {
            Step::Done(Outcome::Failed(_)) if seen.state() == State::Absent && !word.fail(seen) => Step::Again,
            step => step,
        };
    }
    match seen.state() {
        State::Absent if region.sets.inherited.contains(region.index(page)) => {
            inherit::inherit(domain, context, region, page)
        }
        State::Absent => bring_in(domain, context, region, pager, page, seen),
        State::Standby => soft_fault(domain, region, pager, page, seen),
        State::Saving => copy_back(domain, region, page, seen),
        State::Resident if access == Access::Write && seen.wishes().copied_first() => {
            copy_first::first_write(domain, context, region, page, seen)
        }
        State::Resident => check_resident(domain, context, region, pager, page, seen, access),
        State::Busy => word.await_change(seen).map_or(Step::Again, Step::AwaitPage),
        State::Poisoned => poison::cure(domain, context, region, page, seen),
        State::Aside => take_back(domain, context, region, pager, page, seen),
    }
}

/// The page is with its pager: fetch it, and what its stream calls for.
fn bring_in(
    domain: &DomainState,
    context: Context,
    region: &Region,
    pager: &dyn Pager,
    page: PageNo,
    seen: Word,
) -> Step {
    let Some(word) = region.word(page) else {
        return Step::Again;
    };
    if context < pager.fills_in() {
        return Step::HandOver;
    }
    if !word.claim(seen) {
        return Step::Again;
    }
    let index = region.index(page);
    // Only now: a page that is given up is absent before and after. Where the program has taken the guard away it is as one without.
    if region.guarded.contains(index) && domain.mmu.present(page) {
        // A copy would replace the guard.
        domain.settle(region, page, Word::ABSENT);
        domain.mmu.wake_faulters(region.trap, page, 1);
        return Step::Done(Outcome::Retry);
    }
    let ahead = if pager.reads_ahead() { ReadsAhead::Yes } else { ReadsAhead::No };
    let most = if context == Context::Trap { fill::MOST_IN_TRAP } else { fill::MOST_NOW };
    let plan = match region.asks_first.load(Ordering::Relaxed) {
        0 => region.streams.plan(index, domain.limits(most, ahead)),
        // What comes along with a page the handler would not be asked of.
        _ => Plan::ALONE,
    };
    let result = if context == Context::Trap {
        fill::fetch::<{ fill::MOST_IN_TRAP as usize }>(domain, context, region, pager, page, plan)
    } else {
        fill::fetch::<{ fill::MOST_NOW as usize }>(domain, context, region, pager, page, plan)
    };
    if let Some(chunk) = plan.ahead {
        ask_ahead(domain, region, chunk);
    }
    match result {
        Ok(filled) => {
            region.streams.note_fetched();
            Step::Brought(if filled == 0 { Kind::First } else { Kind::Fill })
        }
        Err(step) => step,
    }
}

/// The frame still has the contents: map it again.
fn soft_fault(domain: &DomainState, region: &Region, pager: &dyn Pager, page: PageNo, seen: Word) -> Step {
    let Some(word) = region.word(page) else {
        return Step::Again;
    };
    if !word.claim(seen) {
        return Step::Again;
    }
    domain.stack.leaves_standby();
    let frame = seen.frame();
    // Before the map, which lets the program go on.
    domain.frames.note_use(frame);
    if let Err(partial) = domain.map(region, page, frame, 1) {
        return refused(domain, region, page, frame, partial.why);
    }
    domain.settle(region, page, Word::new(State::Resident, frame));
    domain.admit(region, frame, if seen.trip() { Use::First } else { Use::Again });
    Counters::add(&domain.counters.soft_faults_total, 1);
    if seen.trip() && pager.reads_ahead() {
        let limits = domain.limits(fill::MOST_NOW, ReadsAhead::Yes);
        if let Some(chunk) = region.streams.tripped(region.index(page), limits) {
            ask_ahead(domain, region, chunk);
        }
    }
    Step::Brought(Kind::Soft)
}

/// Hands the reading ahead of a stream to the pager threads, chunk by chunk. What they have no room for is not read ahead.
fn ask_ahead(domain: &DomainState, region: &Region, ahead: Chunk) {
    let piece = domain.limits(1, ReadsAhead::Yes).chunk.max(1);
    let mut at = 0;
    while at < ahead.count {
        let count = piece.min(ahead.count - at);
        let first = ahead.first.wrapping_add((ahead.stride as u64).wrapping_mul(u64::from(at)));
        let page = region.range.first.plus(first);
        if !region.range.contains(page) {
            // The stream ends with its region: what lies beyond may be another's.
            return;
        }
        request(domain, Request::Ahead(page, region.serial(), Chunk { first, count, stride: ahead.stride }));
        at += count;
    }
}

/// The frame is on its way to the store, and must not change until it is there: give the page a copy in another frame. A
/// fault never waits for a save where a frame can be had.
fn copy_back(domain: &DomainState, region: &Region, page: PageNo, seen: Word) -> Step {
    let Some(word) = region.word(page) else {
        return Step::Again;
    };
    let frames_seen = domain.stack.demand.available.count();
    let Some(run) = stack::take(domain, NonZeroU32::MIN) else {
        return Step::AwaitFrameInSave(frames_seen);
    };
    let (old, new) = (seen.frame(), run.first);
    if !word.claim(seen) {
        domain.stack.give(domain.mmu, new, 1);
        return Step::Again;
    }
    domain.frames.set_zeroed(new, Zeroed::Unknown);
    *domain.lease(new).get_mut() = *domain.lease(old).get();
    let is_whole = domain.mmu.holds(old);
    let mapped =
        if is_whole { domain.map(region, page, new, 1).map_err(|partial| partial.why) } else { Err(Refusal::Hole) };
    if let Err(why) = mapped {
        domain.stack.give(domain.mmu, new, 1);
        if !domain.settle(region, page, seen.with_save()) {
            // The saver has finished meanwhile and left the old frame to us; whether it is saved we do not know.
            save::enqueue(domain, page, old);
        }
        // Taken from the domain: the saver finds that out too, and tells the pager that the contents are lost.
        let is_lost = Step::Done(Outcome::Failed(Failure::Machine(why)));
        return if is_whole { refused_whole(domain, region, page, why) } else { is_lost };
    }
    domain.frames.note_use(old);
    domain.frames.set_owner(new, Some(page));
    if !domain.settle(region, page, Word::new(State::Resident, new)) {
        domain.frames.set_owner(old, None);
        domain.stack.give(domain.mmu, old, 1);
    }
    domain.admit(region, new, Use::Again);
    Counters::add(&domain.counters.copied_back_total, 1);
    Step::Brought(Kind::CopyBack)
}

/// The machine would not map a frame whose contents nobody else may have, or have a page written to: the page is as before.
fn refused_whole(domain: &DomainState, region: &Region, page: PageNo, why: Refusal) -> Step {
    match why {
        Refusal::Pinned | Refusal::Hole => Step::Again,
        Refusal::NoDescriptor => Step::HandOver,
        Refusal::NoMemory | Refusal::Denied => Step::Done(Outcome::Failed(Failure::Machine(why))),
        Refusal::Occupied | Refusal::Foreign | Refusal::Ending => {
            domain.mmu.wake_faulters(region.trap, page, 1);
            Step::Done(Outcome::Retry)
        }
    }
}

/// The frame has the contents, and nothing keeps the page from being mapped: it was unmapped to see whether it is used, or for the
/// program's sake, whose wish is gone.
fn take_back(
    domain: &DomainState,
    context: Context,
    region: &Region,
    pager: &dyn Pager,
    page: PageNo,
    seen: Word,
) -> Step {
    let frame = seen.frame();
    let is_whole = domain.mmu.holds(frame);
    if !is_whole && context == Context::Trap {
        // The pager must be told, which may be the program's own code.
        return Step::HandOver;
    }
    if !region.word(page).is_some_and(|word| word.claim(seen)) {
        return Step::Again;
    }
    if !is_whole {
        domain.leaves_aside(seen);
        lost(domain, region, pager, page, frame);
        return Step::Again;
    }
    let was_sampled = domain.frames.note_use(frame);
    if let Err(partial) = domain.map(region, page, frame, 1) {
        domain.settle(region, page, seen);
        return refused_whole(domain, region, page, partial.why);
    }
    domain.leaves_aside(seen);
    domain.settle(region, page, Word::new(State::Resident, frame));
    domain.admit(region, frame, Use::Again);
    if was_sampled {
        Counters::add(&domain.counters.referenced_total, 1);
        Step::Brought(Kind::Referenced)
    } else {
        Counters::add(&domain.counters.soft_faults_total, 1);
        Step::Brought(Kind::Soft)
    }
}

/// Our word says resident, and yet there was a fault: either it was resolved meanwhile, or the page is protected and should not be,
/// or the program dropped the page behind our back, and then its contents are what the program made them: zero.
fn check_resident(
    domain: &DomainState,
    context: Context,
    region: &Region,
    pager: &dyn Pager,
    page: PageNo,
    seen: Word,
    access: Access,
) -> Step {
    let Some(word) = region.word(page) else {
        return Step::Again;
    };
    if domain.mmu.present(page) {
        if let Some(step) = protect::end_protection(domain, region, page, seen, access) {
            return step;
        }
        domain.mmu.wake_faulters(region.trap, page, 1);
        return Step::Done(Outcome::Resolved);
    }
    if seen.in_save() {
        return word.await_change(seen).map_or(Step::Again, Step::AwaitPage);
    }
    if context == Context::Trap {
        // The pager must be told, which may be the program's own code.
        return Step::HandOver;
    }
    if !word.claim(seen) {
        return Step::Again;
    }
    if domain.mmu.present(page) {
        domain.settle(region, page, seen);
        domain.mmu.wake_faulters(region.trap, page, 1);
        return Step::Done(Outcome::Resolved);
    }
    lost(domain, region, pager, page, seen.frame());
    Step::Again
}

/// The memory of a claimed page is gone, and its contents with it. Its frame is given new memory.
///
/// # Context
/// Normal or PagerThread, as for [`Pager::forget`].
fn lost(domain: &DomainState, region: &Region, pager: &dyn Pager, page: PageNo, frame: Frame) {
    Counters::add(&domain.counters.lost_total, 1);
    pager.forget(region.index(page), 1);
    region.sets.changed.insert(region.index(page));
    domain.frames.set_owner(frame, None);
    let _ = domain.settle(region, page, Word::ABSENT);
    domain.renew(frame);
}

/// The machine would not map `frame`, whose contents the pager has too, at a claimed page.
fn refused(domain: &DomainState, region: &Region, page: PageNo, frame: Frame, why: Refusal) -> Step {
    if why == Refusal::Hole {
        // Nobody but the kernel under memory pressure could have taken it; the pager fills it anew.
        let _ = domain.mmu.populate(frame, 1);
    }
    poison::settle_refused(domain, region, page, frame, why);
    if why != Refusal::Pinned && why != Refusal::Hole {
        domain.mmu.wake_faulters(region.trap, page, 1);
    }
    match why {
        Refusal::Pinned | Refusal::Hole => Step::Again,
        // Whatever is there now is not ours: the access is tried again and meets that.
        Refusal::Occupied | Refusal::Foreign | Refusal::Ending => Step::Done(Outcome::Retry),
        Refusal::NoDescriptor => Step::HandOver,
        Refusal::NoMemory | Refusal::Denied => Step::Done(Outcome::Failed(Failure::Machine(why))),
    }
}
