//! Snapshots: pages are armed, cut, and copied before their first write; [`super::image`] reads the others. [`crate::cut`] tells the
//! story.
//!
//! A page of a region that takes part is armed where its word wishes [`Wishes::COPY_FIRST`], and in
//! [`crate::cut::PageSets::unarmed`] where it does not. Only the owner of a page moves it from one to the other, and takes it
//! out of `pending`.

use core::num::NonZeroU32;

use super::image::{copy_resident, take_copies};
use super::{Step, inherit, lost, protect};
use crate::addr::{Frame, PageNo};
use crate::domain::DomainState;
use crate::mmu::{Partial, Refusal, Writing};
use crate::page::{PageWord, State, Wishes, Word};
use crate::pager::Context;
use crate::region::{Region, Serial};
use crate::stack;
use crate::sync::Ordering;

/// Pages armed together. A write to one of them meanwhile waits, for as long as whoever arms has no CPU too: few of them, so
/// that this is seldom met.
const STRETCH: usize = 64;
/// Pages looked at between two visits of the gate.
const MOST_LOOKS: u32 = 4096;
/// Copies take at most one frame in so many.
const MOST_SHARE: u32 = 8;

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
        None => Copied::NotNeeded,
        Some(copy) => keep(domain, region, page, copy),
    };
    let step = match kept {
        Copied::Yes | Copied::NotNeeded => disarm(domain, region, page, word),
        Copied::Full => Step::AwaitCut(moved),
        Copied::NoDescriptor => Step::HandOver,
    };
    domain.settle(region, page, Word::new(State::Resident, seen.frame()));
    match kept {
        Copied::Yes => step,
        // The page is in `pending` still, and a copy that was kept is the image's.
        _ => give(step),
    }
}

/// A write to this region waited in vain for a frame. Whether it can go on without one: then the image does without the page, and is none.
pub(super) fn forgo(domain: &DomainState, page: PageNo, of: Serial) -> bool {
    let _inside = domain.gate.enter(domain.mmu);
    let Some((region, word)) = domain.regions.find_same(page, of).and_then(|region| Some((region, region.word(page)?)))
    else {
        return false;
    };
    let seen = word.load();
    let armed = seen.state() == State::Resident && seen.wishes().copied_first();
    let index = region.index(page);
    if !armed || !region.sets.pending.contains(index) {
        return false;
    }
    // Else an image could end here and the next begin, which would not have the page and not know it.
    let Some(_writing) = domain.cut.begin_write(domain.mmu) else { return true };
    domain.cut.lack();
    region.sets.pending.remove(index);
    true
}

/// Whether `page` is in core, and its next write is answered first.
///
/// # Context
/// Any, outside the gate.
pub fn is_armed(domain: &DomainState, page: PageNo) -> bool {
    let _inside = domain.gate.enter(domain.mmu);
    let seen = domain.regions.find(page).and_then(|region| region.word(page)).map(PageWord::load);
    seen.is_some_and(|seen| seen.state() == State::Resident && seen.wishes().copied_first())
}

/// Whether `page` is in core, and its contents must be given to a clone before they may change.
///
/// # Context
/// Any, outside the gate.
pub fn is_owed(domain: &DomainState, page: PageNo) -> bool {
    let _inside = domain.gate.enter(domain.mmu);
    domain.regions.find(page).is_some_and(|region| {
        let resident = |word: &PageWord| word.load().state() == State::Resident;
        let owed = |heir: &Region| heir.sets.inherited.contains(region.index(page));
        region.word(page).is_some_and(resident) && region.heir().is_some_and(owed)
    })
}

enum Copied {
    Yes,
    /// The image has the page, or does without.
    NotNeeded,
    /// There are as many copies as there may be.
    Full,
    NoDescriptor,
}

/// Copies a claimed page for the image.
fn keep(domain: &DomainState, region: &Region, page: PageNo, copy: Frame) -> Copied {
    match copy_resident(domain, page, copy) {
        Ok(()) => {}
        Err(Refusal::NoDescriptor) => return Copied::NoDescriptor,
        Err(_) => {
            // It cannot be read: the image does without it, and is none.
            domain.cut.lack();
            region.sets.pending.remove(region.index(page));
            return Copied::NotNeeded;
        }
    }
    if !domain.cut.keep(page, copy) {
        return Copied::Full;
    }
    // In this order: whoever finds nothing pending finds every copy.
    region.sets.pending.remove(region.index(page));
    Copied::Yes
}

/// Lets the program write to a claimed page.
fn disarm(domain: &DomainState, region: &Region, page: PageNo, word: &PageWord) -> Step {
    let index = region.index(page);
    // Before the first write can be made.
    region.sets.changed.insert(index);
    let wishes = word.load().wishes().without(Wishes::COPY_FIRST);
    if !wishes.write_protected()
        && let Err(step) = protect::allow_writing(domain, region, page)
    {
        return step;
    }
    protect::wish(word, wishes);
    region.sets.unarmed.insert(index);
    if wishes.write_protected() {
        // Somebody else wants to know of writes: the access is tried again.
        domain.mmu.wake_faulters(region.trap, page, 1);
    }
    Step::Done(super::Outcome::Resolved)
}

/// The contents of `page` are about to be dropped by whoever then claims it as it was `seen`: whether they may be. `Err`: what must be
/// waited for first.
///
/// The result is held until they are. A later look at the word would not do: a page that is written to and armed again by a cut has the
/// same word before and after, and is not armed in between.
pub(super) fn begin_drop<'a>(
    domain: &'a DomainState,
    context: Context,
    region: &Region,
    page: PageNo,
    seen: Word,
) -> Result<Option<crate::sync::Inside<'a>>, Step> {
    let index = region.index(page);
    if !seen.wishes().copied_first() && !region.sets.pending.contains(index) {
        return Ok(None);
    }
    let moved = domain.cut.moved.count();
    let Some(dropping) = domain.cut.begin_write(domain.mmu) else { return Err(Step::AwaitCut(moved)) };
    if let Some(step) = inherit::give(domain, context, region, page) {
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
            if seen.is_busy_or_saved_in_core() {
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

/// Arms claimed resident pages, ascending, in as few calls as their neighbourhood allows. How many; where the program has mapped
/// something of its own a page is lost.
fn protect(domain: &DomainState, region: &Region, pages: &[(PageNo, Frame)]) -> Result<u64, Refusal> {
    let (mut armed, mut at) = (0, 0);
    while let Some(rest) = pages.get(at..)
        && let Some(&(first, _)) = rest.first()
    {
        let run = rest.iter().zip(first.0..).take_while(|(entry, page)| entry.0.0 == *page).count();
        let protected = domain.mmu.set_writing(region.trap, first, run as u32, Writing::Protected);
        let (done, refusal) = Partial::split(protected, run);
        for &(page, frame) in rest.get(..done).unwrap_or(rest) {
            if let Some(word) = region.word(page) {
                region.sets.unarmed.remove(region.index(page));
                protect::wish(word, word.load().wishes().and(Wishes::COPY_FIRST));
            }
            domain.settle(region, page, Word::new(State::Resident, frame));
        }
        armed += done as u64;
        at += done;
        match (refusal, pages.get(at), region.pager()) {
            (None, ..) => {}
            (Some(Refusal::Foreign), Some(&(page, frame)), Some(pager)) => {
                lost(domain, region, pager, page, frame);
                at += 1;
            }
            (Some(why), ..) => {
                for &(page, frame) in pages.get(at..).unwrap_or(&[]) {
                    domain.settle(region, page, Word::new(State::Resident, frame));
                }
                return Err(why);
            }
        }
    }
    Ok(armed)
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
    go_on(domain);
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
fn go_on(domain: &DomainState) {
    domain.cut.open(domain.mmu);
    wake(domain);
}

/// Wakes the threads that are stopped on a write to an armed page, of whichever region: they may try again.
pub(super) fn wake(domain: &DomainState) {
    domain.cut.moved.signal(domain.mmu);
    let _inside = domain.gate.enter(domain.mmu);
    domain.regions.each(|region| {
        if region.sets.joined.load(Ordering::Acquire) != 0 {
            domain.wake_stopped(region.trap, region.range);
        }
    });
}

/// Gives the snapshot up, or ends it: nothing is pending any more, no copy is kept, and nobody waits.
///
/// # Context
/// As for [`arm`].
pub fn end(domain: &DomainState, regions: &[&Region]) {
    regions.iter().for_each(|region| region.sets.pending.clear());
    // Whoever is about to keep a copy has kept it then.
    domain.cut.close(domain.mmu);
    while take_copies(domain, &mut [(PageNo(0), [0; crate::addr::PAGE_BYTES])]) > 0 {}
    go_on(domain);
}

/// Begins a region's part: what is not armed is in `unarmed` from now on.
///
/// # Context
/// As for [`arm`].
pub fn join(domain: &DomainState, region: &Region) {
    region.sets.joined.store(1, Ordering::Release);
    // Armed pages of an earlier part stay armed: whoever writes to one says so.
    let armed = |page: &PageNo| region.word(*page).is_some_and(|word| word.load().wishes().copied_first());
    for piece in region.range.pieces(MOST_LOOKS.into()) {
        let _inside = domain.gate.enter(domain.mmu);
        for page in piece.pages().filter(|page| !armed(page)) {
            region.sets.unarmed.insert(region.index(page));
        }
    }
}

/// In a forked child: its pages are right, and no snapshot of them is taken. Copies are the parent's.
///
/// # Context
/// Normal, with the gate closed.
pub fn forget(domain: &DomainState) {
    domain.cut.forget(domain.mmu);
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
                protect::wish(word, seen.wishes().without(Wishes::COPY_FIRST));
                let _ = word.settle(Word::new(seen.state(), seen.frame()));
            }
        }
    });
}
