//! Fork: the child has the blocks and the cache, page by page as either side writes.

use super::block::{self, PAGES};
use super::keeper;
use super::limit;
use super::lock::Rest;
use super::rounds::Rounds;
use super::workers::WORKERS;
use crate::fork::Once;

static REGISTERED: Once<()> = Once::new();

/// Has forks of this process take care of the allocator. Once is enough; who calls [`prepare`], [`parent`] and [`child`] himself
/// does not need it.
///
/// # Context
/// May allocate.
pub fn register() {
    // SAFETY: fork-handlers: three functions without arguments, which stay loaded as long as the allocator is used.
    REGISTERED.get_or_make(|| unsafe {
        libc::pthread_atfork(Some(before), Some(parent_after), Some(child_after));
    });
}

extern "C" fn before() {
    prepare();
}
extern "C" fn parent_after() {
    parent();
}
extern "C" fn child_after() {
    child();
}

/// Before a fork: brings the allocator to rest. This thread may go on to use it.
///
/// A handler of a signal may have interrupted this thread where it has the lock. Then nothing comes to rest: it goes on with what it was
/// doing on both sides, and until then neither may use the allocator.
pub fn prepare() {
    WORKERS.begin_fork();
    let mut rounds = Rounds::new();
    while PAGES.hold() == Rest::Whole && WORKERS.has_others() {
        // Somebody drops frames of a slot: in the child nobody would put it back.
        PAGES.let_go();
        rounds.pass();
    }
    WORKERS.end_fork();
}

/// After a fork, in the parent.
pub fn parent() {
    if PAGES.let_go() == Rest::Whole {
        // What became too much while the fork waited.
        block::settle(PAGES.take());
    }
}

/// After a fork, in the child.
pub fn child() {
    keeper::forget();
    limit::forget();
    WORKERS.forget_others();
    if PAGES.let_go() == Rest::Whole {
        // Nor does anybody look how much room there is.
        let mut pages = PAGES.take();
        pages.retention.most_bytes = usize::MAX;
        block::settle(pages);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use selfpage_core::linux::thread::{self, CpuSet};

    use super::*;
    use crate::alloc::frames::child;
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
