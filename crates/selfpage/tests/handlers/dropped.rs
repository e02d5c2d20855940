//! Pages that a handler discards.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use selfpage::pager::{Context, PagerError};
use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{DescriptorTable, Domain, Kind, MemoryFault, Protection, Trap};

use crate::over_memory::over_memory;
use crate::scenario::{here, in_child};
use crate::{FRAMES, PAGE, TRAPS, read, unprotect, word, write};

/// Discards in the fault's region, of which the program holds no references.
fn discard(fault: &MemoryFault<'_>, first: usize, count: usize) -> selfpage::Result<()> {
    // SAFETY: test: as above.
    unsafe { fault.discard(first * PAGE, count * PAGE) }
}

#[test]
fn what_a_handler_discards_is_gone_in_core_and_out_of_it() {
    // Upcall regions want the program's own table.
    let private = (Trap::Worker, DescriptorTable::Private);
    for (trap, table) in [private, (Trap::Worker, DescriptorTable::Shared), (Trap::Upcall, DescriptorTable::Shared)] {
        let domain = Domain::with_frames(FRAMES * PAGE).descriptor_table(table).build().unwrap();
        let drops = |fault: &MemoryFault<'_>| {
            // The page of the fault, neighbours, and pages that are not in core.
            discard(fault, 5, 3).unwrap();
            discard(fault, 100, 2).unwrap();
            assert_eq!(discard(fault, 4 * FRAMES, 1).unwrap_err().kind(), Kind::Invalid);
            unprotect(fault)
        };
        let builder = domain.region(4 * FRAMES * PAGE).trap(trap).handler(drops);
        let region = builder.stored(MemoryStore::new(1 << 24).unwrap()).unwrap();
        (0..4 * FRAMES).for_each(|page| write(&region, page, page as u64 + 1));
        // SAFETY: test: a word of the region.
        let second = |page| unsafe { word(&region, page).add(1) };
        // SAFETY: test: as above.
        (4..9).for_each(|page| unsafe { second(page).write_volatile(9) });
        region.protect(5 * PAGE, PAGE, Protection::Read).unwrap();
        write(&region, 5, 50);
        // SAFETY: test: as above.
        let found: Vec<_> = (4..9).map(|page| (read(&region, page), unsafe { second(page).read_volatile() })).collect();
        assert_eq!(found, [(5, 9), (50, 0), (0, 0), (0, 0), (9, 9)], "{trap:?}, {table:?}");
        assert_eq!([99, 100, 101, 102].map(|page| read(&region, page)), [100, 0, 0, 103], "{trap:?}, {table:?}");
        // They are pages as any others.
        (100..102).for_each(|page| write(&region, page, 7));
        region.evict(100 * PAGE, 2 * PAGE).unwrap();
        assert_eq!([100, 101].map(|page| read(&region, page)), [7, 7], "{trap:?}, {table:?}");
    }
}

/// A store whose next read, once it is told so, waits in the middle.
pub struct Slow {
    store: MemoryStore,
    pub slow: AtomicBool,
    pub asked: Barrier,
    pub go_on: Barrier,
}

impl Slow {
    pub fn new() -> Arc<Slow> {
        let [asked, go_on] = [(); 2].map(|()| Barrier::new(2));
        Arc::new(Slow { store: MemoryStore::new(1 << 24).unwrap(), slow: false.into(), asked, go_on })
    }
}

impl BackingStore for Slow {
    over_memory!(store: claim, release, write);

    fn reads_in_trap(&self) -> bool {
        false
    }

    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        if self.slow.swap(false, SeqCst) {
            self.asked.wait();
            self.go_on.wait();
        }
        self.store.read(context, bloks)
    }
}

#[test]
fn a_snapshot_that_needs_a_page_has_it_before_a_handler_discards_it() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("dropped.snap");
            let store = Slow::new();
            let [begun, done] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
            let (begins, ends) = (begun.clone(), done.clone());
            let drops = move |fault: &MemoryFault<'_>| {
                begins.store(true, SeqCst);
                discard(fault, 240, 1).unwrap();
                ends.store(true, SeqCst);
                unprotect(fault)
            };
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let builder = domain.region(4 * FRAMES * PAGE).trap(trap).handler(drops);
            let region = builder.stored_in(store.clone()).unwrap();
            // The first pages are in the store in the end, and the last ones in core.
            (0..4 * FRAMES).for_each(|page| write(&region, page, page as u64 + 1));
            region.protect(220 * PAGE, PAGE, Protection::Read).unwrap();
            let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
            store.slow.store(true, SeqCst);
            std::thread::scope(|scope| {
                let snapshot = scope.spawn(|| snapshots.take().unwrap());
                // The cut was made, and the image is at one of the first pages.
                store.asked.wait();
                let writer = scope.spawn(|| write(&region, 220, 4));
                while !begun.load(SeqCst) {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(50));
                let dropped = done.load(SeqCst);
                store.go_on.wait();
                writer.join().unwrap();
                snapshot.join().unwrap();
                assert!(!dropped, "before the image had it");
            });
            let saved = |page: u64| {
                let mut bytes = [0; PAGE];
                Snapshot::open(&path).unwrap().read_page(0, page, &mut bytes).unwrap();
                u64::from_ne_bytes(bytes[..8].try_into().unwrap())
            };
            assert_eq!((saved(220), saved(240)), (221, 241));
            assert_eq!((read(&region, 220), read(&region, 240)), (4, 0));
            snapshots.take().unwrap();
            assert_eq!((saved(220), saved(240)), (4, 0), "the next one knows of it");
        })
        .well();
    }
}
