//! Absent pages that a handler passes to a pager of the program's own, which waits.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

use selfpage::pager::UserPager;
use selfpage::{Answer, Domain, FaultHandler, FaultKind, MemoryFault, PageBytes, Protection, Region, Trap};

use crate::scenario::{here, in_child, until};
use crate::{PAGE, read, unprotect, write};

/// The pages whose fill waits: fewer than a domain has pager threads.
const WAITING: std::ops::Range<usize> = 0..2;
const PROTECTED: usize = 5;
const MET: usize = 6;

/// A pager that waits in the fill of some pages.
#[derive(Clone, Default)]
struct Waits {
    filling: Arc<AtomicUsize>,
    go_on: Arc<(Mutex<bool>, Condvar)>,
}

impl Waits {
    fn let_go(&self) {
        *self.go_on.0.lock().unwrap() = true;
        self.go_on.1.notify_all();
    }
}

impl UserPager for Waits {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        if WAITING.contains(&(index as usize)) {
            self.filling.fetch_add(1, SeqCst);
            let (may, told) = &*self.go_on;
            drop(told.wait_while(may.lock().unwrap(), |may| !*may).unwrap());
        }
        bytes[0] = index as u8 + 1;
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

/// It passes what is absent, and may touch another page while it answers for the protected one.
#[derive(Clone, Default)]
struct Passes {
    meets: Arc<AtomicBool>,
    base: Arc<AtomicUsize>,
}

impl FaultHandler for Passes {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        if fault.kind() == FaultKind::Missing {
            return Answer::Pass;
        }
        if fault.offset_bytes() / PAGE == PROTECTED && self.meets.load(SeqCst) {
            // SAFETY: test: a word of the region.
            unsafe { ((self.base.load(SeqCst) + MET * PAGE) as *mut u64).write_volatile(60) };
        }
        unprotect(fault)
    }

    fn asks_first(&self) -> bool {
        true
    }
}

#[test]
fn handlers_are_asked_while_the_pager_waits_in_fills_that_others_passed() {
    for (case, meets) in [("a page", false), ("a page, and another within its handler", true)] {
        in_child(here!(), case, || {
            let (pager, handler) = (Waits::default(), Passes::default());
            let domain = Domain::with_frames(64 * PAGE).build().unwrap();
            let region = domain.region(16 * PAGE).trap(Trap::Worker).handler(handler.clone());
            let region: &Region = &region.user(pager.clone()).unwrap();
            handler.base.store(region.as_ptr() as usize, SeqCst);
            handler.meets.store(meets, SeqCst);
            let first = [PROTECTED, MET].map(|page| page as u64 + 1);
            assert_eq!([PROTECTED, MET].map(|page| read(region, page)), first);
            region.protect(PROTECTED * PAGE, 2 * PAGE, Protection::Read).unwrap();
            std::thread::scope(|scope| {
                for page in WAITING {
                    scope.spawn(move || assert_eq!(read(region, page), page as u64 + 1));
                    until("a page is being filled", || pager.filling.load(SeqCst) > page);
                }
                // It hangs here where nobody answers.
                write(region, PROTECTED, 50);
                let met = if meets { 60 } else { first[1] };
                assert_eq!([PROTECTED, MET].map(|page| read(region, page)), [50, met]);
                pager.let_go();
            });
        })
        .well();
    }
}
