//! What comes in by itself when a region is restored.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Trap};

use super::scenario::{here, in_child};
use super::{PAGE, Words};

/// Pages that were in core, each with one beside it that was not.
const IN_CORE: usize = 3000;

/// A snapshot of them.
fn scattered(path: &Path) -> Snapshot {
    let domain = Domain::with_frames(2 * IN_CORE * PAGE).build().unwrap();
    let region = domain.region(2 * IN_CORE * PAGE).zero().unwrap();
    let words = Words::of(&region);
    for page in 0..IN_CORE {
        words.at(2 * page, 0).store(page as u64 + 1, Ordering::Relaxed);
    }
    Snapshots::of(&[&region], path).unwrap().take().unwrap();
    Snapshot::open(path).unwrap()
}

fn restored(domain: &Domain, snapshot: &Snapshot) -> Region {
    domain.region(0).trap(Trap::Upcall).restored(snapshot, 0, MemoryStore::new(64 << 20).unwrap()).unwrap()
}

fn in_core(region: &Region) -> usize {
    region.residency().iter().filter(|page| page.load(Ordering::Relaxed) != 0).count()
}

fn eventually(what: impl Fn() -> bool, found: impl Fn() -> String) {
    let began = Instant::now();
    while !what() {
        assert!(began.elapsed() < Duration::from_secs(30), "{}", found());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn all_runs_that_were_in_core_come_however_many_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = scattered(&dir.path().join("runs.snap"));
    let domain = Domain::with_frames(2 * IN_CORE * PAGE).build().unwrap();
    let region = restored(&domain, &snapshot);
    eventually(|| in_core(&region) == IN_CORE, || format!("{} pages", in_core(&region)));
    let words = Words::of(&region);
    assert!((0..IN_CORE).all(|page| words.at(2 * page, 0).load(Ordering::Relaxed) == page as u64 + 1));
}

#[test]
fn no_more_comes_than_the_frames_hold() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = scattered(&dir.path().join("runs.snap"));
    let domain = Domain::with_frames(IN_CORE / 4 * PAGE).most_frames(IN_CORE * PAGE).build().unwrap();
    let region = restored(&domain, &snapshot);
    // What comes leaves the reserve as it is, and so room for nothing else: the marker's frame is one more.
    domain.add_frames(64).unwrap();
    // Behind it, and so last.
    let marker = domain.region(PAGE).trap(Trap::Upcall).zero().unwrap();
    marker.prefetch(0, PAGE).unwrap();
    eventually(|| in_core(&marker) == 1, || "the marker never came".into());
    eventually(|| in_core(&region) > IN_CORE / 8, || format!("{} pages", in_core(&region)));
    let counts = domain.stats().counts;
    assert_eq!(counts.evictions_total, 0, "{counts:?}");
    assert!(counts.fills_total <= IN_CORE as u64 / 4, "{counts:?}");
}

/// Every pager thread has a run to fetch, and many are noted behind them.
#[test]
fn a_page_that_is_touched_comes_before_the_rest() {
    const RUNS: usize = 1000;
    // Each with a page behind it that was not in core.
    const RUN: usize = 16;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("touched.snap");
    let all = RUNS * RUN;
    let begun = Domain::with_frames(2 * all * PAGE).build().unwrap();
    let region = begun.region(RUNS * (RUN + 1) * PAGE).zero().unwrap();
    let words = Words::of(&region);
    let pages = || (0..RUNS * (RUN + 1)).filter(|page| page % (RUN + 1) < RUN);
    pages().for_each(|page| words.at(page, 0).store(page as u64 + 1, Ordering::Relaxed));
    Snapshots::of(&[&region], &path).unwrap().take().unwrap();
    drop((region, begun));
    let snapshot = Snapshot::open(&path).unwrap();
    let last = pages().next_back().unwrap();
    let missing = |region: &Region| {
        let residency = region.residency();
        pages().filter(|page| residency[*page].load(Ordering::Relaxed) == 0).count()
    };
    let mut found = Vec::new();
    // On a busy machine this thread may get a processor when all of it is there.
    while found.len() < 20 {
        let domain = Domain::with_frames(2 * all * PAGE).build().unwrap();
        let store = MemoryStore::new(1 << 27).unwrap();
        let region = domain.region(0).trap(Trap::Upcall).restored(&snapshot, 0, store).unwrap();
        let before = missing(&region);
        assert_eq!(Words::of(&region).at(last, 0).load(Ordering::Relaxed), last as u64 + 1);
        let after = missing(&region);
        if after > before / 2 {
            return;
        }
        found.push((before, after));
    }
    panic!("of {all} pages were missing before the touch and after it: {found:?}");
}

/// What is not fetched at once is looked at when it is touched.
#[test]
fn a_page_that_was_damaged_is_the_programs_own_fault() {
    for (trap, name) in [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")] {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("damaged.snap");
            let domain = Domain::with_frames(64 * PAGE).build().unwrap();
            let store = || MemoryStore::new(1 << 20).unwrap();
            let region = domain.region(32 * PAGE).stored(store()).unwrap();
            let number = |page: usize| 0x7A6E_5B4C_0000 + page as u64;
            (0..32).for_each(|page| Words::of(&region).at(page, 7).store(number(page), Ordering::Relaxed));
            region.evict(0, 32 * PAGE).unwrap();
            Snapshots::of(&[&region], &path).unwrap().take().unwrap();
            let mut bytes = std::fs::read(&path).unwrap();
            let at = bytes.windows(8).position(|found| found == number(20).to_le_bytes()).unwrap();
            bytes[at + 100] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            let snapshot = Snapshot::open(&path).unwrap();
            let again = domain.region(0).name("again").trap(trap).restored(&snapshot, 0, store()).unwrap();
            let words = Words::of(&again);
            for page in (0..32).filter(|page| *page != 20) {
                assert_eq!(words.at(page, 7).load(Ordering::Relaxed), number(page));
            }
            let wrong = words.at(20, 7).load(Ordering::Relaxed);
            panic!("the page came, with {wrong:#x}");
        })
        .by(libc::SIGBUS, &["region again at 0x"]);
    }
}

/// The hash in the file has no secret: of these two pairs of words, 64 bytes apart, the parts that would differ cancel out.
#[test]
fn a_page_that_was_made_to_look_unchanged_is_not() {
    const WORDS: [u64; 2] = [0x396c_feb8, 0x2c81_017c];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("alike.snap");
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let store = || MemoryStore::new(4 << 20).unwrap();
    let write = |region: &Region, highs: [u64; 2]| {
        let words = Words::of(region);
        [0, 8].iter().zip(WORDS).zip(highs).for_each(|((at, low), high)| {
            words.at(3, *at).store(high << 32 | low, Ordering::Relaxed);
        });
    };
    let region = domain.region(8 * PAGE).stored(store()).unwrap();
    write(&region, [1000, 2000]);
    Snapshots::of(&[&region], &path).unwrap().take().unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    let again = domain.region(0).trap(Trap::Upcall).restored(&snapshot, 0, store()).unwrap();
    write(&again, [1001, 1999]);
    again.evict(0, again.len_bytes()).unwrap();
    // Its frame goes to others.
    let others = domain.region(256 * PAGE).stored(store()).unwrap();
    (0..256).for_each(|page| Words::of(&others).at(page, 0).store(1, Ordering::Relaxed));
    assert_eq!(Words::of(&again).at(3, 0).load(Ordering::Relaxed) >> 32, 1001);
}
