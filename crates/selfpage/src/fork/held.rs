//! What the handlers of a fork hold from before it until after it.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use selfpage_core::linux::thread;

/// Locks that the thread which forks takes before, and gives back after, in the parent and in the child.
///
/// Handlers may be installed twice ([`crate::fork::Once`]): the second of each kind finds nothing to do.
pub(crate) struct OverFork<T> {
    /// The block of the thread that forks, which is the same in the child; 0 for none.
    by: AtomicUsize,
    held: UnsafeCell<Option<T>>,
}

// SAFETY: fork-held: only the thread whose block is in `by` reaches what is held, and it gives back itself what it took.
unsafe impl<T> Sync for OverFork<T> {}

impl<T> OverFork<T> {
    pub(crate) const fn nothing() -> OverFork<T> {
        OverFork { by: AtomicUsize::new(0), held: UnsafeCell::new(None) }
    }

    /// Before the fork. `take` waits until no other thread holds the same.
    pub(crate) fn hold(&self, take: impl FnOnce() -> T) {
        let own = thread::block();
        if self.is_held_here() {
            return;
        }
        let held = take();
        if self.by.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed).is_err() {
            crate::die("two threads hold for a fork what one can");
        }
        // SAFETY: fork-held: from here on it is ours.
        unsafe { *self.held.get() = Some(held) };
    }

    /// Whether the calling thread holds it.
    fn is_held_here(&self) -> bool {
        self.by.load(Ordering::Relaxed) == thread::block()
    }

    /// After the fork. `None`: nothing is held, or not by this thread.
    pub(crate) fn let_go(&self) -> Option<T> {
        if !self.is_held_here() {
            return None;
        }
        // SAFETY: fork-held: it is ours until the next line.
        let held = unsafe { (*self.held.get()).take() };
        self.by.store(0, Ordering::Release);
        held
    }
}
