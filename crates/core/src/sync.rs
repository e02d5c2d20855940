//! Atomics, and the three ways in which threads of a domain wait for one another.
//!
//! Under `--cfg loom` the atomics are loom's, so that the models in `tests/loom` explore every interleaving.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, fence};

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, fence};

pub use core::sync::atomic::Ordering;
pub use waiting::{Event, Gate, Inside, Unclosed};

/// A place between a look at a word and what is done about it, where the simulation lets another thread go on. Elsewhere
/// it is nothing.
#[cfg(not(feature = "sim"))]
pub(crate) const fn race() {}

#[cfg(feature = "sim")]
pub use racing::{RACE, race};

#[cfg(feature = "sim")]
mod racing {
    extern crate std;

    /// What the simulation does there.
    pub static RACE: std::sync::OnceLock<fn()> = std::sync::OnceLock::new();

    /// Calls it.
    pub fn race() {
        if let Some(race) = RACE.get() {
            race();
        }
    }
}

/// Two threads that each write one word and then read the other's: one of them sees the other's write. `SeqCst` accesses
/// promise that already, but loom takes them for `AcqRel` ones; this says it to loom.
fn total_order() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}

mod waiting {
    use super::{AtomicU32, Ordering, total_order};
    use crate::mmu::Mmu;

    /// Something that happens again and again, and that threads may wait for: a count and its sleepers.
    ///
    /// A waiter reads [`Event::count`], looks at the state it waits for, and only then sleeps on that count: a signal in
    /// between is never lost.
    #[derive(Default)]
    pub struct Event {
        count: AtomicU32,
        sleepers: AtomicU32,
    }

    impl Event {
        /// How often it has happened, modulo 2^32.
        pub fn count(&self) -> u32 {
            self.count.load(Ordering::SeqCst)
        }

        /// [`Event::count`], for a thread that sleeps on this event until it is told to end; `None`: it has been. Whoever tells
        /// it signals the event afterwards, so the count must be read before the look.
        pub fn count_unless(&self, ended: impl FnOnce() -> bool) -> Option<u32> {
            let seen = self.count();
            (!ended()).then_some(seen)
        }

        /// It happened: wakes every sleeper. Costs a system call only where somebody sleeps.
        ///
        /// # Context
        /// Trap.
        pub fn signal(&self, mmu: &dyn Mmu) {
            self.count.fetch_add(1, Ordering::SeqCst);
            total_order();
            if self.sleepers.load(Ordering::SeqCst) != 0 {
                mmu.rouse(&self.count, u32::MAX >> 1);
            }
        }

        /// Sleeps until it has happened since `seen` was read, or `timeout_us` has passed (0: without limit).
        pub fn wait(&self, mmu: &dyn Mmu, seen: u32, timeout_us: u32) {
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            total_order();
            if self.count() == seen {
                mmu.sleep(&self.count, seen, timeout_us);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    const CLOSED: u32 = 1 << 31;

    /// Who is inside the domain's tables right now.
    ///
    /// Whoever works on pages is inside. Fork, and the removal of a region, close the gate: they wait until everybody has
    /// left and keep newcomers out. Inside the gate a thread waits for its own I/O and for nothing else, so that the gate
    /// can always be closed; waits for a frame or for another thread's page happen outside.
    #[derive(Default)]
    pub struct Gate(AtomicU32);

    /// Proof that the holder is inside the gate.
    pub struct Inside<'a> {
        gate: &'a Gate,
        mmu: &'a dyn Mmu,
    }

    /// Why a gate was not closed: it is as before.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Unclosed {
        /// Somebody else has it closed.
        ByAnother,
        /// Somebody was inside all the time.
        InUse {
            /// Whether one has left after a sixteenth of the time, or later.
            left_late: bool,
        },
    }

    impl Gate {
        /// Goes inside; waits while the gate is closed.
        ///
        /// # Context
        /// Trap.
        pub fn enter<'a>(&'a self, mmu: &'a dyn Mmu) -> Inside<'a> {
            loop {
                let now = self.0.load(Ordering::SeqCst);
                if now & CLOSED != 0 {
                    mmu.sleep(&self.0, now, 0);
                } else if self.0.compare_exchange_weak(now, now + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                    return Inside { gate: self, mmu };
                }
            }
        }

        /// Whether whoever goes inside now would wait.
        pub fn is_closed(&self) -> bool {
            self.0.load(Ordering::Relaxed) & CLOSED != 0
        }

        /// Goes inside, unless the gate is closed.
        ///
        /// # Context
        /// Trap.
        pub fn try_enter<'a>(&'a self, mmu: &'a dyn Mmu) -> Option<Inside<'a>> {
            loop {
                let now = self.0.load(Ordering::SeqCst);
                if now & CLOSED != 0 {
                    return None;
                }
                if self.0.compare_exchange_weak(now, now + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                    return Some(Inside { gate: self, mmu });
                }
            }
        }

        /// In a forked child: whoever was inside, or had it closed, is not here.
        ///
        /// # Context
        /// Normal, while no other thread is at it.
        pub fn forget(&self) {
            self.0.store(0, Ordering::SeqCst);
        }

        /// Closes the gate and waits until nobody is inside, at most `timeout_us`.
        ///
        /// # Context
        /// Normal, outside the gate.
        ///
        /// # Errors
        /// The caller may try again. That matters where one inside waits for a kernel lock whose holder waits to get in.
        pub fn close(&self, mmu: &dyn Mmu, timeout_us: u32) -> Result<(), Unclosed> {
            if self.0.fetch_or(CLOSED, Ordering::SeqCst) & CLOSED != 0 {
                return Err(Unclosed::ByAnother);
            }
            let (begun_ns, most_ns) = (mmu.now_ns(), u64::from(timeout_us) * 1000);
            // How many are inside after a sixteenth of the time.
            let mut late = None;
            loop {
                let now = self.0.load(Ordering::SeqCst);
                if now == CLOSED {
                    return Ok(());
                }
                let look_ns = begun_ns + late.map_or(most_ns / 16, |_| most_ns);
                let wait_us = look_ns.saturating_sub(mmu.now_ns()) / 1000;
                if wait_us > 0 {
                    mmu.sleep(&self.0, now, wait_us as u32);
                } else if let Some(inside) = late.replace(now & !CLOSED) {
                    self.open(mmu);
                    return Err(Unclosed::InUse { left_late: now & !CLOSED < inside });
                }
            }
        }

        /// Opens the gate again.
        pub fn open(&self, mmu: &dyn Mmu) {
            self.0.fetch_and(!CLOSED, Ordering::SeqCst);
            mmu.rouse(&self.0, u32::MAX >> 1);
        }
    }

    impl Drop for Inside<'_> {
        fn drop(&mut self) {
            if self.gate.0.fetch_sub(1, Ordering::SeqCst) & CLOSED != 0 {
                self.mmu.rouse(&self.gate.0, u32::MAX >> 1);
            }
        }
    }
}
