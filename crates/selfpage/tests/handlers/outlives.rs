//! Handlers that still run when their region is dropped: the access that they were asked about has gone on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use selfpage::{Domain, MemoryFault, Protection, Region, Trap};

use crate::scenario::{here, in_child};
use crate::{PAGE, handled, unprotect, write};

/// A region whose handler is still asked about a page that it has unprotected when it was asked by another thread. As soon as it may go on, and
/// some time later, it writes to the region, and notes that.
fn under_a_handler(may_go_on: Arc<AtomicBool>, wrote: Arc<AtomicBool>) -> (Domain, Region) {
    let (asked, base) = (Barrier::new(2), Arc::new(AtomicUsize::new(0)));
    let from = base.clone();
    let (domain, region) = handled(Trap::Worker, move |fault: &MemoryFault<'_>| {
        if asked.wait().is_leader() {
            while !may_go_on.load(SeqCst) {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(100));
            // SAFETY: test: a word of the region.
            unsafe { ((from.load(SeqCst) + 5 * PAGE) as *mut u64).write_volatile(1) };
            wrote.store(true, SeqCst);
        }
        unprotect(fault)
    });
    base.store(region.as_ptr() as usize, SeqCst);
    region.protect(0, PAGE, Protection::Read).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| write(&region, 0, 9));
        }
    });
    (domain, region)
}

#[test]
fn the_region_goes_when_it_has_answered() {
    in_child(here!(), "", || {
        let [may_go_on, wrote] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (_domain, region) = under_a_handler(may_go_on.clone(), wrote.clone());
        may_go_on.store(true, SeqCst);
        drop(region);
        assert!(wrote.load(SeqCst));
    })
    .well();
}

/// As where it waits for a lock of whoever drops the region.
#[test]
fn one_that_does_not_answer_finds_its_region_gone() {
    in_child(here!(), "", || {
        let [may_go_on, wrote] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (_domain, region) = under_a_handler(may_go_on.clone(), wrote.clone());
        drop(region);
        may_go_on.store(true, SeqCst);
        std::thread::sleep(Duration::from_secs(30));
        panic!("its write neither ended nor failed: {wrote:?}");
    })
    .by(libc::SIGSEGV, &[]);
}
