//! Locks that no handler of a signal meets on the thread that has them.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use selfpage_core::linux::signal;

/// A lock, held. Meanwhile no handler of a signal is let in on this thread: one that wanted the same lock, or forked, would wait for its
/// own thread.
pub(crate) struct Undisturbed<Guard> {
    // First: it is given back before handlers are let in.
    guard: Guard,
    _quiet: signal::Quiet,
}

/// A mutex, held so.
pub(crate) type Locked<'a, T> = Undisturbed<MutexGuard<'a, T>>;

impl<Guard> Undisturbed<Guard> {
    /// Lets no handler in, and then has `lock` wait.
    pub(crate) fn hold(lock: impl FnOnce() -> Guard) -> Undisturbed<Guard> {
        let quiet = signal::Quiet::begin();
        Undisturbed { guard: lock(), _quiet: quiet }
    }
}

/// Holds a mutex, whatever befell those who had it before.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Locked<'_, T> {
    Undisturbed::hold(|| mutex.lock().unwrap_or_else(PoisonError::into_inner))
}

impl<Guard: Deref> Deref for Undisturbed<Guard> {
    type Target = Guard::Target;
    fn deref(&self) -> &Guard::Target {
        &self.guard
    }
}

impl<Guard: DerefMut> DerefMut for Undisturbed<Guard> {
    fn deref_mut(&mut self) -> &mut Guard::Target {
        &mut self.guard
    }
}
