//! The frame stack: a domain's frames in the order in which it would give them up. On top the free ones, then those on
//! standby, whose contents the pager has too, then whatever the policy would choose.
//!
//! # Source
//! Nemesis §6.2: "the top of the stack holds the PFN of the frame which that domain is most prepared to have revoked". A
//! free frame on top is *transparent* revocation, a standby frame costs a later fill, all else is *intrusive*.

use core::num::NonZeroU32;

use crate::addr::{Frame, FrameRun, PageNo};
use crate::contract::{Claim, Held, Holding};
use crate::domain::DomainState;
use crate::frame::{FrameSet, Unpopulated, Zeroed};
use crate::page::Word;
use crate::ring::Ring;
use crate::shortage::Demand;
use crate::sync::{AtomicU32, Ordering};
use crate::trace::Counters;

/// How many frames are given memory at once, at least, when a fault needs one: by the faulting thread itself, since a thread
/// on another CPU that changes page tables makes each of its own changes cost an interrupt there.
const POPULATE_RUN: u32 = 32;
/// When a process has claimed as many frames, those that come are the size of a huge page together.
const BY_GROUPS_FROM: u32 = 2048;

/// The frames that can be had without the policy.
pub struct FrameStack {
    /// Populated, and nobody's.
    pub free: FrameSet,
    standby: Ring,
    on_standby: AtomicU32,
    saving: AtomicU32,
    sampled: AtomicU32,
    /// How often frames were taken in hand so far, and let go.
    taken: AtomicU32,
    let_go: AtomicU32,
    holding: Holding,
    unpopulated: Unpopulated,
    /// The last claim was refused memory: until one is not, what is unclaimed cannot be counted on.
    refused: AtomicU32,
    /// Claimed already when the process was forked.
    inherited: AtomicU32,
    /// Who waits for frames, and what the evictor has to say to them.
    pub demand: Demand,
    /// The reserve that the evictor keeps.
    pub reserve: AtomicU32,
    /// With fewer frames ready than this, or than half the reserve, the evictor is woken.
    pub wake_below: AtomicU32,
}

/// Frames that are being filled, or saved from: they are nobody else's, and no policy names them, until this is dropped.
pub(crate) struct InHand<'a>(&'a FrameStack);

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        self.0.let_go.fetch_add(1, Ordering::SeqCst);
    }
}

impl FrameStack {
    /// No frames yet: `budget` of them may be claimed, one by one, as they are needed.
    pub fn new(free: FrameSet, unpopulated: Unpopulated, standby: Ring, budget: u32) -> FrameStack {
        FrameStack {
            free,
            standby,
            on_standby: AtomicU32::new(0),
            saving: AtomicU32::new(0),
            sampled: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            let_go: AtomicU32::new(0),
            holding: Holding::new(budget),
            unpopulated,
            refused: AtomicU32::new(0),
            inherited: AtomicU32::new(0),
            demand: Demand::default(),
            reserve: AtomicU32::new(0),
            wake_below: AtomicU32::new(0),
        }
    }

    /// How many frames the domain may hold.
    pub fn budget(&self) -> u32 {
        self.holding.held().budget
    }

    /// How many it has claimed so far.
    pub fn claimed(&self) -> u32 {
        self.holding.held().claimed
    }

    /// No page ever held this frame or a later one.
    pub fn begun(&self) -> u32 {
        self.unpopulated.begun()
    }

    /// Frames on standby, about.
    pub fn on_standby(&self) -> u32 {
        self.on_standby.load(Ordering::Relaxed)
    }

    /// Frames whose contents are on their way to a store: to be had soon.
    pub fn saving(&self) -> u32 {
        self.saving.load(Ordering::Relaxed)
    }

    /// The contents of a frame are queued to be saved.
    pub(crate) fn joins_saving(&self) {
        self.saving.fetch_add(1, Ordering::Relaxed);
    }

    /// The caller has frames, and goes to their pager with them, which may take its time.
    pub(crate) fn in_hand(&self) -> InHand<'_> {
        self.taken.fetch_add(1, Ordering::SeqCst);
        InHand(self)
    }

    /// How often frames that were in hand were let go so far, modulo 2^32.
    pub fn let_go(&self) -> u32 {
        self.let_go.load(Ordering::SeqCst)
    }

    /// Whether frames can be had once pagers that take their time have come to their end: frames have been let go less often than they are in
    /// hand, of what a look could see before which it had been so many times, since it was `since`. Where a few frames go round among those who
    /// need more, they are let go all the time.
    pub fn awaits_pagers(&self, since: u32, seen: u32) -> bool {
        self.taken.load(Ordering::SeqCst).wrapping_sub(seen) > seen.wrapping_sub(since)
    }

    /// Frames of pages that are unmapped to see whether they are used.
    pub fn sampled(&self) -> u32 {
        self.sampled.load(Ordering::SeqCst)
    }

    /// A page is about to be unmapped to see whether it is used: call it before the page's word says so.
    pub(crate) fn joins_sampled(&self) {
        self.sampled.fetch_add(1, Ordering::SeqCst);
    }

    /// A page that was unmapped to see whether it is used is something else now.
    pub(crate) fn leaves_sampled(&self) {
        self.sampled.fetch_sub(1, Ordering::SeqCst);
    }

    /// `count` saves have ended, well or not.
    pub(crate) fn leaves_saving(&self, count: u32) {
        self.saving.fetch_sub(count, Ordering::Relaxed);
    }

    /// How many frames are given memory at once where `want` are needed.
    fn populate_run(&self, want: NonZeroU32) -> u32 {
        let own = self.claimed().saturating_sub(self.inherited.load(Ordering::Relaxed));
        if own < BY_GROUPS_FROM { want.get().max(POPULATE_RUN) } else { self.unpopulated.rest_of_group() }
    }

    /// Frames to be had at once.
    pub fn ready(&self) -> u32 {
        let Held { claimed, budget } = self.holding.held();
        let unclaimed = if self.no_memory() { 0 } else { budget.saturating_sub(claimed) };
        self.free.count() + self.on_standby() + unclaimed
    }

    /// Whether the system had no memory when a frame was last claimed.
    pub fn no_memory(&self) -> bool {
        self.refused.load(Ordering::SeqCst) != 0
    }

    /// Lets the domain claim `count` frames more.
    pub fn extend(&self, mmu: &dyn crate::mmu::Mmu, count: u32) {
        self.holding.extend(count);
        self.demand.available.signal(mmu);
    }

    /// Takes up to `count` frames that were never claimed out of the contract. How many are left to be taken elsewhere.
    pub(crate) fn cut_unclaimed(&self, count: u32) -> u32 {
        count - self.holding.cut(count)
    }

    /// Frames taken from the free ones have lost their memory, and the contract is smaller by as many.
    pub(crate) fn retire(&self, first: Frame, count: u32) {
        self.unpopulated.give(first, count);
        self.holding.retire(count);
    }

    /// A frame has lost its memory, and there is none to be had: it may be claimed again later.
    pub(crate) fn unclaim(&self, mmu: &dyn crate::mmu::Mmu, first: Frame, count: u32) {
        self.unpopulated.give(first, count);
        self.holding.unclaim(count);
        self.demand.available.signal(mmu);
    }

    /// Gives frames back, and wakes those who wait for one.
    ///
    /// # Context
    /// Trap.
    pub fn give(&self, mmu: &dyn crate::mmu::Mmu, first: Frame, count: u32) {
        self.free.give(first, count);
        self.demand.available.signal(mmu);
    }

    /// A frame is about to go on standby: call it before the page's word says so, and `list_standby` after.
    pub fn joins_standby(&self) {
        self.on_standby.fetch_add(1, Ordering::SeqCst);
    }

    /// The frame of a page went from standby back to use.
    pub fn leaves_standby(&self) {
        self.on_standby.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Takes up to `want` neighbouring frames: free ones, else ones that the contract still allows, else one from standby.
/// The frames belong to the caller; nobody else knows them. `None`: there are none.
///
/// # Context
/// Trap, inside the gate.
pub fn take(domain: &DomainState, want: NonZeroU32) -> Option<FrameRun> {
    let stack = &domain.stack;
    let free = || stack.free.take(want, || stack.demand.available.signal(domain.mmu));
    let run = match free() {
        Some(run) => Some(run),
        None => claim(domain, stack.populate_run(want))
            .and_then(|()| free())
            .or_else(|| reclaim_standby(domain).map(|first| FrameRun { first, count: NonZeroU32::MIN })),
    };
    // Also with a reserve of one: whoever waits while the last frame changes hands has asked the evictor too early.
    let half = stack.reserve.load(Ordering::Relaxed).div_ceil(2);
    if stack.ready() < stack.wake_below.load(Ordering::Relaxed).max(half) {
        stack.demand.wanted.signal(domain.mmu);
    }
    run
}

/// Gives up to `most` more frames memory and puts them on the free list. `None`: the contract allows no more, or the system
/// has no memory.
///
/// # Context
/// Trap.
pub fn claim(domain: &DomainState, most: u32) -> Option<()> {
    let stack = &domain.stack;
    let Claim { count, claimed } = stack.holding.claim(most)?;
    domain.counters.frames_held_max.fetch_max(u64::from(claimed), Ordering::Relaxed);
    let mut left = count;
    while let Some(want) = NonZeroU32::new(left) {
        let Some(run) = stack.unpopulated.take(want) else {
            stack.holding.unclaim(left);
            // Others were refused meanwhile what was counted here.
            stack.demand.available.signal(domain.mmu);
            return (left < count).then_some(());
        };
        let stand = match domain.mmu.populate(run.first, run.count.get()) {
            Ok(()) => run.count.get(),
            Err(partial) => partial.done,
        };
        for step in 0..stand {
            domain.frames.set_zeroed(run.first.plus(step), Zeroed::Yes);
        }
        if stand > 0 {
            // Whoever is woken by this finds out again, if that was the last memory.
            stack.refused.store(0, Ordering::SeqCst);
            stack.give(domain.mmu, run.first, stand);
        }
        left -= run.count.get();
        if stand < run.count.get() {
            // The system itself is out of memory: the rest is not ours to claim now.
            stack.refused.store(1, Ordering::SeqCst);
            stack.unpopulated.give(run.first.plus(stand), run.count.get() - stand);
            let missing = left + run.count.get() - stand;
            stack.holding.unclaim(missing);
            return (missing < count).then_some(());
        }
    }
    Some(())
}

/// Has `few` frames ready that are free and have memory, as far as the contract allows: whoever needs one next does not wait while a
/// group of frames gets its memory.
///
/// # Context
/// Normal or PagerThread, outside the gate.
pub fn claim_ahead(domain: &DomainState, few: NonZeroU32) {
    let _inside = domain.gate.enter(domain.mmu);
    let stack = &domain.stack;
    if stack.free.count() < few.get() {
        // Where there are no more, whoever needs one finds that out.
        let _ = claim(domain, stack.populate_run(few));
    }
}

/// Gives all frames memory that the contract still allows. `false`: the system has not so much.
///
/// # Context
/// Normal or PagerThread, outside the gate.
pub fn claim_all(domain: &DomainState) -> bool {
    let stack = &domain.stack;
    let claims = || {
        // One group at a time: who closes the gate waits for no more.
        let _inside = domain.gate.enter(domain.mmu);
        claim(domain, stack.unpopulated.rest_of_group()).is_some()
    };
    while claims() {}
    let Held { claimed, budget } = stack.holding.held();
    claimed >= budget
}

/// In a forked child, which did not get the pool: frames that no page has mapped lost their memory, and standby pages are
/// with their pager alone.
///
/// # Context
/// Normal, with the gate closed.
pub fn forget_unmapped(domain: &DomainState) {
    let stack = &domain.stack;
    while let Some(frame) = reclaim_standby(domain) {
        stack.free.give(frame, 1);
    }
    while let Some(run) = stack.free.take(NonZeroU32::MAX, || {}) {
        stack.unclaim(domain.mmu, run.first, run.count.get());
    }
    stack.inherited.store(stack.claimed(), Ordering::Relaxed);
}

/// Takes the frame that has been on standby longest.
///
/// # Context
/// Trap, inside the gate.
pub fn reclaim_standby(domain: &DomainState) -> Option<Frame> {
    loop {
        if let Ok(frame) = pop_standby(domain)? {
            return Some(frame);
        }
    }
}

/// An entry of the standby list whose page came back, or went, since.
struct Stale;

/// Takes the oldest entry off the standby list, and the frame with it. `None`: there is none.
fn pop_standby(domain: &DomainState) -> Option<Result<Frame, Stale>> {
    let (frame, page) = domain.stack.standby.pop()?;
    let (frame, page) = (Frame(frame as u32), PageNo(page));
    let Some((region, word)) = domain.regions.find(page).and_then(|region| Some((region, region.word(page)?))) else {
        return Some(Err(Stale));
    };
    if !word.claim_standby(frame) {
        return Some(Err(Stale));
    }
    domain.stack.leaves_standby();
    domain.frames.set_owner(frame, None);
    let _ = domain.settle(region, page, Word::ABSENT);
    Counters::add(&domain.counters.evictions_total, 1);
    Some(Ok(frame))
}

/// Lists a page that is on standby already. Where the list is full, its oldest entry makes room: most often a stale one, and a
/// list that they have filled would take no page any more. `false`: other threads are at every entry, and the caller must
/// take the page back.
///
/// # Context
/// Trap, inside the gate.
#[must_use]
pub(crate) fn list_standby(domain: &DomainState, frame: Frame, page: PageNo) -> bool {
    while !domain.stack.standby.push(u64::from(frame.0), page.0) {
        match pop_standby(domain) {
            Some(Ok(oldest)) => domain.stack.give(domain.mmu, oldest, 1),
            Some(Err(Stale)) => {}
            None => return false,
        }
    }
    domain.stack.demand.available.signal(domain.mmu);
    true
}
