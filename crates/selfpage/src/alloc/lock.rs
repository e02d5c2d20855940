//! The lock of the allocator: one word, nothing of the C library's, and a fork leaves it in order on both sides.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use selfpage_core::linux::{futex, thread};

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const AWAITED: u32 = 2;
const SPINS: u32 = 100;

/// A value that one thread at a time reaches.
#[derive(Debug)]
pub(super) struct Lock<T> {
    word: AtomicU32,
    /// The block of the thread that forks, which is the same in the child. It may come again: handlers of the program's own allocate too,
    /// in the child before [`Lock::let_go`].
    forking: AtomicUsize,
    value: UnsafeCell<T>,
}

// SAFETY: alloc-lock: only the holder of the word reaches the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The value, until this is dropped.
#[derive(Debug)]
pub(super) struct Held<'a, T> {
    lock: &'a Lock<T>,
    gives_back: bool,
}

impl<T> Lock<T> {
    pub(super) const fn new(value: T) -> Lock<T> {
        Lock { word: AtomicU32::new(FREE), forking: AtomicUsize::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock.
    #[inline]
    pub(super) fn take(&self) -> Held<'_, T> {
        match self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Held { lock: self, gives_back: true },
            Err(_) => self.take_contended(),
        }
    }

    #[cold]
    fn take_contended(&self) -> Held<'_, T> {
        let forking = self.forking.load(Ordering::Relaxed);
        if forking != 0 && forking == thread::block() {
            return Held { lock: self, gives_back: false };
        }
        for _ in 0..SPINS {
            std::hint::spin_loop();
            if self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Held { lock: self, gives_back: true };
            }
        }
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            let _ = futex::wait(&self.word, AWAITED, 0);
        }
        Held { lock: self, gives_back: true }
    }

    /// Takes the lock over a fork, for this thread, until [`Lock::let_go`].
    pub(super) fn hold(&self) {
        std::mem::forget(self.take());
        self.forking.store(thread::block(), Ordering::Relaxed);
    }

    /// Ends [`Lock::hold`], in the process that called it and in its child.
    pub(super) fn let_go(&self) {
        self.forking.store(0, Ordering::Relaxed);
        self.give_back();
    }

    #[inline]
    fn give_back(&self) {
        if self.word.swap(FREE, Ordering::Release) == AWAITED {
            futex::wake(&self.word, 1);
        }
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: alloc-lock: this is the holder.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: alloc-lock: this is the holder, and `self` is borrowed alone.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.gives_back {
            self.lock.give_back();
        }
    }
}
