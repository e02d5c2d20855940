//! What others build on a handler: a collector's write barrier, and a heap that persists.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use selfpage::store::MemoryStore;
use selfpage::{Answer, Domain, FaultHandler, FaultKind, MemoryFault, Protection};

use crate::{FRAMES, PAGE, TRAPS, read, word, write};

/// Old objects are protected; a write to one puts its page into the remembered set, so that a collection of the young looks for
/// pointers there alone.
#[test]
fn a_collectors_write_barrier() {
    const OLD: usize = 2 * FRAMES;
    for (trap, name) in TRAPS {
        let remembered = Arc::new(Mutex::new(BTreeSet::new()));
        let notes = remembered.clone();
        let barrier = move |fault: &MemoryFault<'_>| {
            notes.lock().unwrap().insert(fault.offset_bytes() / PAGE);
            match fault.protect_page(Protection::ReadWrite) {
                Ok(()) => Answer::Handled,
                Err(_) => Answer::Refuse,
            }
        };
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let heap = domain.region(2 * OLD * PAGE).trap(trap).handler(barrier);
        let heap = heap.stored(MemoryStore::new(1 << 24).unwrap()).unwrap();
        let young = |object: usize| (OLD * PAGE + object * 64) as u64;
        let mut dice = 7usize;
        for collection in 0..6u64 {
            heap.protect(0, OLD * PAGE, Protection::Read).unwrap();
            remembered.lock().unwrap().clear();
            let mut kept = BTreeSet::new();
            for object in 0..200 {
                dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                write(&heap, OLD + object % OLD, collection);
                if object % 3 == 0 {
                    // An old object points to a young one.
                    let page = (dice >> 33) % OLD;
                    // SAFETY: test: a word of the region.
                    unsafe { word(&heap, page).add(object).write_volatile(young(object) | collection << 56) };
                    kept.insert(object);
                }
            }
            let pages = remembered.lock().unwrap().clone();
            let mut found = BTreeSet::new();
            for page in &pages {
                for at in 0..200 {
                    // SAFETY: test: as above.
                    let value = unsafe { word(&heap, *page).add(at).read_volatile() };
                    if value == young(at) | collection << 56 {
                        found.insert(at);
                    }
                }
            }
            assert_eq!(found, kept, "{name}, collection {collection}");
            assert!(pages.len() <= kept.len(), "{name}: {} pages", pages.len());
        }
    }
}

/// What a heap is kept as: pages by number.
type Image = Arc<Mutex<Vec<[u8; PAGE]>>>;

/// Pages come from an image when they are first touched, and which have been written since the last commit is known.
struct Persistent {
    image: Image,
    dirty: Arc<Mutex<BTreeSet<usize>>>,
}

impl FaultHandler for Persistent {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        let page = fault.offset_bytes() / PAGE;
        let done = match fault.kind() {
            FaultKind::Missing => {
                let contents = self.image.lock().unwrap()[page];
                // The write that may be under way meets the protection then.
                // SAFETY: test: it stays in core, so it is given once.
                fault.protect_page(Protection::Read).and_then(|()| unsafe { fault.map(&contents) })
            }
            FaultKind::Protection => {
                self.dirty.lock().unwrap().insert(page);
                fault.protect_page(Protection::ReadWrite)
            }
        };
        done.map_or(Answer::Refuse, |()| Answer::Handled)
    }
    fn asks_first(&self) -> bool {
        true
    }
}

#[test]
fn a_heap_that_persists() {
    const PAGES: usize = 32;
    for (trap, name) in TRAPS {
        let image: Image = Arc::new(Mutex::new(vec![[0; PAGE]; PAGES]));
        for life in 0..4u64 {
            let dirty = Arc::new(Mutex::new(BTreeSet::new()));
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let handler = Persistent { image: image.clone(), dirty: dirty.clone() };
            let heap = domain.region(PAGES * PAGE).trap(trap).handler(handler).zero().unwrap();
            for page in 0..PAGES {
                let expected = if page % 4 == 1 { life } else { 0 };
                assert_eq!(read(&heap, page), expected, "{name}, life {life}, page {page}");
            }
            assert!(dirty.lock().unwrap().is_empty(), "{name}");
            (0..PAGES).filter(|page| page % 4 == 1).for_each(|page| write(&heap, page, life + 1));
            // The commit writes what was written, and no more.
            let written = std::mem::take(&mut *dirty.lock().unwrap());
            assert_eq!(written, (0..PAGES).filter(|page| page % 4 == 1).collect(), "{name}");
            for page in written {
                heap.protect(page * PAGE, PAGE, Protection::Read).unwrap();
                image.lock().unwrap()[page] = heap.as_slice::<[u8; PAGE]>()[page];
            }
            // Never committed.
            write(&heap, 2, 99);
            assert_eq!(*dirty.lock().unwrap(), BTreeSet::from([2]), "{name}");
        }
    }
}
