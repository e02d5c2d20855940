//! What is made once in a process, by whoever asks for it first.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const NOT_YET: u32 = 0;
/// No process has this number.
const MADE: u32 = u32::MAX;
/// Between two looks at whether another thread has made it: once in the life of a process.
const PAUSE: Duration = Duration::from_micros(50);

/// A value in a static, as std's `OnceLock`. But there a child that is forked while another thread makes the value waits for ever, for a
/// thread that it does not have. Here it makes the value itself, from the beginning: what is made must do no harm the second time.
pub(crate) struct Once<T> {
    /// [`NOT_YET`], the process whose thread makes it, or [`MADE`].
    state: AtomicU32,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: made-once: one thread writes the value, before others read it.
unsafe impl<T: Send + Sync> Sync for Once<T> {}

impl<T> Once<T> {
    pub(crate) const fn new() -> Once<T> {
        Once { state: AtomicU32::new(NOT_YET), value: UnsafeCell::new(MaybeUninit::uninit()) }
    }

    /// The value, if it is made.
    ///
    /// # Context
    /// Trap.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        // SAFETY: made-once: it was written before the state.
        (self.state.load(Ordering::Acquire) == MADE).then(|| unsafe { (*self.value.get()).assume_init_ref() })
    }

    /// The value, made now by `make` if nobody has; waits for whoever is at it.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> T) -> &T {
        if self.is_mine_to_make() {
            // SAFETY: made-once: the state is ours, and says so until the value is there.
            unsafe { (*self.value.get()).write(make()) };
            self.state.store(MADE, Ordering::Release);
        }
        // SAFETY: made-once: it was written before the state.
        unsafe { (*self.value.get()).assume_init_ref() }
    }

    /// Waits until the value is made, or the state is this thread's.
    fn is_mine_to_make(&self) -> bool {
        loop {
            let now = self.state.load(Ordering::Acquire);
            if now == MADE {
                return false;
            }
            let own = std::process::id();
            if now == own {
                std::thread::sleep(PAUSE);
            } else if self.state.compare_exchange(now, own, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                // Nobody was at it, or a thread that a fork has left behind.
                return true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::child::in_child;

    #[test]
    fn threads_make_it_once_and_see_the_same() {
        for _ in 0..200 {
            let (once, made) = (Once::new(), AtomicUsize::new(0));
            let make = || made.fetch_add(1, Ordering::Relaxed) + 7;
            std::thread::scope(|scope| {
                (0..4).for_each(|_| drop(scope.spawn(|| assert_eq!(*once.get_or_make(make), 7))))
            });
            assert_eq!((made.load(Ordering::Relaxed), once.get()), (1, Some(&7)));
        }
    }

    /// With a `OnceLock` the child waits for ever.
    #[test]
    fn a_child_forked_in_the_middle_makes_its_own() {
        static VALUE: Once<u32> = Once::new();
        let (tell, told) = channel();
        let (go_on, goes_on) = channel::<()>();
        let maker = std::thread::spawn(move || {
            *VALUE.get_or_make(|| {
                tell.send(()).unwrap();
                let _ = goes_on.recv();
                1
            })
        });
        told.recv().unwrap();
        assert_eq!(VALUE.get(), None);
        let ended = in_child(|| {
            // SAFETY: test: a call without pointers, which ends the child where it hangs.
            unsafe { libc::alarm(10) };
            *VALUE.get_or_make(|| 2) == 2 && VALUE.get() == Some(&2)
        });
        assert_eq!(ended, 0, "the child hangs, or has its parent's half of a value");
        drop(go_on);
        assert_eq!(maker.join().unwrap(), 1);
        assert_eq!(VALUE.get(), Some(&1));
    }
}
