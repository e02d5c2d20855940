//! A snapshot that cannot be written: nobody hangs, and the one before stays.

use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::{FileStore, MemoryStore};
use selfpage::{Domain, FileAccess, Kind, Locking, Region};

use super::{PAGE, Words, disk, saved, skip};
use crate::filter::Call;

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

/// Takes all the room that a disk has left.
fn filled(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    let block = [7; PAGE];
    let why = (0..).find_map(|_| file.write_all(&block).err()).unwrap();
    assert_eq!(why.kind(), io::ErrorKind::StorageFull);
}

#[test]
fn a_file_beside_which_there_is_no_room_for_another_grows_on() {
    const PAGES: usize = 1280;
    let dir = tempfile::tempdir().unwrap();
    if let Err(error) = disk::mount(dir.path(), 4 * PAGES * PAGE) {
        return skip::skip("mount", &format!("{error}: run as root"));
    }
    let (path, ballast) = (dir.path().join("one.snap"), dir.path().join("ballast"));
    let domain = Domain::with_frames(2 * PAGES * PAGE).build().unwrap();
    let region = domain.region(PAGES * PAGE).zero().unwrap();
    let words = Words::of(&region);
    let put = |number: u64, pages: usize| {
        (0..pages).for_each(|page| words.at(page, 0).store(number, Ordering::Relaxed));
    };
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    let mut sequences = Vec::new();
    let mut take = |pages: usize| {
        let taken = snapshots.take()?;
        assert_eq!(taken.pages, pages as u64);
        let snapshot = Snapshot::open(&path).unwrap();
        snapshot.verify().unwrap();
        (0..PAGES).for_each(|page| assert_eq!(saved(&snapshot, 0, page)[0], words.at(page, 0).load(Ordering::Relaxed)));
        sequences.push(snapshot.sequence());
        selfpage::Result::Ok(())
    };
    // The fourth brings it above three times the first, where there would be a new one were there room.
    for (number, pages) in [(1, PAGES), (2, PAGES), (3, PAGES), (4, 20), (5, 1)] {
        put(number, pages);
        take(pages).unwrap();
    }
    // What did not fit is in the next one that does, read or not: pages are written 256 at a time. There is less room for that than all take.
    filled(&ballast);
    for number in [6, 7] {
        put(number, 400);
        let failed = take(0);
        assert_eq!(failed.as_ref().err().map(|error| error.kind()), Some(Kind::OutOfSpace), "{failed:?}");
        assert_eq!(saved(&Snapshot::open(&path).unwrap(), 0, 0)[0], 5, "the one before is the newest");
    }
    std::fs::remove_file(&ballast).unwrap();
    words.at(700, 0).store(8, Ordering::Relaxed);
    take(401).unwrap();
    assert_eq!(sequences, [1, 2, 3, 4, 5, 6]);
}

/// What a thread wrote to before, at and after the cut of a snapshot that did not fit.
#[test]
fn the_next_snapshot_after_one_that_did_not_fit_lacks_nothing() {
    const PAGES: usize = 512;
    let dir = tempfile::tempdir().unwrap();
    if let Err(error) = disk::mount(dir.path(), 16 * PAGES * PAGE) {
        return skip::skip("mount", &format!("{error}: run as root"));
    }
    let (path, ballast) = (dir.path().join("one.snap"), dir.path().join("ballast"));
    let domain = Domain::with_frames(PAGES / 2 * PAGE).build().unwrap();
    let store = MemoryStore::new((4 * PAGES * PAGE) as u64).unwrap();
    let region = domain.region(PAGES * PAGE).stored(store).unwrap();
    let words = Words::of(&region);
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let write = || {
        let number = count.fetch_add(1, Ordering::Relaxed);
        words.at(number as usize * 7 % PAGES, 1).store(number + 1, Ordering::Relaxed);
    };
    (0..PAGES).for_each(|_| write());
    snapshots.take().unwrap();
    for _ in 0..6 {
        filled(&ballast);
        stop.store(false, Ordering::Relaxed);
        let failed = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    write();
                }
            });
            let before = count.load(Ordering::Relaxed);
            while count.load(Ordering::Relaxed) < before + 100 {
                std::thread::yield_now();
            }
            let failed = snapshots.take();
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            failed
        });
        assert_eq!(failed.as_ref().err().map(|error| error.kind()), Some(Kind::OutOfSpace), "{failed:?}");
        std::fs::remove_file(&ballast).unwrap();
        snapshots.take().unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        snapshot.verify().unwrap();
        let lacking = |page: &usize| saved(&snapshot, 0, *page)[1] != words.at(*page, 1).load(Ordering::Relaxed);
        assert_eq!((0..PAGES).filter(lacking).count(), 0);
    }
}

/// The kernel sends `SIGXFSZ` for a write beyond the limit, which would end the process.
#[test]
fn beyond_the_limit_on_the_size_of_files_the_old_one_stays_and_the_program_goes_on() {
    const PAGES: usize = 64;
    let ended = super::child::in_child(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.snap");
        let domain = Domain::with_frames(2 * PAGES * PAGE).build().unwrap();
        let region = domain.region(PAGES * PAGE).zero().unwrap();
        let words = Words::of(&region);
        let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
        words.at(3, 0).store(7, Ordering::Relaxed);
        snapshots.take().unwrap();
        for limit in [0, PAGE as u64, (PAGES / 2 * PAGE) as u64] {
            let limits = libc::rlimit { rlim_cur: limit, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: a child of the test's own.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limits) }, 0);
            (0..PAGES).for_each(|page| words.at(page, 0).store(9, Ordering::Relaxed));
            let error = snapshots.take().unwrap_err();
            let said = error.to_string();
            assert!(said.contains("large") && said.contains("raise `ulimit -f`"), "{said}");
            assert_eq!(error.kind(), Kind::OutOfSpace, "{said}");
            let fresh = Snapshots::of(&[&region], dir.path().join("two.snap")).and_then(|mut fresh| fresh.take());
            assert!(fresh.is_err(), "{fresh:?}");
            assert_eq!(saved(&Snapshot::open(&path).unwrap(), 0, 3)[0], 7);
        }
        true
    });
    assert_eq!(ended, 0, "how the child ended");
}

#[test]
fn a_name_that_need_not_survive_is_told() {
    // Files of snapshots have high numbers: what has a low one is the directory.
    let sync = |errno| (Call::up_to(libc::SYS_fsync, 0, 99), errno);
    // To be read only, as nothing is but the directory.
    let open = (Call::up_to(libc::SYS_openat, 2, libc::O_CLOEXEC as u32), libc::EACCES);
    let sync_all = (Call::any(libc::SYS_syncfs), libc::EIO);
    let cases: [(&[(Call, i32)], _); 4] = [
        (&[sync(libc::EIO)], Some(Kind::Io)),
        (&[sync(libc::EINVAL)], None),
        (&[open], None),
        (&[open, sync_all], Some(Kind::Io)),
    ];
    for (refused, told) in cases {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.snap");
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let region = domain.region(16 * PAGE).zero().unwrap();
        let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
        let first = || refused.iter().try_for_each(|(call, errno)| call.fails(*errno)).map(|()| snapshots.take());
        let first = match std::thread::scope(|scope| scope.spawn(first).join().unwrap()) {
            Ok(taken) => taken,
            Err(why) => return skip::skip("seccomp", &format!("system calls cannot be made to fail: {why}")),
        };
        assert_eq!(first.as_ref().err().map(|error| error.kind()), told, "{refused:?}: {first:?}");
        let second = snapshots.take().unwrap();
        assert_eq!(second.pages == 16, told.is_some(), "anew where the first may be lost: {second:?}");
        Snapshot::open(&path).unwrap().verify().unwrap();
    }
}

#[test]
fn where_the_limit_on_the_size_of_files_is_not_told_no_file_is_made_longer() {
    let dir = tempfile::tempdir().unwrap();
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let region = domain.region(16 * PAGE).zero().unwrap();
    let mut snapshots = Snapshots::of(&[&region], dir.path().join("one.snap")).unwrap();
    let untold = || -> io::Result<_> {
        Call::up_to(libc::SYS_prlimit64, 2, 0).fails(libc::EPERM)?;
        Ok([snapshots.take().unwrap_err(), FileStore::create(dir.path().join("s"), 1 << 20).unwrap_err().into()])
    };
    match std::thread::scope(|scope| scope.spawn(untold).join().unwrap()) {
        Ok(errors) => errors.iter().for_each(|error: &selfpage::Error| {
            let remedy = error.to_string().matches("prlimit64").count();
            assert_eq!((error.kind(), remedy), (Kind::Unsupported, 1), "{error}");
        }),
        Err(why) => skip::skip("seccomp", &format!("system calls cannot be made to fail: {why}")),
    }
}

#[test]
fn a_region_that_goes_in_the_middle_is_waited_for_or_told() {
    const PAGES: usize = 2000;
    // Closely where pages are armed and the cut is made, in which the image has no hold on them yet.
    for pause in (0..2000).step_by(100).chain([3000, 8000]).map(Duration::from_micros) {
        let dir = tempfile::tempdir().unwrap();
        let domain = Domain::with_frames(2 * PAGES * PAGE).build().unwrap();
        let region = domain.region(PAGES * PAGE).zero().unwrap();
        let words = Words::of(&region);
        (0..PAGES).for_each(|page| words.at(page, 0).store(1 + page as u64, Ordering::Relaxed));
        let path = dir.path().join("one.snap");
        let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
        let (told, began) = std::sync::mpsc::channel();
        let taker = std::thread::spawn(move || {
            told.send(Instant::now()).unwrap();
            snapshots.take()
        });
        let until = began.recv().unwrap() + pause;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        drop(region);
        match taker.join().unwrap() {
            Ok(_) => {
                let snapshot = Snapshot::open(&path).unwrap();
                let gone = (0..PAGES).filter(|page| saved(&snapshot, 0, *page)[0] != 1 + *page as u64).count();
                assert_eq!(gone, 0, "pages that the snapshot lacks, dropped after {pause:?}");
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

#[test]
fn what_is_no_file_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    // The call would wait for somebody who writes.
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let domain = Domain::with_frames(16 * PAGE).build().unwrap();
    let region = domain.region(PAGE).zero().unwrap();
    let (regular, directory, no_name) =
        ("not a regular file", "a directory: name a file in it", "the path names no file");
    let inside = dir.path().join("..");
    let wrong = [
        (pipe.as_path(), regular),
        ("/dev/zero".as_ref(), regular),
        (dir.path(), directory),
        ("".as_ref(), no_name),
        ("/".as_ref(), no_name),
        (inside.as_path(), no_name),
    ];
    for (path, cause) in wrong {
        let opened = Snapshot::open(path).map(drop);
        for why in [opened.unwrap_err(), Snapshots::of(&[&region], path).map(drop).unwrap_err()] {
            assert_eq!(why.kind(), Kind::Invalid, "{why}");
            assert!(why.to_string().contains(cause), "{why}");
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "something was made");
    assert!(!std::fs::exists(".new").unwrap());
}

#[test]
fn one_that_is_not_whole_yet_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let missing = || Snapshot::open(&path).map(drop).unwrap_err().to_string();
    assert!(!missing().contains("whole"), "{}", missing());
    let domain = Domain::with_frames(16 * PAGE).build().unwrap();
    let region = domain.region(PAGE).zero().unwrap();
    let _snapshots = Snapshots::of(&[&region], &path).unwrap();
    assert!(missing().contains("one.snap.new is there: no snapshot was whole yet"), "{}", missing());
}

#[test]
fn a_place_whose_names_cannot_be_looked_at_is_nobody_elses() {
    let dir = tempfile::tempdir().unwrap();
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let region = domain.region(16 * PAGE).zero().unwrap();
    let made = |name: &str| {
        Call::any(libc::SYS_newfstatat).fails(libc::EPERM).map(|()| Snapshots::of(&[&region], dir.path().join(name)))
    };
    let error = match std::thread::scope(|scope| scope.spawn(|| made("one.snap")).join().unwrap()) {
        Ok(made) => made.unwrap_err(),
        Err(why) => return skip::skip("seccomp", &format!("system calls cannot be made to fail: {why}")),
    };
    assert_eq!(error.kind(), Kind::Unsupported, "{error}");
    let said = error.to_string();
    assert!(said.contains("one.snap") && said.contains("os error 1") && said.contains("newfstatat"), "{said}");
    // Nothing is left of it.
    Snapshots::of(&[&region], dir.path().join("one.snap")).unwrap().take().unwrap();
}

#[test]
fn what_is_refused_is_told_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let (path, text) = (dir.path().join("one.snap"), dir.path().join("text"));
    std::fs::write(&text, "no snapshot").unwrap();
    let domains = [(); 2].map(|()| Domain::with_frames(16 * PAGE).build().unwrap());
    let regions = domains.each_ref().map(|domain| domain.region(PAGE).name("table").zero().unwrap());
    let (domain, region) = (&domains[0], &regions[0]);
    let mut snapshots = Snapshots::of(&[region], &path).unwrap();
    snapshots.take().unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    let of = |regions: &[&Region], path: &Path| Snapshots::of(regions, path).map(drop).unwrap_err();
    let store = || MemoryStore::new(1 << 20).unwrap();
    let restored = |len_bytes, which| domain.region(len_bytes).restored(&snapshot, which, store()).unwrap_err();
    let copied = domain.region(0).file(&text, 0, FileAccess::Read).unwrap().cow_clone(store()).unwrap_err();
    let away = dir.path().join("gone/one.snap");
    let told = [
        (of(&[], &path), "name one"),
        (of(&[region, region], &path), "region table is named twice: name it once"),
        (of(&[region, &regions[1]], &path), "make a `Snapshots` for each"),
        (of(&[region], &dir.path().join("two.snap")), "the domain has a `Snapshots` already: drop that one first"),
        (of(&[&regions[1]], &path), "drop its `Snapshots`, or name another file"),
        (of(&[&regions[1]], &away), "or its directory"),
        (Snapshot::open(&away).unwrap_err(), "or its directory"),
        (Snapshot::open(&text).unwrap_err(), "open another"),
        (restored(0, 1), "the snapshot has 1, numbered from 0"),
        (restored(2 * PAGE, 0), "8192 bytes wanted, and it has 4096: ask for no more, or for 0"),
        (copied, "copy its contents into one"),
    ];
    for (error, remedy) in told {
        assert!(error.to_string().contains(remedy), "{error}: not {remedy}");
    }
}
