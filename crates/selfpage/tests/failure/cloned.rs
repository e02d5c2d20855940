//! Clones where a store fails: the source's, or the clone's.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use selfpage::store::MemoryStore;
use selfpage::{Domain, Kind, Region, Trap};

use crate::scenario::{PAGE, check_pages, here, in_child, number_pages};
use crate::store::Failing;
use crate::tried;

const FRAMES: usize = 64;
const PAGES: usize = 4 * FRAMES;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];
const EIO: u32 = libc::EIO as u32;

fn numbered(domain: &Domain, pages: usize, trap: Trap) -> Region {
    let mut source = domain.region(pages * PAGE).name("source").trap(trap).stored(MemoryStore::new(1 << 30).unwrap());
    number_pages(source.as_mut().unwrap());
    source.unwrap()
}

/// The source goes while the clone's store has no room: as many pages as there are, it takes no longer than to find that out, and the
/// clone says what happened.
#[test]
fn a_source_that_goes_where_the_clone_has_no_room_is_named_as_the_cause() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let source = numbered(&domain, 16 * PAGES, trap);
            let mut clone = source.cow_clone(MemoryStore::new((8 * PAGE) as u64).unwrap()).unwrap();
            let began = Instant::now();
            drop(source);
            assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
            let (mut lacking, mut stored) = (0, 0);
            for page in 0..16 * PAGES {
                match clone.pin(page * PAGE, PAGE) {
                    Ok(()) => {
                        check_pages(&clone, page..page + 1);
                        clone.unpin(page * PAGE, PAGE).unwrap();
                    }
                    // There is no frame for what is in its store.
                    Err(error) if error.kind() == Kind::OutOfSpace => stored += 1,
                    Err(error) => {
                        assert_eq!(error.kind(), Kind::Lost, "{error}");
                        assert!(error.to_string().contains("clone"), "{error}");
                        assert!(error.to_string().contains("discard"), "{error}");
                        lacking += 1;
                    }
                }
            }
            assert!(stored <= 8 && (1..16 * PAGES - 8).contains(&lacking), "{lacking} pages, {stored} stored");
            let error = clone.cow_clone(MemoryStore::new(1 << 20).unwrap()).unwrap_err();
            assert!(error.to_string().contains("discard"), "{error}");
            clone.discard(0, 16 * PAGES * PAGE).unwrap();
            assert!(clone.as_slice::<u64>().iter().all(|word| *word == 0));
        })
        .well();
    }
}

/// A write that is refused changes nothing in either; when the clone's pages can be saved again all goes on.
#[test]
fn a_clone_that_cannot_be_saved_keeps_the_source_from_changing() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut source = numbered(&domain, PAGES, trap);
            source.flush(0, PAGES * PAGE).unwrap();
            let store = Failing::new();
            let clone = source.cow_clone(store.clone()).unwrap();
            store.write.store(EIO, SeqCst);
            let at = |page: usize| source.as_ptr().wrapping_add(page * PAGE + 80).cast::<u64>();
            let refused: Vec<usize> = (0..PAGES).filter(|page| tried::write(at(*page), 9).is_err()).collect();
            assert!(refused.len() > PAGES - FRAMES, "{} refused", refused.len());
            for page in &refused[refused.len() - 4..] {
                let error = source.discard(page * PAGE, PAGE).unwrap_err();
                assert_eq!(error.kind(), Kind::Io, "{error}");
                assert!(error.to_string().contains("region source, bytes"), "{error}");
                assert!(error.to_string().contains("which its clone needs"), "{error}");
            }
            store.write.store(0, SeqCst);
            for page in 0..PAGES {
                source.pin(page * PAGE, PAGE).unwrap();
                source.unpin(page * PAGE, PAGE).unwrap();
                assert_eq!(source.as_slice::<u64>()[page * 512 + 10], if refused.contains(&page) { 0 } else { 9 });
                source.as_mut_slice::<u64>()[page * 512 + 10] = 11;
                assert_eq!(clone.as_slice::<u64>()[page * 512 + 10], 0);
            }
            check_pages(&source, 0..PAGES);
            check_pages(&clone, 0..PAGES);
        })
        .well();
    }
}
