//! The memory of the process stays within its frames and a small overhead, at any time of a run, and none of it is swapped out.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use selfpage::store::FileStore;
use selfpage::{Domain, Trap};

const PAGE: usize = 4096;

/// Bytes of this process in core, all mappings together, and swapped out. The kernel's own counts: a walk over the mappings
/// would count a page twice that moves meanwhile.
fn in_core() -> (u64, u64) {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    };
    (field("VmRSS:"), field("VmSwap:"))
}

/// One after the other: what they count is the process's.
#[test]
fn frames_and_24_bytes_a_page_and_8_mib() {
    [Trap::Upcall, Trap::Worker].into_iter().for_each(pages_within_its_budget);
}

fn pages_within_its_budget(trap: Trap) {
    let (frames_bytes, pages) = (64usize << 20, 65_536usize);
    let before = in_core().0;
    let domain = Domain::with_frames(frames_bytes).build().unwrap();
    let store = FileStore::unnamed_in("/var/tmp", (2 * pages * PAGE) as u64).unwrap();
    let mut region = domain.region(pages * PAGE).trap(trap).stored(store).unwrap();
    let (most, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (most, done) = (&most, &done);
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                let (rss, swap) = in_core();
                assert_eq!(swap, 0, "frames were swapped out");
                most.fetch_max(rss, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let words = region.as_mut_slice::<u64>();
        let mut dice = 1u64;
        for turn in 0..2 * pages {
            // In order first, so that every page has contents and metadata; then anywhere.
            dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let page = if turn < pages { turn } else { (dice >> 33) as usize % pages };
            words[page * PAGE / 8] += 1 + page as u64;
        }
        done.store(true, Ordering::Relaxed);
    });
    let allowed = frames_bytes as u64 + 24 * pages as u64 + (8 << 20);
    let used = most.load(Ordering::Relaxed).saturating_sub(before);
    println!("{trap:?}: {used} of {allowed} bytes used, {} of them frames", frames_bytes);
    assert!(domain.stats().counts.evictions_total > pages as u64);
    assert!(used <= allowed, "{trap:?}: {used} bytes in core, {allowed} allowed");
}
