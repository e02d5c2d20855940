//! Which threads work on slots' frames outside of the lock: a fork waits for the others, and its child goes on without them.

use std::sync::atomic::{AtomicUsize, Ordering};

use selfpage_core::linux::thread;

/// So many at a time. What further ones would drop these do, who go on until nothing is too many.
const PLACES: usize = 64;

/// In a place, beside the thread: a handler of a signal has interrupted it, and forks. It may wait for other forks, which do not wait for it.
const INTERRUPTED: usize = 1;

/// Those of [`super::block::PAGES`].
pub(super) static WORKERS: Workers = Workers::new();

/// The threads at work. They change under the lock; a handler of a signal that forks looks at them without it.
#[derive(Debug)]
pub(super) struct Workers {
    /// The blocks of the threads, 0 where there is none. One that was interrupted by a handler may be there twice.
    places: [AtomicUsize; PLACES],
    /// Forks that wait for them: until those have gone nobody begins, or one could wait for ever.
    forks: AtomicUsize,
}

/// One thread's work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work(usize);

impl Workers {
    const fn new() -> Workers {
        Workers { places: [const { AtomicUsize::new(0) }; PLACES], forks: AtomicUsize::new(0) }
    }

    /// The calling thread begins to work on a slot. [`Workers::end`] must follow. `None`: there are enough that do, or a fork waits.
    pub(super) fn begin(&self) -> Option<Work> {
        if self.is_awaited() {
            return None;
        }
        let own = thread::block();
        let takes = |place: &AtomicUsize| place.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        self.places.iter().position(takes).map(Work)
    }

    pub(super) fn end(&self, work: Work) {
        self.places[work.0].store(0, Ordering::Relaxed);
    }

    /// A fork is to wait. [`Workers::end_fork`] must follow.
    pub(super) fn begin_fork(&self) {
        self.forks.fetch_add(1, Ordering::Relaxed);
    }

    /// The calling thread is about to wait for others so that it can fork. Where it is at work, a handler of a signal has interrupted it: until that
    /// returns nobody is to wait for it, or two such threads would wait for each other.
    pub(super) fn pass_over_own(&self) {
        let own = thread::block();
        for place in &self.places {
            let _ = place.compare_exchange(own, own | INTERRUPTED, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// It waits no longer. In a child nothing waits, though a handler of a signal may have forked in the middle of this.
    pub(super) fn end_fork(&self) {
        let _ = self.forks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |forks| forks.checked_sub(1));
    }

    /// Whether a fork waits.
    pub(super) fn is_awaited(&self) -> bool {
        self.forks.load(Ordering::Relaxed) != 0
    }

    /// Those of other threads.
    fn of_others(&self) -> impl Iterator<Item = &AtomicUsize> {
        let own = thread::block();
        self.places.iter().filter(move |worker| ![0, own].contains(&(worker.load(Ordering::Relaxed) & !INTERRUPTED)))
    }

    /// Whether other threads are at work that a fork can wait for.
    pub(super) fn has_others(&self) -> bool {
        self.of_others().any(|worker| worker.load(Ordering::Relaxed) & INTERRUPTED == 0)
    }

    /// The child of a fork has no other threads. Slots that they were working on stay as they are, and are not used again.
    pub(super) fn forget_others(&self) {
        self.forks.store(0, Ordering::Relaxed);
        self.of_others().for_each(|worker| worker.store(0, Ordering::Relaxed));
    }

    /// How often the calling thread is there.
    #[cfg(test)]
    pub(super) fn own(&self) -> usize {
        let own = thread::block();
        self.places.iter().filter(|worker| worker.load(Ordering::Relaxed) & !INTERRUPTED == own).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_its_own_threads_work_alone() {
        let workers = Workers::new();
        let own = workers.begin().unwrap();
        assert!(!workers.has_others());
        // The thread stays until the end, so that no other has its block.
        let begun = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                workers.begin().unwrap();
                begun.wait();
                begun.wait();
            });
            begun.wait();
            assert!(workers.has_others());
            workers.forget_others();
            assert_eq!((workers.has_others(), workers.own()), (false, 1));
            begun.wait();
        });
        workers.end(own);
        assert_eq!(workers.own(), 0);
    }

    #[test]
    fn whoever_forks_in_the_middle_of_work_is_waited_for_by_nobody() {
        let workers = Workers::new();
        let begun = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let work = workers.begin().unwrap();
                begun.wait();
                begun.wait();
                workers.pass_over_own();
                begun.wait();
                begun.wait();
                assert_eq!(workers.own(), 1);
                workers.end(work);
                // It is as any other in what it does next.
                workers.begin().unwrap();
                begun.wait();
                begun.wait();
            });
            begun.wait();
            assert!(workers.has_others());
            begun.wait();
            begun.wait();
            assert!(!workers.has_others());
            begun.wait();
            begun.wait();
            assert!(workers.has_others());
            workers.forget_others();
            assert!(!workers.has_others());
            begun.wait();
        });
    }

    #[test]
    fn while_a_fork_waits_nobody_begins() {
        let workers = Workers::new();
        let before = workers.begin().unwrap();
        workers.begin_fork();
        workers.begin_fork();
        assert!(workers.begin().is_none());
        workers.end(before);
        workers.end_fork();
        assert!(workers.begin().is_none() && workers.own() == 0);
        workers.end_fork();
        assert!(workers.begin().is_some());
        // In a child no other fork waits, and one in the middle of which a handler forked ends there, too.
        workers.begin_fork();
        workers.forget_others();
        workers.end_fork();
        assert!(workers.begin().is_some());
    }

    #[test]
    fn where_all_places_are_taken_nobody_begins() {
        let workers = Workers::new();
        let works = [(); PLACES].map(|()| workers.begin().unwrap());
        assert!(workers.begin().is_none());
        workers.end(works[7]);
        assert_eq!(workers.begin().map(|work| work.0), Some(7));
    }
}
