//! The image of a cut: the pages that it needs are taken from wherever they are, while the program goes on.
//!
//! # Source
//! As for [`super::copy_first`].

use core::ops::Range;

use super::copy_first::wake;
use super::fill::ask;
use super::{Failure, Outcome, PAUSE_US, Step, inherit};
use crate::addr::{Frame, PageBytes, PageNo};
use crate::domain::DomainState;
use crate::frame::Zeroed;
use crate::mmu::Refusal;
use crate::page::{PageWord, State, Word};
use crate::pager::{Context, FillPage, Pager, PagerError};
use crate::region::Region;
use crate::shortage::FrameWait;
use crate::stack;

/// Pages that one request to a pager brings for the image, at most.
const MOST_FILLED: usize = 16;

/// Pages that are passed over without letting others into the gate, at most.
const MOST_PASSED: u64 = 1 << 14;

/// A page of the image.
pub type Image = (PageNo, PageBytes);

/// Takes copies that were made before a first write, as many as `into` holds. How many. Whoever waits for room goes on.
///
/// # Context
/// Normal or PagerThread, outside the gate; one thread at a time.
pub fn take_copies(domain: &DomainState, into: &mut [Image]) -> usize {
    let inside = domain.gate.enter(domain.mmu);
    let mut count = 0;
    while let Some(entry) = into.get_mut(count)
        && let Some((page, copy)) = domain.cut.take()
    {
        *entry = (page, *domain.lease(copy).get());
        domain.stack.give(domain.mmu, copy, 1);
        count += 1;
    }
    drop(inside);
    if count > 0 {
        wake(domain);
    }
    count
}

/// Reads pages that the image needs from number `from` of `region` on, as many as `into` holds. How many, and where to go on;
/// `None`: there is nothing more.
///
/// # Context
/// PagerThread, outside the gate; one thread at a time.
///
/// # Errors
/// A page cannot be had, or no frame to read it.
pub fn read(
    domain: &DomainState,
    region: &Region,
    from: u64,
    into: &mut [Image],
) -> Result<(usize, Option<u64>), (PageNo, Failure)> {
    let mut count = 0;
    let mut frame_wait = FrameWait::default();
    let mut next = region.sets.pending.next(from);
    while let Some(index) = next
        && let Some(rest) = into.get_mut(count..).filter(|rest| !rest.is_empty())
    {
        let page = region.range.first.plus(index);
        let available = domain.stack.demand.available.count();
        let inside = domain.gate.enter(domain.mmu);
        let step = read_at(domain, region, page, rest);
        drop(inside);
        match step {
            Read::Pages(read) => {
                count += read;
                next = region.sets.pending.next(index + read.max(1) as u64);
            }
            Read::Again => next = region.sets.pending.next(index),
            Read::Pause => domain.cut.moved.wait(domain.mmu, domain.cut.moved.count(), PAUSE_US),
            Read::AwaitPage(word, seen) => domain.mmu.sleep(word.low_half(), seen.low(), 0),
            Read::AwaitFrame => frame_wait
                .sleep(&domain.stack.demand, domain.mmu, available)
                .map_err(|shortage| (page, Failure::Shortage(shortage)))?,
            Read::Failed(failure) => return Err((page, failure)),
        }
    }
    // Whoever waits to drop one of them may.
    domain.cut.moved.signal(domain.mmu);
    Ok((count, next))
}

/// Passes over pages from number `from` of `region` on that the image needs, that no frame holds and that their pager keeps nothing of:
/// they are zero, as in a region of which little was touched yet. Which.
///
/// # Context
/// PagerThread, outside the gate; the thread that reads the image.
pub fn pass_over(domain: &DomainState, region: &Region, from: u64) -> Range<u64> {
    let start = region.sets.pending.next(from).unwrap_or(region.range.count);
    let mut end = start;
    let inside = domain.gate.enter(domain.mmu);
    if let Some(pager) = region.pager() {
        let most = MOST_PASSED.min(region.range.count - start);
        while end - start < most && claim_next(domain, region, region.range.first.plus(end)) {
            // Now that nobody saves it.
            let is_zero = !pager.keeps(end);
            if is_zero {
                region.sets.pending.remove(end);
            }
            domain.settle(region, region.range.first.plus(end), Word::ABSENT);
            if !is_zero {
                break;
            }
            end += 1;
        }
    }
    drop(inside);
    if start < end {
        domain.cut.moved.signal(domain.mmu);
    }
    start..end
}

enum Read<'a> {
    /// So many pages from this one on.
    Pages(usize),
    Again,
    /// The page of a clone's source is busy, which tells nobody here.
    Pause,
    AwaitPage(&'a PageWord, Word),
    AwaitFrame,
    Failed(Failure),
}

fn read_at<'a>(domain: &DomainState, region: &'a Region, page: PageNo, into: &mut [Image]) -> Read<'a> {
    let (Some(word), Some(pager)) = (region.word(page), region.pager()) else { return Read::Pages(0) };
    let seen = word.load();
    if seen.state() == State::Busy || seen.in_save() {
        return word.await_change(seen).map_or(Read::Again, |seen| Read::AwaitPage(word, seen));
    }
    let absent = matches!(seen.state(), State::Absent | State::Poisoned);
    let want = if absent { MOST_FILLED.min(into.len()) } else { 1 };
    if absent && region.sets.inherited.contains(region.index(page)) {
        return match inherit::inherit_ahead(domain, Context::PagerThread, region, page) {
            Step::Done(Outcome::Failed(failure)) => Read::Failed(failure),
            Step::AwaitFrame(_) => Read::AwaitFrame,
            Step::Pause => Read::Pause,
            _ => Read::Again,
        };
    }
    let Some(run) = stack::take(domain, domain.affordable(want as u32)) else { return Read::AwaitFrame };
    let (frame, held, _in_hand) = (run.first, run.count.get(), domain.stack.in_hand());
    let read = if word.claim(seen) {
        match seen.state() {
            State::Absent | State::Poisoned => read_absent(domain, region, pager, (page, seen), (frame, held), into),
            _ => read_claimed(domain, region, page, seen, frame, into),
        }
    } else {
        Read::Again
    };
    domain.stack.give(domain.mmu, frame, held);
    read
}

/// Copies what is mapped at a claimed resident page into `copy`, which is the caller's. A page that the program dropped behind our back,
/// or mapped over, is zero: what it held before is gone, and the region's page reads so from now on.
///
/// # Errors
/// The page is there, and the machine cannot read it.
pub(super) fn copy_resident(domain: &DomainState, page: PageNo, copy: Frame) -> Result<(), Refusal> {
    domain.frames.set_zeroed(copy, Zeroed::Unknown);
    match domain.mmu.copy_out(page, copy) {
        Err(why) if why == Refusal::Foreign || !domain.mmu.present(page) => {
            domain.lease(copy).clear();
            Ok(())
        }
        copied => copied,
    }
}

/// Reads a claimed page that a frame holds, and settles it as it was.
fn read_claimed<'a>(
    domain: &DomainState,
    region: &Region,
    page: PageNo,
    seen: Word,
    copy: Frame,
    into: &mut [Image],
) -> Read<'a> {
    let index = region.index(page);
    let needed = region.sets.pending.contains(index);
    let mut read = Read::Pages(usize::from(needed));
    let mut take = |from: Frame| {
        if let Some(entry) = into.first_mut() {
            *entry = (page, *domain.lease(from).get());
        }
    };
    match seen.state() {
        State::Resident => match copy_resident(domain, page, copy) {
            Ok(()) => take(copy),
            Err(why) => read = Read::Failed(Failure::Machine(why)),
        },
        State::Standby | State::Aside => take(seen.frame()),
        // It could not be had when it was last asked for.
        _ => read = Read::Failed(Failure::Pager(PagerError::Corrupt)),
    }
    if matches!(read, Read::Pages(_)) {
        region.sets.pending.remove(index);
    }
    domain.put_back(region, page, seen);
    read
}

/// Reads a claimed page that its pager has, and those behind it that the image needs and the pager brings cheaply. They stay as they
/// are.
fn read_absent<'a>(
    domain: &DomainState,
    region: &Region,
    pager: &dyn Pager,
    (first, seen): (PageNo, Word),
    (frame, held): (Frame, u32),
    into: &mut [Image],
) -> Read<'a> {
    let index = region.index(first);
    if !region.sets.pending.contains(index) {
        // It came in, was copied, and went again.
        domain.settle(region, first, Word::new(seen.state(), Frame(0)));
        return Read::Again;
    }
    let most = held.min(pager.extent(index, held)).min(MOST_FILLED as u32).max(1);
    let claimed = 1 + (1..most).take_while(|step| claim_next(domain, region, first.plus((*step).into()))).count();
    let mut fills: [FillPage<'_>; MOST_FILLED] = core::array::from_fn(|step| {
        let frame = if step < claimed { frame.plus(step as u32) } else { frame };
        FillPage { index: index + step as u64, bytes: domain.lease(frame), zeroed: domain.frames.zeroed(frame) }
    });
    (0..claimed).for_each(|step| domain.frames.set_zeroed(frame.plus(step as u32), Zeroed::Unknown));
    let mut done = claimed;
    let mut filled = ask(domain, Context::PagerThread, pager, fills.get_mut(..done).unwrap_or(&mut []));
    if filled.is_err() && claimed > 1 {
        // It may be a neighbour that cannot be had.
        done = 1;
        fills.iter_mut().for_each(|fill| fill.zeroed = false);
        filled = ask(domain, Context::PagerThread, pager, fills.get_mut(..done).unwrap_or(&mut []));
    }
    for (step, (fill, entry)) in fills.iter().zip(into.iter_mut()).take(claimed).enumerate() {
        let page = first.plus(step as u64);
        if filled.is_ok() && step < done {
            *entry = (page, *fill.bytes.get());
            region.sets.pending.remove(index + step as u64);
        }
        // A poisoned page could not be had when it was last asked for, which says nothing of now; whoever touches it asks by name.
        domain.settle(region, page, if step == 0 { Word::new(seen.state(), Frame(0)) } else { Word::ABSENT });
    }
    match filled {
        Ok(_) => Read::Pages(done),
        Err(error) => Read::Failed(Failure::Pager(error)),
    }
}

/// Claims a page that its pager has and the image needs, to be read with the one before it.
fn claim_next(domain: &DomainState, region: &Region, page: PageNo) -> bool {
    let (index, pending) = (region.index(page), &region.sets.pending);
    // The pager of a clone does not have what its source has.
    let claimed = pending.contains(index)
        && !region.sets.inherited.contains(index)
        && region.word(page).is_some_and(|word| {
            let seen = word.load();
            seen.state() == State::Absent && !seen.in_save() && word.claim(seen)
        });
    // Its word may be what it was, and yet the page was written to after it was copied for the image, and has gone again.
    let needed = claimed && pending.contains(index);
    if claimed && !needed {
        domain.settle(region, page, Word::ABSENT);
    }
    needed
}
