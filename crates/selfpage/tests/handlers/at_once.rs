//! Handlers of several threads that fault at the same moment.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};

use selfpage::store::MemoryStore;
use selfpage::{Answer, Domain, FaultHandler, FaultKind, MemoryFault, Protection, Region, Trap};

use crate::{PAGE, read, unprotect, write};

const PAGES: usize = 32;

/// A handler's own write, to the page that belongs to the one that it was called for.
fn fault_too(base: &AtomicUsize, page: usize) {
    let other = base.load(SeqCst) + (PAGES / 2 + page) * PAGE;
    // SAFETY: test: a page of the region, which nobody holds a reference into.
    unsafe { (other as *mut u64).write_volatile(7) };
}

/// Has so many threads write to a page each, whose handler faults itself.
fn all_are_answered(region: &Region, handlers: usize) {
    std::thread::scope(|scope| {
        for page in 0..handlers {
            scope.spawn(move || write(region, page, 3));
        }
    });
    assert!((0..handlers).all(|page| read(region, page) == 3 && read(region, PAGES / 2 + page) == 7));
}

/// Each of the first pages' handlers writes to a page of its own, when all of them have begun.
fn all_fault_at_once(handlers: usize) {
    let base = Arc::new(AtomicUsize::new(0));
    let (from, begun) = (base.clone(), Barrier::new(handlers));
    let handler = move |fault: &MemoryFault<'_>| {
        let page = fault.offset_bytes() / PAGE;
        if page < handlers {
            begun.wait();
            fault_too(&from, page);
        }
        unprotect(fault)
    };
    // All comes in before, without a fault: one that is told late has the thread that waits there try again, and ask again.
    let domain = Domain::with_frames(8 * PAGES * PAGE).build().unwrap();
    let builder = domain.region(PAGES * PAGE).name("handled").trap(Trap::Worker).handler(handler);
    let region = builder.stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
    region.pin(0, PAGES * PAGE).unwrap();
    base.store(region.as_ptr() as usize, SeqCst);
    region.protect(0, PAGES * PAGE, Protection::Read).unwrap();
    all_are_answered(&region, handlers);
}

#[test]
fn handlers_that_fault_at_once_are_all_answered() {
    // The threads that answer are started as they are needed, so each domain is new.
    for handlers in [2, 3, 8] {
        (0..100).for_each(|_| all_fault_at_once(handlers));
    }
}

/// The same for pages that are absent: it is asked first, and passes them.
struct Passes {
    base: Arc<AtomicUsize>,
    handlers: usize,
    begun: Barrier,
}

impl FaultHandler for Passes {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        if fault.kind() == FaultKind::Missing {
            return Answer::Pass;
        }
        let page = fault.offset_bytes() / PAGE;
        if page < self.handlers {
            self.begun.wait();
            fault_too(&self.base, page);
        }
        unprotect(fault)
    }

    fn asks_first(&self) -> bool {
        true
    }
}

fn all_meet_absent_pages_at_once(handlers: usize) {
    let base = Arc::new(AtomicUsize::new(0));
    let passes = Passes { base: base.clone(), handlers, begun: Barrier::new(handlers) };
    let domain = Domain::with_frames(8 * PAGES * PAGE).build().unwrap();
    let builder = domain.region(PAGES * PAGE).name("passed").trap(Trap::Worker).handler(passes);
    let region = builder.stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
    base.store(region.as_ptr() as usize, SeqCst);
    region.pin(0, PAGES / 2 * PAGE).unwrap();
    region.protect(0, PAGES / 2 * PAGE, Protection::Read).unwrap();
    all_are_answered(&region, handlers);
}

#[test]
fn handlers_that_meet_passed_pages_at_once_are_all_answered() {
    (0..100).for_each(|_| all_meet_absent_pages_at_once(PAGES / 2));
}
