//! When no frame can be had: who waits for one, and when the wait ends in vain.

use crate::mmu::Mmu;
use crate::pager::PagerError;
use crate::sync::{AtomicU64, Event, Ordering};

/// Why no frame can be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortage {
    /// Every resident page is pinned by the program, the kernel or a device, or its pager has nowhere to save it to; or the policy names none
    /// that can go.
    AllHeld,
    /// The system has no memory for the frames that the contract still allows, and the domain holds none that could go.
    NoMemory,
    /// Pages cannot be saved: the store failed with this.
    Unsaved(PagerError),
}

impl Shortage {
    /// As a small number that is not zero, for words that have no room for more.
    pub(crate) const fn code(self) -> u32 {
        match self {
            Shortage::AllHeld => 1,
            Shortage::NoMemory => 2,
            Shortage::Unsaved(error) => error.code() + 2,
        }
    }

    pub(crate) const fn from_code(code: u32) -> Option<Shortage> {
        match code {
            0 => None,
            1 => Some(Shortage::AllHeld),
            2 => Some(Shortage::NoMemory),
            code => Some(Shortage::Unsaved(PagerError::from_code(code - 2))),
        }
    }
}

/// The demand for frames, and the evictor's answer to it.
#[derive(Default)]
pub struct Demand {
    /// Frames became available, or the evictor gave up.
    pub available: Event,
    /// Fewer frames are available than the reserve wants.
    pub wanted: Event,
    /// What the evictor found when it last looked in vain: a [`Shortage`], and above it the count of `wanted` from before it
    /// began to look. 0: it can free frames.
    verdict: AtomicU64,
}

impl Demand {
    /// Why no frame can be had, if the evictor says so.
    pub fn shortage(&self) -> Option<Shortage> {
        Shortage::from_code(self.verdict.load(Ordering::SeqCst) as u32)
    }

    /// No frame can be had, for this reason: an answer to whoever had asked when the count of `wanted` was `asked`, before
    /// the evictor began to look. Only the evictor may say so.
    pub fn state_shortage(&self, mmu: &dyn Mmu, asked: u32, why: Shortage) {
        self.verdict.store(u64::from(asked) << 32 | u64::from(why.code()), Ordering::SeqCst);
        self.available.signal(mmu);
    }

    /// Frames can be had again. Only the evictor may say so.
    pub fn end_shortage(&self) {
        self.verdict.store(0, Ordering::SeqCst);
    }
}

/// One thread's wait for a frame. It ends in vain only when the evictor has begun to look after it was asked: what was short a
/// while ago need not be so now.
#[derive(Clone, Copy, Default)]
pub struct FrameWait {
    /// The count of [`Demand::wanted`] that has this thread's own asking in it.
    asked: Option<u32>,
}

impl FrameWait {
    /// Asks the evictor for frames, and sleeps until there may be some; `seen` is the count of [`Demand::available`] from
    /// before the caller looked for one.
    ///
    /// # Context
    /// Trap, outside the gate.
    ///
    /// # Errors
    /// The evictor says that there is none to be had.
    pub fn sleep(&mut self, demand: &Demand, mmu: &dyn Mmu, seen: u32) -> Result<(), Shortage> {
        self.sleep_at_most(demand, mmu, seen, 0)
    }

    /// The same for whoever may come to need no frame, of which nobody tells: it looks again after `timeout_us` (0: without limit).
    ///
    /// # Context
    /// As for [`FrameWait::sleep`].
    ///
    /// # Errors
    /// As there.
    pub fn sleep_at_most(
        &mut self,
        demand: &Demand,
        mmu: &dyn Mmu,
        seen: u32,
        timeout_us: u32,
    ) -> Result<(), Shortage> {
        let verdict = demand.verdict.load(Ordering::SeqCst);
        if let Some(asked) = self.asked
            && let Some(shortage) = Shortage::from_code(verdict as u32)
            && ((verdict >> 32) as u32).wrapping_sub(asked).cast_signed() >= 0
        {
            return Err(shortage);
        }
        demand.wanted.signal(mmu);
        self.asked.get_or_insert_with(|| demand.wanted.count());
        demand.available.wait(mmu, seen, timeout_us);
        Ok(())
    }
}
