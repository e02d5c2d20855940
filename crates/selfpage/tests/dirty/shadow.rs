//! Four threads write at random, beside a shadow of every write; each scan is compared with it, both ways.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

use crate::memory::{HUGE, Memory, PAGE};
use crate::swap::Swap;
use crate::{Stop, arm, in_child, pages, tracker};

const THREADS: u64 = 4;
const SCANS: usize = 60;

/// How many writes of a page began, and how many ended.
#[derive(Default)]
struct Shadow {
    began: AtomicU64,
    ended: AtomicU64,
}

fn read(shadow: &[Shadow], of: impl Fn(&Shadow) -> &AtomicU64) -> Vec<u64> {
    shadow.iter().map(|page| of(page).load(Ordering::SeqCst)).collect()
}

/// Of numbers that are as good as random.
pub fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// What a scan may find that nobody wrote.
#[derive(Clone, Copy, PartialEq)]
pub enum Beyond {
    Nothing,
    /// Pages that came and went.
    Moved,
}

/// Whether the writers discard pages, too.
#[derive(Clone, Copy, PartialEq)]
enum Discards {
    Never,
    Sometimes,
}

/// Writes, discards, forks and scans, and compares: `grain` pages are written as one.
pub fn compare(tracker: &DirtyTracker, memory: &Memory, grain: usize, beyond: Beyond) {
    let size_pages = memory.range().len() / PAGE;
    // Traps do not notice it.
    let noticed = tracker.mechanism() == Mechanism::WriteProtection && memory.is_discarded_by_page();
    let discards = if noticed { Discards::Sometimes } else { Discards::Never };
    let shadow: Vec<Shadow> = (0..size_pages).map(|_| Shadow::default()).collect();
    let stop = AtomicBool::new(false);
    let of_grain = |counts: &[u64], page: usize| -> u64 {
        counts.chunks(grain).nth(page / grain).map_or(0, |chunk| chunk.iter().sum())
    };
    arm(tracker, memory);
    thread::scope(|scope| {
        for thread in 1..=THREADS {
            let (shadow, stop) = (&shadow, &stop);
            scope.spawn(move || {
                let mut seed = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(thread);
                while !stop.load(Ordering::Relaxed) {
                    // Most go to few pages, so that a page is written in many rounds and others in none.
                    let page = next(&mut seed) as usize % size_pages;
                    let page = if seed & 0x700 == 0 { page } else { page % 7 * (size_pages / 8) };
                    shadow[page].began.fetch_add(1, Ordering::SeqCst);
                    if discards == Discards::Sometimes && seed & 0x70_0000 == 0 {
                        memory.advise(page..page + 1, libc::MADV_DONTNEED);
                    } else {
                        memory.write(page, seed);
                    }
                    shadow[page].ended.fetch_add(1, Ordering::SeqCst);
                    if seed & 0xf000 == 0 {
                        thread::yield_now();
                    }
                }
            });
        }
        let _stop = Stop(&stop);
        let mut found = Dirty::new();
        // What scans that found the page may have meant. One that did not find it meant nothing: not even a write during it, which the
        // next must find.
        let mut told = vec![0; size_pages];
        let mut ended_at_last = vec![0; size_pages];
        for scan in 0..SCANS {
            if memory.is_plain() && scan % 8 == 3 {
                assert_eq!(in_child(|| ()), 0, "a child that only ends");
            }
            let ended = read(&shadow, |page| &page.ended);
            tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
            let began = read(&shadow, |page| &page.began);
            for page in (0..size_pages).step_by(grain) {
                let is = found.contains(memory.page(page));
                let must = of_grain(&ended, page) > of_grain(&told, page);
                let may = of_grain(&began, page) > of_grain(&ended_at_last, page);
                assert!(is || !must, "scan {scan} misses page {page} of {memory:?}");
                assert!(
                    !is || may || beyond == Beyond::Moved,
                    "scan {scan} finds page {page} of {memory:?}, which nobody wrote"
                );
                if is {
                    told[page..page + grain].copy_from_slice(&began[page..page + grain]);
                }
            }
            ended_at_last = ended;
        }
    });
}

/// Two threads scan at once while a third writes to every other page: what was written is found by one of the two, and nothing else by any.
pub fn share(tracker: &DirtyTracker, memory: &Memory) {
    let size_pages = memory.range().len() / PAGE;
    let found: Vec<AtomicBool> = (0..size_pages).map(|_| AtomicBool::new(false)).collect();
    let scan = |into: &mut Dirty| {
        tracker.scan_and_rearm(memory.range(), into).unwrap();
        pages(memory, into).into_iter().for_each(|page| found[page].store(true, Ordering::SeqCst));
    };
    arm(tracker, memory);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut into = Dirty::new();
                while !stop.load(Ordering::SeqCst) {
                    scan(&mut into);
                }
            });
        }
        let _stop = Stop(&stop);
        for page in (1..size_pages).step_by(2) {
            memory.write(page, 1);
            if page % 32 == 1 {
                thread::yield_now();
            }
        }
    });
    scan(&mut Dirty::new());
    let found: Vec<usize> = (0..size_pages).filter(|page| found[*page].load(Ordering::SeqCst)).collect();
    assert_eq!(found, (1..size_pages).step_by(2).collect::<Vec<_>>(), "{memory:?}");
}

#[test]
fn two_threads_that_scan_find_all_writes_between_them() {
    let Some(tracker) = tracker() else { return };
    for memory in [Memory::anonymous(4000), Memory::shared(4000), Memory::memfd(1000)] {
        (0..500).for_each(|page| memory.write(page, 1)); // The rest are holes.
        share(&tracker, &memory);
    }
    let (traps, memory) = (DirtyTracker::with(Mechanism::Traps).unwrap(), Memory::anonymous(2000));
    share(&traps, &memory);
    traps.disarm(memory.range()).unwrap();
}

#[test]
fn every_write_is_found_by_traps_too() {
    let tracker = DirtyTracker::with(Mechanism::Traps).unwrap();
    for memory in [Memory::anonymous(2000), Memory::shared(500)] {
        compare(&tracker, &memory, 1, Beyond::Nothing);
        tracker.disarm(memory.range()).unwrap();
    }
}

#[test]
fn every_write_is_found_and_nothing_else() {
    let Some(tracker) = tracker() else { return };
    for memory in [
        Memory::anonymous(2000),
        Memory::shared(2000),
        Memory::file(1000),
        Memory::private_file(1000),
        Memory::private_memfd(1000),
        Memory::memfd(1000),
    ] {
        compare(&tracker, &memory, 1, Beyond::Nothing);
    }
    if let Some(memory) = Memory::huge(8 * HUGE / PAGE) {
        compare(&tracker, &memory, 1, Beyond::Nothing);
    }
    for sharing in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
        if let Some(memory) = Memory::hugetlb(4 * HUGE / PAGE, sharing) {
            compare(&tracker, &memory, HUGE / PAGE, Beyond::Nothing);
        }
    }
}

/// The kernel takes pages out while they are written to and looked for.
#[test]
fn swapping_is_no_write_and_hides_none_of_four_threads() {
    let Some(tracker) = tracker() else { return };
    let Some(_swap) = Swap::on() else { return };
    let (memory, stop) = (Memory::anonymous(2000), AtomicBool::new(false));
    let most = thread::scope(|scope| {
        let swaps = scope.spawn(|| {
            let mut most = 0;
            while !stop.load(Ordering::Relaxed) {
                memory.advise(0..2000, libc::MADV_PAGEOUT);
                most = most.max(memory.swapped());
            }
            most
        });
        let until = Stop(&stop);
        compare(&tracker, &memory, 1, Beyond::Nothing);
        drop(until);
        swaps.join().unwrap()
    });
    assert!(most > 0, "nothing was swapped out");
}
