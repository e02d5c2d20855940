//! Waiting for another thread that wakes nobody when it is done.

use std::sync::atomic::AtomicU32;

use selfpage_core::linux::{futex, thread};

/// So often the CPU is only offered: whoever is waited for is about to be done.
const OFFERS: u32 = 16;
/// And from then on left for so long each time.
const NAP_US: u32 = 50;

/// How often the thread has looked in vain.
#[derive(Debug)]
pub(super) struct Rounds(u32);

impl Rounds {
    pub(super) const fn new() -> Rounds {
        Rounds(0)
    }

    /// Before the next look. A thread with more of a right to run (`SCHED_FIFO`) gives way to none with less by an offer: asleep it does. No
    /// point of cancellation.
    pub(super) fn pass(&mut self) {
        if self.0 < OFFERS {
            self.0 += 1;
            return thread::give_way();
        }
        // Nobody knows the word.
        let _ = futex::wait(&AtomicU32::new(0), 0, NAP_US);
    }
}
