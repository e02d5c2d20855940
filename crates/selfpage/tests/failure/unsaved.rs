//! Domains whose pages cannot be saved: what is in core is used on, and whoever gets nothing is told why.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

use selfpage::store::MemoryStore;
use selfpage::{Domain, Kind, Region, Trap};

use crate::scenario::{PAGE, check_pages, here, in_child, number_what_fits};
use crate::store::Failing;

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];
const EIO: u32 = libc::EIO as u32;

/// A region whose first pages are numbered and in core, as many as there is room for: none of them can be saved.
fn full(trap: Trap) -> (Domain, Region, Arc<Failing>, usize) {
    let store = Failing::new();
    store.write.store(EIO, SeqCst);
    let domain = Domain::with_frames(FRAMES * PAGE).most_frames(4 * FRAMES * PAGE).build().unwrap();
    let mut region = domain.region(4 * FRAMES * PAGE).name("heap").trap(trap).stored_in(store.clone()).unwrap();
    let written = number_what_fits(&mut region);
    (domain, region, store, written)
}

/// Others ask for frames in vain all the time, so that the evictor tries each page again and again; a store may take its time to fail.
#[test]
fn what_is_in_core_is_used_on() {
    for (trap, name) in TRAPS {
        for write_ms in [0, 20] {
            in_child(here!(), &format!("{name} {write_ms}"), || {
                let (domain, region, store, written) = full(trap);
                store.write_ms.store(write_ms, SeqCst);
                let other = domain.region(PAGE).zero().unwrap();
                let done = AtomicBool::new(false);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        while !done.load(Relaxed) {
                            assert_eq!(other.pin(0, PAGE).unwrap_err().kind(), Kind::Io);
                        }
                    });
                    let began = Instant::now();
                    while began.elapsed() < Duration::from_millis(1500) {
                        check_pages(&region, 0..written);
                    }
                    done.store(true, Relaxed);
                });
                store.write.store(0, SeqCst);
                other.pin(0, PAGE).unwrap();
                check_pages(&region, 0..written);
            })
            .well();
        }
    }
}

/// Whatever failed before, this is about pages that nobody can save: those that are pinned.
#[test]
fn a_failure_that_is_over_is_no_cause() {
    in_child(here!(), "", || {
        let (domain, region, _store, _) = full(Trap::Worker);
        drop(region);
        let held = domain.region(4 * FRAMES * PAGE).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
        let error = held.pin(0, held.len_bytes()).unwrap_err();
        assert_eq!(error.kind(), Kind::Held, "{error}");
        assert!(error.to_string().contains("pinned"), "{error}");
    })
    .well();
}
