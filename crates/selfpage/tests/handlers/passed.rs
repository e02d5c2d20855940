//! Absent pages that a handler passes to a pager of the program's own, which waits.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
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

/// It gives what is absent its contents.
struct Gives;

impl FaultHandler for Gives {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        // SAFETY: test: nobody refers to the page.
        unsafe { fault.map(&[7; PAGE]) }.unwrap();
        Answer::Handled
    }

    fn asks_first(&self) -> bool {
        true
    }
}

/// It passes what is absent once its region has gone, and the next one comes as soon as that has given its addresses back.
struct Goes {
    domain: Arc<Domain>,
    addr: Arc<AtomicUsize>,
    asked: Arc<AtomicBool>,
    gone: Mutex<Receiver<()>>,
    next: Sender<Region>,
}

impl FaultHandler for Goes {
    fn handle(&self, _: &MemoryFault<'_>) -> Answer {
        self.asked.store(true, SeqCst);
        self.gone.lock().unwrap().recv().unwrap();
        Answer::Pass
    }

    fn asks_first(&self) -> bool {
        true
    }
}

impl Drop for Goes {
    fn drop(&mut self) {
        let region = self.domain.region(PAGE).at(self.addr.load(SeqCst)).handler(Gives).zero().unwrap();
        self.next.send(region).unwrap();
    }
}

#[test]
fn what_was_passed_in_a_region_is_asked_in_the_next_one_at_its_addresses() {
    in_child(here!(), "", || {
        let domain = Arc::new(Domain::with_frames(64 * PAGE).build().unwrap());
        let (goes, gone) = channel();
        let (next, comes) = channel();
        let (addr, asked) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let gone = Mutex::new(gone);
        let handler = Goes { domain: domain.clone(), addr: addr.clone(), asked: asked.clone(), gone, next };
        let region = domain.region(PAGE).handler(handler).zero().unwrap();
        let at = region.as_ptr() as usize;
        addr.store(at, SeqCst);
        // SAFETY: test: the page of the one region, or of the other.
        let reads = std::thread::spawn(move || unsafe { (at as *const u8).read_volatile() });
        until("the handler is asked", || asked.load(SeqCst));
        drop(region);
        goes.send(()).unwrap();
        let _next = comes.recv().unwrap();
        assert_eq!(reads.join().unwrap(), 7);
    })
    .well();
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
