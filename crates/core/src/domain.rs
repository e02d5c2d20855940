//! A domain's tables, and the machine and counters that go with them: what every step of a fault works on.

use core::num::NonZeroU32;

use crate::addr::{Frame, PageNo, PageRange};
use crate::cut::Cut;
use crate::fault::handover::Handovers;
use crate::fault::{self, Request};
use crate::frame::{FrameBytes, FrameTable, Use, Zeroed};
use crate::mmu::{Mmu, Partial, Refusal, Trap};
use crate::page::{PageWord, State, Word};
use crate::region::{Region, RegionMap};
use crate::ring::Ring;
use crate::stack::{self, FrameStack};
use crate::stream::{DEPTH, Limits};
use crate::sync::{AtomicBool, AtomicU32, Event, Gate, Ordering};
use crate::trace::Counters;
use crate::tracer::{Event as Traced, Kind, Tracer};

/// Who owns frames and regions. The library's `Domain` gives it memory and threads.
///
/// # Source
/// Nemesis §4 and §6.2 (a domain and its contract).
pub struct DomainState {
    /// The machine.
    pub mmu: &'static dyn Mmu,
    /// Who is inside.
    pub gate: Gate,
    /// Every frame.
    pub frames: FrameTable,
    /// The frames that can be had.
    pub stack: FrameStack,
    /// Every region.
    pub regions: RegionMap,
    /// Work for pager threads that somebody waits for.
    pub requests: Ring,
    /// Work for pager threads that nobody waits for: they do it when there is no other.
    pub advice: Ring,
    /// There is work for pager threads.
    pub requested: Event,
    /// Threads that wait for what becomes of their faults.
    pub handovers: Handovers,
    /// Pages to be saved, with their frames.
    pub saves: Ring,
    /// There are pages to be saved.
    pub to_save: Event,
    /// A fork waits until none is: there is [room](crate::fault::save::room) for no more.
    pub draining: AtomicBool,
    /// The last save failed with this ([`crate::pager::PagerError`] as a code), 0 if it did not.
    pub save_trouble: AtomicU32,
    /// Its part in snapshots.
    pub cut: Cut,
    /// Whether any page was ever [protected from all access](crate::fault::protect::Protection::None): few programs do that.
    pub hides: AtomicBool,
    /// Counts.
    pub counters: Counters,
    /// Where events go.
    pub tracer: Tracer,
}

impl DomainState {
    /// Every page that has a frame to itself, in core or set aside, and its word: as long a walk as there were ever frames in use, however
    /// many there may be, and pages of regions.
    ///
    /// # Context
    /// Normal, with the gate closed.
    pub fn each_held(&self, mut visit: impl FnMut(&Region, PageNo, Word)) {
        for frame in (0..self.stack.begun()).map(Frame) {
            if let Some(page) = self.frames.owner(frame)
                && let Some(region) = self.regions.find(page)
                && let Some(seen) = region.word(page).map(PageWord::load)
                && matches!(seen.state(), State::Resident | State::Aside)
                && seen.frame() == frame
            {
                visit(region, page, seen);
            }
        }
    }

    /// Ends the claim of `page` of `region`, and wakes those who wait for it. `true`: a save of it is still in flight.
    ///
    /// # Context
    /// Trap, inside the gate, as the owner of the page.
    pub fn settle(&self, region: &Region, page: PageNo, next: Word) -> bool {
        let Some(word) = region.word(page) else { return false };
        region.set_resident(page, u8::from(next.state() == State::Resident));
        let settled = word.settle(next);
        if settled.awaited {
            self.wake(region, page);
        }
        settled.in_save
    }

    /// Wakes those who wait for `page`.
    pub(crate) fn wake(&self, region: &Region, page: PageNo) {
        if let Some(word) = region.word(page) {
            self.mmu.rouse(word.low_half(), u32::MAX >> 1);
        }
        self.wake_stopped(region.trap, PageRange { first: page, count: 1 });
    }

    /// Has the threads try again that are stopped on pages of `range`, of a region with this trap; a pager thread does, where the program
    /// has closed this thread's descriptors.
    ///
    /// # Context
    /// Any.
    pub fn wake_stopped(&self, trap: Trap, range: PageRange) {
        let mut at = range.first;
        while trap.is_read() && at < range.end() {
            let count = (range.end().0 - at.0).min(MOST_WOKEN) as u32;
            if !self.mmu.wake_faulters(trap, at, count) {
                while !fault::request(self, Request::Wake(at, count)) {
                    // Counted only now: the request has signalled itself, and whoever makes room does not.
                    let seen = self.requested.count();
                    self.requested.wait(self.mmu, seen, 1000);
                }
            }
            at = at.plus(count.into());
        }
    }

    /// Ends the claim of an unmapped page whose contents its pager has too: its frame goes on standby.
    pub(crate) fn settle_standby(&self, region: &Region, page: PageNo, next: Word) {
        self.stack.joins_standby();
        let _ = self.settle(region, page, next);
        self.publish_standby(region, page, next.frame());
    }

    /// Ends the claim of a page that was only looked at: it is what it was.
    pub(crate) fn put_back(&self, region: &Region, page: PageNo, seen: Word) {
        if seen.state() == State::Standby {
            self.stack.leaves_standby();
            self.settle_standby(region, page, Word::new(State::Standby, seen.frame()));
        } else {
            self.settle(region, page, Word::new(seen.state(), seen.frame()));
        }
    }

    /// Lists a page that is on standby already, or takes its frame where the list is full.
    pub(crate) fn publish_standby(&self, region: &Region, page: PageNo, frame: Frame) {
        if stack::list_standby(self, frame, page) {
            return;
        }
        let Some(word) = region.word(page) else { return };
        if word.claim_standby(frame) {
            self.stack.leaves_standby();
            self.settle_absent(region, page, frame);
        }
    }

    /// A page that was found aside is something else now.
    pub(crate) fn leaves_aside(&self, found: Word) {
        if !found.wishes().unmapped() {
            self.stack.leaves_sampled();
        }
    }

    /// Ends the claim of a page that loses its frame.
    pub(crate) fn settle_absent(&self, region: &Region, page: PageNo, frame: Frame) {
        self.settle_as(region, page, frame, Word::ABSENT);
    }

    /// The same, of one that could not be had. Its word says so at once: from then on another may have the page, and let it go again.
    pub(crate) fn settle_failed(&self, region: &Region, page: PageNo, frame: Frame) {
        self.settle_as(region, page, frame, Word::ABSENT.with_failure());
    }

    fn settle_as(&self, region: &Region, page: PageNo, frame: Frame, absent: Word) {
        self.frames.set_owner(frame, None);
        let _ = self.settle(region, page, absent);
        self.stack.give(self.mmu, frame, 1);
    }

    /// The memory of a frame is gone, which is nobody's now: it is given new memory.
    pub(crate) fn renew(&self, frame: Frame) {
        match self.mmu.populate(frame, 1) {
            Ok(()) => {
                // The slot should have been empty, but nothing has looked.
                self.frames.set_zeroed(frame, Zeroed::Unknown);
                self.stack.give(self.mmu, frame, 1);
            }
            Err(_) => self.stack.unclaim(self.mmu, frame, 1),
        }
    }

    /// Lists a frame that a page of `region` has in core now, for the policy to learn of.
    pub(crate) fn admit(&self, region: &Region, frame: Frame, use_: Use) {
        if region.pager().is_some_and(|pager| pager.saves()) {
            self.frames.admit(frame, use_);
        }
    }

    /// What becomes of a claimed page that the machine would not unmap, for the reason `why`: where it has a protection key it is copied.
    pub(crate) fn unmap_keyed(&self, region: &Region, page: PageNo, frame: Frame, why: Refusal) -> Result<(), Refusal> {
        if why != Refusal::Pinned || region.keyed.load(Ordering::Relaxed) == 0 {
            return Err(why);
        }
        self.mmu.unmap_by_copy(region.trap, page, frame)
    }

    /// Maps frames at neighbouring claimed pages of `region`, each protected as somebody wants it. The caller settles them all, also
    /// those that the machine refused.
    pub(crate) fn map(&self, region: &Region, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        let mut done = 0;
        while done < count {
            let first = page.plus(done.into());
            let protected = region.write_protected(first);
            let alike = |at: &u32| region.write_protected(page.plus((*at).into())) == protected;
            let run = 1 + (done + 1..count).take_while(alike).count() as u32;
            // The program may use a page before its word is settled, and finds it in core. The other way round, a page that is said
            // to be in core may not be mapped yet: the two cannot change at once, and a fault on it only waits a moment.
            for at in 0..run {
                region.set_resident(first.plus(at.into()), 1);
            }
            let mapped = if protected {
                self.mmu.map_to_read(region.trap, first, frame.plus(done), run)
            } else {
                self.mmu.map(region.trap, first, frame.plus(done), run)
            };
            mapped.map_err(|partial| Partial { done: done + partial.done, ..partial })?;
            done += run;
        }
        Ok(())
    }

    /// Notes what happened to a page just now, where somebody traces.
    pub(crate) fn trace(&self, page: PageNo, kind: Kind) {
        if self.tracer.is_on() {
            self.tracer.note(Traced { time_ns: self.mmu.now_ns(), page, kind, access: None, thread: 0 });
        }
    }

    /// The contents of `frame`, in its slot.
    pub(crate) fn lease(&self, frame: Frame) -> FrameBytes<'_> {
        crate::frame::lease(self.mmu, frame)
    }

    /// How much one fault may fetch: never more than a small part of the frames.
    pub fn limits(&self, most_now: u32, reads_ahead: ReadsAhead) -> Limits {
        let budget = self.stack.budget();
        let chunk = match reads_ahead {
            ReadsAhead::Yes => (budget / CHUNKS).min(MOST_AHEAD),
            ReadsAhead::No => 0,
        };
        Limits { now: most_now.min(budget / 32).max(1), chunk }
    }

    /// Frames that would be worth having now, for a fetch of `want`: no more than are ready, so that a fetch of more than
    /// one page never makes another fault wait.
    pub(crate) fn affordable(&self, want: u32) -> NonZeroU32 {
        NonZeroU32::new(want.min(self.stack.ready())).unwrap_or(NonZeroU32::MIN)
    }

    /// How many pages are where a fork copies none from: on their way to a store, or unmapped to see whether they are used.
    pub fn undrained(&self) -> usize {
        self.saves.len() + self.stack.sampled() as usize
    }

    /// Why saving fails, if it does.
    pub fn save_error(&self) -> Option<crate::pager::PagerError> {
        match self.save_trouble.load(Ordering::Relaxed) {
            0 => None,
            code => Some(crate::pager::PagerError::from_code(code)),
        }
    }
}

/// Pages of a region that one call wakes the threads of, at most.
const MOST_WOKEN: u64 = 1 << 20;

/// Chunks that the frames have room for, at least: what a stream has in front of it, the chunk that the program is in and those that
/// were asked for after it, is 1/32 of the frames.
pub const CHUNKS: u32 = 32 * (DEPTH + 1);

/// Pages in a chunk that is read ahead, at most.
pub const MOST_AHEAD: u32 = 512;

/// Whether a pager wants its patterns read ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadsAhead {
    /// It reads from somewhere slow.
    Yes,
    /// It makes its pages.
    No,
}
