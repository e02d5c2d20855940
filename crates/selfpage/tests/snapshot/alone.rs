//! One `Snapshots` at a time writes to a path, whoever made it and whatever has become of the file.

use std::fs::Permissions;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use selfpage::pager::{Context, PagerError};
use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{Domain, Kind, Region};

use super::{PAGE, Words, child, saved, skip};
use crate::filter::Call;
use crate::over_memory::over_memory;

/// Two domains with a region each.
fn two() -> [(Domain, Region); 2] {
    [(); 2].map(|()| {
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let region = domain.region(16 * PAGE).zero().unwrap();
        (domain, region)
    })
}

fn kind(made: selfpage::Result<Snapshots>) -> Option<Kind> {
    made.err().map(|error| error.kind())
}

/// Two places: at the first there is a snapshot, and at the second none yet.
fn begun(dir: &Path, regions: &[(Domain, Region); 2]) -> ([PathBuf; 2], Snapshots, Snapshots) {
    let places = ["one.snap", "two.snap"].map(|name| dir.join(name));
    let mut first = Snapshots::of(&[&regions[0].1], &places[0]).unwrap();
    first.take().unwrap();
    let second = Snapshots::of(&[&regions[1].1], &places[1]).unwrap();
    (places, first, second)
}

fn taken_anew(places: &[PathBuf; 2], regions: &[(Domain, Region); 2]) -> [Option<Kind>; 2] {
    [0, 1].map(|at| kind(Snapshots::of(&[&regions[at].1], &places[at])))
}

#[test]
fn the_second_is_refused_before_there_is_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let [(_here, mine), (_there, other)] = two();
    let mut first = Snapshots::of(&[&mine], &path).unwrap();
    assert_eq!(kind(Snapshots::of(&[&other], &path)), Some(Kind::Held));
    assert!(!path.exists(), "it has no snapshot yet");
    first.take().unwrap();
    assert_eq!(kind(Snapshots::of(&[&other], &path)), Some(Kind::Held));
    drop(first);
    let second = Snapshots::of(&[&other], &path).unwrap();
    assert_eq!(kind(Snapshots::of(&[&mine], &path)), Some(Kind::Held));
    drop(second);
    // One that never took a snapshot leaves nothing behind.
    let path = dir.path().join("none.snap");
    drop(Snapshots::of(&[&mine], &path).unwrap());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_file_that_loses_its_name_gets_no_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let (path, kept) = (dir.path().join("one.snap"), dir.path().join("kept.snap"));
    let [(_here, mine), (_there, other)] = two();
    let words = Words::of(&mine);
    let mut snapshots = Snapshots::of(&[&mine], &path).unwrap();
    for round in 1..4u64 {
        words.at(3, 0).store(round, Ordering::Relaxed);
        snapshots.take().unwrap();
        assert_eq!(saved(&Snapshot::open(&path).unwrap(), 0, 3)[0], round);
        // Moved away, and removed.
        match round {
            1 => std::fs::rename(&path, &kept).unwrap(),
            _ => std::fs::remove_file(&path).unwrap(),
        }
    }
    assert_eq!(saved(&Snapshot::open(&kept).unwrap(), 0, 3)[0], 1);
    // Where somebody else has the path meanwhile, that is said.
    let mut second = Snapshots::of(&[&other], &path).unwrap();
    second.take().unwrap();
    assert_eq!(snapshots.take().err().map(|error| error.kind()), Some(Kind::Held));
    Words::of(&other).at(3, 0).store(7, Ordering::Relaxed);
    second.take().unwrap();
    assert_eq!(saved(&Snapshot::open(&path).unwrap(), 0, 3)[0], 7);
    drop(second);
    snapshots.take().unwrap();
    assert_eq!(saved(&Snapshot::open(&path).unwrap(), 0, 3)[0], 3);
}

/// Whoever copies a file over it does not ask for the lock.
#[test]
fn a_file_that_is_changed_gets_no_snapshot_on_top() {
    let dir = tempfile::tempdir().unwrap();
    let (path, others) = (dir.path().join("one.snap"), dir.path().join("two.snap"));
    let [(_here, mine), (_there, other)] = two();
    let words = Words::of(&mine);
    Snapshots::of(&[&other], &others).unwrap().take().unwrap();
    let others = std::fs::read(others).unwrap();
    let mut snapshots = Snapshots::of(&[&mine], &path).unwrap();
    let mut round = 0;
    let mut take = || {
        round += 1;
        words.at(3, 0).store(round, Ordering::Relaxed);
        snapshots.take().unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        snapshot.verify().unwrap();
        assert_eq!(saved(&snapshot, 0, 3)[0], round);
        (std::fs::read(&path).unwrap(), snapshot.sequence())
    };
    let older = take().0;
    let (newer, sequence) = take();
    assert_eq!(sequence, 2);
    let cut = newer.len() - PAGE;
    for put in [&others[..], &older, &newer[..cut], &[]] {
        std::fs::write(&path, put).unwrap();
        assert_eq!(take().1, 1, "{} bytes were put there", put.len());
        assert_eq!(take().1, 2, "what is intact is built on");
    }
}

/// Does something when it is read.
struct Reacting {
    store: MemoryStore,
    reaction: Arc<Mutex<Option<Reaction>>>,
}

type Reaction = Box<dyn FnOnce() + Send>;

impl BackingStore for Reacting {
    over_memory!(store: claim, release, write);

    fn reads_in_trap(&self) -> bool {
        false
    }
    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        let reaction = self.reaction.lock().unwrap().take();
        reaction.into_iter().for_each(|reaction| reaction());
        self.store.read(context, bloks)
    }
}

/// What was written to it before the cut is gone, and what is written behind it leaves a hole there.
#[test]
fn a_file_that_is_cut_while_a_snapshot_is_written_is_told() {
    const PAGES: usize = 1024;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let reaction = Arc::default();
    let store =
        Reacting { store: MemoryStore::new((8 * PAGES * PAGE) as u64).unwrap(), reaction: Arc::clone(&reaction) };
    let domain = Domain::with_frames(2 * PAGES * PAGE).build().unwrap();
    let region = domain.region(PAGES * PAGE).stored(store).unwrap();
    let words = Words::of(&region);
    let put = |number: u64| {
        (0..PAGES).for_each(|page| words.at(page, 0).store(number, Ordering::Relaxed));
        // The last pages are in no frame: they are read from the store when the others have been written to the file.
        let last = ((PAGES - 100) * PAGE, 100 * PAGE);
        region.flush(last.0, last.1).unwrap();
        for _ in 0..2 {
            region.evict(last.0, last.1).unwrap();
        }
    };
    let cut = |file: PathBuf, len_bytes: u64| {
        let cuts = move || std::fs::OpenOptions::new().write(true).open(file).unwrap().set_len(len_bytes).unwrap();
        *reaction.lock().unwrap() = Some(Box::new(cuts));
    };
    let newest = || {
        let snapshot = Snapshot::open(&path).unwrap();
        snapshot.verify().unwrap();
        saved(&snapshot, 0, 3)[0]
    };
    put(1);
    Snapshots::of(&[&region], &path).unwrap().take().unwrap();
    // A new file that takes the place of an old one, and then a file that grows.
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    for number in [2, 4] {
        put(number);
        match number {
            2 => cut(dir.path().join("one.snap.new"), 0),
            _ => cut(path.clone(), std::fs::metadata(&path).unwrap().len()),
        }
        let error = snapshots.take().unwrap_err();
        assert!(error.to_string().contains("somebody else"), "{error}");
        assert_eq!(newest(), number - 1, "the one before is the newest");
        put(number + 1);
        assert_eq!(snapshots.take().unwrap().pages, PAGES as u64, "it is taken anew");
        assert_eq!(newest(), number + 1);
    }
}

#[test]
fn a_child_that_lives_on_does_not_keep_the_place() {
    let (dir, regions) = (tempfile::tempdir().unwrap(), two());
    let (places, first, second) = begun(dir.path(), &regions);
    let (mut told, writer) = std::io::pipe().unwrap();
    let mut parents = Some((first, second, writer));
    // What a child has of the parent's says nothing about the parent's files when it goes.
    assert_eq!(child::in_child(|| parents.take().is_some()), 0);
    assert!(dir.path().join("two.snap.new").exists());
    let child = child::fork(|| {
        let kept = parents.take().map(|(first, second, writer)| (first, second, drop(writer)));
        told.read_to_end(&mut Vec::new()).is_ok() && kept.is_some()
    });
    let (mut first, second, writer) = parents.take().unwrap();
    first.take().unwrap();
    drop((first, second));
    assert_eq!(taken_anew(&places, &regions), [None, None]);
    drop(writer);
    assert_eq!(child.wait(), 0);
}

#[test]
fn a_process_that_is_just_being_started_does_not_keep_the_place() {
    let (dir, regions) = (tempfile::tempdir().unwrap(), two());
    let (places, first, second) = begun(dir.path(), &regions);
    // Before exec it has all that this process has open, and no handler of a fork has run.
    // SAFETY: test: as fork(2); the child waits for its end and does nothing else.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
    if child == 0 {
        // SAFETY: test: as above.
        unsafe { libc::sleep(60) };
        // SAFETY: test: as above.
        unsafe { libc::_exit(0) };
    }
    drop((first, second));
    let again = taken_anew(&places, &regions);
    let mut status = 0;
    // SAFETY: test: ends our own child, and waits for it.
    let ended = unsafe { libc::kill(child, libc::SIGKILL) == 0 && libc::waitpid(child, &mut status, 0) == child };
    assert!(ended);
    assert_eq!(again, [None, None]);
}

#[test]
fn a_link_stays_and_the_file_that_it_leads_to_is_the_place() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let [(_here, mine), (_there, other)] = two();
    std::fs::create_dir(at("far")).unwrap();
    symlink("near.snap", at("link.snap")).unwrap();
    symlink("far/one.snap", at("near.snap")).unwrap();
    // At first nothing is there.
    for _ in 0..2 {
        let mut snapshots = Snapshots::of(&[&mine], at("link.snap")).unwrap();
        snapshots.take().unwrap();
        assert!(at("link.snap").is_symlink() && at("near.snap").is_symlink());
        assert!(!at("far/one.snap").is_symlink());
        assert_eq!(kind(Snapshots::of(&[&other], at("far/one.snap"))), Some(Kind::Held));
        assert_eq!(kind(Snapshots::of(&[&other], at("link.snap"))), Some(Kind::Held));
        assert_eq!(Snapshot::open(at("far/one.snap")).unwrap().sequence(), 1);
    }
    symlink("two.loop", at("one.loop")).unwrap();
    symlink("one.loop", at("two.loop")).unwrap();
    let why = Snapshots::of(&[&mine], at("one.loop")).unwrap_err();
    assert!(why.to_string().contains("symbolic links"), "{why}");
}

/// What becomes of a snapshot at a link that the kernel does not follow, and of the file that it leads to.
fn is_not_followed(made: selfpage::Result<()>, target: &Path, before: &[u8]) {
    let why = made.unwrap_err();
    assert!(why.kind() == Kind::Denied && why.to_string().contains("Permission denied"), "{why}");
    assert!(std::fs::read(target).unwrap() == before);
}

#[test]
fn a_link_that_the_kernel_does_not_follow_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (path, link) = (dir.path().join("one.snap"), dir.path().join("link.snap"));
    let [(_here, mine), _] = two();
    Snapshots::of(&[&mine], &path).unwrap().take().unwrap();
    let before = std::fs::read(&path).unwrap();
    symlink("one.snap", &link).unwrap();
    let take = || Snapshots::of(&[&mine], &link).and_then(|mut snapshots| snapshots.take().map(drop));
    // Whoever looks at a link itself, or at what is open, says so by a flag.
    let refused = || Call::with(libc::SYS_statx, 2, 0).fails(libc::EACCES).map(|()| take());
    match std::thread::scope(|scope| scope.spawn(refused).join().unwrap()) {
        Ok(made) => is_not_followed(made, &path, &before),
        Err(why) => skip::skip("seccomp", &format!("system calls cannot be made to fail: {why}")),
    }
}

#[test]
fn a_link_that_another_user_has_put_into_a_directory_for_all_is_not_followed() {
    let protected = std::fs::read_to_string("/proc/sys/fs/protected_symlinks");
    if !protected.is_ok_and(|set| set.trim() == "1") {
        let why = "the kernel follows links in directories for all: sysctl -w fs.protected_symlinks=1";
        return skip::skip("protected_symlinks", why);
    }
    let dir = tempfile::tempdir().unwrap();
    let (path, all) = (dir.path().join("one.snap"), dir.path().join("all"));
    let link = all.join("link.snap");
    let [(_here, mine), _] = two();
    Snapshots::of(&[&mine], &path).unwrap().take().unwrap();
    std::fs::create_dir(&all).unwrap();
    std::fs::set_permissions(&all, Permissions::from_mode(0o1777)).unwrap();
    symlink(&path, &link).unwrap();
    if lchown(&link, Some(65534), Some(65534)).is_err() {
        return skip::skip("root", "only root makes links of another user");
    }
    let before = std::fs::read(&path).unwrap();
    is_not_followed(Snapshots::of(&[&mine], &link).and_then(|mut made| made.take().map(drop)), &path, &before);
    // Where nothing is at its end yet.
    std::fs::remove_file(&path).unwrap();
    assert_eq!(kind(Snapshots::of(&[&mine], &link)), Some(Kind::Denied));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}
