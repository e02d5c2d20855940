//! What a snapshot has, what the next one costs, and what is refused.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering;

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::MemoryStore;
use selfpage::{DescriptorTable, Domain, FileAccess, Kind, Trap};

use super::{PAGE, Words, child, saved, skip};

#[test]
fn what_was_armed_ahead_is_not_armed_in_the_cut() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let dir = tempfile::tempdir().unwrap();
        let domain = Domain::with_frames(300 * PAGE).build().unwrap();
        let region = domain.region(200 * PAGE).trap(trap).stored(MemoryStore::new(2 << 20).unwrap()).unwrap();
        let words = Words::of(&region);
        let write =
            |pages: std::ops::Range<usize>| pages.for_each(|page| words.at(page, 0).store(1, Ordering::Relaxed));
        write(0..200);
        let mut snapshots = Snapshots::of(&[&region], dir.path().join("ahead")).unwrap();
        // A page that somebody is at meanwhile is left out: a few, at most.
        const FEW: u64 = 20;
        assert!((200 - FEW..=200).contains(&snapshots.arm().unwrap()));
        assert!(snapshots.arm().unwrap() <= FEW, "nothing was written since");
        // Each of these is let through, and armed again by `take`, which has nothing left for the cut then.
        write(50..60);
        let taken = snapshots.take().unwrap();
        assert!((10..=10 + FEW).contains(&(taken.armed_ahead + taken.armed_in_cut)), "{taken:?}");
        assert!(taken.armed_in_cut <= FEW && taken.pages == 200, "{taken:?}");
        let taken = snapshots.take().unwrap();
        assert!(taken.armed_ahead + taken.armed_in_cut <= FEW && taken.pages == 0, "{taken:?}");
    }
}

#[test]
fn the_next_snapshot_has_only_what_changed() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("two.snap");
        let domain = Domain::with_frames(300 * PAGE).build().unwrap();
        let store = || MemoryStore::new(8 << 20).unwrap();
        let left = domain.region(500 * PAGE).name("left").trap(trap).stored(store()).unwrap();
        let right = domain.region(50 * PAGE).zero().unwrap();
        let (mine, other) = (Words::of(&left), Words::of(&right));
        for page in 0..400 {
            mine.at(page, 3).store(page as u64 + 1, Ordering::Relaxed);
        }
        other.at(49, 511).store(12, Ordering::Relaxed);
        let mut snapshots = Snapshots::of(&[&left, &right], &path).unwrap();
        let whole = snapshots.take().unwrap();
        assert_eq!(whole.pages, 550);
        mine.at(17, 3).store(1000, Ordering::Relaxed);
        mine.at(399, 3).store(0, Ordering::Relaxed);
        mine.at(450, 0).store(5, Ordering::Relaxed);
        let some = snapshots.take().unwrap();
        assert_eq!(some.pages, 3);
        assert!(some.bytes <= 4 * PAGE as u64, "two pages with something in them, a table, a trailer: {some:?}");
        let none = snapshots.take().unwrap();
        assert_eq!(none.pages, 0);
        let snapshot = Snapshot::open(&path).unwrap();
        assert_eq!((snapshot.sequence(), snapshot.regions()[0].name.as_str()), (3, "left"));
        snapshot.verify().unwrap();
        for page in 0..500 {
            let expected = match page {
                17 => 1000,
                399.. => 0,
                _ => page as u64 + 1,
            };
            assert_eq!(saved(&snapshot, 0, page)[3], expected, "page {page}");
        }
        assert_eq!((saved(&snapshot, 0, 450)[0], saved(&snapshot, 1, 49)[511]), (5, 12));
        // And what is restored may be written to and taken again.
        drop((snapshots, left, right));
        let again = domain.region(0).trap(trap).restored(&snapshot, 0, store()).unwrap();
        let words = Words::of(&again);
        assert_eq!(words.at(17, 3).load(Ordering::Relaxed), 1000);
        words.at(18, 3).store(2000, Ordering::Relaxed);
        let mut snapshots = Snapshots::of(&[&again], &path).unwrap();
        snapshots.take().unwrap();
        let newer = Snapshot::open(&path).unwrap();
        assert_eq!((saved(&newer, 0, 18)[3], saved(&newer, 0, 19)[3]), (2000, 20));
        // The older file is gone from the directory, and open still.
        assert_eq!(saved(&snapshot, 0, 18)[3], 19);
        assert_eq!(words.at(21, 3).load(Ordering::Relaxed), 22);
    }
}

#[test]
fn what_nobody_has_any_more_is_zero_in_the_next_snapshot() {
    const PAGES: usize = 40_000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dropped.snap");
    let domain = Domain::with_frames(300 * PAGE).build().unwrap();
    let store = || MemoryStore::new(8 << 20).unwrap();
    let (left, mut right) =
        (domain.region(50 * PAGE).stored(store()).unwrap(), domain.region(PAGES * PAGE).stored(store()).unwrap());
    let (mine, other) = (Words::of(&left), Words::of(&right));
    (0..50).for_each(|page| mine.at(page, 0).store(1, Ordering::Relaxed));
    // Few of the many, at both ends and amid the rest.
    let touched = [0, 1, 7, 20, 16_384, 39_998, 39_999];
    touched.iter().for_each(|page| other.at(*page, 0).store(2, Ordering::Relaxed));
    let mut snapshots = Snapshots::of(&[&left, &right], &path).unwrap();
    assert_eq!(snapshots.take().unwrap().pages, 50 + PAGES as u64);
    assert_eq!(saved(&Snapshot::open(&path).unwrap(), 1, 39_999)[0], 2);
    for page in [1, 7, 39_998] {
        right.discard(page * PAGE, PAGE).unwrap();
    }
    assert_eq!(snapshots.take().unwrap().pages, 3);
    let snapshot = Snapshot::open(&path).unwrap();
    snapshot.verify().unwrap();
    assert!((0..50).all(|page| saved(&snapshot, 0, page)[0] == 1));
    for page in touched {
        let expected = if [1, 7, 39_998].contains(&page) { 0 } else { 2 };
        assert_eq!(saved(&snapshot, 1, page)[0], expected, "page {page}");
    }
}

#[test]
fn a_large_snapshot_takes_no_more_memory_than_a_small_one() {
    const PAGES: usize = 20_000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.snap");
    let domain = Domain::with_frames(2000 * PAGE).build().unwrap();
    let region = domain.region(PAGES * PAGE).stored(MemoryStore::new(96 << 20).unwrap()).unwrap();
    let words = Words::of(&region);
    (0..PAGES).for_each(|page| words.at(page, 7).store(page as u64 + 1, Ordering::Relaxed));
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    let whole = snapshots.take().unwrap();
    words.at(12_345, 7).store(0, Ordering::Relaxed);
    words.at(54, 7).store(7, Ordering::Relaxed);
    let some = snapshots.take().unwrap();
    assert_eq!((whole.pages, some.pages), (PAGES as u64, 2));
    assert_eq!(whole.buffer_bytes, some.buffer_bytes);
    assert!(whole.buffer_bytes < 2 << 20, "{whole:?}");
    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!((snapshot.sequence(), snapshot.pages()), (2, PAGES as u64 - 1));
    for page in 0..PAGES {
        let expected = match page {
            54 => 7,
            12_345 => 0,
            _ => page as u64 + 1,
        };
        assert_eq!(saved(&snapshot, 0, page)[7], expected, "page {page}");
    }
}

#[test]
fn a_file_that_has_grown_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("grown.snap");
    let domain = Domain::with_frames(100 * PAGE).build().unwrap();
    let region = domain.region(64 * PAGE).zero().unwrap();
    let words = Words::of(&region);
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    let mut most = 0;
    for round in 0..20u64 {
        for page in 0..64 {
            words.at(page, 0).store(round * 100 + page as u64 + 1, Ordering::Relaxed);
        }
        snapshots.take().unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        assert!((0..64).all(|page| saved(&snapshot, 0, page)[0] == round * 100 + page as u64 + 1));
        most = most.max(std::fs::metadata(&path).unwrap().len());
    }
    assert!(most < 5 * 70 * PAGE as u64, "{most} bytes");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let kind = |made: selfpage::Result<Snapshots>| made.err().map(|error| error.kind());
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let (one, other) = (domain.region(PAGE).zero().unwrap(), domain.region(PAGE).zero().unwrap());
    let elsewhere = Domain::with_frames(64 * PAGE).build().unwrap();
    let foreign = elsewhere.region(PAGE).zero().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, [7; PAGE]).unwrap();
    let mapped = domain.region(0).file(&file, 0, FileAccess::ReadWrite).unwrap();
    assert_eq!(kind(Snapshots::of(&[], &path)), Some(Kind::Invalid));
    assert_eq!(kind(Snapshots::of(&[&one, &one], &path)), Some(Kind::Invalid));
    assert_eq!(kind(Snapshots::of(&[&one, &foreign], &path)), Some(Kind::Invalid));
    assert_eq!(kind(Snapshots::of(&[&mapped], &path)), Some(Kind::Invalid));
    assert_eq!(kind(Snapshots::of(&[&one], &file)), Some(Kind::Invalid));
    assert_eq!(
        kind(Snapshots::of(&[&one], dir.path().join("none/one.snap")).and_then(|mut s| s.take().map(|_| s))),
        Some(Kind::Io)
    );
    let private = Domain::with_frames(64 * PAGE).descriptor_table(DescriptorTable::Private).build().unwrap();
    assert_eq!(kind(Snapshots::of(&[&private.region(PAGE).zero().unwrap()], &path)), Some(Kind::Invalid));
    let mut first = Snapshots::of(&[&one], &path).unwrap();
    assert_eq!(kind(Snapshots::of(&[&other], dir.path().join("two.snap"))), Some(Kind::Held));
    first.take().unwrap();
    drop(one);
    assert_eq!(first.take().err().map(|error| error.kind()), Some(Kind::Invalid));
    assert_eq!(Snapshot::open(&path).unwrap().sequence(), 1);
    drop(first);
    Snapshots::of(&[&other], &path).unwrap().take().unwrap();
    assert_eq!(Snapshot::open(&file).err().map(|error| error.kind()), Some(Kind::Lost));
    assert_eq!(Snapshot::open(dir.path().join("none")).err().map(|error| error.kind()), Some(Kind::Io));
}

#[test]
fn it_goes_where_it_was_to_go_whatever_the_directory_and_is_nobody_elses() {
    let dir = tempfile::tempdir().unwrap();
    child::forked(|| {
        std::env::set_current_dir(&dir).unwrap();
        // Left by somebody who let everybody read.
        std::fs::write("here.snap.new", "").unwrap();
        std::fs::set_permissions("here.snap.new", Permissions::from_mode(0o644)).unwrap();
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let region = domain.region(16 * PAGE).name("at risk").zero().unwrap();
        let mut snapshots = Snapshots::of(&[&region], "here.snap").unwrap();
        snapshots.take().unwrap();
        std::env::set_current_dir("/").unwrap();
        snapshots.take().unwrap();
    });
    let path = dir.path().join("here.snap");
    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!((snapshot.sequence(), snapshot.regions()[0].name.as_str()), (2, "at risk"));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

/// The flags of the mapping at an address.
fn flags(addr: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut within = false;
    let found = maps.lines().find(|line| {
        if let Some((start, end)) = line.split_once(' ').and_then(|(range, _)| range.split_once('-'))
            && let (Ok(start), Ok(end)) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
        {
            within = (start..end).contains(&addr);
        }
        within && line.starts_with("VmFlags:")
    });
    format!("{} ", found.unwrap())
}

/// The kernel maps what it merges anew, without the protection by which a write is seen.
#[test]
fn a_process_whose_pages_are_merged_has_none_of_a_domain_merged() {
    child::forked(|| {
        // SAFETY: plain numbers.
        if unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, 1, 0, 0, 0) } != 0 {
            return skip::skip("ksm", "the kernel merges no pages of whole processes");
        }
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let region = domain.region(16 * PAGE).zero().unwrap();
        let plain = vec![1_u8; 64 << 20];
        assert!(flags(plain.as_ptr() as usize + PAGE).contains(" mg "), "nothing is merged here");
        assert!(!flags(region.as_ptr() as usize).contains(" mg "));
    });
}
