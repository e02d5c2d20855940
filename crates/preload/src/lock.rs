//! A lock that is one word: no allocation, no thread-local, and nothing of the C library's, which would call us back.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const AWAITED: u32 = 2;
const SPINS: u32 = 100;

/// A value behind a futex.
pub struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: lock-word: only the holder of the word reaches the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The value, until it is dropped.
pub struct Held<'a, T>(&'a Lock<T>);

impl<T> Lock<T> {
    /// A free lock.
    pub const fn new(value: T) -> Lock<T> {
        Lock { word: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Takes it if it is free.
    pub fn try_take(&self) -> Option<Held<'_, T>> {
        self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok().then(|| Held(self))
    }

    /// Waits for it.
    pub fn take(&self) -> Held<'_, T> {
        for _ in 0..SPINS {
            if let Some(held) = self.try_take() {
                return held;
            }
            std::hint::spin_loop();
        }
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            sys::sleep(&self.word, AWAITED);
        }
        Held(self)
    }

    /// Takes it until [`Lock::let_go`]: over a fork.
    pub fn hold(&self) {
        std::mem::forget(self.take());
    }

    /// Ends [`Lock::hold`], in the process that called it or in its child.
    ///
    /// # Safety
    /// *lock-word*: the calling thread, or in a child the thread it is a copy of, holds the lock.
    pub unsafe fn let_go(&self) {
        // SAFETY: lock-word: passed on from our caller.
        drop(unsafe { self.held() });
    }

    /// What [`Lock::hold`] took, to be let go of.
    ///
    /// # Safety
    /// *lock-word*: as for [`Lock::let_go`].
    pub unsafe fn held(&self) -> Held<'_, T> {
        Held(self)
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: lock-word: this is the holder.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: lock-word: this is the holder, and `self` is borrowed alone.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        if self.0.word.swap(FREE, Ordering::Release) == AWAITED {
            sys::rouse(&self.0.word);
        }
    }
}
