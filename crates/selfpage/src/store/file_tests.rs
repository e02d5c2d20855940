use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use super::*;

fn write(store: &FileStore, blok: Blok, fill: u8) -> Result<(), PagerError> {
    let page = Page([fill; PAGE_BYTES]);
    let mut writes = [WriteBlok { blok, bytes: &page.0, outcome: Err(PagerError::NoStore) }];
    store.write(&mut writes);
    writes[0].outcome
}

fn read(store: &FileStore, context: Context, blok: Blok) -> Result<u8, PagerError> {
    let mut page = Page([0xee; PAGE_BYTES]);
    store.read(context, &mut [ReadBlok { blok, bytes: &mut page.0 }])?;
    assert!(page.0.iter().all(|&byte| byte == page.0[0]));
    Ok(page.0[0])
}

fn refusal(made: Result<FileStore, StoreError>) -> String {
    made.expect_err("this must be refused").to_string()
}

/// On the disk of the source tree, where `/tmp` may be memory.
fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap()
}

#[test]
fn pages_come_back_in_every_context() {
    let dir = dir();
    let stores = [FileStore::create(dir.path().join("s"), 1 << 20), FileStore::unnamed_in(dir.path(), 1 << 20)];
    for store in stores.map(Result::unwrap) {
        let (first, len) = store.claim(3).unwrap();
        assert_eq!((first, len), (Blok(1), 3));
        for blok in 1..4 {
            write(&store, Blok(blok), blok as u8).unwrap();
        }
        for context in [Context::Trap, Context::PagerThread, Context::Normal] {
            assert_eq!([1, 2, 3].map(|blok| read(&store, context, Blok(blok)).unwrap()), [1, 2, 3]);
        }
        assert_eq!(store.claim(1000).unwrap().1, 253);
        assert_eq!(store.claim(1), Err(PagerError::Full));
        assert!(store.descriptors()[0] >= 100, "{:?}", store.descriptors());
    }
}

#[test]
fn an_unnamed_store_has_no_name() {
    let dir = dir();
    let _store = FileStore::unnamed_in(dir.path(), 1 << 20).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn an_empty_name_is_called_empty() {
    for made in [FileStore::create("", 1 << 20), FileStore::unnamed_in("", 1 << 20)] {
        let why = refusal(made);
        assert!(why.contains("its name is empty") && !why.contains("no files can be made"), "{why}");
    }
}

#[test]
fn a_directory_without_files_of_ours_is_not_called_missing() {
    for made in [FileStore::unnamed_in("/proc", 1 << 20), FileStore::create("/proc/selfpage-store", 1 << 20)] {
        let why = refusal(made);
        assert!(why.contains("no files can be made") && !why.contains("make its directory"), "{why}");
    }
    let dir = dir();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path().join("none/store"), &link).unwrap();
    for missing in [dir.path().join("none/store"), link] {
        assert!(refusal(FileStore::create(missing, 1 << 20)).ends_with("make its directory first, or name another"));
    }
    assert!(refusal(FileStore::unnamed_in(dir.path().join("none"), 1 << 20)).contains("make its directory"));
}

#[test]
fn names_that_a_killed_process_left_are_passed_over() {
    let dir = dir();
    let left = |at| dir.path().join(format!(".selfpage-{}-{at}", process::id()));
    (0..8).for_each(|at| drop(File::create(left(at)).unwrap()));
    let file = briefly_named(dir.path(), Mode::from_raw_mode(0o600)).unwrap();
    assert_eq!(fstat(&file).unwrap().st_nlink, 0);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 8);
}

#[test]
fn a_named_store_is_sparse_kept_and_may_be_used_again() {
    let dir = dir();
    let path = dir.path().join("s");
    for _ in 0..2 {
        let store = FileStore::create(&path, 1 << 30).unwrap();
        write(&store, store.claim(1).unwrap().0, 1).unwrap();
        let meta = fs::metadata(&path).unwrap();
        assert_eq!(meta.mode() & 0o777, 0o600);
        assert!(meta.blocks() * 512 < 1 << 20 && meta.len() >= 1 << 30);
    }
}

/// Whoever has opened a file goes on to read it, whatever becomes of its mode.
#[test]
fn a_file_that_others_may_have_open_is_made_anew() {
    let dir = dir();
    let (path, link) = (dir.path().join("s"), dir.path().join("link"));
    std::os::unix::fs::symlink("s", &link).unwrap();
    // As by touch(1), and by truncate(1).
    for (name, len_bytes) in [(&path, 0), (&path, 3 << 20), (&link, 0)] {
        let made = File::create(&path).unwrap();
        made.set_len(len_bytes).unwrap();
        made.set_permissions(fs::Permissions::from_mode(0o644)).unwrap();
        let others = File::open(&path).unwrap();
        let store = FileStore::create(name, 1 << 20).unwrap();
        write(&store, store.claim(1).unwrap().0, 7).unwrap();
        assert!(holds_nothing(&others, u64::MAX).unwrap(), "{} bytes before", len_bytes);
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.mode() & 0o777, meta.uid()), (0o600, rustix::process::geteuid().as_raw()));
        assert!(link.is_symlink());
        // The lock is on the file that has the name now.
        assert!(refusal(FileStore::try_create(&path, 1 << 20)).contains("another running program"));
        drop(store);
        // Nobody else can have this one open.
        FileStore::create(&path, 1 << 20).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), meta.ino());
    }
}

#[test]
fn a_file_of_another_user_is_left_alone() {
    let dir = dir();
    let path = dir.path().join("s");
    File::create(&path).unwrap();
    if std::os::unix::fs::chown(&path, Some(65534), Some(65534)).is_err() {
        return crate::skip::skip("root", "only root makes files of another user");
    }
    let before = fs::metadata(&path).unwrap();
    for mode in [0o644, 0o600] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let says = refusal(FileStore::create(&path, 1 << 20));
        assert!(says.contains("another user's") && says.contains("remove it, or name another"), "{says}");
        let after = fs::metadata(&path).unwrap();
        assert_eq!((after.mode() & 0o777, after.uid(), after.ino()), (mode, 65534, before.ino()));
        assert_eq!(after.len(), 0);
    }
}

#[test]
fn two_domains_cannot_have_one_store() {
    let dir = dir();
    let path = dir.path().join("s");
    let store = FileStore::create(&path, 1 << 20).unwrap();
    let says = refusal(FileStore::create(&path, 1 << 20));
    assert!(says.contains("another running program") && says.contains(&path.display().to_string()), "{says}");
    assert!(says.contains("or this one") && says.contains("stored_in"), "{says}");
    drop(store);
    FileStore::create(&path, 1 << 20).unwrap();
}

#[test]
fn a_file_with_something_in_it_is_left_alone() {
    let dir = dir();
    let path = dir.path().join("thesis.txt");
    fs::write(&path, "years of work").unwrap();
    let says = refusal(FileStore::create(&path, 1 << 20));
    assert!(says.contains("not a store's") && says.contains("remove it"), "{says}");
    assert_eq!(fs::read(&path).unwrap(), b"years of work");
    // Nothing at the start, something later, be there a hole before it or zeros.
    for (zeros, at) in [(0, 100), (0, 1 << 30), (3 << 20, (3 << 20) + 1), (4096, 8 << 20)] {
        let late = File::create(dir.path().join("late")).unwrap();
        late.write_all_at(&vec![0; zeros], 0).unwrap();
        late.write_all_at(b"x", at).unwrap();
        assert!(refusal(FileStore::create(dir.path().join("late"), 1 << 20)).contains("not a store's"), "{at}");
    }
    // Preallocated.
    File::create(dir.path().join("zeros")).unwrap().set_len(3 << 20).unwrap();
    FileStore::create(dir.path().join("zeros"), 1 << 20).unwrap();
}

#[test]
fn places_that_make_no_sense_are_refused() {
    let dir = dir();
    assert!(refusal(FileStore::create(dir.path().join("no/s"), 1 << 20)).contains("make its directory first"));
    assert!(refusal(FileStore::unnamed_in(dir.path().join("no"), 1 << 20)).contains("make its directory first"));
    assert!(refusal(FileStore::create(Path::new("/dev/null"), 1 << 20)).contains("neither a file nor a block device"));
    assert!(refusal(FileStore::create(dir.path(), 1 << 20)).contains("Is a directory"));
    assert!(refusal(FileStore::create(dir.path().join("s"), 100)).contains("holds no page"));
}

#[test]
fn a_place_says_how_large_a_store_may_be() {
    let dir = dir();
    let most_bytes = FileStore::most_bytes(dir.path()).unwrap();
    assert!(most_bytes > 0 && most_bytes.is_multiple_of(PAGE_BYTES as u64));
    // As much room as there is in the file system: it changes while we look.
    let of_a_file = FileStore::most_bytes(dir.path().join("s")).unwrap();
    assert!(of_a_file.abs_diff(most_bytes) < most_bytes / 2, "{of_a_file} in place of {most_bytes}");
    assert!(FileStore::most_bytes(Path::new("s")).is_ok());
    assert!(FileStore::most_bytes(dir.path().join("no/s")).is_err());
}

#[test]
fn a_truncated_file_is_noticed() {
    let dir = dir();
    let path = dir.path().join("s");
    let store = FileStore::create(&path, 1 << 20).unwrap();
    store.claim(8).unwrap();
    write(&store, Blok(1), 1).unwrap();
    write(&store, Blok(8), 8).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(2 * PAGE_BYTES as u64).unwrap();
    assert_eq!(read(&store, Context::PagerThread, Blok(1)), Ok(1));
    assert_eq!(read(&store, Context::PagerThread, Blok(8)), Err(PagerError::Truncated));
    // A trap cannot tell whether that was our file.
    assert_eq!(read(&store, Context::Trap, Blok(8)), Err(PagerError::WrongContext));
}

/// The program closes what it does not know, and opens another file at the number; a thread with a table of its own goes on.
#[test]
fn a_descriptor_closed_by_the_program_is_left_to_pager_threads() {
    let dir = dir();
    let store = &FileStore::unnamed_in(dir.path(), 1 << 20).unwrap();
    store.claim(2).unwrap();
    write(store, Blok(1), 5).unwrap();
    // A member that has died, and left blok 2.
    store.bloks.hand_to(9);
    store.release(Blok(2), 1);
    let (closed, program) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let pager = scope.spawn(move || {
            program.recv().unwrap();
            let before = store.taken_bloks();
            store.reclaim_dead();
            (read(store, Context::PagerThread, Blok(1)), before, store.taken_bloks())
        });
        let program = scope.spawn(move || {
            own_descriptor_table();
            let number = store.descriptors()[0];
            close_number(number);
            let absent = read(store, Context::Trap, Blok(1));
            let other = tempfile::NamedTempFile::new().unwrap();
            let raised = rustix::io::fcntl_dupfd_cloexec(other.as_file(), number).unwrap();
            assert_eq!(std::os::fd::AsRawFd::as_raw_fd(&raised), number);
            // Nobody has locked that one, and nobody does.
            store.reclaim_dead();
            assert!(!is_locked(other.reopen().unwrap().as_fd(), LOCKS_FROM + 9).unwrap());
            closed.send(()).unwrap();
            absent
        });
        assert_eq!(program.join().unwrap(), Err(PagerError::WrongContext));
        assert_eq!(pager.join().unwrap(), (Ok(5), 2, 1));
    });
}

#[test]
fn a_family_that_is_full_says_so_before_a_fork() {
    let dir = dir();
    let path = dir.path().join("s");
    let store = FileStore::create(&path, 1 << 20).unwrap();
    let this = rustix::thread::gettid().as_raw_nonzero().get();
    let others = File::options().write(true).open(&path).unwrap();
    let hold = |members| lock(others.as_fd(), LOCKS_FROM + 1, members);
    // All but one.
    assert!(hold(u64::from(MEMBERS) - 2).unwrap());
    store.check_fork(this).unwrap();
    store.before_fork(this).unwrap();
    let full = |checked: Result<(), StoreError>| {
        let error = checked.unwrap_err();
        assert_eq!(error.cause.kind(), io::ErrorKind::QuotaExceeded);
        assert!(error.to_string().contains("MemoryStore"), "{error}");
    };
    full(store.check_fork(this));
    full(store.before_fork(this));
    store.after_fork_in_parent();
    store.check_fork(this).unwrap();
    assert!(hold(u64::from(MEMBERS) - 1).unwrap());
    full(store.check_fork(this));
    drop(others);
    store.check_fork(this).unwrap();
}

#[test]
fn members_that_have_ended_are_none_from_the_next_fork_on() {
    let store = FileStore::unnamed_in(dir().path(), 1 << 20).unwrap();
    let this = rustix::thread::gettid().as_raw_nonzero().get();
    // As long as its lock is there, a child lives.
    let child = || {
        store.before_fork(this).unwrap();
        store.child.lock().unwrap().take().unwrap()
    };
    let mut children = [(); 50].map(|()| Some(child()));
    assert_eq!(store.bloks.others().count(), 50);
    children[..49].fill_with(|| None);
    let next = child();
    assert_eq!((next.member, store.bloks.others().count()), (1, 50));
    drop((children, next));
    assert_eq!(child().member, 1);
    assert_eq!(store.bloks.others().count(), 1);
}

#[allow(unsafe_code)]
fn own_descriptor_table() {
    // SAFETY: fd-number: this thread only opens and closes descriptors of its own from here on.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES) }.unwrap();
}

#[allow(unsafe_code)]
fn close_number(number: RawFd) {
    // SAFETY: fd-number: closing under the store's feet is the point.
    unsafe { rustix::io::close(number) };
}
