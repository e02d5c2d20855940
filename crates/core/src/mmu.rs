//! The machine under a domain: what maps and unmaps frames, and what stops and wakes threads.
//!
//! Three machines stand behind this trait: Linux (`UFFDIO_MOVE`), page tables of our own ([`crate::tables::TableMmu`]), and the
//! simulator of the tests. It knows addresses and frames and nothing else.
//!
//! # Source
//! Nemesis §6.3 (low-level translation: `map(va, pa, attr)`, `unmap(va)`), Cichlid §3.2.

use crate::addr::{Frame, PageBytes, PageNo};
use crate::region::Access;
use crate::sync::AtomicU32;

/// How a region's faults reach the domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trap {
    /// A pager thread reads the fault. System calls on absent pages work.
    Worker,
    /// `SIGBUS` on the faulting thread. Faster; a system call on an absent page fails with `EFAULT`.
    Upcall,
    /// As [`Trap::Worker`], and the machine notes which pages are written: what `RegionBuilder::tracked` makes of that.
    TrackedWorker,
    /// As [`Trap::Upcall`], and the machine notes which pages are written: what `RegionBuilder::tracked` makes of that.
    TrackedUpcall,
}

impl Trap {
    /// The same, and the machine notes which pages are written.
    pub const fn tracked(self) -> Trap {
        match self {
            Trap::Worker | Trap::TrackedWorker => Trap::TrackedWorker,
            Trap::Upcall | Trap::TrackedUpcall => Trap::TrackedUpcall,
        }
    }
    /// Whether the machine notes which pages are written.
    pub const fn is_tracked(self) -> bool {
        matches!(self, Trap::TrackedWorker | Trap::TrackedUpcall)
    }
    /// Whether a pager thread reads the fault.
    pub const fn is_read(self) -> bool {
        matches!(self, Trap::Worker | Trap::TrackedWorker)
    }
    /// Whether it is `SIGBUS` on the faulting thread.
    pub const fn is_signal(self) -> bool {
        !self.is_read()
    }
}

/// What becomes of writes to mapped pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writing {
    /// They go on, as the mapping lets them.
    Allowed,
    /// They are faults.
    Protected,
}

/// Why the machine could not do all that was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The destination of a map is populated already.
    Occupied,
    /// The source of a map or unmap holds nothing: dropped by somebody behind our back.
    Hole,
    /// The kernel or a device holds the page (direct I/O in flight, registered buffers, memory that is sealed and may not be written).
    Pinned,
    /// The address range is no longer the mapping that the domain made.
    Foreign,
    /// The descriptor of the machine is gone from this thread's table: hand over to a pager thread.
    NoDescriptor,
    /// The process is ending.
    Ending,
    /// The machine is out of its own memory (page tables).
    NoMemory,
    /// Somebody forbids the call: a filter on system calls that the program installed.
    Denied,
}

impl Refusal {
    /// Back from `self as u32`.
    pub(crate) const fn from_code(code: u32) -> Refusal {
        match code {
            0 => Refusal::Occupied,
            1 => Refusal::Hole,
            2 => Refusal::Pinned,
            3 => Refusal::Foreign,
            4 => Refusal::NoDescriptor,
            5 => Refusal::Ending,
            6 => Refusal::NoMemory,
            _ => Refusal::Denied,
        }
    }
}

/// A map or unmap that stopped early: `done` pages of it stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Partial {
    /// Pages at the front that were moved.
    pub done: u32,
    /// What stopped the next one.
    pub why: Refusal,
}

impl Partial {
    /// How many of the `count` pages of a call were done, and what stopped it.
    pub fn split(called: Result<(), Partial>, count: usize) -> (usize, Option<Refusal>) {
        match called {
            Ok(()) => (count, None),
            Err(partial) => (partial.done as usize, Some(partial.why)),
        }
    }
}

/// The translation system and the threads stopped on it.
///
/// # Context
/// Every function may be called in any context, a trap included: none allocates or locks.
pub trait Mmu: Sync {
    /// Maps the frames `[frame, frame+count)` at the pages `[page, page+count)` and wakes whoever waits for those
    /// pages. The frames' slots are empty afterwards. What is in the frames is visible at once and completely.
    ///
    /// # Errors
    /// [`Partial`]: the first `done` pages are mapped, the rest are as before.
    fn map(&self, trap: Trap, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial>;

    /// As [`Mmu::map`], and a write to one of the pages is a fault, from the first moment on.
    ///
    /// # Errors
    /// As for [`Mmu::map`].
    fn map_to_read(&self, trap: Trap, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        self.map(trap, page, frame, count)
    }

    /// Makes writes to the mapped pages of `[page, page+count)` faults, or lets them go on and wakes whoever waits to write.
    ///
    /// # Errors
    /// [`Partial`]: it is so for the first `done` pages, the rest are as before. [`Refusal::Denied`]: this machine cannot.
    fn set_writing(&self, _trap: Trap, _page: PageNo, _count: u32, _writing: Writing) -> Result<(), Partial> {
        Err(Partial { done: 0, why: Refusal::Denied })
    }

    /// Unmaps the pages `[page, page+count)` into the slots of `[frame, frame+count)`: no later write can reach them.
    ///
    /// # Errors
    /// [`Partial`]: the first `done` pages are unmapped, the rest are as before. [`Refusal::Foreign`]: what is there is not the
    /// domain's, and stays.
    fn unmap(&self, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial>;

    /// Unmaps a page that [`Mmu::unmap`] cannot move, because its mapping has a protection key and the frames' has none: it is copied
    /// while every write to it waits. What a device writes meanwhile is lost.
    ///
    /// # Errors
    /// As for [`Mmu::unmap`]; [`Refusal::Pinned`]: the machine knows of no such pages.
    fn unmap_by_copy(&self, _trap: Trap, _page: PageNo, _frame: Frame) -> Result<(), Refusal> {
        Err(Refusal::Pinned)
    }

    /// Copies what is mapped at `page` into the slot of `frame`, which must be populated; the page stays mapped.
    ///
    /// # Errors
    /// [`Refusal::Hole`]: nothing is mapped there. [`Refusal::Foreign`]: what is there is not the domain's. [`Refusal::Denied`]: it is there,
    /// and cannot be read.
    fn copy_out(&self, page: PageNo, frame: Frame) -> Result<(), Refusal>;

    /// Whether the page is populated as the machine sees it.
    fn present(&self, page: PageNo) -> bool;

    /// Whether a write to a page that is populated, in a region that is not tracked, would be a fault. Never, where a machine has no
    /// protection but what [`Mmu::set_writing`] and [`Mmu::map_to_read`] last said.
    fn faults_writes(&self, _page: PageNo) -> bool {
        false
    }

    /// Drops what the machine has at `[page, page+count)`, without keeping it; what is not the domain's stays.
    fn drop_pages(&self, page: PageNo, count: u32);

    /// Whether the page is not the domain's any more, and such an access to what is there now fails of itself, as one to a file does that
    /// was cut short: then the signal for it is the program's own.
    fn fails_of_itself(&self, _page: PageNo, _access: Access) -> bool {
        false
    }

    /// Wakes the threads stopped on `[page, page+count)`; they try their access again. `false`: this thread cannot, since the descriptor
    /// of the machine is gone from its table, and a pager thread must do it; or somebody forbids the call, and nobody can.
    fn wake_faulters(&self, trap: Trap, page: PageNo, count: u32) -> bool;

    /// Makes every access to the page fail (`SIGBUS`), and wakes whoever waits for it. `false`: nobody could be woken, as for
    /// [`Mmu::wake_faulters`].
    fn poison(&self, trap: Trap, page: PageNo) -> bool;

    /// Gives `[frame, frame+count)` physical memory if their slots have none, cleared to zero. A whole [group](crate::frame::GROUP)
    /// may come as neighbours; its slots must not have contents that anybody wants.
    ///
    /// # Errors
    /// [`Refusal::NoMemory`]: the system has none to give (the count says how many stand).
    fn populate(&self, frame: Frame, count: u32) -> Result<(), Partial>;

    /// Returns the physical memory of `[frame, frame+count)` to the system; their slots must be populated or empty.
    fn release(&self, frame: Frame, count: u32);

    /// Whether what was put into an unmapped frame is still there. A machine that others take frames from says no, for good, once a
    /// frame has been taken: so whoever asks after reading knows what was read.
    fn holds(&self, _frame: Frame) -> bool {
        true
    }

    /// The contents of an unmapped frame, in its slot; anything, if the machine no longer [`holds`](Mmu::holds) them.
    fn bytes(&self, frame: Frame) -> *mut PageBytes;

    /// Sleeps while `*word == expected`, for at most `timeout_us` microseconds (0: without limit). May return early.
    fn sleep(&self, word: &AtomicU32, expected: u32, timeout_us: u32);

    /// Wakes up to `count` sleepers on `word`.
    fn rouse(&self, word: &AtomicU32, count: u32);

    /// A monotonic clock, in nanoseconds.
    fn now_ns(&self) -> u64;
}
