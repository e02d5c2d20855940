//! Threads that read and write at random over eight times the frames, against a shadow.

use std::sync::atomic::{AtomicU64, Ordering};

use selfpage::store::FileStore;
use selfpage::{Domain, Region, Trap};

const PAGE: usize = 4096;
const THREADS: usize = 4;

fn accesses() -> usize {
    if cfg!(debug_assertions) { 50_000 } else { 1_000_000 }
}

fn storm(trap: Trap) {
    let frames = 512;
    let pages = 8 * frames;
    let domain = Domain::with_frames(frames * PAGE).build().unwrap();
    let store = FileStore::unnamed_in("/var/tmp".as_ref(), (4 * pages * PAGE) as u64).unwrap();
    let region: Region = domain.region(pages * PAGE).trap(trap).stored(store).unwrap();
    let shadow: Vec<AtomicU64> = (0..pages).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (region, shadow) = (&region, &shadow);
            scope.spawn(move || {
                let words = region.as_slice::<u64>();
                // SAFETY: region-view: atomics over plain words of the region; every thread goes through atomics.
                let word = |at: usize| unsafe { AtomicU64::from_ptr((&raw const words[at]).cast_mut()) };
                let mut dice = 0x9e3779b97f4a7c15u64.wrapping_mul(thread as u64 + 1);
                for turn in 1..=accesses() / THREADS {
                    dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let page = (dice >> 33) as usize % pages;
                    // Each thread writes its own pages, and reads all: a word only ever grows.
                    let first = page * PAGE / 8;
                    let at = first + (dice >> 20) as usize % 4 * 100;
                    if page % THREADS == thread && dice >> 40 & 1 == 0 {
                        let next = (turn as u64) << 8 | thread as u64;
                        word(at).store(next, Ordering::Release);
                        word(first).store(next, Ordering::Release);
                        shadow[page].store(next, Ordering::Release);
                    } else {
                        let before = shadow[page].load(Ordering::Acquire);
                        let seen = word(first).load(Ordering::Acquire);
                        assert!(seen >= before, "page {page}: {seen:#x} is older than {before:#x}");
                        assert!(seen == 0 || seen & 0xff == (page % THREADS) as u64, "page {page}: {seen:#x}");
                    }
                }
            });
        }
    });
    let words = region.as_slice::<u64>();
    for page in 0..pages {
        assert_eq!(words[page * PAGE / 8], shadow[page].load(Ordering::Relaxed), "page {page}");
    }
    let counts = domain.stats().counts;
    println!("{trap:?}: {counts:?}");
    assert!(counts.evictions_total > pages as u64, "{counts:?}");
}

#[test]
fn worker() {
    storm(Trap::Worker);
}

#[test]
fn upcall() {
    storm(Trap::Upcall);
}
