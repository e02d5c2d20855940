//! Domains whose pages cannot be saved: what is in core is used on, and whoever gets nothing is told why.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

use selfpage::pager::{Context, PagerError};
use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{Domain, Kind, Region, Trap};

use crate::over_memory::over_memory;
use crate::scenario::{PAGE, check_pages, here, in_child, number_what_fits, pages, until};
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

/// A page comes back as soon as its save has failed, and not when the evictor gives up: until then there is a fault each time.
#[test]
fn whoever_uses_a_page_on_its_way_goes_on_when_it_is_back() {
    const FREE: usize = 8;
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let store = Failing::new();
            store.write.store(EIO, SeqCst);
            store.write_ms.store(5, SeqCst);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region((FRAMES - FREE) * PAGE).trap(trap).stored_in(store).unwrap();
            crate::scenario::number_pages(&mut region);
            let other = domain.region(2 * FREE * PAGE).zero().unwrap();
            let done = AtomicBool::new(false);
            let faults = || domain.stats().counts.faults_total as usize;
            let before = faults();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(other.pin(0, 2 * FREE * PAGE).unwrap_err().kind(), Kind::Io);
                    done.store(true, Relaxed);
                    let more = faults() - before;
                    // Its own, and one for each thread that would wait with it.
                    assert!(more > 2 * FREE + 8, "{more} faults");
                });
                while !done.load(Relaxed) {
                    check_pages(&region, 0..pages(&region));
                }
            });
        })
        .well();
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

/// As the kernel has them in completions, which a store may pass on as they are.
#[test]
fn errors_of_numbers_that_none_has_are_told_like_others() {
    for errno in [-16, -18, -5, i32::MIN, i32::MAX] {
        in_child(here!(), &errno.to_string(), || {
            let (_domain, region, store, written) = full(Trap::Worker);
            store.write.store(errno as u32, SeqCst);
            assert_eq!(region.pin(written * PAGE, PAGE).unwrap_err().kind(), Kind::Io);
            let region = std::hint::black_box(region);
            println!("{}", region.as_slice::<u64>()[(pages(&region) - 1) * PAGE / 8]);
        })
        .by(libc::SIGBUS, &["heap", "no frame", "cannot be saved"]);
    }
}

/// A store whose claims make no sense.
struct Senseless(MemoryStore, (Blok, u32));

impl BackingStore for Senseless {
    over_memory!(0: reads_in_trap, read, write);

    fn claim(&self, _want: u32) -> Result<(Blok, u32), PagerError> {
        Ok(self.1)
    }
    fn release(&self, first: Blok, count: u32) {
        panic!("{first:?} and {count} were never claimed");
    }
    fn descriptors(&self) -> Vec<i32> {
        if self.1.1 == u32::MAX { vec![-1] } else { vec![] }
    }
}

#[test]
fn claims_of_nothing_or_of_blok_0_are_a_full_store() {
    for claimed in [(Blok(0), 1), (Blok(0), 64), (Blok(1), 0)] {
        in_child(here!(), &format!("{claimed:?}"), || {
            let store = Senseless(MemoryStore::new(1 << 20).unwrap(), claimed);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(4 * FRAMES * PAGE).name("heap").stored(store).unwrap();
            let written = number_what_fits(&mut region);
            let error = region.pin(written * PAGE, PAGE).unwrap_err();
            assert!(error.to_string().contains("the store is full"), "{error}");
            check_pages(&region, 0..written);
        })
        .well();
    }
}

#[test]
fn a_store_with_a_descriptor_that_none_is_is_refused() {
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let store = Senseless(MemoryStore::new(1 << 20).unwrap(), (Blok(1), u32::MAX));
    let why = domain.region(FRAMES * PAGE).stored(store).unwrap_err();
    assert!(why.kind() == Kind::Invalid && why.to_string().contains("the descriptor -1"), "{why}");
    domain.region(FRAMES * PAGE).zero().unwrap().pin(0, PAGE).unwrap();
}

#[test]
fn frames_go_as_far_as_they_can_and_others_come() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, mut region, store, written) = full(trap);
            let error = domain.remove_frames(8).unwrap_err();
            assert_eq!(error.kind(), Kind::Io, "{error}");
            assert!(
                error.to_string().contains("remove 8 frames: no frame can be had: pages cannot be saved"),
                "{error}"
            );
            let left = domain.contract().guaranteed() as usize;
            assert!((written..=FRAMES).contains(&left), "{left} of {FRAMES}, {written} in use");
            check_pages(&region, 0..written);
            domain.add_frames(16).unwrap();
            let more = number_what_fits(&mut region);
            assert!(more > written, "{more} {written}");
            // Behind the first one that has no frame nothing is pinned.
            let all = region.pin(0, region.len_bytes()).unwrap_err();
            assert!(all.to_string().contains("region heap, bytes "), "{all}");
            store.write.store(0, SeqCst);
            domain.remove_frames(16).unwrap();
            check_pages(&region, 0..more);
            region.evict(0, region.len_bytes()).unwrap();
            until("all have gone", || {
                let _ = region.evict(0, region.len_bytes());
                region.residency().iter().all(|byte| byte.load(Relaxed) == 0)
            });
            check_pages(&region, 0..more);
        })
        .well();
    }
}

#[test]
fn what_is_asked_by_name_says_why_and_leaves_all_as_it_was() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, mut region, store, written) = full(trap);
            // They are on their way, and come back.
            let _ = region.evict(0, written * PAGE);
            check_pages(&region, 0..written);
            let error = region.flush(0, region.len_bytes()).unwrap_err();
            assert_eq!(error.kind(), Kind::Io, "{error}");
            assert!(error.to_string().contains("flush region heap, bytes "), "{error}");
            region.prefetch(0, region.len_bytes()).unwrap();
            region.pin(0, 8 * PAGE).unwrap();
            region.unpin(0, 8 * PAGE).unwrap();
            region.discard(0, 8 * PAGE).unwrap();
            assert!(region.as_slice::<u64>()[..8 * 512].iter().all(|word| *word == 0));
            check_pages(&region, 8..written);
            store.write.store(0, SeqCst);
            region.flush(0, region.len_bytes()).unwrap();
            check_pages(&region, 8..written);
        })
        .well();
    }
}

/// Of a range of which one page cannot be read nothing is pinned, and what lies about that page is brought in.
#[test]
fn pages_about_one_that_cannot_be_read_are_right() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, mut region, store, _) = full(trap);
            store.write.store(0, SeqCst);
            crate::scenario::number_pages(&mut region);
            region.pin(0, PAGE).unwrap();
            store.read.store(EIO, SeqCst);
            region.unpin(0, PAGE).unwrap();
            region.prefetch(0, FRAMES / 2 * PAGE).unwrap();
            let error = region.pin(0, FRAMES / 2 * PAGE).unwrap_err();
            assert_eq!(error.kind(), Kind::Io, "{error}");
            assert!(error.to_string().contains("pin region heap, bytes "), "{error}");
            assert_eq!(region.unpin(0, PAGE).unwrap_err().kind(), Kind::Invalid);
            store.read.store(0, SeqCst);
            region.prefetch(0, FRAMES / 2 * PAGE).unwrap();
            region.pin(0, FRAMES / 2 * PAGE).unwrap();
            region.unpin(0, FRAMES / 2 * PAGE).unwrap();
            check_pages(&region, 0..pages(&region));
        })
        .well();
    }
}

/// The page of a snapshot as a word.
fn first_word(snapshot: &Snapshot, page: usize) -> u64 {
    let mut bytes = [0; PAGE];
    snapshot.read_page(0, page as u64, &mut bytes).unwrap();
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

#[test]
fn a_snapshot_that_cannot_be_taken_says_why_and_the_next_one_is_whole() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, mut region, store, written) = full(trap);
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("one.snap");
            let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
            let error = snapshots.take().unwrap_err();
            assert_eq!(error.kind(), Kind::Io, "{error}");
            assert!(error.to_string().contains("region heap, bytes "), "{error}");
            // Whoever writes goes on.
            for page in &mut region.as_mut_slice::<[u64; 512]>()[..written] {
                page[7] = 7;
            }
            check_pages(&region, 0..written);
            store.write.store(0, SeqCst);
            crate::scenario::number_pages(&mut region);
            snapshots.take().unwrap();
            store.read.store(EIO, SeqCst);
            for page in &mut region.as_mut_slice::<[u64; 512]>()[4 * FRAMES - 2..] {
                page[0] += 1000;
            }
            // What has not changed since is not read.
            snapshots.take().unwrap();
            let old = Snapshot::open(&path).unwrap();
            let is_right = |page| first_word(&old, page) == page as u64 + if page < 4 * FRAMES - 2 { 1 } else { 1001 };
            assert!((0..4 * FRAMES).all(is_right));
            drop(snapshots);
            let mut snapshots = Snapshots::of(&[&region], dir.path().join("other.snap")).unwrap();
            let error = snapshots.take().unwrap_err();
            assert_eq!(error.kind(), Kind::Io, "{error}");
            assert!(error.to_string().contains("region heap, bytes "), "{error}");
            store.read.store(0, SeqCst);
            snapshots.take().unwrap();
            Snapshot::open(dir.path().join("other.snap")).unwrap().verify().unwrap();
        })
        .well();
    }
}
