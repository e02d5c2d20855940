//! A child that is forked while another thread makes the process's first domain has no part in that.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use selfpage::Domain;
use selfpage::trap::{on_pager_thread, starts_own_threads};

mod child;

const IDLE: u32 = 0;
/// The next allocation while a pager thread is being started waits until there was a fork.
const WAITING: u32 = 1;
const NOW: u32 = 2;

static STAGE: AtomicU32 = AtomicU32::new(IDLE);
static WAS_STARTER: AtomicBool = AtomicBool::new(false);

struct Forks;

// SAFETY: test: the system's own blocks.
unsafe impl GlobalAlloc for Forks {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let turns = || STAGE.compare_exchange(WAITING, NOW, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if STAGE.load(Ordering::SeqCst) == WAITING && on_pager_thread() && turns() {
            WAS_STARTER.store(starts_own_threads(), Ordering::SeqCst);
            while STAGE.load(Ordering::SeqCst) == NOW {
                std::thread::yield_now();
            }
        }
        // SAFETY: test: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: test: passed on.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static FORKS: Forks = Forks;

/// What it allocates would else be kept from being managed, for ever.
#[test]
fn a_child_starts_no_pager_thread_that_its_parent_was_starting() {
    let forker = std::thread::spawn(|| {
        while STAGE.load(Ordering::SeqCst) != NOW {
            std::thread::yield_now();
        }
        // The other thread's, and no concern of this one's but for where it may allocate.
        let told = (on_pager_thread(), starts_own_threads());
        let child = child::fork(|| !on_pager_thread() && !starts_own_threads());
        STAGE.store(IDLE, Ordering::SeqCst);
        (child.wait(), told)
    });
    STAGE.store(WAITING, Ordering::SeqCst);
    let domain = Domain::with_frames(64 * 4096).build().unwrap();
    assert_eq!(forker.join().unwrap(), (0, (true, false)));
    drop(domain);
    assert!(WAS_STARTER.load(Ordering::SeqCst) && !on_pager_thread() && !starts_own_threads());
}
