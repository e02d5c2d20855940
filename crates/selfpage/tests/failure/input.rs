//! Sizes and names that make no sense: one clear line, and nothing started.

use std::ffi::CString;
use std::fs::Permissions;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use selfpage::dirty::{Dirty, DirtyTracker};
use selfpage::protection::Memory;
use selfpage::store::{FileStore, MemoryStore};
use selfpage::{DescriptorTable, Domain, Error, FileAccess, Kind, Protection, Region, Trap};

use crate::disk;
use crate::filter::Call;
use crate::own_file::limit_file_size;
use crate::scenario::{PAGE, here, in_child, number_pages};
use crate::skip::skip;

/// Descriptors, threads and mappings of this process: what a call that failed must not leave behind.
fn running() -> (usize, usize) {
    let count = |dir| std::fs::read_dir(dir).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

#[track_caller]
fn refused<T>(result: Result<T, Error>, kind: Kind, words: &[&str]) {
    let Err(error) = result else { panic!("it was not refused") };
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    assert!(!text.contains('\n') && text.len() < 300, "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is missing from: {text}");
    }
}

#[test]
fn domains() {
    in_child(here!(), "", || {
        let before = running();
        let least = (&[0, 1, 15 * PAGE][..], "16 frames of 4096 bytes at least");
        let most = (&[((1 << 31) - 1) * PAGE, usize::MAX / 2, usize::MAX][..], "at most 2147483646 frames");
        for (all, limit) in [least, most] {
            for bytes in all {
                refused(Domain::with_frames(*bytes).build(), Kind::Invalid, &[limit, &bytes.to_string()]);
            }
        }
        let with_room = |bytes| Domain::with_frames(16 * PAGE).most_frames(bytes).build();
        refused(with_room(usize::MAX), Kind::Invalid, &["most_frames of 18446744073709551615", "at most 2147483646"]);
        refused(with_room(15 * PAGE), Kind::Invalid, &["most_frames of 61440 bytes", "begins with 65536 bytes"]);
        for name in ["", "LRU", "lru2", "random\n"] {
            refused(
                Domain::with_frames(16 * PAGE).policy(name).build(),
                Kind::Invalid,
                &["policy", "fifo", "priority"],
            );
        }
        for count in [0, 65, 100_000] {
            let built = Domain::with_frames(16 * PAGE).workers(count).build();
            refused(built, Kind::Invalid, &[&format!("{count} workers"), "1 to 64"]);
        }
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("there");
        std::fs::create_dir(&place).unwrap();
        let traced = Domain::with_frames(16 * PAGE).trace(&place, Duration::ZERO).build();
        refused(traced, Kind::Invalid, &["open trace", "there: it is a directory", "name a file"]);
        let nowhere = Domain::with_frames(16 * PAGE).trace(dir.path().join("no/t"), Duration::ZERO).build();
        refused(nowhere, Kind::Io, &["open trace", "no/t: No such file"]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "a trace beside it");
        crate::scenario::until("its threads are gone", || running() == before);
        assert_eq!(running(), before);
    })
    .well();
}

#[test]
fn regions() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(16 * PAGE).build().unwrap();
        let before = running();
        for bytes in [0, usize::MAX, isize::MAX as usize] {
            refused(domain.region(bytes).zero(), Kind::Invalid, &["region", "bytes"]);
        }
        let too_large = &["region of 1152921504606846976 bytes", "make it smaller", "ulimit -v"];
        refused(domain.region(1 << 60).zero(), Kind::OutOfSpace, too_large);
        refused(domain.region(64 * PAGE).pinned(), Kind::Held, &["ENOMEM", "more frames"]);
        let region = domain.region(5 * PAGE).zero().unwrap();
        refused(region.pin(PAGE, usize::MAX), Kind::Invalid, &["20480 bytes"]);
        refused(region.evict(5 * PAGE, 1), Kind::Invalid, &["20480 bytes"]);
        refused(region.flush(0, 6 * PAGE), Kind::Invalid, &["20480 bytes"]);
        refused(region.prefetch(usize::MAX, 1), Kind::Invalid, &["20480 bytes"]);
        refused(region.unpin(0, 1), Kind::Invalid, &["not pinned", "as often", "bytes 0..4096"]);
        [0, 2].into_iter().for_each(|page| region.pin(page * PAGE, PAGE).unwrap());
        refused(region.unpin(0, 3 * PAGE), Kind::Invalid, &["not pinned", "bytes 4096..8192"]);
        refused(region.unpin(2 * PAGE, PAGE), Kind::Invalid, &["not pinned", "bytes 8192..12288"]);
        let there = region.as_ptr() as usize;
        let store = MemoryStore::new(1 << 20).unwrap();
        refused(domain.region(PAGE).at(there).stored(store), Kind::Invalid, &["region of 4096 bytes"]);
        let grows = &["has 16 frames", "room for 16", "add 0 at most", "Config::most_frames, in bytes"];
        refused(domain.add_frames(1), Kind::OutOfSpace, grows);
        refused(domain.add_frames(u32::MAX), Kind::OutOfSpace, grows);
        refused(domain.remove_frames(u32::MAX), Kind::Invalid, &["has 16 frames", "16 at least", "remove 0 at most"]);
        let mut region = region;
        unaligned(&mut region);
        drop(region);
        assert_eq!(running(), before);
        let private = Domain::with_frames(16 * PAGE).descriptor_table(DescriptorTable::Private).build().unwrap();
        refused(private.region(PAGE).trap(Trap::Upcall).zero(), Kind::Invalid, &["DescriptorTable::Shared"]);
    })
    .well();
}

/// A range that begins or ends within a page: nothing of it is dropped or protected.
fn unaligned(region: &mut Region) {
    region.as_mut_slice::<u64>().fill(7);
    for (offset, len) in [(100, 1), (0, 1), (PAGE - 1, 2), (8, 2 * PAGE), (PAGE, PAGE + 1), (5 * PAGE - 1, 0)] {
        let bytes = format!("bytes {offset}..{}", offset + len);
        refused(
            region.protect(offset, len, Protection::Read),
            Kind::Invalid,
            &["protect", &bytes, "multiples of 4096"],
        );
        refused(region.discard(offset, len), Kind::Invalid, &["discard", &bytes, "multiples of 4096"]);
    }
    assert!((0..5).all(|page| region.protection(page * PAGE).unwrap() == Protection::ReadWrite));
    assert!(region.as_slice::<u64>().iter().all(|word| *word == 7));
}

/// What regions without a store cannot do, and how many there are.
#[test]
fn what_stays_and_what_is_too_many() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(64 * PAGE).most_frames(128 * PAGE).build().unwrap();
        let mut zero = domain.region(48 * PAGE).name("zero").zero().unwrap();
        number_pages(&mut zero);
        let stays = &["evict region zero, bytes 0..196608: none of its pages", "unpin them", "with a store"];
        refused(zero.evict(0, 48 * PAGE), Kind::Held, stays);
        refused(zero.flush(0, PAGE), Kind::Held, &["region zero, bytes 0..4096", "no store", "RegionBuilder::stored"]);
        refused(domain.add_frames(65), Kind::OutOfSpace, &["has 64 frames", "room for 128", "add 64 at most"]);
        refused(domain.remove_frames(40), Kind::Held, &["unpin or discard some", "frames now"]);
        drop(zero);
        let all: Vec<_> = (0..1024).map(|_| domain.region(PAGE).zero().unwrap()).collect();
        refused(domain.region(PAGE).zero(), Kind::OutOfSpace, &["has 1024 regions", "drop one", "another domain"]);
        drop(all);
        domain.region(PAGE).zero().unwrap();
    })
    .well();
}

#[test]
fn memory_that_has_rights_already() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(16 * PAGE).build().unwrap();
        for name in ["", "ledger ", "at home "] {
            let region = domain.region(PAGE).name(name.trim_end());
            let region = Arc::new(region.zero().unwrap());
            let (start, _given) = (region.as_ptr().addr(), Memory::of(&region).unwrap());
            let end = start + PAGE;
            let words = &[
                &*format!("protect memory {name}at {start:#x}..{end:#x}: "),
                &*format!(": memory {name}at {start:#x} has rights of its own"),
            ];
            refused(Memory::of(&region), Kind::Invalid, words);
        }
    })
    .well();
}

/// What the program gives to others that say `?` with errors of std's has all that ours says.
#[test]
fn as_an_error_of_std() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(16 * PAGE).build().unwrap();
        let text = |error: Error| {
            let (said, error) = (error.to_string(), std::io::Error::from(error));
            assert_eq!(error.to_string(), said);
            assert!(error.get_ref().is_some_and(|inner| inner.is::<Error>()));
            error.kind()
        };
        let missing = domain.region(0).file("/nowhere/to/be/found", 0, FileAccess::Read).unwrap_err();
        assert_eq!(text(missing), std::io::ErrorKind::NotFound);
        assert_eq!(text(domain.add_frames(1).unwrap_err()), std::io::ErrorKind::Other);
    })
    .well();
}

#[test]
fn files() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir().unwrap();
        let domain = Domain::with_frames(16 * PAGE).build().unwrap();
        let before = running();
        let map = |path: &Path, offset, len| domain.region(len).file(path, offset, FileAccess::ReadWrite);
        let file = dir.path().join("data");
        std::fs::write(&file, vec![7; 3 * PAGE + 1]).unwrap();
        refused(map(&dir.path().join("none"), 0, 0), Kind::Io, &["none", "No such file", "name another"]);
        refused(map(dir.path(), 0, 0), Kind::Io, &["Is a directory"]);
        refused(map(Path::new("/dev/zero"), 0, 0), Kind::Invalid, &["/dev/zero", "not a regular file"]);
        let made_up = domain.region(0).file("/proc/self/maps", 0, FileAccess::Read);
        refused(made_up, Kind::Invalid, &["/proc/self/maps", "not a regular file with a length", "copy"]);
        refused(map(Path::new("a\0b"), 0, 0), Kind::Invalid, &["a\0b"]);
        refused(map(&file, 1, 0), Kind::Invalid, &["no multiple of 4096"]);
        let behind = &["data", "has 12289 bytes", "none from 16384 on"];
        refused(map(&file, 4 * PAGE as u64, 0), Kind::Invalid, behind);
        refused(map(&file, 4 * PAGE as u64, PAGE), Kind::Invalid, behind);
        refused(map(&file, u64::MAX - 4095, PAGE), Kind::Invalid, &["data"]);
        let wanted =
            &["16384 bytes wanted from 4096 on", "the file's 12289 bytes 8193 follow", "0, which stands for the rest"];
        refused(map(&file, PAGE as u64, 4 * PAGE), Kind::Invalid, wanted);
        let empty = dir.path().join("empty");
        std::fs::write(&empty, "").unwrap();
        for (offset, len) in [(0, 0), (0, PAGE), (PAGE as u64, 0)] {
            refused(map(&empty, offset, len), Kind::Invalid, &["empty: the file is empty", "longer"]);
        }
        let pipe = dir.path().join("pipe");
        let name = CString::new(pipe.as_os_str().as_bytes()).unwrap();
        // SAFETY: test: a name that ends.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        refused(domain.region(PAGE).file(&pipe, 0, FileAccess::Read), Kind::Invalid, &["pipe", "not a regular file"]);
        assert_eq!(running(), before);
    })
    .well();
}

/// In a process of its own: once there was one that was `tracked()`, regions are looked for.
#[test]
fn a_region_that_is_tracked_by_its_trap_alone() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let mut region = domain.region(16 * PAGE).trap(Trap::TrackedWorker).zero().unwrap();
        let start = region.as_ptr() as usize;
        let (tracker, mut found) = (DirtyTracker::new().unwrap(), Dirty::new());
        region.pin(0, 16 * PAGE).unwrap();
        // SAFETY: the region's memory, which no reference is to.
        unsafe { tracker.arm(start..start + 16 * PAGE) }.unwrap();
        region.as_mut_slice::<u8>()[5 * PAGE] = 1;
        tracker.scan(start..start + 16 * PAGE, &mut found).unwrap();
        assert!(found.pages() == 1 && found.contains(start + 5 * PAGE), "{found:?}");
    })
    .well();
}

#[test]
fn stores() {
    let dir = tempfile::tempdir().unwrap();
    let says = |error: selfpage::store::StoreError, words: &[&str]| {
        let io = std::io::Error::from(error);
        let text = io.to_string();
        words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is missing from: {text}"));
    };
    for bytes in [0, 1, 4095, u64::MAX] {
        let with_size = bytes.to_string();
        says(MemoryStore::new(bytes).err().unwrap(), &[&with_size, "ask for"]);
        says(FileStore::unnamed_in(dir.path(), bytes).err().unwrap(), &[&with_size, "ask for"]);
    }
    says(FileStore::create(dir.path().join("a/b"), 8192).err().unwrap(), &["a/b", "No such file", "directory"]);
    says(FileStore::create(dir.path(), 8192).err().unwrap(), &["directory"]);
    says(FileStore::unnamed_in(dir.path().join("none"), 8192).err().unwrap(), &["No such file"]);
    std::fs::write(dir.path().join("mine"), "precious").unwrap();
    says(FileStore::create(dir.path().join("mine"), 8192).err().unwrap(), &["mine", "not a store's", "name another"]);
    assert_eq!(std::fs::read(dir.path().join("mine")).unwrap(), b"precious");
    let kind = |name: &str| Error::from(FileStore::try_create(dir.path().join(name), 8192).unwrap_err()).kind();
    let _in_use = FileStore::create(dir.path().join("used"), 8192).unwrap();
    assert_eq!([kind("mine"), kind("used"), kind("a/b")], [Kind::Invalid, Kind::Held, Kind::Io]);
}

/// To be aligned to more than a page.
#[repr(C, align(8192))]
#[derive(Clone, Copy)]
struct Wide([u8; 8192]);

// SAFETY: test: bytes.
unsafe impl bytemuck::Zeroable for Wide {}
// SAFETY: test: bytes, without padding.
unsafe impl bytemuck::Pod for Wide {}

#[test]
#[should_panic(expected = "aligned to 4096 bytes, and not to 8192")]
fn values_that_are_aligned_to_more_than_a_page() {
    let domain = Domain::with_frames(16 * PAGE).build().unwrap();
    let mut region = domain.region(5 * PAGE).zero().unwrap();
    region.as_mut_slice::<Wide>()[0] = Wide([1; 8192]);
}

#[test]
fn what_cannot_be_pinned_says_why() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(16 * PAGE).build().unwrap();
        let region = domain.region(PAGE).zero().unwrap();
        region.protect(0, PAGE, Protection::None).unwrap();
        refused(region.pin(0, PAGE), Kind::Held, &["protected against reading", "Region::protect"]);
    })
    .well();
}

/// As where all files are one user's, whoever makes them, and have the modes that they have.
#[test]
fn a_store_that_others_may_read_is_not_left() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
        let (path, link) = (dir.path().join("store"), dir.path().join("link"));
        symlink(&path, &link).unwrap();
        // What this thread makes from here on is another user's.
        // SAFETY: test: numbers.
        let set_user = |user| unsafe { (libc::setfsuid(user), libc::setfsuid(user)).1 };
        if set_user(65534) != 65534 {
            return skip("root", "only root makes files of another user");
        }
        Call::any(libc::SYS_fchmod).fails(libc::EPERM).unwrap();
        let refusal = |name| FileStore::create(name, 1 << 20).unwrap_err().to_string();
        for name in [&path, &link] {
            let said = refusal(name);
            assert!(said.contains("name a place on a file system with owners and modes"), "{said}");
            assert!(!path.exists() && link.is_symlink(), "what was made for it is left");
        }
        std::fs::write(&path, "").unwrap();
        let said = refusal(&path);
        assert!(said.contains("remove it, or name another") && path.exists(), "{said}");
        set_user(0);
    })
    .well();
}

/// Of a store that could not be made, nothing is left; what was there stays.
#[test]
fn a_file_that_was_made_for_a_refused_store_is_not_left() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (path, link, old) = (dir.path().join("store"), dir.path().join("link"), dir.path().join("old"));
        symlink(&path, &link).unwrap();
        std::fs::write(&old, "").unwrap();
        let is_refused = |remedy: &str| {
            for name in [&path, &link, &old] {
                let said = FileStore::create(name, 1 << 20).unwrap_err().to_string();
                assert!(said.contains(remedy), "{said}");
                assert!(!path.exists() && link.is_symlink(), "what was made for it is left: {said}");
            }
            assert!(old.exists());
        };
        // SAFETY: test: no other thread of this process reads the variable.
        unsafe { std::env::set_var("SELFPAGE_IO", "x") };
        is_refused("auto or pool");
        // SAFETY: test: as above.
        unsafe { std::env::remove_var("SELFPAGE_IO") };
        limit_file_size(8 * PAGE);
        is_refused("ulimit -f");
        limit_file_size(usize::MAX);
        // A file that somebody else has just made, and is about to use.
        let other = FileStore::create(&path, 1 << 20).unwrap();
        FileStore::create(&path, 1 << 20).unwrap_err();
        assert!(path.exists());
        drop(other);
        std::fs::remove_file(&path).unwrap();
        // There is no room for the mark.
        let full = tempfile::tempdir().unwrap();
        if disk::mount(full.path(), 4 * PAGE).is_err() {
            return skip("mount", "no small disk can be mounted: run as root");
        }
        std::fs::write(full.path().join("others"), [1; 4 * PAGE]).unwrap();
        let path = full.path().join("store");
        let said = FileStore::create(&path, 1 << 20).unwrap_err().to_string();
        assert!(said.contains("free disk space") && !path.exists(), "{said}");
    })
    .well();
}
