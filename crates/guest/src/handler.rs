//! What answers the page faults of a closure: code of the program, at ring 3 of the same machine, on tables of its own.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use selfpage_core::addr::VirtAddr;
use selfpage_core::fault::{Fault, Outcome};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::region::Access;
use selfpage_core::tables::Tlb;

use crate::entry::{self, Call, Saved};
use crate::guest::Stopped;

/// Bits of the error code of a page fault.
const CODE_WRITE: u64 = 1 << 1;
const CODE_EXECUTE: u64 = 1 << 4;
/// How often an instruction may fault at one address, one time after the other.
const MOST_FAULTS: u32 = 100;

/// What ring 0 leaves: its words in order.
const FAULT_AT: u64 = 0;
const RAX: u64 = 8;
const CODE: u64 = 16;
const INSTRUCTION: u64 = 24;

/// Answers a closure's page faults, and its questions, in the guest, while the closure is stopped.
///
/// It reads the program, and writes all of the guest's RAM, page tables among it, and what [`Private`](crate::Private) keeps. It has
/// nothing else: no heap, no thread-local data, no statics that change, no system. So it takes no lock of std's, which look at
/// thread-local data once a thread has panicked. It asks the process by [`host_call`](crate::host_call).
pub trait Handler {
    /// The closure touched what its tables do not let it touch.
    fn fault(&mut self, fault: Fault) -> Outcome;

    /// The closure asked, by [`handler_call`](crate::handler_call).
    fn answer(&mut self, _call: Call) -> u64 {
        u64::MAX
    }
}

impl<F: FnMut(Fault) -> Outcome> Handler for F {
    fn fault(&mut self, fault: Fault) -> Outcome {
        self(fault)
    }
}

/// How often what happened to a guest.
#[derive(Default)]
pub struct Counts {
    pub(crate) exits: AtomicU64,
    pub(crate) faults: AtomicU64,
    pub(crate) calls: AtomicU64,
    pub(crate) forgotten_whole: AtomicU64,
    pub(crate) forgotten_pages: AtomicU64,
}

impl Counts {
    /// The machine stopped and the process went on: the questions of the closure and of the handler, the end, and signals.
    pub fn exits(&self) -> u64 {
        self.exits.load(Ordering::Relaxed)
    }

    /// Page faults that came to the handler.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// Questions that came to the handler.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// How often the rules told the CPU to forget all translations. It does that at each load of a root, whatever it was told.
    pub fn forgotten_whole(&self) -> u64 {
        self.forgotten_whole.load(Ordering::Relaxed)
    }

    /// How many single pages they told it to forget.
    pub fn forgotten_pages(&self) -> u64 {
        self.forgotten_pages.load(Ordering::Relaxed)
    }
}

/// What changed in the closure's page tables.
#[derive(Default)]
pub struct Changes {
    /// The root of the closure's.
    pub root: AtomicU64,
    /// Entries have changed that the CPU may know.
    pub stale: AtomicBool,
    /// The root's memory is something else now.
    pub revoked: AtomicBool,
}

/// What handler and process both look at.
pub struct Shared {
    pub physical: PhysMemory,
    pub changes: Changes,
    pub counts: Counts,
    /// Whether the closure's instructions are to be counted.
    pub stepping: AtomicBool,
}

impl Tlb for Shared {
    fn forget_all(&self) {
        self.counts.forgotten_whole.fetch_add(1, Ordering::Relaxed);
        self.changes.stale.store(true, Ordering::Relaxed);
    }

    fn forget(&self, _page: VirtAddr) {
        self.counts.forgotten_pages.fetch_add(1, Ordering::Relaxed);
        self.changes.stale.store(true, Ordering::Relaxed);
    }

    fn leave(&self, root: PhysAddr) {
        if root.0 == self.changes.root.load(Ordering::Relaxed) {
            self.changes.revoked.store(true, Ordering::Relaxed);
        }
    }
}

/// A handler with what it works on.
pub struct Station<'m, H> {
    pub handler: H,
    pub shared: &'m Shared,
    /// Where ring 0 leaves what it interrupted.
    pub interrupted: PhysAddr,
    /// Why the closure must not go on.
    pub verdict: Option<Stopped>,
    last: (VirtAddr, VirtAddr),
    repeated: u32,
}

impl<'m, H: Handler> Station<'m, H> {
    pub const fn new(handler: H, shared: &'m Shared, interrupted: PhysAddr) -> Station<'m, H> {
        let nowhere = (VirtAddr(0), VirtAddr(0));
        Station { handler, shared, interrupted, verdict: None, last: nowhere, repeated: 0 }
    }

    fn attend(&mut self, saved: &Saved) -> Result<(), Stopped> {
        let word = |offset| self.shared.physical.load(self.interrupted.plus(offset));
        let (at, code, by) = (VirtAddr(word(FAULT_AT) as usize), word(CODE), VirtAddr(word(INSTRUCTION) as usize));
        if by == entry::handler_call() {
            self.shared.counts.calls.fetch_add(1, Ordering::Relaxed);
            // It has gone on since its last fault.
            self.repeated = 0;
            let call = Call { number: saved.rdi, arguments: [saved.rsi, saved.rdx, saved.rcx] };
            let answer = self.handler.answer(call);
            self.shared.physical.store(self.interrupted.plus(RAX), answer);
            self.shared.physical.store(self.interrupted.plus(INSTRUCTION), entry::handler_called().0 as u64);
        } else {
            self.shared.counts.faults.fetch_add(1, Ordering::Relaxed);
            self.resolve(at, code, by)?;
        }
        let changes = &self.shared.changes;
        if changes.revoked.load(Ordering::Relaxed) {
            return Err(Stopped::Revoked);
        }
        // The way back loads the root, and with that the CPU forgets.
        changes.stale.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn resolve(&mut self, at: VirtAddr, code: u64, by: VirtAddr) -> Result<(), Stopped> {
        let access = if code & CODE_WRITE != 0 { Access::Write } else { Access::Read };
        self.repeated = if self.last == (at, by) { self.repeated + 1 } else { 0 };
        self.last = (at, by);
        if self.repeated > MOST_FAULTS {
            return Err(Stopped::NoProgress { at });
        }
        if code & CODE_EXECUTE != 0 {
            return Err(Stopped::Unregistered { at, access, by });
        }
        match self.handler.fault(Fault { addr: at, access, thread: 0 }) {
            Outcome::Resolved | Outcome::Retry | Outcome::Busy => Ok(()),
            Outcome::Failed(failure) => Err(Stopped::Failed(failure)),
            Outcome::NotOurs | Outcome::Violation | Outcome::Protected | Outcome::Missing => {
                Err(Stopped::Unregistered { at, access, by })
            }
        }
    }
}

/// What the handler's first instructions call.
pub extern "C" fn attend<H: Handler>(station: *mut Station<'_, H>, saved: *const Saved) {
    // SAFETY: guest-private: both lie in the handler's memory, and the process does not touch them while the guest runs.
    let (station, saved) = unsafe { (&mut *station, &*saved) };
    if let Err(stopped) = station.attend(saved) {
        station.verdict = Some(stopped);
        // SAFETY: guest-host-call: we are the handler.
        unsafe { entry::stop() }
    }
}
