//! How many instructions of ring 3 closure and handler take: the CPU raises an exception behind each, and ring 0 counts those.
//!
//! # Source
//! AMD64 Architecture Programmer's Manual, volume 2, §13.1.4 (single stepping).

use std::sync::atomic::Ordering;

use selfpage_core::physical::{PhysAddr, PhysMemory};

use crate::entry::STEPS;
use crate::handler::Shared;
use crate::private::Private;

/// Flags of ring 3: one that is always set, and interrupts, of which there are none.
pub const FLAGS: u64 = 0x202;
const TRAP: u64 = 1 << 8;
/// Where an exception leaves the flags, in bytes below the top of the stack.
const FLAGS_BELOW: u64 = 24;

/// Counts instructions that are carried out at ring 3. Each takes two more at ring 0, so while they are counted everything is slow: some
/// 50 µs each where KVM emulates ring 0.
///
/// It begins and ends in the answer to a [`host_call`](crate::host_call) of the closure, and counts from that call's return on. What
/// faults is not carried out: it counts when it is tried again and does not fault. A string instruction that repeats itself counts as
/// often as it does. The closure can write its own count, as it
/// lies on its stack of ring 0.
#[derive(Clone, Copy)]
pub struct Steps<'m> {
    pub(crate) shared: &'m Shared,
    /// The end of the closure's stack of ring 0.
    pub(crate) closure_stack: PhysAddr,
    pub(crate) private: &'m Private,
}

/// How many instructions were counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stepped {
    /// The closure's.
    pub closure: u64,
    /// Those of its handler, for faults and questions.
    pub handler: u64,
}

/// Whether a side raises an exception behind each instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stepping {
    On,
    Off,
}

impl Stepping {
    pub const fn applied_to(self, flags: u64) -> u64 {
        match self {
            Stepping::On => flags | TRAP,
            Stepping::Off => flags & !TRAP,
        }
    }
}

impl Steps<'_> {
    /// Counts from now on, beginning at none.
    pub fn begin(&self) {
        let ((closure, at), (handler, of_handler)) = self.places();
        closure.store(at, 0);
        handler.store(of_handler, 0);
        self.shared.stepping.store(true, Ordering::Relaxed);
    }

    /// Counts no longer. How many there were.
    pub fn end(&self) -> Stepped {
        self.shared.stepping.store(false, Ordering::Relaxed);
        let ((closure, at), (handler, of_handler)) = self.places();
        Stepped { closure: closure.load(at), handler: handler.load(of_handler) }
    }

    fn places(&self) -> ((&PhysMemory, PhysAddr), (&PhysMemory, PhysAddr)) {
        let below = |end: PhysAddr| PhysAddr(end.0 - STEPS);
        let (handler, end) = self.private.ring0_stack();
        ((&self.shared.physical, below(self.closure_stack)), (handler, below(end)))
    }

    /// Has closure and handler go on as they should, before the closure does.
    pub(crate) fn apply(&self) {
        let stepping = if self.shared.stepping.load(Ordering::Relaxed) { Stepping::On } else { Stepping::Off };
        let flags = PhysAddr(self.closure_stack.0 - FLAGS_BELOW);
        let physical = &self.shared.physical;
        physical.store(flags, stepping.applied_to(physical.load(flags)));
        self.private.step(stepping);
    }
}
