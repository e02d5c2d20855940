//! Clones where a store fails: the source's, or the clone's.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use selfpage::store::MemoryStore;
use selfpage::{Domain, Kind, Region, Trap};

use crate::places::probe;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages};
use crate::skip::skip;
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

/// Somebody is at a fault of a region that is gone, at whose addresses a clone is made, on a stack that needs the only worker.
#[test]
fn a_late_fault_of_a_clones_keeps_no_worker_from_the_thread_that_makes_it() {
    struct Work<'a>(&'a Region, &'a AtomicUsize, &'a AtomicBool, &'a AtomicBool);

    extern "C" fn clones(work: *mut c_void) -> *mut c_void {
        // SAFETY: test: it outlives the thread.
        let Work(source, addr, stop, evicted) = unsafe { &*work.cast::<Work<'_>>() };
        for _ in 0..100 {
            let clone = source.cow_clone(MemoryStore::new(1 << 20).unwrap()).unwrap();
            addr.store(clone.as_ptr().addr(), SeqCst);
        }
        stop.store(true, SeqCst);
        // At a thread's end nobody serves the kernel's access to its number on this stack (CAVEATS, exiting threads): it would not be joined.
        while !evicted.load(SeqCst) {
            std::hint::spin_loop();
        }
        std::ptr::null_mut()
    }

    in_child(here!(), "", || {
        let domain = Domain::with_frames(PAGES * PAGE).workers(1).build().unwrap();
        if !domain.serves_system_calls() {
            return skip("root", "the kernel's own faults are not served");
        }
        let source = domain.region(16 * PAGE).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
        let stack = domain.region(128 * PAGE).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
        let (addr, stop, evicted) =
            (AtomicUsize::new(source.as_ptr().addr()), AtomicBool::new(false), AtomicBool::new(false));
        let work = Work(&source, &addr, &stop, &evicted);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for page in (0..16).cycle().take_while(|_| !stop.load(SeqCst)) {
                    probe(addr.load(SeqCst) + page * PAGE);
                }
            });
            scope.spawn(|| {
                while !stop.load(SeqCst) {
                    let _ = stack.evict(0, stack.len_bytes());
                }
                evicted.store(true, SeqCst);
            });
            // SAFETY: test: the stack and the work outlive the thread.
            unsafe {
                let mut how = std::mem::zeroed();
                libc::pthread_attr_init(&mut how);
                assert_eq!(libc::pthread_attr_setstack(&mut how, stack.as_ptr().cast(), stack.len_bytes()), 0);
                let (mut thread, work) = (std::mem::zeroed(), (&raw const work).cast_mut().cast());
                assert_eq!(libc::pthread_create(&mut thread, &how, clones, work), 0);
                assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
            }
        });
    })
    .well();
}
