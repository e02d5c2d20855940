//! Pages that are given up: an access to them is to be refused, and there is no mapping more to refuse it with.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use selfpage::pager::{Context, PagerError};
use selfpage::snapshot::Snapshots;
use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{
    Answer, DescriptorTable, Domain, FaultHandler, FaultKind, Guards, Kind, Locking, MemoryFault, Protection, Region,
};

use crate::locking::may_lock;
use crate::no_mappings::{mappings, use_up_mappings};
use crate::over_memory::over_memory;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, until};
use crate::sealed::seal;
use crate::store::Failing;
use crate::tried;

const FRAMES: usize = 64;
const PAGES: usize = 8;
const MADV_GUARD_REMOVE: i32 = 103;
const MCL_ONFAULT: i32 = 4;
const TABLES: [DescriptorTable; 2] = [DescriptorTable::Shared, DescriptorTable::Private];
/// Locked pages take no guard.
const LOCKINGS: [Locking; 2] = [Locking::WherePermitted, Locking::Never];

/// What refuses an access takes a mapping, as a rule.
#[test]
fn a_page_that_is_given_up_to_refuse_an_access_is_said_to_be_lost() {
    for handler in [true, false] {
        in_child(here!(), &format!("{handler}"), || {
            tried::catch();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut builder = domain.region(8 * PAGE).name("heap");
            if handler {
                builder = builder.handler(|_: &MemoryFault<'_>| Answer::Refuse);
            }
            let mut region = builder.zero().unwrap();
            number_pages(&mut region);
            let at = |page: usize| (region.as_ptr().addr() + page * PAGE) as *mut u64;
            region.protect(PAGE, PAGE, Protection::Read).unwrap();
            if !use_up_mappings(0) {
                return;
            }
            assert!(tried::write(at(1), 6).is_err() && tried::write(at(1), 6).is_err());
            let why = region.pin(PAGE, PAGE).unwrap_err();
            assert_eq!(why.kind(), Kind::Lost, "{why}");
            assert!(why.to_string().contains("discard it"), "{why}");
            check_pages(&region, (0..8).filter(|page| *page != 1));
            region.discard(PAGE, PAGE).unwrap();
            region.protect(PAGE, PAGE, Protection::ReadWrite).unwrap();
            assert_eq!(region.as_slice::<u64>()[512], 0);
            number_pages(&mut region);
            check_pages(&region, 0..8);
            region.pin(PAGE, PAGE).unwrap();
        })
        .well();
    }
}

#[test]
fn a_page_that_is_given_up_is_told() {
    if mappings().is_none() {
        return;
    }
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let mut region = domain.region(8 * PAGE).name("heap").zero().unwrap();
        number_pages(&mut region);
        region.protect(PAGE, PAGE, Protection::Read).unwrap();
        assert!(use_up_mappings(0));
        number_pages(&mut region);
    })
    .by_one_of(&[libc::SIGSEGV, libc::SIGBUS], &["region heap", "offset 4096", "given up", "vm.max_map_count"]);
}

/// Refuses what is asked of page 1, until it is told to ask no more.
struct Refusing {
    first: bool,
    refuses: Arc<AtomicBool>,
}

impl FaultHandler for Refusing {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        let refused = fault.offset_bytes() / PAGE == 1 && self.refuses.load(Ordering::Relaxed);
        if refused || fault.kind() == FaultKind::Protection { Answer::Refuse } else { Answer::Pass }
    }

    fn asks_first(&self) -> bool {
        self.first
    }
}

/// Where the page is, and what is asked of it, when it is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    /// In core, and written to.
    Resident,
    /// In a frame that is mapped nowhere, since nobody may access it.
    Aside,
    /// In a frame, and in the store.
    Standby,
    /// Nowhere: the handler is asked first.
    Absent,
}

const CASES: [Case; 4] = [Case::Resident, Case::Aside, Case::Standby, Case::Absent];

/// Gives page 1 of a region up. `None`: more mappings are allowed than can be made. With it, what has its handler refuse no more.
fn given_up(domain: &Domain, case: Case) -> Option<(Region, Arc<AtomicBool>)> {
    tried::catch();
    let refuses = Arc::new(AtomicBool::new(false));
    let handler = Refusing { first: case == Case::Absent, refuses: refuses.clone() };
    let store = MemoryStore::new((4 * PAGES * PAGE) as u64).unwrap();
    let mut region = domain.region(PAGES * PAGE).name("heap").handler(handler).stored(store).unwrap();
    number_pages(&mut region);
    match case {
        Case::Resident => region.protect(PAGE, PAGE, Protection::Read).unwrap(),
        Case::Aside => region.protect(PAGE, PAGE, Protection::None).unwrap(),
        Case::Standby => {
            region.protect(PAGE, PAGE, Protection::Read).unwrap();
            assert_eq!(region.evict(PAGE, PAGE).unwrap(), 1);
            region.flush(PAGE, PAGE).unwrap();
        }
        Case::Absent => region.discard(PAGE, PAGE).unwrap(),
    }
    refuses.store(true, Ordering::Relaxed);
    if !use_up_mappings(0) {
        return None;
    }
    assert!(tried::write(at(&region, 1), 6).is_err() && tried::write(at(&region, 1), 6).is_err());
    assert_eq!(region.pin(PAGE, PAGE).unwrap_err().kind(), Kind::Lost);
    check_pages(&region, (0..PAGES).filter(|page| *page != 1));
    Some((region, refuses))
}

fn at(region: &Region, page: usize) -> *mut u64 {
    (region.as_ptr().addr() + page * PAGE) as *mut u64
}

#[test]
fn a_page_that_is_given_up_is_as_new_once_it_is_discarded() {
    for (locking, case) in LOCKINGS.into_iter().flat_map(|how| CASES.map(|case| (how, case))) {
        in_child(here!(), &format!("{locking:?} {case:?}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let Some((mut region, refuses)) = given_up(&domain, case) else { return };
            refuses.store(false, Ordering::Relaxed);
            region.discard(PAGE, PAGE).unwrap();
            region.protect(PAGE, PAGE, Protection::ReadWrite).unwrap();
            assert_eq!(tried::read(at(&region, 1)), Ok(0));
            number_pages(&mut region);
            check_pages(&region, 0..PAGES);
            region.pin(PAGE, PAGE).unwrap();
        })
        .well();
    }
}

/// The thread that finds no mapping is one for handlers, which has no descriptors of ours.
#[test]
fn a_page_is_given_up_without_our_descriptors_and_nobody_reads_another_in_its_place() {
    for (table, locking) in TABLES.into_iter().flat_map(|table| LOCKINGS.map(|locking| (table, locking))) {
        in_child(here!(), &format!("{table:?} {locking:?}"), || {
            static AT: AtomicUsize = AtomicUsize::new(0);
            static ASKED: AtomicUsize = AtomicUsize::new(0);
            static BEGINS: AtomicBool = AtomicBool::new(false);
            tried::catch();
            let domain = Domain::with_frames(FRAMES * PAGE).descriptor_table(table).locking(locking).build().unwrap();
            // Now, since a thread takes mappings.
            let reader = std::thread::spawn(|| {
                until("there is a page to read", || AT.load(Ordering::Acquire) != 0);
                let at = AT.load(Ordering::Acquire) as *const u64;
                while let Ok(word) = tried::read(at) {
                    assert_eq!(word, 2);
                    BEGINS.store(true, Ordering::Release);
                }
            });
            let refuse = |_: &MemoryFault<'_>| {
                if ASKED.fetch_add(1, Ordering::Relaxed) > 1000 {
                    // A handler that panics has refused, too.
                    std::process::abort();
                }
                Answer::Refuse
            };
            let mut region = domain.region(PAGES * PAGE).handler(refuse).zero().unwrap();
            number_pages(&mut region);
            region.protect(PAGE, PAGE, Protection::Read).unwrap();
            if !use_up_mappings(0) {
                return;
            }
            AT.store(at(&region, 1).addr(), Ordering::Release);
            until("the page is read", || BEGINS.load(Ordering::Acquire));
            assert!(tried::write(at(&region, 1), 6).is_err());
            reader.join().unwrap();
            check_pages(&region, (0..PAGES).filter(|page| *page != 1));
            assert_eq!(region.pin(PAGE, PAGE).unwrap_err().kind(), Kind::Lost);
        })
        .well();
    }
}

/// Whoever discards a page while it is given up finds it so, or has it given up afterwards: it is known in either case.
#[test]
fn a_page_that_is_given_up_while_it_is_discarded_can_be_discarded() {
    for locking in LOCKINGS {
        in_child(here!(), &format!("{locking:?}"), || {
            tried::catch();
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let refuse = |_: &MemoryFault<'_>| Answer::Refuse;
            let mut region = domain.region(PAGES * PAGE).handler(refuse).zero().unwrap();
            number_pages(&mut region);
            region.protect(PAGE, PAGE, Protection::Read).unwrap();
            let address = at(&region, 1).addr();
            static ENDS: AtomicBool = AtomicBool::new(false);
            let writer = std::thread::spawn(move || {
                while !ENDS.load(Ordering::Relaxed) {
                    assert!(tried::write(address as *mut u64, 6).is_err());
                }
            });
            if use_up_mappings(0) {
                let ends = Instant::now() + Duration::from_millis(500);
                while Instant::now() < ends {
                    region.discard(PAGE, PAGE).unwrap();
                }
            }
            ENDS.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            // First: the handler may have been asked twice of one access, and have the other answer still to give. It refuses nothing now.
            region.protect(PAGE, PAGE, Protection::ReadWrite).unwrap();
            region.discard(PAGE, PAGE).unwrap();
            assert_eq!(tried::read(at(&region, 1)), Ok(0));
        })
        .well();
    }
}

#[test]
fn contents_move_to_a_page_that_was_given_up_and_not_from_there() {
    for (locking, case) in LOCKINGS.into_iter().flat_map(|how| CASES.map(|case| (how, case))) {
        in_child(here!(), &format!("{locking:?} {case:?}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let Some((region, refuses)) = given_up(&domain, case) else { return };
            refuses.store(false, Ordering::Relaxed);
            // SAFETY: test: nobody holds a reference into either range.
            let why = unsafe { region.move_contents(0, 2 * PAGE, &region, 4 * PAGE) }.unwrap_err();
            assert_eq!(why.kind(), Kind::Lost, "{why}");
            check_pages(&region, (0..PAGES).filter(|page| *page != 1));
            // SAFETY: test: as above.
            unsafe { region.move_contents(4 * PAGE, 2 * PAGE, &region, 0) }.unwrap();
            region.protect(PAGE, PAGE, Protection::ReadWrite).unwrap();
            assert_eq!([0, 1].map(|page| tried::read(at(&region, page))), [Ok(5), Ok(6)]);
            region.pin(PAGE, PAGE).unwrap();
        })
        .well();
    }
}

#[test]
fn what_lies_behind_a_page_that_was_given_up_is_flushed() {
    for (locking, case) in LOCKINGS.into_iter().flat_map(|how| CASES.map(|case| (how, case))) {
        in_child(here!(), &format!("{locking:?} {case:?}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let Some((region, _)) = given_up(&domain, case) else { return };
            let before = domain.stats().counts.saves_total as usize;
            let why = region.flush(0, PAGES * PAGE).unwrap_err();
            assert_eq!(why.kind(), Kind::Lost, "{why}");
            assert!(why.to_string().contains("4096..8192"), "{why}");
            assert_eq!(domain.stats().counts.saves_total as usize, before + PAGES - 1);
            region.flush(2 * PAGE, (PAGES - 2) * PAGE).unwrap();
        })
        .well();
    }
}

#[test]
fn a_page_that_is_given_up_can_be_protected() {
    for (locking, case) in LOCKINGS.into_iter().flat_map(|how| CASES.map(|case| (how, case))) {
        in_child(here!(), &format!("{locking:?} {case:?}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let Some((mut region, refuses)) = given_up(&domain, case) else { return };
            refuses.store(false, Ordering::Relaxed);
            for protection in [Protection::None, Protection::ReadWrite] {
                region.protect(0, PAGES * PAGE, protection).unwrap();
                assert!(tried::write(at(&region, 1), 6).is_err(), "{protection:?}");
            }
            check_pages(&region, (0..PAGES).filter(|page| *page != 1));
            region.discard(PAGE, PAGE).unwrap();
            assert_eq!(tried::read(at(&region, 1)), Ok(0));
        })
        .well();
    }
}

/// A copy would replace what refuses the access.
#[test]
fn a_page_that_is_given_up_does_not_come_back_before_it_is_discarded() {
    for (locking, case) in LOCKINGS.into_iter().flat_map(|how| [Case::Standby, Case::Absent].map(|case| (how, case))) {
        in_child(here!(), &format!("{locking:?} {case:?}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let Some((region, _)) = given_up(&domain, case) else { return };
            region.protect(0, PAGES * PAGE, Protection::Read).unwrap();
            // To the store, and out of their frames.
            region.evict(0, PAGES * PAGE).unwrap();
            region.flush(2 * PAGE, (PAGES - 2) * PAGE).unwrap();
            let _ = region.evict(0, PAGES * PAGE);
            region.prefetch(0, PAGES * PAGE).unwrap();
            until("the others are in core", || {
                (0..PAGES).all(|page| page == 1 || region.residency()[page].load(Ordering::Relaxed) == 1)
            });
            check_pages(&region, (0..PAGES).filter(|page| *page != 1));
            assert!(tried::read(at(&region, 1)).is_err());
            assert_eq!(region.pin(PAGE, PAGE).unwrap_err().kind(), Kind::Lost);
        })
        .well();
    }
}

/// What is lost stays so, whatever the program says of guards.
#[test]
fn a_page_that_is_given_up_stays_so_where_guards_are_removed() {
    for locking in LOCKINGS {
        in_child(here!(), &format!("{locking:?}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let Some((mut region, refuses)) = given_up(&domain, Case::Resident) else { return };
            refuses.store(false, Ordering::Relaxed);
            let (start, all) = (region.as_ptr().addr(), PAGES * PAGE);
            let still = &region;
            let removed = region.while_still(move || {
                // SAFETY: test: the program's guards, of which there are none.
                assert_eq!(unsafe { libc::madvise(start as *mut _, all, MADV_GUARD_REMOVE) }, 0);
                still.set_guards(0, all, Guards::Removed)
            });
            removed.unwrap().unwrap();
            region.protect(PAGE, PAGE, Protection::ReadWrite).unwrap();
            assert!(tried::read(at(&region, 1)).is_err());
            assert_eq!(region.pin(PAGE, PAGE).unwrap_err().kind(), Kind::Lost);
            region.discard(PAGE, PAGE).unwrap();
            number_pages(&mut region);
            check_pages(&region, 0..PAGES);
        })
        .well();
    }
}

/// Locked since, they take no guard. As long as they are, nothing can be brought in that comes out of frames that are not.
#[test]
fn a_page_that_is_given_up_stays_so_where_guards_of_locked_memory_are_removed() {
    if !may_lock() {
        return;
    }
    for all in [true, false] {
        in_child(here!(), &format!("{all}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(Locking::Never).build().unwrap();
            let Some((mut region, refuses)) = given_up(&domain, Case::Resident) else { return };
            refuses.store(false, Ordering::Relaxed);
            let (start, len) = (region.as_ptr().addr(), PAGES * PAGE);
            // SAFETY: test: mappings are locked, and nothing else becomes of them.
            let locked = unsafe {
                match all {
                    true => libc::mlockall(libc::MCL_CURRENT | MCL_ONFAULT),
                    false => libc::mlock2(start as *const _, len, libc::MLOCK_ONFAULT),
                }
            };
            assert_eq!(locked, 0);
            let still = &region;
            let removed = region.while_still(move || {
                // SAFETY: test: the program's guards, of which there are none.
                assert_eq!(unsafe { libc::madvise(start as *mut _, len, MADV_GUARD_REMOVE) }, 0);
                still.set_guards(0, len, Guards::Removed).unwrap();
            });
            removed.unwrap();
            region.protect(PAGE, PAGE, Protection::ReadWrite).unwrap();
            assert!(tried::read(at(&region, 1)).is_err());
            assert_eq!(region.pin(PAGE, PAGE).unwrap_err().kind(), Kind::Lost);
            // SAFETY: test: as above.
            assert_eq!(unsafe { libc::munlockall() }, 0);
            region.discard(PAGE, PAGE).unwrap();
            number_pages(&mut region);
            check_pages(&region, 0..PAGES);
        })
        .well();
    }
}

/// A region whose page 1 may not be written to, and whose handler refuses all that it is asked of; and its clone.
fn with_a_clone(domain: &Domain) -> (Region, Region, Arc<Failing>) {
    tried::catch();
    let store = Failing::new();
    let refuse = |_: &MemoryFault<'_>| Answer::Refuse;
    let mut source = domain.region(PAGES * PAGE).name("heap").handler(refuse).stored_in(store.clone()).unwrap();
    number_pages(&mut source);
    source.protect(PAGE, PAGE, Protection::Read).unwrap();
    let clone = source.cow_clone(MemoryStore::new((4 * PAGES * PAGE) as u64).unwrap()).unwrap();
    (source, clone, store)
}

#[test]
fn a_clone_has_what_its_source_gives_up() {
    for locking in LOCKINGS {
        in_child(here!(), &format!("{locking:?}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let (mut source, clone, _) = with_a_clone(&domain);
            if !use_up_mappings(0) {
                return;
            }
            assert!(tried::write(at(&source, 1), 6).is_err());
            assert_eq!(source.pin(PAGE, PAGE).unwrap_err().kind(), Kind::Lost);
            check_pages(&clone, 0..PAGES);
            source.discard(0, 2 * PAGE).unwrap();
            assert_eq!([0, 1].map(|page| tried::read(at(&source, page))), [Ok(0), Ok(0)]);
            check_pages(&clone, 0..PAGES);
        })
        .well();
    }
}

/// Nobody has it then: not its source, and not the clone, which says so as its source does.
#[test]
fn what_a_clone_cannot_have_of_what_its_source_gives_up_is_given_up_there() {
    for locking in LOCKINGS {
        in_child(here!(), &format!("{locking:?}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let (mut source, mut clone, store) = with_a_clone(&domain);
            // To the store, and out of its frame.
            source.evict(PAGE, PAGE).unwrap();
            source.flush(PAGE, PAGE).unwrap();
            source.evict(PAGE, PAGE).unwrap();
            store.read.store(libc::EIO as u32, Ordering::SeqCst);
            if !use_up_mappings(0) {
                return;
            }
            assert!(tried::write(at(&source, 1), 6).is_err());
            store.read.store(0, Ordering::SeqCst);
            for region in [&mut source, &mut clone] {
                assert!(tried::read(at(region, 1)).is_err());
                assert_eq!(region.pin(PAGE, PAGE).unwrap_err().kind(), Kind::Lost);
                check_pages(region, (0..PAGES).filter(|page| *page != 1));
                region.discard(PAGE, PAGE).unwrap();
                assert_eq!(tried::read(at(region, 1)), Ok(0));
            }
        })
        .well();
    }
}

#[test]
fn a_region_with_a_page_that_was_given_up_has_no_image() {
    for locking in LOCKINGS {
        in_child(here!(), &format!("{locking:?}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let (folder, of_clone) =
                (tempfile::tempdir().unwrap(), MemoryStore::new((2 * PAGES * PAGE) as u64).unwrap());
            let Some((mut region, refuses)) = given_up(&domain, Case::Resident) else { return };
            let mut snapshots = Snapshots::of(&[&region], folder.path().join("snapshot")).unwrap();
            for why in [snapshots.take().unwrap_err(), region.cow_clone(of_clone).unwrap_err()] {
                assert_eq!(why.kind(), Kind::Lost, "{why}");
                assert!(why.to_string().contains("4096..8192") && why.to_string().contains("discard it"), "{why}");
            }
            refuses.store(false, Ordering::Relaxed);
            region.discard(PAGE, PAGE).unwrap();
            snapshots.take().unwrap();
        })
        .well();
    }
}

/// A store that does not give back the pages that [`number_pages`] has numbered and that are held.
struct Holding {
    store: MemoryStore,
    held: [AtomicBool; PAGES],
    asked: AtomicUsize,
}

impl BackingStore for Holding {
    over_memory!(store: claim, release, write);

    fn reads_in_trap(&self) -> bool {
        false
    }

    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        self.store.read(context, bloks)?;
        for read in bloks {
            let page = read.bytes[0] as usize - 1;
            self.asked.fetch_add(1, Ordering::SeqCst);
            until("the page is held no more", || !self.held[page].load(Ordering::SeqCst));
        }
        Ok(())
    }
}

/// What is not armed yet a cut arms, one page after the other. Each waits for those before it, and may be given up meanwhile.
#[test]
fn a_region_with_a_page_that_is_given_up_in_the_cut_has_no_image() {
    const FIRST: usize = 1;
    const GIVEN_UP: usize = 5;
    const WRITTEN: usize = 7;
    for (locking, is_clone) in LOCKINGS.into_iter().flat_map(|how| [true, false].map(|is_clone| (how, is_clone))) {
        in_child(here!(), &format!("{locking:?} {is_clone}"), || {
            tried::catch();
            let store = MemoryStore::new((2 * PAGES * PAGE) as u64).unwrap();
            let held = [const { AtomicBool::new(false) }; PAGES];
            let store = Arc::new(Holding { store, held, asked: AtomicUsize::new(0) });
            let domain = Domain::with_frames(FRAMES * PAGE).locking(locking).build().unwrap();
            let refuse = |_: &MemoryFault<'_>| Answer::Refuse;
            let builder = domain.region(PAGES * PAGE).name("heap").handler(refuse);
            let mut region = builder.stored_in(store.clone()).unwrap();
            number_pages(&mut region);
            region.protect(GIVEN_UP * PAGE, PAGE, Protection::Read).unwrap();
            if !seal(&region) {
                return;
            }
            for page in [FIRST, GIVEN_UP] {
                // To the store, and out of its frame.
                region.evict(page * PAGE, PAGE).unwrap();
                region.flush(page * PAGE, PAGE).unwrap();
                region.evict(page * PAGE, PAGE).unwrap();
                store.held[page].store(true, Ordering::SeqCst);
            }
            let (folder, of_clone) =
                (tempfile::tempdir().unwrap(), MemoryStore::new((2 * PAGES * PAGE) as u64).unwrap());
            let mut snapshots = Snapshots::of(&[&region], folder.path().join("snapshot")).unwrap();
            let (region, store) = (&region, &store);
            let (writes, ended) = (&AtomicUsize::new(0), &AtomicBool::new(false));
            let why = std::thread::scope(|scope| {
                let read = |page| move || tried::read(tried::word(region, page));
                scope.spawn(read(FIRST));
                let given_up = scope.spawn(read(GIVEN_UP));
                until("both pages are coming", || store.asked.load(Ordering::SeqCst) == 2);
                scope.spawn(move || {
                    while !ended.load(Ordering::SeqCst) {
                        tried::write(tried::word(region, WRITTEN), 1).unwrap();
                        writes.fetch_add(1, Ordering::SeqCst);
                    }
                });
                until("somebody writes", || writes.load(Ordering::SeqCst) > 0);
                let taken = scope.spawn(move || {
                    if is_clone { region.cow_clone(of_clone).map(drop) } else { snapshots.take().map(drop) }
                });
                until("nobody writes, since the cut is made", || {
                    let before = writes.load(Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(50));
                    writes.load(Ordering::SeqCst) == before
                });
                store.held[GIVEN_UP].store(false, Ordering::SeqCst);
                assert_eq!(given_up.join().unwrap(), Ok(GIVEN_UP as u64 + 1));
                assert!(tried::write(tried::word(region, GIVEN_UP), 1).is_err());
                assert_eq!(region.pin(GIVEN_UP * PAGE, PAGE).unwrap_err().kind(), Kind::Lost);
                assert!(!taken.is_finished(), "it waits for a page");
                store.held[FIRST].store(false, Ordering::SeqCst);
                let taken = taken.join().unwrap();
                ended.store(true, Ordering::SeqCst);
                taken.unwrap_err()
            });
            assert_eq!(why.kind(), Kind::Lost, "{why}");
            assert!(why.to_string().contains("20480..24576") && why.to_string().contains("discard it"), "{why}");
        })
        .well();
    }
}
