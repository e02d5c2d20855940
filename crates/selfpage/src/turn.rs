//! Turns: what one thread of a domain does at a time, without a lock that a forked child could find taken.

use std::sync::atomic::{AtomicU32, Ordering};

use selfpage_core::linux::{futex, signal};

/// What threads do one after the other.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// 1 while a thread has its turn.
    taken: AtomicU32,
}

/// The turn of this thread; it ends when this is dropped. A handler of a signal that wanted one meanwhile, or forked, could wait for its own
/// thread: none is let in.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    _quiet: signal::Quiet,
}

impl Turns {
    /// Waits for the turn. Meanwhile handlers of signals are let in, where the caller lets them in.
    pub(crate) fn begin(&self) -> Turn<'_> {
        loop {
            let quiet = signal::Quiet::begin();
            if self.taken.swap(1, Ordering::Acquire) == 0 {
                return Turn { turns: self, _quiet: quiet };
            }
            drop(quiet);
            let _ = futex::wait(&self.taken, 1, 0);
        }
    }

    /// Nobody has the turn: in a forked child, or where a turn was forgotten that ends so.
    pub(crate) fn end(&self) {
        self.taken.store(0, Ordering::Release);
        futex::wake(&self.taken, u32::MAX);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.end();
    }
}
