//! What comes in by itself when a region is restored.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Trap};

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
