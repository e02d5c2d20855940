//! Fork: the child has the blocks and the cache, page by page as either side writes.

use super::block::{self, PAGES};
use super::keeper;
use super::limit;
use super::lock::Rest;
use super::rounds::Rounds;
use super::workers::WORKERS;
use crate::fork::Once;

static REGISTERED: Once<()> = Once::new();
static OUTER: Once<Outer> = Once::new();

/// What else comes to rest over a fork: locks under which somebody may wait for the allocator, and which so are taken before it. Who has some of
/// it may fork in a handler of a signal, and so may who has the allocator: nothing of all this is kept while a fork waits for the rest.
#[derive(Clone, Copy, Debug)]
pub struct Outer {
    /// Takes it. False: there was something that somebody has, who may wait for the allocator; and nothing was taken.
    pub try_hold: fn() -> bool,
    /// Gives it back, in the parent or before another try.
    pub let_go: fn(),
    /// Gives it back in the child.
    pub let_go_in_child: fn(),
}

/// As [`register`], and of what stands on the allocator as well. The first call counts.
///
/// # Context
/// May allocate.
pub fn register_with(outer: Outer) {
    OUTER.get_or_make(|| outer);
    register();
}

/// Has forks of this process take care of the allocator. Once is enough; who calls [`prepare`], [`parent`] and [`child`] himself
/// does not need it, nor whoever has blocks by [`GrowVec`](super::GrowVec) alone, or has a domain.
///
/// # Context
/// May allocate.
pub fn register() {
    // SAFETY: fork-handlers: three functions without arguments, which stay loaded as long as the allocator is used.
    REGISTERED.get_or_make(|| unsafe {
        libc::pthread_atfork(Some(prepare), Some(parent), Some(child));
    });
}

/// Before a fork: brings the allocator to rest. This thread may go on to use it.
///
/// A handler of a signal may have interrupted this thread where it has the lock. Then nothing comes to rest: it goes on with what it was
/// doing on both sides, and until then neither may use the allocator.
pub extern "C" fn prepare() {
    bring_to_rest(OUTER.get());
}

fn bring_to_rest(outer: Option<&Outer>) {
    // First: who has what this waits for may fork as well.
    WORKERS.pass_over_own();
    let mut rounds = Rounds::new();
    loop {
        // Somebody may have some of it for long, and wait for those at work himself: nobody is kept from beginning meanwhile.
        let has_outer = outer.is_none_or(|outer| (outer.try_hold)());
        WORKERS.begin_fork();
        let rests = has_outer && try_to_rest();
        if !rests {
            // Nothing is kept: whoever this waits for may fork, too, and wait for it.
            if let Some(outer) = outer.filter(|_| has_outer) {
                (outer.let_go)();
            }
            rounds.pass();
        }
        WORKERS.end_fork();
        if rests {
            return;
        }
    }
}

/// Whether the allocator is at rest. Else this thread has nothing of it.
fn try_to_rest() -> bool {
    match PAGES.try_hold() {
        // Somebody drops frames of a slot: in the child nobody would put it back.
        Some(Rest::Whole) if WORKERS.has_others() => {
            PAGES.let_go();
            false
        }
        rest => rest.is_some(),
    }
}

/// After a fork, in the parent. Does nothing where this thread has not called [`prepare`].
pub extern "C" fn parent() {
    go_on(OUTER.get());
}

fn go_on(outer: Option<&Outer>) {
    if !PAGES.is_held_over_fork() {
        return;
    }
    let rest = PAGES.let_go();
    // First: who gets the allocator now may be interrupted by a handler that forks.
    if let Some(outer) = outer {
        (outer.let_go)();
    }
    if rest == Rest::Whole {
        // What became too much while the fork waited.
        block::settle(PAGES.take());
    }
}

/// After a fork, in the child. Does nothing where this thread has not called [`prepare`], in the parent.
pub extern "C" fn child() {
    if !PAGES.is_held_over_fork() {
        return;
    }
    keeper::forget();
    limit::forget();
    WORKERS.forget_others();
    if PAGES.let_go() == Rest::Whole {
        // Nor does anybody look how much room there is.
        let mut pages = PAGES.take();
        pages.retention.most_bytes = usize::MAX;
        block::settle(pages);
    }
    if let Some(outer) = OUTER.get() {
        (outer.let_go_in_child)();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use selfpage_core::linux::thread::{self, CpuSet};

    use super::*;
    use crate::child;
    use crate::skip::skip;

    /// The calling thread runs before all others that do not say so, from now on. Whether it may.
    fn becomes_urgent() -> bool {
        let least = libc::sched_param { sched_priority: 1 };
        // SAFETY: test: the number outlives the call.
        unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const least) == 0 }
    }

    /// How often the calling thread has slept.
    fn sleeps() -> i64 {
        let mut used = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: test: a place for numbers, which are all zero before.
        unsafe {
            libc::getrusage(libc::RUSAGE_THREAD, used.as_mut_ptr());
            used.assume_init().ru_nvcsw
        }
    }

    /// As the C library's list of streams.
    static LIST: AtomicUsize = AtomicUsize::new(0);
    static TRIES: AtomicUsize = AtomicUsize::new(0);
    const OVER_LIST: Outer = Outer { try_hold: take_list, let_go: let_go_of_list, let_go_in_child: let_go_of_list };

    fn take_list() -> bool {
        while LIST.compare_exchange(0, thread::block(), Ordering::Acquire, Ordering::Relaxed).is_err() {
            thread::give_way();
        }
        TRIES.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn let_go_of_list() {
        LIST.store(0, Ordering::Release);
    }

    /// As the handler of a signal does, on a thread that it has interrupted. It comes back.
    fn forks(outer: Option<&Outer>) {
        bring_to_rest(outer);
        go_on(outer);
    }

    /// Runs `work`, which ends soon, or never.
    fn ends(work: impl FnOnce()) {
        child::forked(|| {
            // SAFETY: test: ends this child where it hangs.
            unsafe { libc::alarm(20) };
            work();
        });
    }

    #[test]
    fn two_threads_that_were_interrupted_at_work_and_fork_do_not_wait_for_each_other() {
        ends(|| {
            let begun = Barrier::new(2);
            let works_and_forks = || {
                let work = WORKERS.begin().unwrap();
                begun.wait();
                forks(None);
                WORKERS.end(work);
            };
            std::thread::scope(|scope| {
                (0..2).for_each(|_| _ = scope.spawn(works_and_forks));
            });
        });
    }

    #[test]
    fn who_has_the_allocator_and_forks_gets_what_another_fork_would_hold_over_it() {
        ends(|| {
            std::thread::scope(|scope| {
                let held = PAGES.take();
                let other = scope.spawn(|| forks(Some(&OVER_LIST)));
                while TRIES.load(Ordering::Relaxed) == 0 {
                    thread::give_way();
                }
                forks(Some(&OVER_LIST));
                drop(held);
                other.join().unwrap();
            });
        });
    }

    #[test]
    fn who_has_not_prepared_a_fork_ends_none() {
        ends(|| {
            let held = PAGES.take();
            let work = WORKERS.begin().unwrap();
            let neither = || {
                parent();
                child();
            };
            std::thread::scope(|scope| scope.spawn(neither).join()).unwrap();
            // Nor who has the lock for something else.
            neither();
            assert_eq!((PAGES.is_own(), WORKERS.own()), (true, 1));
            WORKERS.end(work);
            drop(held);
        });
    }

    static IS_WANTED: AtomicBool = AtomicBool::new(false);
    static IS_LEFT: AtomicBool = AtomicBool::new(false);

    /// As where somebody else has the list for long.
    fn take_list_when_it_is_left() -> bool {
        IS_WANTED.store(true, Ordering::Relaxed);
        while !IS_LEFT.load(Ordering::Relaxed) {
            thread::give_way();
        }
        take_list()
    }

    #[test]
    fn who_has_what_a_fork_would_hold_over_the_allocator_gives_back_what_is_kept() {
        const BYTES: usize = 8 << 20;
        register();
        ends(|| {
            let block = block::allocate(BYTES, 1).unwrap();
            // SAFETY: slot-held: a block that nobody uses.
            unsafe { block::free(block) };
            std::thread::scope(|scope| {
                let outer = Outer { try_hold: take_list_when_it_is_left, ..OVER_LIST };
                scope.spawn(move || forks(Some(&outer)));
                while !IS_WANTED.load(Ordering::Relaxed) {
                    thread::give_way();
                }
                assert!(block::trim(0) >= BYTES);
                IS_LEFT.store(true, Ordering::Relaxed);
            });
        });
    }

    static TIMES_TAKEN: AtomicUsize = AtomicUsize::new(0);

    /// Who has the list gets it again.
    fn take_list_again() -> bool {
        if LIST.load(Ordering::Relaxed) != thread::block() {
            IS_WANTED.store(TIMES_TAKEN.load(Ordering::Relaxed) > 0, Ordering::Relaxed);
            take_list();
        }
        TIMES_TAKEN.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn let_go_once() {
        if TIMES_TAKEN.fetch_sub(1, Ordering::Relaxed) == 1 {
            let_go_of_list();
        }
    }

    #[test]
    fn who_was_interrupted_at_work_and_waits_for_the_list_is_waited_for_by_nobody() {
        const OUTER: Outer = Outer { try_hold: take_list_again, let_go: let_go_once, let_go_in_child: let_go_once };
        ends(|| {
            assert!(take_list_again());
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let work = WORKERS.begin().unwrap();
                    forks(Some(&OUTER));
                    WORKERS.end(work);
                });
                while !IS_WANTED.load(Ordering::Relaxed) {
                    thread::give_way();
                }
                forks(Some(&OUTER));
                let_go_once();
            });
        });
    }

    #[test]
    fn who_forks_leaves_the_cpu_to_whoever_it_waits_for() {
        if !std::thread::spawn(becomes_urgent).join().unwrap() {
            return skip("fifo", "SCHED_FIFO is refused: be root, or raise ulimit -r");
        }
        register();
        child::forked(|| {
            CpuSet::only(thread::cpu()).bind(0).unwrap();
            let begun = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let work = WORKERS.begin().unwrap();
                    begun.wait();
                    while !WORKERS.is_awaited() {
                        thread::give_way();
                    }
                    WORKERS.end(work);
                });
                begun.wait();
                assert!(becomes_urgent());
                let before = sleeps();
                prepare();
                parent();
                // Else the other thread has the CPU only where the kernel takes it from those with more of a right after nearly a second.
                assert!(sleeps() > before);
            });
        });
    }
}
