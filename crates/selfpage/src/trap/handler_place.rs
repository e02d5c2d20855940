//! A thread for handlers, and what it is at: so that another can see to that, if it ends without a word.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use selfpage_core::linux::thread;

use crate::pthread::{self, Pthread};

/// In place of the number of a thread: no thread has this one.
const PASSES: u32 = super::thread::TAKEN;

/// Where a thread for handlers is noted.
pub(super) struct Place {
    /// What the C library calls it; 0: there is none.
    name: AtomicUsize,
    /// Whoever has started it waits for it no longer, and has left its name to whoever sees that it has ended.
    kept: AtomicBool,
    /// Its number while it runs a handler; [`PASSES`] while it has a page fetched that the handler has passed; else 0.
    thread: AtomicU32,
    /// The call that it has taken, until that is answered; an address of 0: none.
    addr: AtomicU64,
    what: AtomicU64,
    /// It has said that it ends.
    ends: AtomicBool,
}

/// What a thread was at when it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum At {
    /// At none of the others: it was idle.
    Nothing,
    Handler,
    /// Its handler had passed the page.
    Passing,
}

/// What a thread that has ended has left.
pub(super) struct Left {
    pub(super) thread: Pthread,
    pub(super) has_said: bool,
    pub(super) at: At,
    pub(super) call: (u64, u64),
}

impl Place {
    pub(super) const fn new() -> Place {
        Place {
            name: AtomicUsize::new(0),
            kept: AtomicBool::new(false),
            thread: AtomicU32::new(0),
            addr: AtomicU64::new(0),
            what: AtomicU64::new(0),
            ends: AtomicBool::new(false),
        }
    }

    pub(super) fn is_free(&self) -> bool {
        self.name.load(Ordering::Acquire) == 0
    }

    /// Whether its thread is the calling one.
    pub(super) fn is_own(&self) -> bool {
        self.name.load(Ordering::Acquire) == pthread::own_name() as usize
    }

    /// Takes it for the calling thread, which begins, where it is free. It names itself: it may fork in a handler before it is kept.
    pub(super) fn begin(&self) -> bool {
        self.name.compare_exchange(0, pthread::own_name() as usize, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Keeps its thread, which whoever has started it has heard. From now on anybody who sees that it has ended leaves it to itself.
    pub(super) fn keep(&self, thread: Pthread) {
        let _ = thread.into_raw();
        self.kept.store(true, Ordering::Release);
    }

    /// In a forked child: whether its thread is here, which has forked in its handler. Else it is free.
    pub(super) fn stays_in_child(&self) -> bool {
        if self.is_own() {
            self.thread.store(thread::id(), Ordering::SeqCst);
            // Whoever has started it is not here to do so.
            self.kept.store(true, Ordering::SeqCst);
            return true;
        }
        self.kept.store(false, Ordering::SeqCst);
        self.name.store(0, Ordering::SeqCst);
        self.thread.store(0, Ordering::SeqCst);
        self.addr.store(0, Ordering::SeqCst);
        self.ends.store(false, Ordering::SeqCst);
        false
    }

    /// Its thread takes a call, and is no idle one from now on.
    pub(super) fn take(&self, (addr, what): (u64, u64)) {
        self.what.store(what, Ordering::Relaxed);
        self.addr.store(addr, Ordering::Relaxed);
        self.thread.store(thread::id(), Ordering::Release);
    }

    /// The call is another one.
    pub(super) fn amend(&self, what: u64) {
        self.what.store(what, Ordering::Relaxed);
    }

    pub(super) fn what(&self) -> u64 {
        self.what.load(Ordering::Relaxed)
    }

    /// Whether its thread has this number, and is in a handler.
    pub(super) fn is_in_handler(&self, thread: u32) -> bool {
        self.thread.load(Ordering::Acquire) == thread
    }

    pub(super) fn leave_handler(&self) {
        self.thread.store(0, Ordering::Release);
    }

    /// The handler has passed the page.
    pub(super) fn pass(&self) {
        self.thread.store(PASSES, Ordering::Release);
    }

    /// What the handler has said is done.
    pub(super) fn done(&self) {
        self.addr.store(0, Ordering::Relaxed);
        self.thread.store(0, Ordering::Release);
    }

    /// Its thread ends by itself, and leaves nothing.
    pub(super) fn say_end(&self) {
        self.ends.store(true, Ordering::Release);
    }

    /// What its thread has left, if that has ended: then the place is free. One caller at a time: a thread's name is good only until it is left to itself.
    pub(super) fn vacate_if_over(&self) -> Option<Left> {
        if !self.kept.load(Ordering::Acquire) {
            return None;
        }
        let name = self.name.load(Ordering::Relaxed) as libc::pthread_t;
        // SAFETY: thread-joined-once: it is kept, so it has not been left to itself, and none but the caller looks.
        let has_ended = unsafe { pthread::has_ended(name) };
        if !has_ended && !self.ends.load(Ordering::Acquire) {
            return None;
        }
        let left = Left {
            // SAFETY: thread-joined-once: it is kept, and no longer from here on.
            thread: unsafe { Pthread::from_raw(name) },
            has_said: self.ends.swap(false, Ordering::AcqRel),
            at: match self.thread.swap(0, Ordering::AcqRel) {
                0 => At::Nothing,
                PASSES => At::Passing,
                _ => At::Handler,
            },
            call: (self.addr.swap(0, Ordering::Relaxed), self.what()),
        };
        self.kept.store(false, Ordering::Relaxed);
        self.name.store(0, Ordering::Release);
        Some(left)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::pthread::PROGRAM_STACK_BYTES;

    /// Where a thread is noted that has done `work` there, and has ended without a word: its name, which its starter has yet to keep.
    fn ended_after(work: impl FnOnce(&Place) + Send + 'static) -> (Arc<Place>, libc::pthread_t) {
        let place = Arc::new(Place::new());
        let of_thread = place.clone();
        let thread = pthread::start(c"noted", PROGRAM_STACK_BYTES, move || {
            assert!(of_thread.begin());
            work(&of_thread);
        });
        let name = thread.unwrap().into_raw();
        // SAFETY: test: it is neither joined nor left to itself before the caller keeps it.
        while !unsafe { pthread::has_ended(name) } {
            std::thread::yield_now();
        }
        (place, name)
    }

    #[test]
    fn a_thread_that_forks_before_its_starter_keeps_it_stays_in_the_child() {
        let place = Place::new();
        assert!(place.begin());
        assert!(place.stays_in_child());
        assert!(place.is_own() && place.kept.load(Ordering::Relaxed));
    }

    #[test]
    fn a_place_is_free_once_its_thread_is_kept_and_has_ended() {
        let (place, name) = ended_after(|_| {});
        assert!(place.vacate_if_over().is_none(), "its starter still has its name");
        // SAFETY: test: it has ended, and nobody else has its name.
        place.keep(unsafe { Pthread::from_raw(name) });
        let left = place.vacate_if_over().unwrap();
        assert!(!left.has_said && left.at == At::Nothing && left.call.0 == 0);
        assert!(place.is_free() && place.vacate_if_over().is_none());
        // The next one has to be kept as well.
        assert!(place.begin() && place.vacate_if_over().is_none());
    }

    #[test]
    fn what_a_thread_was_at_when_it_ended_is_known() {
        type Work = fn(&Place);
        let works: [(Work, At, u64); 4] = [
            (|place| place.take((7, 1)), At::Handler, 7),
            (|place| (place.take((7, 1)), place.leave_handler()).1, At::Nothing, 7),
            (|place| (place.take((7, 1)), place.pass()).1, At::Passing, 7),
            (|place| (place.take((7, 1)), place.pass(), place.done()).2, At::Nothing, 0),
        ];
        for (work, at, addr) in works {
            let (place, name) = ended_after(work);
            // SAFETY: test: it has ended, and nobody else has its name.
            place.keep(unsafe { Pthread::from_raw(name) });
            let left = place.vacate_if_over().unwrap();
            assert_eq!((left.at, left.call.0), (at, addr));
        }
    }
}
