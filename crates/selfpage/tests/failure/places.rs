//! Addresses: a region comes at those of one that is gone, and leaves its own to whatever the program maps there.

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::channel;

use selfpage::dirty::DirtyTracker;
use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{Domain, FileAccess, Kind, Locking, Region, Sampling};

use crate::child::opens_nothing;
use crate::scenario::{PAGE, check_pages, here, in_child, is_at, number_pages, own_number, until};
use crate::skip::skip;
use crate::store::Failing;

const PAGES: usize = 16;

/// What is at `addr`, as the kernel reads it, which ends nobody for an address where nothing is.
pub fn probe(addr: usize) -> Option<u8> {
    let mut byte = 0u8;
    let here = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let there = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: 1 };
    // SAFETY: test: the kernel writes one byte, to ours.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0) };
    (read == 1).then_some(byte)
}

/// Somebody is at a fault of a region that is gone, at whose addresses one is made whose pager needs a file.
#[test]
fn a_late_fault_finds_the_file_of_the_region_that_it_meets() {
    in_child(here!(), "", || {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        std::fs::write(file.path(), [7; PAGES * PAGE]).unwrap();
        let domain = Domain::with_frames(4 * PAGES * PAGE).build().unwrap();
        if !domain.serves_system_calls() {
            return skip("root", "the kernel's own faults are not served");
        }
        let make = || domain.region(0).file(file.path(), 0, FileAccess::Read).unwrap();
        let (addr, stop) = (AtomicUsize::new(make().as_ptr().addr()), AtomicBool::new(false));
        let probed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for page in (0..PAGES).cycle().take_while(|_| !stop.load(Relaxed)) {
                    let found = probe(addr.load(Relaxed) + page * PAGE);
                    probed.fetch_add(found.is_some().into(), Relaxed);
                }
            });
            let wrong = (0..500).find_map(|round| {
                let region = make();
                addr.store(region.as_ptr().addr(), Relaxed);
                let page = (0..PAGES).find(|page| probe(region.as_ptr().addr() + page * PAGE) != Some(7))?;
                Some((round, page))
            });
            stop.store(true, Relaxed);
            assert_eq!(wrong, None, "a page of a region that was just made cannot be read");
        });
        assert!(probed.into_inner() > 0);
    })
    .well();
}

/// Maps memory of the program's own where a region was.
pub fn map_own(at: *mut u8) {
    let (rights, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
    // SAFETY: test: what was there is not used any more.
    unsafe {
        assert_eq!(libc::mmap(at.cast(), PAGES * PAGE, rights, flags, -1, 0), at.cast());
        *at = 7;
    }
}

/// Whoever knows a region for what it was keeps nobody from its addresses.
#[test]
fn what_the_program_maps_where_a_region_was_outlives_its_snapshots_and_samples() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let domain = Domain::with_frames(4 * PAGES * PAGE).build().unwrap();
        let make = || domain.region(PAGES * PAGE).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
        let mut region = make();
        region.as_mut_slice::<u8>().fill(1);
        let (at, sample) = (region.as_ptr(), region.sample(Sampling::Whole).unwrap());
        let mut snapshots = Snapshots::of(&[&region], dir.path().join("one.snap")).unwrap();
        snapshots.take().unwrap();
        drop(region);
        assert_eq!(probe(at.addr()), None, "the region's mapping is there still");
        map_own(at);
        let gone = snapshots.take().unwrap_err();
        assert!(gone.to_string().contains("is gone"), "{gone}");
        drop((snapshots, sample));
        assert_eq!(probe(at.addr()), Some(7));
    })
    .well();
}

/// Unmaps a part of a region, which nobody uses. Its addresses.
fn unmap(region: &Region, pages: Range<usize>) -> Range<usize> {
    let at = region.as_ptr().wrapping_add(pages.start * PAGE);
    // SAFETY: test: nobody uses that part.
    assert_eq!(unsafe { libc::munmap(at.cast(), pages.len() * PAGE) }, 0);
    at.addr()..at.addr() + pages.len() * PAGE
}

/// The kernel has room in a hole of a region's, and no domain has.
#[test]
fn a_region_in_a_hole_of_another_is_told_why_it_cannot_be() {
    in_child(here!(), "", || {
        let domains = [(); 2].map(|()| Domain::with_frames(PAGES * PAGE).build().unwrap());
        let big = domains[0].region(4 * PAGES * PAGE).name("big").zero().unwrap();
        let hole = unmap(&big, PAGES..2 * PAGES);
        for domain in &domains {
            let error = domain.region(PAGE).at(hole.start).zero().unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{error}");
            assert!(["region big", "unmapped", "drop"].iter().all(|word| error.to_string().contains(word)), "{error}");
        }
        assert_eq!(probe(hole.start), None, "what was refused is there still");
    })
    .well();
}

/// Has the kernel have no room for `len_bytes` above a hole that is longer.
fn fill_up_to(hole: &Range<usize>, len_bytes: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    loop {
        // SAFETY: test: fresh memory, which nobody uses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        if hole.contains(&at.addr()) {
            // SAFETY: test: as above.
            assert_eq!(unsafe { libc::munmap(at, len_bytes) }, 0);
            return;
        }
    }
}

/// Nor do another domain's frames.
#[test]
fn no_other_domain_comes_to_a_hole_of_a_region() {
    in_child(here!(), "", || {
        const MANY: usize = 16 * 1024;
        let domain = Domain::with_frames(PAGES * PAGE).build().unwrap();
        let big = domain.region(MANY * PAGE).zero().unwrap();
        let hole = unmap(&big, MANY / 2..MANY);
        fill_up_to(&hole, MANY / 16 * PAGE);
        let other = Domain::with_frames(MANY / 16 * PAGE).build().unwrap();
        let mut region = other.region(MANY / 16 * PAGE).zero().unwrap();
        number_pages(&mut region);
        let clone = region.cow_clone(MemoryStore::new((MANY / 8 * PAGE) as u64).unwrap()).unwrap();
        assert!([&region, &clone].iter().all(|region| !hole.contains(&region.as_ptr().addr())));
        drop((clone, big));
        // They go to their frames and come back.
        drop(region.sample(Sampling::Whole).unwrap());
        check_pages(&region, 0..MANY / 16);
    })
    .well();
}

/// Nor does one that lies far from all.
#[test]
fn a_region_far_from_all_comes_to_no_hole_of_another() {
    in_child(here!(), "", || {
        const MANY: usize = 1 << 32;
        let domain = Domain::with_frames(PAGES * PAGE).locking(Locking::Never).build().unwrap();
        let big = domain.region(MANY * PAGE).zero().unwrap();
        unmap(&big, 1..MANY);
        for _ in 0..50 {
            domain.region(PAGE).far_from_all().zero().unwrap();
        }
    })
    .well();
}

/// The kernel has room for few addresses more, and would have the region in a hole of a long one. What is mapped cannot always be read.
#[test]
fn a_region_comes_beside_a_hole_where_addresses_are_limited() {
    for reads in [true, false] {
        in_child(here!(), &format!("{reads}"), || {
            const GIB: usize = 1 << 30;
            let domain = Domain::with_frames(PAGES * PAGE).locking(Locking::Never).build().unwrap();
            let big = domain.region(4 * GIB).zero().unwrap();
            let hole = unmap(&big, (4 * GIB - GIB / 16) / PAGE..4 * GIB / PAGE);
            fill_up_to(&hole, GIB / 64);
            let used: usize =
                std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
            let limit = (used * PAGE + GIB) as u64;
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            // SAFETY: test: a value of ours.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
            if !reads {
                opens_nothing();
            }
            let mut region = domain.region(GIB / 64).zero().unwrap();
            let (start, end) = (big.as_ptr().addr(), big.as_ptr().addr() + big.len_bytes());
            assert!(region.as_ptr().addr() >= end || region.as_ptr().addr() + region.len_bytes() <= start);
            region.as_mut_slice::<u8>()[GIB / 128] = 7;
        })
        .well();
    }
}

/// However long the store of another domain takes, whose regions are held as long as it takes frames away.
#[test]
fn domains_and_regions_are_made_while_another_domain_waits_for_its_store() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(4 * PAGES * PAGE).build().unwrap();
        let store = Failing::new();
        let mut region = domain.region(3 * PAGES * PAGE).stored_in(store.clone()).unwrap();
        number_pages(&mut region);
        store.holds_writes.store(true, SeqCst);
        std::thread::scope(|scope| {
            let removed = scope.spawn(|| domain.remove_frames(3 * PAGES as u32).unwrap());
            until("frames are taken away", || store.begun_writes.load(SeqCst) > 0);
            // A tracker looks for regions that are tracked, and waits for these.
            let (tell, told) = channel();
            scope.spawn(move || {
                tell.send(own_number()).unwrap();
                let Ok(tracker) = DirtyTracker::new() else { return };
                let mut own = vec![0u8; 4 * PAGE];
                let start = own.as_mut_ptr().addr().next_multiple_of(PAGE);
                // SAFETY: test: memory of its own.
                let _ = unsafe { tracker.arm(start..start + PAGE) };
            });
            let tracks = told.recv().unwrap();
            until("a tracker waits", || is_at(tracks, libc::SYS_futex).unwrap_or(true));
            let made = scope.spawn(|| {
                let other = Domain::with_frames(PAGES * PAGE).build().unwrap();
                number_pages(&mut other.region(PAGES * PAGE).zero().unwrap());
                number_pages(&mut other.region(PAGES * PAGE).far_from_all().zero().unwrap());
            });
            until("a domain and its regions are made", || made.is_finished());
            assert!(!removed.is_finished(), "it did not wait");
            store.holds_writes.store(false, SeqCst);
        });
        check_pages(&region, 0..3 * PAGES);
    })
    .well();
}

/// However large the hole is, and wherever in the region.
#[test]
fn nor_does_one_come_there_that_may_lie_anywhere() {
    for (case, hole) in [("end", 48..64), ("begin", 0..48), ("middle", 8..56), ("all", 0..64)] {
        in_child(here!(), case, || {
            let domain = Domain::with_frames(16 * PAGES * PAGE).build().unwrap();
            let big = domain.region(4 * PAGES * PAGE).name("big").zero().unwrap();
            let (start, end) = (big.as_ptr().addr(), big.as_ptr().addr() + big.len_bytes());
            unmap(&big, hole);
            // More than the kernel has room for elsewhere above it.
            let regions: Vec<_> = (0..20)
                .map(|_| {
                    let mut region = domain.region(4 * PAGE).zero().unwrap();
                    region.as_mut_slice::<u8>().fill(7);
                    region
                })
                .collect();
            assert!(regions.iter().all(|region| !(start..end).contains(&region.as_ptr().addr())));
        })
        .well();
    }
}
