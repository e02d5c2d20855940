//! A snapshot that cannot be written: nobody hangs, and the one before stays.

use std::sync::atomic::{AtomicBool, Ordering};

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::{Domain, Kind, Locking};

use super::{PAGE, Words, disk, saved, skip};

#[test]
fn on_a_full_disk_the_old_one_stays_and_the_program_goes_on() {
    const PAGES: usize = 200;
    let dir = tempfile::tempdir().unwrap();
    if let Err(error) = disk::mount(dir.path(), (PAGES + 100) * PAGE) {
        return skip::skip("mount", &format!("{error}: run as root"));
    }
    let path = dir.path().join("one.snap");
    let domain = Domain::with_frames(2 * PAGES * PAGE).build().unwrap();
    let region = domain.region(PAGES * PAGE).zero().unwrap();
    let words = Words::of(&region);
    let put = |number: u64, pages: usize| {
        (0..pages).for_each(|page| words.at(page, 0).store(number + page as u64, Ordering::Relaxed));
    };
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    put(1000, PAGES);
    snapshots.take().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Writes all the time: were a page left waiting for a snapshot that failed, this thread would not end.
        let writer = scope.spawn(|| {
            let mut count = 0u64;
            while !stop.load(Ordering::Relaxed) {
                words.at(count as usize % PAGES, 1).store(count, Ordering::Relaxed);
                count += 1;
            }
        });
        for _ in 0..5 {
            put(2000, PAGES);
            let failed = snapshots.take();
            assert_eq!(failed.as_ref().err().map(|error| error.kind()), Some(Kind::OutOfSpace), "{failed:?}");
            let old = Snapshot::open(&path).unwrap();
            old.verify().unwrap();
            assert!((0..PAGES).all(|page| saved(&old, 0, page)[0] == 1000 + page as u64));
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "what failed is not left behind");
    // Somebody makes room.
    std::fs::remove_file(&path).unwrap();
    put(3000, PAGES);
    snapshots.take().unwrap();
    let new = Snapshot::open(&path).unwrap();
    assert!((0..PAGES).all(|page| saved(&new, 0, page)[0] == 3000 + page as u64));
}

#[test]
fn a_region_that_goes_in_the_middle_is_waited_for_or_told() {
    const PAGES: usize = 2000;
    for pause in [0, 1, 3, 8] {
        let dir = tempfile::tempdir().unwrap();
        let domain = Domain::with_frames(2 * PAGES * PAGE).build().unwrap();
        let region = domain.region(PAGES * PAGE).zero().unwrap();
        let words = Words::of(&region);
        (0..PAGES).for_each(|page| words.at(page, 0).store(1 + page as u64, Ordering::Relaxed));
        let path = dir.path().join("one.snap");
        let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
        let taker = std::thread::spawn(move || snapshots.take());
        std::thread::sleep(std::time::Duration::from_millis(pause));
        drop(region);
        match taker.join().unwrap() {
            Ok(_) => {
                let snapshot = Snapshot::open(&path).unwrap();
                let found: Vec<u64> = (0..PAGES).map(|page| saved(&snapshot, 0, page)[0]).collect();
                // Dropping goes page by page, from the first on.
                let gone = found.iter().take_while(|word| **word == 0).count();
                assert!((gone..PAGES).all(|page| found[page] == 1 + page as u64), "{gone} pages were gone");
            }
            Err(error) => assert_eq!(error.kind(), Kind::Invalid),
        }
    }
}

/// What madvise(2) has dropped is zero from then on, in the next snapshot too.
#[test]
fn a_page_that_the_program_has_dropped_is_zero() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let domain = Domain::with_frames(64 * PAGE).locking(Locking::Never).build().unwrap();
    let region = domain.region(16 * PAGE).zero().unwrap();
    let words = Words::of(&region);
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    for turn in 1..4 {
        (0..16).for_each(|page| words.at(page, 0).store(turn, Ordering::Relaxed));
        // SAFETY: test: a page of the region.
        assert_eq!(unsafe { libc::madvise(region.as_ptr().add(5 * PAGE).cast(), PAGE, libc::MADV_DONTNEED) }, 0);
        snapshots.take().unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        (0..16).for_each(|page| assert_eq!(saved(&snapshot, 0, page)[0], if page == 5 { 0 } else { turn }));
    }
}
