//! Large regions of which hardly anything is used: what is done with all of one costs what was used.

use std::path::Path;
use std::sync::Arc;

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Trap};
use xxhash_rust::xxh3::xxh3_128;

use crate::child::fork;
use crate::scenario::{PAGE, here, in_child};

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];
/// Pages of such a region.
const PAGES: usize = (64 << 30) / PAGE;

/// How often the kernel gave this process memory, or a page of zeros to read.
fn faults() -> i64 {
    // SAFETY: test: zeros are a value, and the kernel fills them in.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage.ru_minflt
    }
}

/// That `work` looks at few of the words of [`PAGES`] pages.
fn looks_at_few(what: &str, work: impl FnOnce()) {
    let before = faults();
    work();
    let faults = faults() - before;
    // A page of the table has the words of 512.
    assert!(faults < PAGES as i64 / 512 / 10, "{what}: {faults} faults");
}

/// Writes to the first page and the last, neighbours in different pages of the table, and more than the frames hold.
fn use_some(region: &Region) {
    let used = [0, 511, 512, PAGES - 513, PAGES - 1].into_iter().chain((0..2 * FRAMES).map(|at| at * 1000 + 77));
    for page in used {
        // SAFETY: test: a byte of the region.
        unsafe { region.as_ptr().add(page * PAGE).write_volatile(1) };
    }
}

/// A region of [`PAGES`] pages, and whose it is.
fn over_a_store(trap: Trap) -> (Domain, Arc<MemoryStore>, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let store = Arc::new(MemoryStore::new(1 << 26).unwrap());
    let region = domain.region(PAGES * PAGE).trap(trap).stored(store.clone()).unwrap();
    (domain, store, region)
}

/// That no page holds a frame of the domain's.
fn frames_are_free(domain: &Domain, trap: Trap) {
    let pinned = domain.region((FRAMES - 8) * PAGE).trap(trap).pinned().unwrap();
    assert!(pinned.as_slice::<u64>().iter().all(|word| *word == 0));
}

/// That the end of a region of [`PAGES`] pages costs what was used of it, and leaves nothing.
fn ends_as_a_small_one(domain: &Domain, store: &MemoryStore, region: Region, trap: Trap) {
    use_some(&region);
    looks_at_few("its end", || drop(region));
    assert_eq!(store.taken_bloks(), 0);
    frames_are_free(domain, trap);
}

/// A snapshot of a region of so many pages, all zero but page 1, which begins with 5. Its file says so: there never was such a region.
fn snapshot_of(path: &Path, pages: usize) -> Snapshot {
    // docs/snapshots.md: in a header of one page the length of the first region, and the hash of what is before it.
    const LEN: std::ops::Range<usize> = 44..52;
    const HASH: std::ops::Range<usize> = PAGE - 16..PAGE;
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let mut small = domain.region(8 * PAGE).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
    small.as_mut_slice::<u64>()[PAGE / 8] = 5;
    // What was in core is fetched into it at once.
    small.flush(0, 8 * PAGE).unwrap();
    small.evict(0, 8 * PAGE).unwrap();
    Snapshots::of(&[&small], path).unwrap().take().unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes[LEN], 8_u64.to_le_bytes());
    bytes[LEN].copy_from_slice(&(pages as u64).to_le_bytes());
    let hash = xxh3_128(&bytes[..HASH.start]);
    bytes[HASH].copy_from_slice(&hash.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
    Snapshot::open(path).unwrap()
}

#[test]
fn a_large_region_ends_as_soon_as_a_small_one() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, store, region) = over_a_store(trap);
            ends_as_a_small_one(&domain, &store, region, trap);
        })
        .well();
    }
}

/// What only the snapshot's file has is nothing that has to be given back.
#[test]
fn a_large_restored_region_ends_as_soon_as_a_small_one() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir().unwrap();
            let snapshot = snapshot_of(&dir.path().join("sparse.snap"), PAGES);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = Arc::new(MemoryStore::new(1 << 26).unwrap());
            let region = domain.region(0).trap(trap).restored(&snapshot, 0, store.clone()).unwrap();
            assert_eq!((region.len_bytes(), region.as_slice::<u64>()[PAGE / 8]), (PAGES * PAGE, 5));
            ends_as_a_small_one(&domain, &store, region, trap);
        })
        .well();
    }
}

/// A clone that has none of its pages yet gets those that are not zero, and no others take a frame or a place.
#[test]
fn what_a_restored_region_leaves_to_its_clone() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir().unwrap();
            let snapshot = snapshot_of(&dir.path().join("sparse.snap"), 4096);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = || MemoryStore::new(1 << 24).unwrap();
            let mut source = domain.region(0).trap(trap).restored(&snapshot, 0, store()).unwrap();
            let words = PAGE / 8;
            source.as_mut_slice::<u64>()[3000 * words] = 7;
            // One that is zero since, in place of what the snapshot has.
            source.as_mut_slice::<u64>()[2000 * words] = 8;
            source.discard(2000 * PAGE, PAGE).unwrap();
            let clone = source.cow_clone(store()).unwrap();
            let before = domain.stats().counts;
            drop(source);
            let after = domain.stats().counts;
            assert_eq!(after.evictions_total, before.evictions_total, "there was no room for what was copied");
            let in_core = clone.residency().iter().filter(|byte| byte.load(std::sync::atomic::Ordering::Relaxed) != 0);
            assert_eq!(in_core.count(), 2);
            for (page, first) in (0..4096).map(|page| (page, clone.as_slice::<u64>()[page * words])) {
                let expected = match page {
                    1 => 5,
                    3000 => 7,
                    _ => 0,
                };
                assert_eq!(first, expected, "page {page}");
            }
        })
        .well();
    }
}

/// Each in a region of its own: the first look at a word is what costs a fault.
#[test]
fn what_was_never_used_is_neither_evicted_nor_flushed() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let used = || {
                let store = Arc::new(MemoryStore::new(1 << 26).unwrap());
                let region = domain.region(PAGES * PAGE).trap(trap).stored(store.clone()).unwrap();
                use_some(&region);
                (region, store)
            };
            let in_core = |region: &Region| {
                [0, PAGES - 1].map(|page| region.residency()[page].load(std::sync::atomic::Ordering::Relaxed))
            };
            let touch = |region: &Region| {
                // SAFETY: test: bytes of the region.
                [0, PAGES - 1].map(|page| unsafe { region.as_ptr().add(page * PAGE).write_volatile(2) })
            };
            let (region, store) = used();
            // Pinned: an evictor that has not had a CPU for a while may still take some.
            for page in [0, PAGES - 1] {
                region.pin(page * PAGE, PAGE).unwrap();
            }
            touch(&region);
            let saved = store.taken_bloks();
            looks_at_few("a flush", || region.flush(0, PAGES * PAGE).unwrap());
            assert!(store.taken_bloks() > saved && in_core(&region) == [1, 1], "{} bloks", store.taken_bloks());
            drop(region);
            let (region, store) = used();
            touch(&region);
            let mut evicted = 0;
            looks_at_few("an eviction", || evicted = region.evict(0, PAGES * PAGE).unwrap());
            assert!(evicted >= 2 && in_core(&region) == [0, 0], "{evicted} of {:?}", store);
            // Behind what was used but for the end.
            evicted = region.evict(200_000 * PAGE, 1_000_000 * PAGE).unwrap();
            assert_eq!(evicted, 0);
        })
        .well();
    }
}

#[test]
fn what_was_never_used_is_not_discarded() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, store, mut region) = over_a_store(trap);
            use_some(&region);
            looks_at_few("a discard", || region.discard(0, PAGES * PAGE).unwrap());
            assert_eq!(store.taken_bloks(), 0);
            assert!([0, 511, PAGES - 1].iter().all(|page| region.as_slice::<u8>()[page * PAGE] == 0));
            frames_are_free(&domain, trap);
            ends_as_a_small_one(&domain, &store, region, trap);
        })
        .well();
    }
}

/// What is only looked at has the kernel's page of zeros in the table.
#[test]
fn words_that_were_only_looked_at_count_as_never_used() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, store, region) = over_a_store(trap);
            // Of a part of them it says so.
            let looked_at = PAGES / 2;
            region.protect(0, looked_at * PAGE, selfpage::Protection::ReadWrite).unwrap();
            looks_at_few("an eviction", || assert_eq!(region.evict(0, PAGES * PAGE).unwrap(), 0));
            ends_as_a_small_one(&domain, &store, region, trap);
        })
        .well();
    }
}

/// A clone, or a region that is restored, has contents that were never in core.
#[test]
fn what_was_never_in_core_is_discarded_where_it_has_contents() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir().unwrap();
            let snapshot = snapshot_of(&dir.path().join("sparse.snap"), 4096);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = || MemoryStore::new(1 << 24).unwrap();
            let restored = domain.region(0).trap(trap).restored(&snapshot, 0, store()).unwrap();
            let mut clone = restored.cow_clone(store()).unwrap();
            clone.discard(0, clone.len_bytes()).unwrap();
            assert_eq!((clone.as_slice::<u64>()[PAGE / 8], restored.as_slice::<u64>()[PAGE / 8]), (0, 5));
            drop(clone);
            let mut clone = restored.cow_clone(store()).unwrap();
            drop(restored);
            clone.discard(0, clone.len_bytes()).unwrap();
            assert_eq!(clone.as_slice::<u64>()[PAGE / 8], 0);
            let mut restored = domain.region(0).trap(trap).restored(&snapshot, 0, store()).unwrap();
            restored.discard(0, restored.len_bytes()).unwrap();
            assert_eq!(restored.as_slice::<u64>()[PAGE / 8], 0);
        })
        .well();
    }
}

/// The tables of frames are looked at where frames were used.
#[test]
fn a_fork_costs_the_frames_that_were_used() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(PAGES * PAGE).build().unwrap();
            let mut region = domain.region(PAGES * PAGE).trap(trap).zero().unwrap();
            region.as_mut_slice::<u64>()[0] = 7;
            let mut child = None;
            looks_at_few("a fork", || child = Some(fork(|| region.as_slice::<u64>()[0] == 7)));
            assert_eq!(child.unwrap().wait(), 0);
        })
        .well();
    }
}
