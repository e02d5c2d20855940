//! The lock of the allocator: one word, nothing of the C library's, and a fork leaves it in order on both sides.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use selfpage_core::linux::{futex, thread};

const FREE: usize = 0;
/// Beside the holder: others wait.
const AWAITED: usize = 1;
const SPINS: u32 = 100;

/// A value that one thread at a time reaches.
#[derive(Debug)]
pub(super) struct Lock<T> {
    /// The block of the thread that holds it, which is the same in a forked child, and whether others wait. That it says who holds it, from
    /// the first moment, is for handlers of signals that fork.
    word: AtomicUsize,
    /// The holder forks. It may come again: handlers of the program's own allocate too, in the child before [`Lock::let_go`].
    over_fork: AtomicBool,
    /// How often the holder was interrupted by a handler that forks.
    interrupted: AtomicUsize,
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

/// What became of the value when a thread that forks took the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rest {
    /// It is whole.
    Whole,
    /// This thread was in the middle of a change, and goes on with it on both sides when the handler of the signal has returned.
    Interrupted,
}

impl<T> Lock<T> {
    pub(super) const fn new(value: T) -> Lock<T> {
        Lock {
            word: AtomicUsize::new(FREE),
            over_fork: AtomicBool::new(false),
            interrupted: AtomicUsize::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock.
    #[inline]
    pub(super) fn take(&self) -> Held<'_, T> {
        match self.word.compare_exchange(FREE, thread::block(), Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Held { lock: self, gives_back: true },
            Err(_) => self.take_contended(),
        }
    }

    #[cold]
    fn take_contended(&self) -> Held<'_, T> {
        let own = thread::block();
        if self.is_own() && self.over_fork.load(Ordering::Relaxed) {
            return Held { lock: self, gives_back: false };
        }
        if let Some(held) = self.try_take() {
            return held;
        }
        loop {
            let now = self.word.load(Ordering::Relaxed);
            if now == FREE {
                // There may be others that wait.
                if self.turn(FREE, own | AWAITED) {
                    return Held { lock: self, gives_back: true };
                }
            } else if now & AWAITED != 0 || self.turn(now, now | AWAITED) {
                let _ = futex::wait(self.half(), (now | AWAITED) as u32, 0);
            }
        }
    }

    /// The lock, unless somebody has it for longer than a moment.
    pub(super) fn try_take(&self) -> Option<Held<'_, T>> {
        let own = thread::block();
        (0..SPINS).find_map(|_| {
            std::hint::spin_loop();
            self.turn(FREE, own).then(|| Held { lock: self, gives_back: true })
        })
    }

    /// Whether the word was `from`, and is `to` now.
    fn turn(&self, from: usize, to: usize) -> bool {
        self.word.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Takes the lock over a fork, for this thread, until [`Lock::let_go`]. `None`: somebody has it for longer than a moment.
    pub(super) fn try_hold(&self) -> Option<Rest> {
        if self.is_own() {
            self.interrupted.store(self.interrupted.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            return Some(Rest::Interrupted);
        }
        std::mem::forget(self.try_take()?);
        self.over_fork.store(true, Ordering::Relaxed);
        Some(Rest::Whole)
    }

    /// Ends [`Lock::try_hold`], in the process that called it and in its child. Where this thread was interrupted it still has the lock.
    pub(super) fn let_go(&self) -> Rest {
        let interrupted = self.interrupted.load(Ordering::Relaxed);
        if interrupted > 0 {
            self.interrupted.store(interrupted - 1, Ordering::Relaxed);
            return Rest::Interrupted;
        }
        self.over_fork.store(false, Ordering::Relaxed);
        self.give_back();
        Rest::Whole
    }

    /// Whether this thread has it by [`Lock::try_hold`]: nobody else may end that.
    pub(super) fn is_held_over_fork(&self) -> bool {
        let is_held = || self.over_fork.load(Ordering::Relaxed) || self.interrupted.load(Ordering::Relaxed) > 0;
        self.is_own() && is_held()
    }

    /// Whether this thread holds it.
    pub(super) fn is_own(&self) -> bool {
        self.word.load(Ordering::Relaxed) & !AWAITED == thread::block()
    }

    /// The half of the word that the kernel looks at before it lets a thread sleep. Nothing else reads it.
    fn half(&self) -> &AtomicU32 {
        // SAFETY: alloc-lock: the lower half of a word that lives as long, of which the kernel alone gets the address.
        unsafe { AtomicU32::from_ptr(self.word.as_ptr().cast()) }
    }

    #[inline]
    fn give_back(&self) {
        if self.word.swap(FREE, Ordering::Release) & AWAITED != 0 {
            futex::wake(self.half(), 1);
        }
    }
}

impl<T> Held<'_, T> {
    /// Whether this thread holds the lock over a fork, and goes on to when this is dropped.
    pub(super) fn is_lent(&self) -> bool {
        !self.gives_back
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
