//! Snapshots: pages are armed, cut, copied before their first write, and read for the image. [`crate::cut`] tells the story.
//!
//! A page of a region that takes part is armed where its word wishes [`Wishes::COPY_FIRST`], and in
//! [`crate::cut::PageSets::unarmed`] where it does not. Only the owner of a page moves it from one to the other, and takes it
//! out of `pending`.

use core::num::NonZeroU32;

use super::{Failure, Outcome, Step, inherit};
use crate::addr::{Frame, PageBytes, PageNo};
use crate::domain::DomainState;
use crate::frame::Zeroed;
use crate::mmu::{Partial, Refusal, Writing};
use crate::page::{PageWord, State, Wishes, Word};
use crate::pager::{Context, FillPage, Pager};
use crate::region::Region;
use crate::shortage::FrameWait;
use crate::stack;
use crate::sync::Ordering;

/// Pages armed together. A write to one of them meanwhile waits, for as long as whoever arms has no CPU too: few of them, so
/// that this is seldom met.
const STRETCH: usize = 64;
/// Pages looked at between two visits of the gate.
const MOST_LOOKS: u32 = 4096;
/// Copies take at most one frame in so many.
const MOST_SHARE: u32 = 8;
/// Pages that one request to a pager brings for the image, at most.
const MOST_FILLED: usize = 16;

/// A write to a resident page that is armed.
///
/// # Context
/// Trap or PagerThread, inside the gate.
pub(super) fn first_write(domain: &DomainState, context: Context, region: &Region, page: PageNo, seen: Word) -> Step {
    let Some(word) = region.word(page) else { return Step::Again };
    if seen.in_save() {
        // A copy-back leaves the older frame to whoever ends second, and an owner in between would not know it.
        return word.await_change(seen).map_or(Step::Again, Step::AwaitPage);
    }
    let moved = domain.cut.moved.count();
    let Some(_writing) = domain.cut.begin_write(domain.mmu) else { return Step::AwaitCut(moved) };
    if let Some(step) = inherit::give(domain, context, region, page) {
        return step;
    }
    let index = region.index(page);
    let mut copy = None;
    if region.sets.pending.contains(index) {
        // The rest of the frames is for those who need them to go on at all.
        if domain.cut.copies() >= (domain.stack.budget() / MOST_SHARE).max(1) {
            return Step::AwaitCut(moved);
        }
        let available = domain.stack.demand.available.count();
        let Some(run) = stack::take(domain, NonZeroU32::MIN) else { return Step::AwaitFrame(available) };
        copy = Some(run.first);
    }
    let give = |step| {
        if let Some(copy) = copy {
            domain.stack.give(domain.mmu, copy, 1);
        }
        step
    };
    if !word.claim(seen) {
        return give(Step::Again);
    }
    // Now that the page is ours, nobody else copies it for the image.
    let kept = match copy.filter(|_| region.sets.pending.contains(index)) {
        None => Kept::NotNeeded,
        Some(copy) => keep(domain, region, page, copy),
    };
    let step = match kept {
        Kept::Yes | Kept::NotNeeded => disarm(domain, region, page, word),
        Kept::Full => Step::AwaitCut(moved),
        Kept::Gone => Step::Again,
        Kept::NoDescriptor => Step::HandOver,
    };
    domain.settle(region, page, Word::new(State::Resident, seen.frame()));
    match kept {
        Kept::Yes => step,
        // The page is in `pending` still, and a copy that was kept is the image's.
        _ => give(step),
    }
}

/// A write waited in vain for a frame. Whether it can go on without one: then the image does without the page, and is none.
pub(super) fn forgo(domain: &DomainState, page: PageNo) -> bool {
    let _inside = domain.gate.enter(domain.mmu);
    let Some((region, word)) = domain.regions.find(page).and_then(|region| Some((region, region.word(page)?))) else {
        return false;
    };
    let seen = word.load();
    let armed = seen.state() == State::Resident && seen.wishes().copied_first();
    let index = region.index(page);
    if armed && region.sets.pending.contains(index) {
        domain.cut.lack();
        region.sets.pending.remove(index);
        return true;
    }
    false
}

enum Kept {
    Yes,
    NotNeeded,
    /// There are as many copies as there may be.
    Full,
    /// The program dropped the page behind our back.
    Gone,
    NoDescriptor,
}

/// Copies a claimed page for the image.
fn keep(domain: &DomainState, region: &Region, page: PageNo, copy: Frame) -> Kept {
    domain.frames.set_zeroed(copy, Zeroed::Unknown);
    match domain.mmu.copy_out(page, copy) {
        Ok(()) => {}
        Err(Refusal::NoDescriptor) => return Kept::NoDescriptor,
        Err(_) => {
            // What it held at the cut is lost, and what it holds now is as good as anything.
            region.sets.pending.remove(region.index(page));
            return Kept::Gone;
        }
    }
    if !domain.cut.keep(page, copy) {
        return Kept::Full;
    }
    // In this order: whoever finds nothing pending finds every copy.
    region.sets.pending.remove(region.index(page));
    Kept::Yes
}

/// Lets the program write to a claimed page.
fn disarm(domain: &DomainState, region: &Region, page: PageNo, word: &PageWord) -> Step {
    let index = region.index(page);
    // Before the first write can be made.
    region.sets.changed.insert(index);
    let wishes = word.load().wishes().without(Wishes::COPY_FIRST);
    if !wishes.write_protected()
        && let Err(partial) = domain.mmu.set_writing(region.trap, page, 1, Writing::Allowed)
    {
        return match partial.why {
            Refusal::NoDescriptor => Step::HandOver,
            // Whatever is there now is not ours: the access is tried again and meets that.
            _ => {
                domain.mmu.wake_faulters(region.trap, page, 1);
                Step::Done(super::Outcome::Retry)
            }
        };
    }
    wish(word, wishes);
    region.sets.unarmed.insert(index);
    if wishes.write_protected() {
        // Somebody else wants to know of writes: the access is tried again.
        domain.mmu.wake_faulters(region.trap, page, 1);
    }
    Step::Done(super::Outcome::Resolved)
}

/// Changes what is wanted of a page that is claimed. Pins are taken back, and saves end, at any time.
fn wish(word: &PageWord, wishes: Wishes) {
    while !word.wish(word.load(), wishes) {}
}

/// The contents of `page` are about to be dropped: whether they may be. `Err`: what must be waited for first.
///
/// The result is held until they are.
pub(super) fn begin_drop<'a>(
    domain: &'a DomainState,
    region: &Region,
    page: PageNo,
) -> Result<Option<crate::sync::Inside<'a>>, Step> {
    let armed = region.word(page).is_some_and(|word| word.load().wishes().copied_first());
    let index = region.index(page);
    if !armed && !region.sets.pending.contains(index) {
        return Ok(None);
    }
    let moved = domain.cut.moved.count();
    let Some(dropping) = domain.cut.begin_write(domain.mmu) else { return Err(Step::AwaitCut(moved)) };
    if let Some(step) = inherit::give(domain, Context::PagerThread, region, page) {
        return Err(step);
    }
    if region.sets.pending.contains(index) {
        domain.cut.hurry(page);
        return Err(Step::AwaitCut(moved));
    }
    region.sets.changed.insert(index);
    Ok(Some(dropping))
}

/// What to do about pages that somebody is at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtBusy {
    /// Leave them for the next time.
    Skip,
    /// Wait.
    Wait,
}

/// Arms the pages of `region` that are not armed. How many it armed.
///
/// # Context
/// Normal or PagerThread, outside the gate; one thread at a time. The region's memory outlives the call.
///
/// # Errors
/// The machine would not protect a page.
pub fn arm(domain: &DomainState, region: &Region, at_busy: AtBusy) -> Result<u64, Refusal> {
    let mut armed = 0;
    let mut from = Some(0);
    while let Some(first) = from.and_then(|from| region.sets.unarmed.next(from)) {
        let inside = domain.gate.enter(domain.mmu);
        let mut claimed = [(PageNo(0), Frame(0)); STRETCH];
        let (mut len, mut looks, mut wait) = (0, 0, None);
        let mut next = Some(first);
        while let Some(index) = next
            && let Some(entry) = claimed.get_mut(len)
            && looks < MOST_LOOKS
        {
            looks += 1;
            let page = region.range.first.plus(index);
            let Some(word) = region.word(page) else { break };
            let seen = word.load();
            let resident = seen.state() == State::Resident;
            if seen.state() == State::Busy || (resident && seen.in_save()) {
                if at_busy == AtBusy::Wait {
                    wait = word.await_change(seen).map(|seen| (word, seen));
                    break;
                }
            } else if resident {
                if !word.claim(seen) {
                    continue;
                }
                *entry = (page, seen.frame());
                len += 1;
            } else {
                // Before somebody can bring it in, write to it, and put it back into the set.
                region.sets.unarmed.remove(index);
                if !word.wish(seen, seen.wishes().and(Wishes::COPY_FIRST)) {
                    region.sets.unarmed.insert(index);
                    continue;
                }
                armed += 1;
            }
            next = region.sets.unarmed.next(index + 1);
        }
        let done = protect(domain, region, claimed.get(..len).unwrap_or(&[]));
        drop(inside);
        armed += done?;
        from = next;
        if let Some((word, seen)) = wait {
            domain.mmu.sleep(word.low_half(), seen.low(), 0);
        }
    }
    Ok(armed)
}

/// Arms claimed resident pages, ascending, in as few calls as their neighbourhood allows.
fn protect(domain: &DomainState, region: &Region, pages: &[(PageNo, Frame)]) -> Result<u64, Refusal> {
    let mut result = Ok(pages.len() as u64);
    let mut at = 0;
    while let Some(rest) = pages.get(at..)
        && let Some(&(first, _)) = rest.first()
    {
        let run = rest.iter().zip(first.0..).take_while(|(entry, page)| entry.0.0 == *page).count();
        let protected = result.map_err(|why| Partial { done: 0, why });
        let protected =
            protected.and_then(|_| domain.mmu.set_writing(region.trap, first, run as u32, Writing::Protected));
        let done = protected.map_or_else(|partial| partial.done as usize, |()| run);
        result = protected.map(|()| pages.len() as u64).map_err(|partial| partial.why);
        for (at, &(page, frame)) in rest.iter().take(run).enumerate() {
            if at < done
                && let Some(word) = region.word(page)
            {
                region.sets.unarmed.remove(region.index(page));
                wish(word, word.load().wishes().and(Wishes::COPY_FIRST));
            }
            domain.settle(region, page, Word::new(State::Resident, frame));
        }
        at += run;
    }
    result
}

/// Makes the cut: at one instant of this call every page of `regions` is armed, and nobody writes before `at_once` has run. Returns
/// how many pages had to be armed meanwhile.
///
/// # Context
/// As for [`arm`]; `at_once` neither waits nor works on pages.
///
/// # Errors
/// The machine would not protect a page: there is no image, and nothing has happened.
pub fn cut(domain: &DomainState, regions: &[&Region], at_once: impl FnOnce()) -> Result<u64, Refusal> {
    domain.cut.close(domain.mmu);
    let mut armed = 0;
    let mut result = Ok(());
    for region in regions {
        // A page that was skipped would be written to while others are not.
        while result.is_ok() && region.sets.unarmed.next(0).is_some() {
            result = arm(domain, region, AtBusy::Wait).map(|count| armed += count);
        }
    }
    if result.is_ok() {
        // This is the instant.
        at_once();
    }
    go_on(domain, regions);
    result.map(|()| armed)
}

/// What changed since the last cut is what the image of this one needs.
///
/// # Context
/// In a [`cut`]; nothing may be pending.
pub fn note_image(regions: &[&Region]) {
    regions.iter().for_each(|region| region.sets.pending.take_all(&region.sets.changed));
}

/// Lets everybody go on who waited.
fn go_on(domain: &DomainState, regions: &[&Region]) {
    domain.cut.open(domain.mmu);
    wake(domain, regions);
}

/// Wakes the threads that are stopped on a write: they may try again.
fn wake(domain: &DomainState, regions: &[&Region]) {
    domain.cut.moved.signal(domain.mmu);
    for region in regions {
        let mut at = region.range.first;
        while at < region.range.end() {
            let count = (region.range.end().0 - at.0).min(1 << 20);
            domain.mmu.wake_faulters(region.trap, at, count as u32);
            at = at.plus(count);
        }
    }
}

/// A page of the image.
pub type Image = (PageNo, PageBytes);

/// Takes copies that were made before a first write, as many as `into` holds. How many. Whoever waits for room goes on.
///
/// # Context
/// Normal or PagerThread, outside the gate; one thread at a time.
pub fn take_copies(domain: &DomainState, regions: &[&Region], into: &mut [Image]) -> usize {
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
        wake(domain, regions);
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

enum Read<'a> {
    /// So many pages from this one on.
    Pages(usize),
    Again,
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
        return match inherit::inherit(domain, Context::PagerThread, region, page) {
            Step::Done(Outcome::Failed(failure)) => Read::Failed(failure),
            Step::AwaitFrame(_) => Read::AwaitFrame,
            _ => Read::Again,
        };
    }
    let Some(run) = stack::take(domain, domain.affordable(want as u32)) else { return Read::AwaitFrame };
    let (frame, held) = (run.first, run.count.get());
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
        State::Resident => {
            domain.frames.set_zeroed(copy, Zeroed::Unknown);
            match domain.mmu.copy_out(page, copy) {
                Ok(()) => take(copy),
                Err(why) => read = Read::Failed(Failure::Machine(why)),
            }
        }
        State::Standby | State::Aside => take(seen.frame()),
        // It could not be had when it was last asked for.
        _ => read = Read::Failed(Failure::Pager(crate::pager::PagerError::Corrupt)),
    }
    if matches!(read, Read::Pages(_)) {
        region.sets.pending.remove(index);
    }
    if seen.state() == State::Standby {
        domain.stack.leaves_standby();
        domain.settle_standby(region, page, Word::new(State::Standby, seen.frame()));
    } else {
        domain.settle(region, page, Word::new(seen.state(), seen.frame()));
    }
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
    let claimed = 1
        + (1..most)
            .take_while(|step| {
                let page = first.plus((*step).into());
                let index = region.index(page);
                region.sets.pending.contains(index)
                    // The pager of a clone does not have what its source has.
                    && !region.sets.inherited.contains(index)
                    && region.word(page).is_some_and(|word| {
                        let seen = word.load();
                        seen.state() == State::Absent && !seen.in_save() && word.claim(seen)
                    })
            })
            .count();
    let mut fills: [FillPage<'_>; MOST_FILLED] = core::array::from_fn(|step| {
        let frame = if step < claimed { frame.plus(step as u32) } else { frame };
        FillPage { index: index + step as u64, bytes: domain.lease(frame), zeroed: domain.frames.zeroed(frame) }
    });
    (0..claimed).for_each(|step| domain.frames.set_zeroed(frame.plus(step as u32), Zeroed::Unknown));
    let mut done = claimed;
    let mut filled = pager.fill(Context::PagerThread, fills.get_mut(..done).unwrap_or(&mut []));
    if filled.is_err() && claimed > 1 {
        // It may be a neighbour that cannot be had.
        done = 1;
        fills.iter_mut().for_each(|fill| fill.zeroed = false);
        filled = pager.fill(Context::PagerThread, fills.get_mut(..done).unwrap_or(&mut []));
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

/// Gives the snapshot up, or ends it: nothing is pending any more, no copy is kept, and nobody waits.
///
/// # Context
/// As for [`arm`].
pub fn end(domain: &DomainState, regions: &[&Region]) {
    regions.iter().for_each(|region| region.sets.pending.clear());
    // Whoever is about to keep a copy has kept it then.
    domain.cut.close(domain.mmu);
    while take_copies(domain, &[], &mut [(PageNo(0), [0; crate::addr::PAGE_BYTES])]) > 0 {}
    go_on(domain, regions);
}

/// Begins a region's part: what is not armed is in `unarmed` from now on.
///
/// # Context
/// As for [`arm`].
pub fn join(domain: &DomainState, region: &Region) {
    let _inside = domain.gate.enter(domain.mmu);
    region.sets.joined.store(1, Ordering::Release);
    // Armed pages of an earlier part stay armed: whoever writes to one says so.
    let armed = |page: &PageNo| region.word(*page).is_some_and(|word| word.load().wishes().copied_first());
    for page in region.range.pages().filter(|page| !armed(page)) {
        region.sets.unarmed.insert(region.index(page));
    }
}

/// In a forked child: its pages are right, and no snapshot of them is taken. Copies are the parent's.
///
/// # Context
/// Normal, with the gate closed.
pub fn forget(domain: &DomainState) {
    domain.cut.forget();
    while let Some((_, copy)) = domain.cut.take() {
        domain.stack.unclaim(domain.mmu, copy, 1);
    }
    domain.regions.each(|region| {
        if region.sets.joined.load(Ordering::Acquire) == 0 {
            // A look at each of its pages would be felt in every fork.
            return;
        }
        region.sets.changed.clear();
        region.sets.pending.clear();
        if region.heir().is_some() {
            // Its clone is here, too.
            return;
        }
        region.sets.joined.store(0, Ordering::Release);
        region.sets.unarmed.clear();
        for page in region.range.pages() {
            let Some(word) = region.word(page) else { return };
            let seen = word.load();
            // No other thread is here, and nothing is protected yet.
            if seen.wishes().copied_first() && word.claim(seen) {
                wish(word, seen.wishes().without(Wishes::COPY_FIRST));
                let _ = word.settle(Word::new(seen.state(), seen.frame()));
            }
        }
    });
}
