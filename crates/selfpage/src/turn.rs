//! Turns: what one thread of a domain does at a time, without a lock that a forked child could find taken.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use selfpage_core::linux::signal;

/// What threads do one after the other.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    taken: AtomicBool,
}

/// The turn of this thread; it ends when this is dropped. A handler of a signal that wanted one meanwhile, or forked, could wait for its own
/// thread: none is let in.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    _quiet: signal::Quiet,
}

impl Turns {
    /// Waits for the turn.
    pub(crate) fn begin(&self) -> Turn<'_> {
        let quiet = signal::Quiet::begin();
        while self.taken.swap(true, Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(100));
        }
        Turn { turns: self, _quiet: quiet }
    }

    /// Nobody has the turn: in a forked child, or where a turn was forgotten that ends so.
    pub(crate) fn end(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.end();
    }
}
