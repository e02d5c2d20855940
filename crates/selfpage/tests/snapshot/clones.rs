//! Clones: two regions that share contents until one of them changes.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{Domain, Kind, Region, Trap};

use super::{PAGE, Words};
use crate::scenario::{here, in_child};
use crate::skip::skip;

const PAGES: usize = 256;
/// Pages that are written to in turn.
const CHAIN: [usize; 8] = [200, 3, 111, 77, 64, 250, 25, 130];

fn store() -> MemoryStore {
    MemoryStore::new(8 << 20).unwrap()
}

fn resident(region: &Region) -> usize {
    region.residency().iter().filter(|byte| byte.load(Ordering::Relaxed) != 0).count()
}

fn each_goes_its_own_way(trap: Trap, frames: usize) {
    let domain = Domain::with_frames(frames * PAGE).build().unwrap();
    let mut source = domain.region(PAGES * PAGE).trap(trap).stored(store()).unwrap();
    for page in 0..PAGES {
        source.as_mut_slice::<u64>()[page * 512] = page as u64 + 1;
    }
    let mut clone = source.cow_clone(store()).unwrap();
    assert_eq!((clone.len_bytes(), resident(&clone)), (PAGES * PAGE, 0), "it has no frame before it needs one");
    // One is written to in the source, one in the clone, one dropped in each, one read.
    for page in 0..PAGES {
        match page % 5 {
            0 => source.as_mut_slice::<u64>()[page * 512] = 1000,
            1 => clone.as_mut_slice::<u64>()[page * 512] = 2000,
            2 => source.discard(page * PAGE, PAGE).unwrap(),
            3 => clone.discard(page * PAGE, PAGE).unwrap(),
            _ => assert_eq!(clone.as_slice::<u64>()[page * 512], page as u64 + 1),
        }
    }
    for _ in 0..2 {
        for page in 0..PAGES {
            let (old, left, right) =
                (page as u64 + 1, source.as_slice::<u64>()[page * 512], clone.as_slice::<u64>()[page * 512]);
            let expected = match page % 5 {
                0 => (1000, old),
                1 => (old, 2000),
                2 => (0, old),
                3 => (old, 0),
                _ => (old, old),
            };
            assert_eq!((left, right), expected, "page {page}");
        }
    }
    drop(source);
    assert!((0..PAGES).all(|page| page % 5 != 2 || clone.as_slice::<u64>()[page * 512] == page as u64 + 1));
}

#[test]
fn neither_sees_what_the_other_writes() {
    for trap in [Trap::Worker, Trap::Upcall] {
        each_goes_its_own_way(trap, 3 * PAGES);
        each_goes_its_own_way(trap, PAGES / 4);
    }
}

#[test]
fn a_clone_outlives_its_source_and_the_other_way_round() {
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let make = || {
        let mut source = domain.region(PAGES * PAGE).stored(store()).unwrap();
        (0..PAGES).for_each(|page| source.as_mut_slice::<u64>()[page * 512 + 9] = page as u64 + 7);
        source
    };
    let source = make();
    let clone = source.cow_clone(store()).unwrap();
    let why = source.cow_clone(store()).unwrap_err();
    assert!(why.kind() == Kind::Held && why.to_string().contains("pin all pages of the clone, "), "{why}");
    assert_eq!(clone.cow_clone(store()).err().map(|error| error.kind()), Some(Kind::Held));
    drop(source);
    assert!((0..PAGES).all(|page| clone.as_slice::<u64>()[page * 512 + 9] == page as u64 + 7));
    // It has all its pages now, and may have a clone of its own.
    let third = clone.cow_clone(store()).unwrap();
    drop(third);
    let mut again = clone.cow_clone(store()).unwrap();
    again.as_mut_slice::<u64>()[9] = 3;
    assert_eq!(clone.as_slice::<u64>()[9], 7);
    drop(again);
    assert_eq!(clone.as_slice::<u64>()[512 + 9], 8);
}

/// The source has nothing to give for a page that it never had, or has dropped.
#[test]
fn what_a_source_never_had_is_zero_in_its_clone_when_it_goes() {
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    for trap in [Trap::Worker, Trap::Upcall] {
        let stored = || domain.region(PAGES * PAGE).trap(trap).stored(store()).unwrap();
        let zero = || domain.region(16 * PAGE).trap(trap).zero().unwrap();
        for mut source in [stored(), zero()] {
            let pages = source.len_bytes() / PAGE;
            (0..pages).step_by(2).for_each(|page| source.as_mut_slice::<u64>()[page * 512] = page as u64 + 1);
            source.discard(0, PAGE).unwrap();
            let clone = source.cow_clone(store()).unwrap();
            source.discard(2 * PAGE, PAGE).unwrap();
            source.discard(PAGE, PAGE).unwrap();
            drop(source);
            for page in 0..pages {
                let number = if page % 2 == 0 && page > 0 { page as u64 + 1 } else { 0 };
                assert_eq!(clone.as_slice::<u64>()[page * 512], number, "page {page}");
            }
            drop(clone.cow_clone(store()).unwrap());
        }
    }
}

#[test]
fn a_clone_can_be_fetched_ahead_as_a_whole() {
    let domain = Domain::with_frames(256 * PAGE).build().unwrap();
    let mut source = domain.region(64 * PAGE).stored(store()).unwrap();
    source.as_mut_slice::<u8>().iter_mut().step_by(PAGE).zip(1u8..).for_each(|(byte, number)| *byte = number);
    let clone = source.cow_clone(store()).unwrap();
    assert_eq!(resident(&clone), 0);
    clone.prefetch(0, 64 * PAGE).unwrap();
    let began = Instant::now();
    while resident(&clone) < 64 {
        assert!(began.elapsed() < Duration::from_secs(20), "{} pages are there", resident(&clone));
        std::thread::sleep(Duration::from_millis(1));
    }
    // And it no longer needs its source.
    drop(source);
    assert!(clone.as_slice::<u8>().iter().step_by(PAGE).zip(1u8..).all(|(byte, number)| *byte == number));
}

#[test]
fn a_clone_is_of_one_instant() {
    for (trap, frames) in [(Trap::Worker, 4 * PAGES), (Trap::Upcall, 4 * PAGES), (Trap::Worker, PAGES / 2)] {
        let domain = Domain::with_frames(frames * PAGE).build().unwrap();
        let source = domain.region(PAGES * PAGE).trap(trap).stored(store()).unwrap();
        let words = Words::of(&source);
        let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Pages far apart, one after the other: a later one never has a higher number.
                for number in 1u64.. {
                    for page in CHAIN {
                        words.at(page, 4).store(number, Ordering::SeqCst);
                    }
                    rounds.store(number, Ordering::SeqCst);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            scope.spawn(|| {
                // So that the cut has something to arm.
                let mut number = 1u64;
                while !stop.load(Ordering::Relaxed) {
                    number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    words.at((number >> 40) as usize % PAGES, 9).store(number, Ordering::Relaxed);
                }
            });
            for _ in 0..25 {
                let before = rounds.load(Ordering::SeqCst);
                let clone = source.cow_clone(store()).unwrap();
                let copy = Words::of(&clone);
                let found = CHAIN.map(|page| copy.at(page, 4).load(Ordering::SeqCst));
                let (first, last) = (found[0], found[CHAIN.len() - 1]);
                if !(found.is_sorted_by(|one, other| one >= other) && first - last <= 1 && last >= before) {
                    stop.store(true, Ordering::Relaxed);
                    panic!("{found:?}, {before} before");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

/// Whether what is at `addr` could be read, by the kernel, which ends nobody for an address where nothing is.
fn probe(addr: usize) -> bool {
    let mut byte = 0u8;
    let here = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let there = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: 1 };
    // SAFETY: test: the kernel writes one byte, to ours.
    unsafe { libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0) == 1 }
}

/// Somebody is at a fault of a region that is gone, at whose addresses a clone is made. In a process where nobody else's region is.
#[test]
fn a_late_fault_brings_nothing_into_a_clone() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(4 * PAGES * PAGE).build().unwrap();
        if !domain.serves_system_calls() {
            return skip("root", "the kernel's own faults are not served");
        }
        let mut source = domain.region(PAGES * PAGE).stored(store()).unwrap();
        source.as_mut_slice::<u64>().fill(7);
        let (addr, stop) = (AtomicUsize::new(source.as_ptr().addr()), AtomicBool::new(false));
        let probed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for page in (0..PAGES).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                    let there = addr.load(Ordering::Relaxed) + page * PAGE;
                    probed.fetch_add(probe(there).into(), Ordering::Relaxed);
                }
            });
            let wrong = (0..200).find(|_| {
                let clone = source.cow_clone(store()).unwrap();
                addr.store(clone.as_ptr().addr(), Ordering::Relaxed);
                !clone.as_slice::<u64>().iter().all(|word| *word == 7)
            });
            stop.store(true, Ordering::Relaxed);
            assert_eq!(wrong, None);
        });
        assert!(probed.load(Ordering::Relaxed) > 0);
    })
    .well();
}

#[test]
fn a_forked_child_has_both() {
    let domain = Domain::with_frames(PAGES * PAGE).build().unwrap();
    let mut source = domain.region(PAGES * PAGE).stored(store()).unwrap();
    (0..PAGES).for_each(|page| source.as_mut_slice::<u64>()[page * 512] = page as u64 + 1);
    let mut clone = source.cow_clone(store()).unwrap();
    let mut diverge = |value: u64| {
        (0..PAGES).for_each(|page| match page % 3 {
            0 => source.as_mut_slice::<u64>()[page * 512] = value,
            1 => clone.as_mut_slice::<u64>()[page * 512] = value,
            _ => {}
        });
        (0..PAGES).all(|page| {
            let old = page as u64 + 1;
            let expected = [(value, old), (old, value), (old, old)][page % 3];
            (source.as_slice::<u64>()[page * 512], clone.as_slice::<u64>()[page * 512]) == expected
        })
    };
    assert_eq!(super::child::in_child(|| diverge(5000)), 0);
    assert!(diverge(6000));
}

/// The cut for a clone keeps writers to every armed page waiting, whichever region it is of.
#[test]
fn writers_to_other_regions_go_on_after_the_cut() {
    let dir = tempfile::tempdir().unwrap();
    let domain = Domain::with_frames(4 * PAGES * PAGE).build().unwrap();
    let (other, source) = (domain.region(PAGES * PAGE).zero().unwrap(), domain.region(PAGES * PAGE).zero().unwrap());
    let (others, sources) = (Words::of(&other), Words::of(&source));
    let mut snapshots = Snapshots::of(&[&other], dir.path().join("other.snap")).unwrap();
    let (armed, written, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1.. {
                while armed.load(Ordering::SeqCst) < number && !stop.load(Ordering::SeqCst) {
                    std::hint::spin_loop();
                }
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                (0..PAGES).for_each(|page| others.at(page, 0).store(number, Ordering::Relaxed));
                written.store(number, Ordering::SeqCst);
            }
        });
        for number in 1..=20 {
            snapshots.take().unwrap();
            armed.store(number, Ordering::SeqCst);
            let began = Instant::now();
            while written.load(Ordering::SeqCst) < number {
                (0..PAGES).for_each(|page| sources.at(page, 0).store(number, Ordering::Relaxed));
                drop(source.cow_clone(store()).unwrap());
                if began.elapsed() > Duration::from_secs(20) {
                    stop.store(true, Ordering::SeqCst);
                    // Its own cut lets the writer go on.
                    let _ = snapshots.take();
                    panic!("round {number}: a writer is stopped for good");
                }
            }
        }
        stop.store(true, Ordering::SeqCst);
    });
}
