//! Saving pages that have been unmapped, in batches, by a thread of its own: neither a fault nor an eviction waits for it.

use core::array;

use super::evict::{is_mapped_over, mapped_over};
use super::lost;
use super::range::settled;
use crate::addr::{Frame, PAGE_BYTES, PageNo};
use crate::domain::DomainState;
use crate::frame::Use;
use crate::mmu::Refusal;
use crate::page::{Found, State, Word};
use crate::pager::{PagerError, SavePage};
use crate::region::Region;
use crate::sync::Ordering;
use crate::trace::Counters;
use crate::tracer::Kind;

/// How long whoever waits for a frame sleeps whose page is back when its save fails. A failed save does not wake those who wait for frames:
/// the evictor is among them, and would take the page again before it is used.
pub(super) const IN_SAVE_US: u32 = 1000;

/// Pages saved at once, at most.
pub const BATCH: usize = 256;

/// Whether the contents of `page` are in a frame that is not mapped, perhaps nowhere else. A page that somebody is at is waited for.
///
/// # Context
/// PagerThread, outside the gate.
pub fn is_in_frame_only(domain: &DomainState, page: PageNo) -> bool {
    settled(domain, page, |_, seen| matches!(seen.state(), State::Aside | State::Saving))
}

/// Queues a page that is Saving already. Waits for room, which the saver makes.
pub(super) fn enqueue(domain: &DomainState, page: PageNo, frame: Frame) {
    domain.stack.joins_saving();
    // What fails is queued again by the saver itself, who waits for nobody: a batch of places is left to it, and one more, since those
    // who look at the same time may all find the same place.
    let leaves_some = || domain.saves.len() + 2 * BATCH < domain.saves.capacity();
    while !leaves_some() || !domain.saves.push(page.0, u64::from(frame.0)) {
        let seen = domain.stack.demand.available.count();
        domain.to_save.signal(domain.mmu);
        domain.stack.demand.available.wait(domain.mmu, seen, 1000);
    }
    domain.to_save.signal(domain.mmu);
}

/// What one turn of the saver came to, in pages.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Turn {
    /// They were taken from the queue.
    pub taken: usize,
    /// Of these, those that could not be saved.
    pub failed: usize,
}

/// Saves what is queued, up to a batch.
///
/// # Context
/// The saver alone (PagerThread), outside the gate.
pub fn save(domain: &DomainState) -> Turn {
    let _inside = domain.gate.enter(domain.mmu);
    let mut queued = [(PageNo(0), Frame(0)); BATCH];
    let (mut len, mut gone, mut failed) = (0, 0, 0);
    while let Some(entry) = queued.get_mut(len)
        && let Some((page, frame)) = domain.saves.pop()
    {
        let (page, frame) = (PageNo(page), Frame(frame as u32));
        if !domain.mmu.holds(frame)
            && let Some(region) = domain.regions.find(page)
        {
            lose(domain, region, page, frame);
            gone += 1;
            continue;
        }
        *entry = (page, frame);
        len += 1;
    }
    let queued = queued.get_mut(..len).unwrap_or(&mut []);
    queued.sort_unstable_by_key(|entry| entry.0);
    let mut rest = &*queued;
    while let Some(&(first, _)) = rest.first() {
        let region = domain.regions.find(first);
        let same = match region {
            Some(region) => rest.iter().take_while(|entry| region.range.contains(entry.0)).count(),
            None => 1,
        };
        let (now, later) = rest.split_at_checked(same).unwrap_or((rest, &[]));
        match region {
            Some(region) => failed += save_in(domain, region, now),
            // A region goes only after its saves have ended.
            None => debug_assert!(false, "a page to be saved lost its region"),
        }
        rest = later;
    }
    domain.stack.leaves_saving((len + gone) as u32);
    Turn { taken: len + gone, failed }
}

/// Saves pages of one region. How many could not be.
fn save_in(domain: &DomainState, region: &Region, pages: &[(PageNo, Frame)]) -> usize {
    let mut failed = 0;
    save_each(domain, region, pages, |page, frame, outcome| match outcome {
        // Taken away while the pager was at it: who knows what it saved.
        Ok(()) if !domain.mmu.holds(frame) => lose(domain, region, page, frame),
        Ok(()) => {
            domain.trace(page, Kind::Save);
            saved(domain, region, page, frame);
        }
        Err(error) => {
            failed += 1;
            unsaved(domain, region, page, frame, error);
        }
    });
    failed
}

/// Saves pages together, a batch at most, each from its frame, and tells `then` what became of each.
pub(super) fn save_each(
    domain: &DomainState,
    region: &Region,
    pages: &[(PageNo, Frame)],
    mut then: impl FnMut(PageNo, Frame, Result<(), PagerError>),
) {
    let Some(&first) = pages.first() else { return };
    let mut saves: [SavePage<'_>; BATCH] = array::from_fn(|at| {
        // The rest of the array is of a page that nobody writes either.
        let (page, frame) = pages.get(at).copied().unwrap_or(first);
        let bytes = domain.lease(frame).into_shared();
        SavePage { index: region.index(page), bytes, outcome: Err(PagerError::NoStore) }
    });
    let saves = saves.get_mut(..pages.len()).unwrap_or(&mut []);
    if let Some(pager) = region.pager() {
        pager.save(saves);
    }
    let saved = saves.iter().filter(|save| save.outcome.is_ok()).count();
    Counters::add(&domain.counters.saves_total, pages.len() as u64);
    Counters::add(&domain.counters.save_errors_total, (pages.len() - saved) as u64);
    Counters::add(&domain.counters.bytes_saved, (saved * PAGE_BYTES) as u64);
    for (&(page, frame), save) in pages.iter().zip(saves.iter()) {
        then(page, frame, save.outcome);
    }
}

/// The page is safe: unless it is in use again, its frame may go.
fn saved(domain: &DomainState, region: &Region, page: PageNo, frame: Frame) {
    domain.save_trouble.store(0, Ordering::Relaxed);
    domain.stack.joins_standby();
    let found = end(domain, region, page, Word::new(State::Standby, frame));
    match found {
        Found::Untouched => domain.publish_standby(region, page, frame),
        Found::BeingCopied => domain.stack.leaves_standby(),
        Found::Copied => {
            domain.stack.leaves_standby();
            give_back(domain, page, frame);
        }
    }
}

/// The page could not be saved: its frame holds the only copy, and goes back where it came from.
fn unsaved(domain: &DomainState, region: &Region, page: PageNo, frame: Frame, error: PagerError) {
    domain.save_trouble.store(error.code(), Ordering::Relaxed);
    let Some(word) = region.word(page) else { return };
    let seen = word.load();
    if seen.state() == State::Saving && word.claim(seen) {
        // A page whose every access traps stays unmapped.
        let unmapped = seen.wishes().unmapped();
        match if unmapped { Ok(()) } else { domain.map(region, page, frame, 1) } {
            Ok(()) => {
                // The save has ended here, and the claim is ours.
                let _ = word.end_save(Word::ABSENT);
                let state = if unmapped { State::Aside } else { State::Resident };
                domain.trace(page, Kind::Ahead);
                domain.settle(region, page, Word::new(state, frame));
                domain.admit(region, frame, Use::First);
            }
            Err(partial) if partial.why == Refusal::Hole => lose_claimed(domain, region, page, frame),
            Err(partial) if is_mapped_over(partial.why) => {
                let Some(pager) = region.pager() else { return };
                let _ = word.end_save(Word::ABSENT);
                mapped_over(domain, region, pager, page, frame);
            }
            Err(_) => {
                domain.settle(region, page, seen);
                requeue(domain, page, frame);
            }
        }
        return;
    }
    leave(domain, region, page, frame);
}

/// The frame of a page was taken from the domain before its contents were safe.
fn lose(domain: &DomainState, region: &Region, page: PageNo, frame: Frame) {
    let Some(word) = region.word(page) else { return };
    let seen = word.load();
    if seen.state() == State::Saving && word.claim(seen) {
        return lose_claimed(domain, region, page, frame);
    }
    leave(domain, region, page, frame);
}

fn lose_claimed(domain: &DomainState, region: &Region, page: PageNo, frame: Frame) {
    let (Some(word), Some(pager)) = (region.word(page), region.pager()) else { return };
    // The save has ended here, and the claim is ours.
    let _ = word.end_save(Word::ABSENT);
    lost(domain, region, pager, page, frame);
}

/// Ends a save in vain of a page that another thread has, or had, claimed.
fn leave(domain: &DomainState, region: &Region, page: PageNo, frame: Frame) {
    match end(domain, region, page, seen_saving(frame)) {
        // The copy that was made meanwhile is the only one now, and ours is not needed.
        Found::Copied => give_back(domain, page, frame),
        Found::BeingCopied => {}
        Found::Untouched => requeue(domain, page, frame),
    }
}

const fn seen_saving(frame: Frame) -> Word {
    Word::new(State::Saving, frame).with_save()
}

/// Queues a page again from the saver itself. Whoever else queues leaves room for that: see [`enqueue`] and [`room`].
fn requeue(domain: &DomainState, page: PageNo, frame: Frame) {
    domain.stack.joins_saving();
    let pushed = domain.saves.push(page.0, u64::from(frame.0));
    debug_assert!(pushed, "whoever queues leaves room for a batch");
}

/// How many more pages may be queued: a batch that fails must find room again, and the frames on their way to the store
/// must leave enough for faults.
pub fn room(domain: &DomainState) -> usize {
    if domain.draining.load(Ordering::SeqCst) {
        return 0;
    }
    let frames = (domain.stack.budget() as usize / 4).max(1);
    let slots = domain.saves.capacity().saturating_sub(2 * BATCH);
    frames.min(slots).saturating_sub(domain.saves.len())
}

fn end(domain: &DomainState, region: &Region, page: PageNo, settled: Word) -> Found {
    let Some(word) = region.word(page) else {
        return Found::BeingCopied;
    };
    let end = word.end_save(settled);
    if end.awaited {
        domain.wake(region, page);
    }
    end.found
}

/// Gives back the frame of a page that lives in another one by now.
fn give_back(domain: &DomainState, page: PageNo, frame: Frame) {
    if domain.frames.owner(frame) == Some(page) {
        domain.frames.set_owner(frame, None);
    }
    domain.stack.give(domain.mmu, frame, 1);
}

/// Says that somebody waits for a page that is being saved, and gives what to sleep on. `None`: it is not, or not any more.
pub(super) fn await_end(domain: &DomainState, page: PageNo) -> Option<Word> {
    let _inside = domain.gate.enter(domain.mmu);
    let word = domain.regions.find(page)?.word(page)?;
    let seen = word.load();
    if seen.state() == State::Saving { word.await_change(seen) } else { None }
}
