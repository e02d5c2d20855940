//! A lock that is one word: no allocation, no thread-local, and nothing of the C library's, which would call us back. A handler of a
//! signal may fork whatever its thread holds.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use selfpage_core::linux::{futex, thread};

use crate::sys;

const FREE: usize = 0;
/// Beside the holder: others wait.
const AWAITED: usize = 1;
const SPINS: u32 = 100;

/// A value behind a futex.
pub struct Lock<T> {
    /// The block of the thread that holds it, which is the same in a forked child, and whether others wait. That it says who holds it, from
    /// the first moment, is for handlers of signals that fork.
    word: AtomicUsize,
    /// The holder was interrupted by such a handler.
    interrupted: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: lock-word: only the holder of the word reaches the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The value, until it is dropped.
pub struct Held<'a, T>(&'a Lock<T>);

impl<T> Lock<T> {
    /// A free lock.
    pub const fn new(value: T) -> Lock<T> {
        Lock { word: AtomicUsize::new(FREE), interrupted: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Takes it if it is free.
    pub fn try_take(&self) -> Option<Held<'_, T>> {
        self.turn(FREE, thread::block()).then(|| Held(self))
    }

    /// Waits for it.
    pub fn take(&self) -> Held<'_, T> {
        for _ in 0..SPINS {
            if let Some(held) = self.try_take() {
                return held;
            }
            std::hint::spin_loop();
        }
        loop {
            let now = self.word.load(Ordering::Relaxed);
            if now == FREE {
                // There may be others that wait.
                if self.turn(FREE, thread::block() | AWAITED) {
                    return Held(self);
                }
            } else if now & !AWAITED == thread::block() && std::thread::panicking() {
                // Room for what a panic says is made before we hear of it, in a heap that may be locked.
                sys::abort("a bug of ours: a panic while memory is locked")
            } else if now & AWAITED != 0 || self.turn(now, now | AWAITED) {
                let _ = futex::wait(self.half(), (now | AWAITED) as u32, 0);
            }
        }
    }

    /// Whether the word was `from`, and is `to` now.
    fn turn(&self, from: usize, to: usize) -> bool {
        self.word.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Takes it until [`Lock::let_go`]: over a fork, with signals blocked. A thread that was in the middle of a change has it already, and
    /// goes on with it on both sides when the handler that forks has returned.
    pub fn hold(&self) {
        if self.word.load(Ordering::Relaxed) & !AWAITED == thread::block() {
            self.interrupted.store(true, Ordering::Relaxed);
        } else {
            std::mem::forget(self.take());
        }
    }

    /// Ends [`Lock::hold`], in the process that called it or in its child.
    ///
    /// # Safety
    /// *lock-word*: the calling thread, or in a child the thread it is a copy of, holds the lock.
    pub unsafe fn let_go(&self) {
        if !self.interrupted.swap(false, Ordering::Relaxed) {
            // SAFETY: lock-word: passed on from our caller.
            drop(unsafe { self.held() });
        }
    }

    /// What [`Lock::hold`] took, to be let go of.
    ///
    /// # Safety
    /// *lock-word*: as for [`Lock::let_go`].
    pub unsafe fn held(&self) -> Held<'_, T> {
        Held(self)
    }

    /// The half of the word that the kernel looks at before it lets a thread sleep. Nothing else reads it.
    fn half(&self) -> &AtomicU32 {
        // SAFETY: lock-word: the lower half of a word that lives as long, of which the kernel alone gets the address.
        unsafe { AtomicU32::from_ptr(self.word.as_ptr().cast()) }
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
        if self.0.word.swap(FREE, Ordering::Release) & AWAITED != 0 {
            futex::wake(self.0.half(), 1);
        }
    }
}
