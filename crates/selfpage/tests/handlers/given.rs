//! Contents that a handler gives, beside snapshots and clones: the page was something else before.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::MemoryStore;
use selfpage::{Answer, DescriptorTable, Domain, FaultHandler, MemoryFault, PageBytes, Region, Trap};

use crate::dropped::Slow;
use crate::scenario::{here, in_child};
use crate::{FRAMES, PAGE, TRAPS, read, write};

/// What the handler gives.
const GIVEN: u64 = 4711;
/// The pages that it gives: nobody writes to them.
const PAGES: std::ops::Range<usize> = 3..8;

struct Gives;

impl FaultHandler for Gives {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        if PAGES.contains(&(fault.offset_bytes() / PAGE)) { Gives::give(fault) } else { Answer::Pass }
    }

    fn asks_first(&self) -> bool {
        true
    }
}

impl Gives {
    fn give(fault: &MemoryFault<'_>) -> Answer {
        let mut contents = [0; PAGE];
        contents[..8].copy_from_slice(&GIVEN.to_ne_bytes());
        // SAFETY: test: nobody refers to the page.
        match unsafe { fault.map(&contents) } {
            Ok(()) => Answer::Handled,
            Err(_) => Answer::Refuse,
        }
    }
}

/// It gives pages once it is told so, and counts them.
#[derive(Clone, Default)]
struct GivesInTime {
    gives: Arc<AtomicBool>,
    begun: Arc<AtomicUsize>,
}

impl FaultHandler for GivesInTime {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        if !self.gives.load(SeqCst) {
            return Answer::Pass;
        }
        self.begun.fetch_add(1, SeqCst);
        Gives::give(fault)
    }

    fn asks_first(&self) -> bool {
        true
    }
}

fn store() -> MemoryStore {
    MemoryStore::new(1 << 22).unwrap()
}

fn region(domain: &Domain, trap: Trap) -> Region {
    let region = domain.region(64 * PAGE).trap(trap).handler(Gives).stored(store()).unwrap();
    write(&region, 20, 20);
    region
}

#[test]
fn the_next_snapshot_has_what_a_handler_gave() {
    for (trap, name) in TRAPS {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("given.snap");
        let domain = Domain::with_frames(128 * PAGE).build().unwrap();
        let region = region(&domain, trap);
        let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
        snapshots.take().unwrap();
        let saved = |page: u64| {
            let mut bytes = [0; PAGE];
            Snapshot::open(&path).unwrap().read_page(0, page, &mut bytes).unwrap();
            u64::from_ne_bytes(bytes[..8].try_into().unwrap())
        };
        assert_eq!((saved(3), saved(20)), (0, 20), "{name}");
        // Only read: no first write tells of the page.
        assert!(PAGES.into_iter().all(|page| read(&region, page) == GIVEN), "{name}");
        assert_eq!(snapshots.take().unwrap().pages, PAGES.len() as u64, "{name}");
        assert_eq!((saved(3), saved(7), saved(20)), (GIVEN, GIVEN, 20), "{name}");
        assert_eq!(snapshots.take().unwrap().pages, 0, "{name}");
        // And what is written to it afterwards is told as ever.
        write(&region, 4, 5);
        assert_eq!(snapshots.take().unwrap().pages, 1, "{name}");
        assert_eq!((saved(3), saved(4)), (GIVEN, 5), "{name}");
    }
}

#[test]
fn a_handler_gives_contents_where_the_program_has_closed_all_descriptors() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(128 * PAGE).build().unwrap();
            let region = region(&domain, trap);
            // SAFETY: test: what a program does that closes whatever is open.
            assert_eq!(unsafe { libc::close_range(3, u32::MAX, 0) }, 0);
            assert!(PAGES.into_iter().all(|page| read(&region, page) == GIVEN), "{name}");
        })
        .well();
    }
}

/// Gives each page what the same page of another region has.
struct GivesFrom(usize);

impl FaultHandler for GivesFrom {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        let from = (self.0 + fault.offset_bytes() / PAGE * PAGE) as *const PageBytes;
        // SAFETY: test: a page of a region that lives as long, and that nobody writes to; nobody refers to the other.
        match unsafe { fault.map(&*from) } {
            Ok(()) => Answer::Handled,
            Err(_) => Answer::Refuse,
        }
    }

    fn asks_first(&self) -> bool {
        true
    }
}

#[test]
fn what_a_handler_gives_may_be_managed_itself() {
    for table in [DescriptorTable::Shared, DescriptorTable::Private] {
        in_child(here!(), &format!("{table:?}"), || {
            let domain = Domain::with_frames(128 * PAGE).descriptor_table(table).build().unwrap();
            let source = domain.region(64 * PAGE).stored(store()).unwrap();
            (0..64).for_each(|page| write(&source, page, page as u64 + 1));
            source.evict(0, source.len_bytes()).unwrap();
            let from = GivesFrom(source.as_ptr() as usize);
            let region = domain.region(64 * PAGE).handler(from).stored(store()).unwrap();
            assert!((0..64).all(|page| read(&region, page) == page as u64 + 1));
        })
        .well();
    }
}

#[test]
fn a_clone_does_not_inherit_what_was_given_after_it() {
    for (trap, name) in TRAPS {
        let domain = Domain::with_frames(128 * PAGE).build().unwrap();
        let source = region(&domain, trap);
        let clone = source.cow_clone(store()).unwrap();
        assert!(PAGES.into_iter().all(|page| read(&source, page) == GIVEN), "{name}");
        assert!(PAGES.into_iter().all(|page| read(&clone, page) == 0), "{name}: as it was at the cut");
        assert_eq!(read(&clone, 20), 20, "{name}");
    }
}

/// A clone needs the pages first, and only a pager thread can read them for it. Then the image needs them, and pager threads read that:
/// none of them may be waiting for it, however many handlers there are.
#[test]
fn an_image_is_read_while_handlers_wait_to_give_pages_that_it_needs() {
    // More than there are pager threads, and none of them among the pages that are read for the image at first.
    let given = 4 * FRAMES - 8..4 * FRAMES;
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("given.snap");
            let (handler, slow) = (GivesInTime::default(), Slow::new());
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let builder = domain.region(4 * FRAMES * PAGE).trap(trap).handler(handler.clone());
            let region = builder.stored_in(slow.clone()).unwrap();
            // These and the first pages are in the store in the end.
            given.clone().chain(0..given.start).for_each(|page| write(&region, page, page as u64 + 1));
            let clone = region.cow_clone(store()).unwrap();
            let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
            slow.slow.store(true, SeqCst);
            std::thread::scope(|scope| {
                let snapshot = scope.spawn(|| snapshots.take().unwrap());
                // The cut was made, and the image is at one of the first pages.
                slow.asked.wait();
                handler.gives.store(true, SeqCst);
                let region = &region;
                let readers: Vec<_> = given.clone().map(|page| scope.spawn(move || read(region, page))).collect();
                let inherited =
                    || clone.residency()[given.clone()].iter().filter(|byte| byte.load(SeqCst) != 0).count();
                // All handlers have asked, and as many pages as there are other pager threads wait for the image.
                while handler.begun.load(SeqCst) < given.len() || inherited() < 2 {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(50));
                slow.go_on.wait();
                assert!(readers.into_iter().all(|reader| reader.join().unwrap() == GIVEN));
                snapshot.join().unwrap();
            });
            handler.gives.store(false, SeqCst);
            let snapshot = Snapshot::open(&path).unwrap();
            for page in 0..4 * FRAMES {
                let mut bytes = [0; PAGE];
                snapshot.read_page(0, page as u64, &mut bytes).unwrap();
                assert_eq!(u64::from_ne_bytes(bytes[..8].try_into().unwrap()), page as u64 + 1, "in the image");
                assert_eq!(read(&clone, page), page as u64 + 1, "in the clone");
                assert_eq!(read(&region, page), if given.contains(&page) { GIVEN } else { page as u64 + 1 });
            }
        })
        .well();
    }
}

/// It passes the first pages of a sequence, and gives what follows.
struct GivesLater;

impl FaultHandler for GivesLater {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        if fault.offset_bytes() / PAGE < 8 { Answer::Pass } else { Gives::give(fault) }
    }

    fn asks_first(&self) -> bool {
        true
    }
}

#[test]
fn a_handler_is_asked_of_each_page_of_a_sequence() {
    for (trap, name) in TRAPS {
        // Enough frames for a fault to bring its neighbours along.
        let domain = Domain::with_frames(1024 * PAGE).build().unwrap();
        let region = domain.region(64 * PAGE).trap(trap).handler(GivesLater).stored(store()).unwrap();
        for page in 0..64 {
            assert_eq!(read(&region, page), if page < 8 { 0 } else { GIVEN }, "{name}: page {page}");
        }
    }
}

const SHARED: usize = 64;

/// It gives a page once two threads have asked for it: the one of them that is later finds it in core.
struct GivesBoth([AtomicUsize; SHARED]);

impl FaultHandler for GivesBoth {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        let asked = &self.0[fault.offset_bytes() / PAGE];
        asked.fetch_add(1, SeqCst);
        while asked.load(SeqCst) < 2 {
            std::thread::yield_now();
        }
        Gives::give(fault)
    }

    fn asks_first(&self) -> bool {
        true
    }
}

#[test]
fn two_threads_on_one_missing_page_both_have_it() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(128 * PAGE).build().unwrap();
            let handler = GivesBoth([const { AtomicUsize::new(0) }; SHARED]);
            let region = domain.region(SHARED * PAGE).trap(trap).handler(handler).stored(store()).unwrap();
            let both = Barrier::new(2);
            let reads = || {
                (0..SHARED).for_each(|page| {
                    both.wait();
                    assert_eq!(read(&region, page), GIVEN, "{name}: page {page}");
                });
            };
            std::thread::scope(|scope| [(); 2].map(|()| scope.spawn(reads)).map(|reader| reader.join().unwrap()));
        })
        .well();
    }
}
