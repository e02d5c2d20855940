//! Stores that are full, fail, or give back other bytes than they were given.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use selfpage::doctor::State;
use selfpage::pager::{Context, PagerError};
use selfpage::store::{BackingStore, Blok, FileStore, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{Domain, Kind, Region, Trap};

use crate::formatted::{self, Kind as FileSystem};
use crate::over_memory::over_memory;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, number_what_fits, pages, until};
use crate::skip::skip;
use crate::{disk, tried};

const FRAMES: usize = 64;
const TRAPS: [Trap; 2] = [Trap::Worker, Trap::Upcall];

fn name(trap: Trap) -> &'static str {
    if trap.is_read() { "worker" } else { "upcall" }
}

#[test]
fn full() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = MemoryStore::new((FRAMES * PAGE) as u64).unwrap();
            let mut region = domain.region(4 * FRAMES * PAGE).name("heap").trap(trap).stored(store).unwrap();
            number_pages(&mut region);
        })
        .by(libc::SIGBUS, &["heap", "offset", "no frame", "the store is full (ENOSPC)"]);
    }
}

#[test]
fn full_and_then_not() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = MemoryStore::new((FRAMES * PAGE) as u64).unwrap();
        let mut region = domain.region(4 * FRAMES * PAGE).stored(store).unwrap();
        let written = number_what_fits(&mut region);
        assert!(written > FRAMES, "{written}");
        let error = region.pin(written * PAGE, PAGE).unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfSpace, "{error}");
        assert!(error.to_string().contains("ENOSPC"), "{error}");
        let spent_us = cpu_us();
        std::thread::sleep(Duration::from_millis(300));
        let idle_us = cpu_us() - spent_us;
        assert!(idle_us < 100_000, "{idle_us} us of CPU while nobody asks for anything");
        region.discard(0, 16 * PAGE).unwrap();
        region.pin(written * PAGE, PAGE).unwrap();
        region.unpin(written * PAGE, PAGE).unwrap();
        check_pages(&region, 16..written);
    })
    .well();
}

/// CPU time of this process.
fn cpu_us() -> i64 {
    // SAFETY: test: the kernel fills it in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let us = |time: libc::timeval| time.tv_sec * 1_000_000 + time.tv_usec;
    us(usage.ru_utime) + us(usage.ru_stime)
}

#[test]
fn a_full_disk() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir().unwrap();
        if let Err(error) = disk::mount(dir.path(), 256 << 10) {
            return crate::skip::skip("mount", &format!("{error}: run as root"));
        }
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = FileStore::unnamed_in(dir.path(), (8 * FRAMES * PAGE) as u64).unwrap();
        let region = domain.region(4 * FRAMES * PAGE).stored(store).unwrap();
        let mut written = 0;
        let error = loop {
            if let Err(error) = region.pin(written * PAGE, PAGE) {
                break error;
            }
            // SAFETY: test: a page of the region.
            unsafe { region.as_ptr().add(written * PAGE).cast::<[u64; 512]>().write([written as u64 + 1; 512]) };
            region.unpin(written * PAGE, PAGE).unwrap();
            written += 1;
        };
        assert_eq!(error.kind(), Kind::OutOfSpace, "{error}");
        // Every frame holds the only copy of something: room must be made first.
        let mut region = region;
        written -= 16;
        region.discard(written * PAGE, 16 * PAGE).unwrap();
        for (index, page) in region.as_slice::<[u64; 512]>()[..written].iter().enumerate() {
            assert_eq!(*page, [index as u64 + 1; 512], "page {index}");
        }
    })
    .well();
}

/// A store that fails as told: errno for reads and for writes, 0 for none. A write takes so long, and as long as writes are held.
pub struct Failing {
    store: MemoryStore,
    pub read: AtomicU32,
    pub write: AtomicU32,
    pub write_ms: AtomicU32,
    pub holds_writes: AtomicBool,
    pub begun_writes: AtomicU32,
}

impl Failing {
    pub fn new() -> Arc<Failing> {
        let store = MemoryStore::new(1 << 30).unwrap();
        let [read, write, write_ms, begun_writes] = [(); 4].map(|()| AtomicU32::new(0));
        Arc::new(Failing { store, read, write, write_ms, holds_writes: false.into(), begun_writes })
    }
}

impl BackingStore for Failing {
    over_memory!(store: claim, release, reads_in_trap);

    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        match self.read.load(SeqCst) {
            0 => self.store.read(context, bloks),
            errno => Err(PagerError::Io(errno as i32)),
        }
    }
    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        self.begun_writes.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_millis(self.write_ms.load(SeqCst).into()));
        until("writes are held no more", || !self.holds_writes.load(SeqCst));
        match self.write.load(SeqCst) {
            0 => self.store.write(bloks),
            errno => bloks.iter_mut().for_each(|write| write.outcome = Err(PagerError::Io(errno as i32))),
        }
    }
}

/// A region with its pages numbered, most of them in the store.
fn numbered_over(trap: Trap, store: Arc<dyn BackingStore>) -> (Domain, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let mut region = domain.region(4 * FRAMES * PAGE).name("heap").trap(trap).stored_in(store).unwrap();
    number_pages(&mut region);
    (domain, region)
}

/// The pages that cannot be read: each says why when it is asked for by name. The others are right.
fn unreadable(region: &Region, why: Kind) -> Vec<usize> {
    let fails = |index: &usize| match tried::read(region.as_ptr().wrapping_add(index * PAGE).cast()) {
        Ok(word) => {
            assert_eq!(word, *index as u64 + 1);
            false
        }
        Err(signal) => {
            assert_eq!(signal, libc::SIGBUS);
            let error = region.pin(index * PAGE, PAGE).unwrap_err();
            assert_eq!(error.kind(), why, "{error}");
            assert!(error.to_string().contains("heap"), "{error}");
            true
        }
    };
    (0..pages(region)).filter(fails).collect()
}

#[test]
fn reads_fail() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            let store = Failing::new();
            let (_domain, region) = numbered_over(trap, store.clone());
            store.read.store(libc::EIO as u32, SeqCst);
            let sum: u64 = region.as_slice::<[u64; 512]>().iter().map(|page| page[0]).sum();
            println!("read {sum}");
        })
        .by(libc::SIGBUS, &["heap", "offset", "EIO"]);
    }
}

#[test]
fn a_clone_lacks_what_its_source_could_not_read_when_it_went() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            let store = Failing::new();
            let (_domain, region) = numbered_over(trap, store.clone());
            let mut clone = region.cow_clone(MemoryStore::new(1 << 30).unwrap()).unwrap();
            store.read.store(libc::EIO as u32, SeqCst);
            drop(region);
            let mut lacking = 0;
            for index in 0..4 * FRAMES {
                match clone.pin(index * PAGE, PAGE) {
                    Ok(()) => {
                        check_pages(&clone, index..index + 1);
                        clone.unpin(index * PAGE, PAGE).unwrap();
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), Kind::Lost, "{error}");
                        lacking += 1;
                    }
                }
            }
            assert!((1..4 * FRAMES).contains(&lacking), "{lacking} pages");
            clone.discard(0, 4 * FRAMES * PAGE).unwrap();
            assert!(clone.as_slice::<u64>().iter().all(|word| *word == 0));
        })
        .well();
    }
}

#[test]
fn reads_fail_and_then_do_not() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            tried::catch();
            let store = Failing::new();
            let (_domain, region) = numbered_over(trap, store.clone());
            store.read.store(libc::EIO as u32, SeqCst);
            let failed = unreadable(&region, Kind::Io);
            assert!(failed.len() >= 2 * FRAMES, "{failed:?}");
            store.read.store(0, SeqCst);
            // A failed page is asked for again by name; in an upcall region any access does that.
            for index in failed {
                region.pin(index * PAGE, PAGE).unwrap();
                region.unpin(index * PAGE, PAGE).unwrap();
            }
            check_pages(&region, 0..pages(&region));
        })
        .well();
    }
}

#[test]
fn a_failed_page_that_is_discarded_is_new() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            tried::catch();
            let store = Failing::new();
            let (_domain, mut region) = numbered_over(trap, store.clone());
            region.evict(0, PAGE).unwrap();
            until("page 0 is saved and its frame used", || {
                let _ = region.as_slice::<[u64; 512]>()[FRAMES..].iter().map(|page| page[0]).sum::<u64>();
                let _ = region.evict(0, PAGE);
                region.residency()[0].load(std::sync::atomic::Ordering::Relaxed) == 0
            });
            store.read.store(libc::EIO as u32, SeqCst);
            assert_eq!(tried::read(region.as_ptr().cast()), Err(libc::SIGBUS));
            region.discard(0, PAGE).unwrap();
            assert_eq!(tried::read(region.as_ptr().cast()), Ok(0));
        })
        .well();
    }
}

#[test]
fn writes_fail() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            let store = Failing::new();
            store.write.store(libc::EIO as u32, SeqCst);
            numbered_over(trap, store.clone());
        })
        .by(libc::SIGBUS, &["heap", "offset", "no frame, because pages cannot be saved", "EIO"]);
    }
}

#[test]
fn writes_fail_and_then_do_not() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            let store = Failing::new();
            let (domain, mut region) = numbered_over(trap, store.clone());
            region.flush(0, region.len_bytes()).unwrap();
            store.write.store(libc::EIO as u32, SeqCst);
            let some = FRAMES / 2;
            for page in &mut region.as_mut_slice::<[u64; 512]>()[..some] {
                page[1] = 77;
            }
            let error = region.flush(0, some * PAGE).unwrap_err();
            assert_eq!(error.kind(), Kind::Io, "{error}");
            assert!(error.to_string().contains("bytes 0..4096"), "{error}");
            std::thread::scope(|scope| {
                // The others go on while that half cannot be saved: clean pages make room.
                scope.spawn(|| check_pages(&region, 0..pages(&region)));
            });
            store.write.store(0, SeqCst);
            check_pages(&region, 0..pages(&region));
            assert!(region.as_slice::<[u64; 512]>()[..some].iter().all(|page| page[1] == 77));
            region.flush(0, region.len_bytes()).unwrap();
            println!("{:?}", domain.stats().counts);
        })
        .well();
    }
}

/// Flips a bit in every page of the store that holds anything but its mark.
fn damage(path: &std::path::Path) -> usize {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    let mut damaged = 0;
    for offset in (PAGE as u64..len).step_by(PAGE) {
        let mut page = [0; PAGE];
        file.read_exact_at(&mut page, offset).unwrap();
        if page.iter().any(|byte| *byte != 0) {
            page[100] ^= 1;
            file.write_all_at(&page, offset).unwrap();
            damaged += 1;
        }
    }
    damaged
}

/// As [`numbered_over`] a file, in which every page is damaged that was saved. How many those are.
fn numbered_over_damage(trap: Trap) -> (Domain, Region, usize) {
    // It is gone before the end that comes.
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("store");
    let store = FileStore::create(&path, (8 * FRAMES * PAGE) as u64).unwrap();
    let (domain, region) = numbered_over(trap, Arc::new(store));
    let damaged = damage(&path);
    assert!(damaged > FRAMES);
    (domain, region, damaged)
}

#[test]
fn a_damaged_page_is_noticed() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            let (_domain, region, _) = numbered_over_damage(trap);
            check_pages(&region, 0..pages(&region));
        })
        .by(libc::SIGBUS, &["SIGBUS: region heap at 0x", "offset", "the store gave back other bytes than were saved"]);
    }
}

#[test]
fn several_threads_that_fail_at_once_are_all_told_of_by_the_name_of_the_region() {
    const THREADS: usize = 4;
    let ended = in_child(here!(), "", || {
        tried::catch();
        let (_domain, region, _) = numbered_over_damage(Trap::Upcall);
        std::thread::scope(|scope| {
            (0..THREADS).for_each(|_| drop(scope.spawn(|| unreadable(&region, Kind::Lost))));
        });
    });
    let Some(said) = ended.and_said() else { return };
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("SIGBUS: region")).collect();
    let nameless = lines.iter().filter(|line| !line.contains("region heap at 0x")).count();
    assert!(lines.len() > THREADS * FRAMES && nameless == 0, "{nameless} of {} lines lack the name", lines.len());
}

#[test]
fn threads_that_pin_a_damaged_page_at_once_are_all_told_why() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            let (_domain, region, _) = numbered_over_damage(trap);
            let is_lost = |at: &usize| region.pin(*at, PAGE).map_err(|error| error.kind()) == Err(Kind::Lost);
            let lost = (0..pages(&region)).map(|index| index * PAGE).find(is_lost).unwrap();
            std::thread::scope(|scope| {
                let pins =
                    || (0..2000).for_each(|_| assert_eq!(region.pin(lost, PAGE).unwrap_err().kind(), Kind::Lost));
                (0..4).for_each(|_| drop(scope.spawn(pins)));
            });
        })
        .well();
    }
}

#[test]
fn damaged_pages_are_lost_and_the_others_right() {
    for trap in TRAPS {
        in_child(here!(), name(trap), || {
            tried::catch();
            let (_domain, region, damaged) = numbered_over_damage(trap);
            let lost = unreadable(&region, Kind::Lost).len();
            assert!(lost > FRAMES && lost <= damaged, "{lost} of {damaged}");
        })
        .well();
    }
}

#[test]
fn nothing_is_left_after_a_kill() {
    // The child is told where by the environment, as it is the same test: a directory of its own would be left behind.
    let own = std::env::var_os("SELFPAGE_TEST_DIR").is_none().then(|| tempfile::tempdir_in("/var/tmp").unwrap());
    let place = own.as_ref().map(|dir| dir.path().to_str().unwrap().to_owned());
    let place = place.unwrap_or_else(|| std::env::var("SELFPAGE_TEST_DIR").unwrap());
    // SAFETY: test: no other thread of this process reads the variable.
    unsafe { std::env::set_var("SELFPAGE_TEST_DIR", &place) };
    let listed = |dir: &str| -> Vec<String> {
        let names = std::fs::read_dir(dir).unwrap().flatten();
        names.map(|entry| entry.file_name().into_string().unwrap()).collect()
    };
    let before = listed("/dev/shm");
    in_child(here!(), "", || {
        let place = std::path::Path::new(&place);
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let named = FileStore::create(place.join("named"), (8 * FRAMES * PAGE) as u64).unwrap();
        let unnamed = FileStore::unnamed_in(place, (8 * FRAMES * PAGE) as u64).unwrap();
        let mut one = domain.region(4 * FRAMES * PAGE).stored(named).unwrap();
        let mut other = domain.region(4 * FRAMES * PAGE).stored(unnamed).unwrap();
        number_pages(&mut one);
        number_pages(&mut other);
        // SAFETY: test: ends this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    })
    .by(libc::SIGKILL, &[]);
    assert_eq!(listed(&place), ["named"]);
    // What other programs have there meanwhile is theirs.
    let ours = |name: &String| name.contains("selfpage") && !before.contains(name);
    assert_eq!(listed("/dev/shm").into_iter().find(ours), None);
    // And it can be used again.
    FileStore::create(std::path::Path::new(&place).join("named"), 1 << 20).unwrap();
}

#[test]
fn a_page_that_is_in_core_again_while_it_is_saved_goes() {
    for trap in TRAPS {
        in_child(here!(), &format!("{trap:?}"), || {
            let store = Failing::new();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(PAGE).trap(trap).stored_in(store.clone()).unwrap();
            for turn in 1..4 {
                store.write_ms.store(100, SeqCst);
                region.as_mut_slice::<u64>()[0] = turn;
                assert_eq!(region.evict(0, PAGE).unwrap(), 1);
                std::thread::sleep(Duration::from_millis(20));
                assert_eq!(region.as_slice::<u64>()[0], turn);
                assert_eq!(region.evict(0, PAGE).unwrap(), 1, "it was saved meanwhile");
            }
        })
        .well();
    }
}

#[repr(align(4096))]
struct Aligned([u8; PAGE]);

/// Whether a page that is written past the kernel's page cache there is not in it then: a file system of memory takes such a write too.
fn takes_direct(dir: &Path) -> bool {
    let path = dir.join("tried");
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT).open(&path);
    opened.is_ok_and(|file| file.write_all_at(&Aligned([7; PAGE]).0, 0).is_ok() && !is_cached(&file))
}

/// Whether the first page of a file is in the page cache.
fn is_cached(file: &std::fs::File) -> bool {
    let mut cached = 0;
    // SAFETY: test: a mapping of its own, which is looked at by its address alone.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert!(at != libc::MAP_FAILED && libc::mincore(at, PAGE, &mut cached) == 0);
        libc::munmap(at, PAGE);
    }
    cached & 1 == 1
}

/// Whether a store there goes past the cache: what it says, and what its descriptor is.
fn goes_past_the_cache(dir: &Path) -> bool {
    let store = FileStore::unnamed_in(dir, 1 << 20).unwrap();
    // SAFETY: test: the store's descriptor is asked for its flags.
    let flags = unsafe { libc::fcntl(store.descriptors()[0], libc::F_GETFL) };
    assert_eq!(store.is_direct(), flags & libc::O_DIRECT != 0);
    store.is_direct()
}

#[test]
fn direct_is_what_the_file_system_takes() {
    in_child(here!(), "", || {
        let on_disk = tempfile::tempdir_in("/var/tmp").unwrap();
        assert_eq!(goes_past_the_cache(on_disk.path()), takes_direct(on_disk.path()));
        // File systems that have nothing but the cache. The first says that it could do without.
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "ramfs", "ramfs"]).arg(dir.path());
        let of_memory = || {
            assert!(!takes_direct(dir.path()));
            assert!(!goes_past_the_cache(dir.path()));
        };
        if disk::mount(dir.path(), 1 << 20).is_err() {
            return skip("mount", "no file system of memory can be mounted: run as root");
        }
        of_memory();
        if !mount.status().is_ok_and(|ended| ended.success()) {
            return skip("mount", "no file system that refuses O_DIRECT can be mounted: run as root");
        }
        of_memory();
    })
    .well();
}

/// Pages that are saved there take the memory that they were to make room in.
#[test]
fn the_doctor_tells_where_stores_are_memory() {
    in_child(here!(), "", || {
        if disk::mount(Path::new("/var/tmp"), 8 << 20).is_err() {
            return skip("mount", "no file system of memory can be mounted: run as root");
        }
        let findings = selfpage::doctor::examine();
        let direct = findings.iter().find(|finding| finding.feature == "O_DIRECT").unwrap();
        assert!(direct.state == State::Degraded && direct.why.contains("/var/tmp is memory"), "{direct:?}");
        assert!(direct.remedy.as_ref().is_some_and(|remedy| remedy.contains("--store PATH")), "{direct:?}");
    })
    .well();
}

/// A store that could have room has none on its disk, or may have none.
#[test]
fn what_keeps_a_store_from_having_room_is_named() {
    let refused = |region: &mut Region, remedy: &str| {
        number_pages(region);
        let error = region.flush(0, region.len_bytes()).unwrap_err();
        assert!(error.to_string().contains(remedy), "{error}");
        assert_eq!(error.kind(), Kind::OutOfSpace, "{error}");
        check_pages(region, 0..pages(region));
    };
    in_child(here!(), "disk", || {
        let dir = tempfile::tempdir().unwrap();
        if let Err(error) = disk::mount(dir.path(), 1 << 20) {
            return skip("mount", &format!("{error}: run as root"));
        }
        let store = FileStore::unnamed_in(dir.path(), 8 << 20).unwrap();
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let mut region = domain.region(FRAMES / 2 * PAGE).stored(store).unwrap();
        let mut others = std::fs::File::create(dir.path().join("others")).unwrap();
        while std::io::Write::write_all(&mut others, &[1; PAGE]).is_ok() {}
        refused(&mut region, "free space on the disk");
    })
    .well();
    in_child(here!(), "limit", || {
        let store = FileStore::unnamed_in("/var/tmp", 8 << 20).unwrap();
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let mut region = domain.region(FRAMES / 2 * PAGE).stored(store).unwrap();
        crate::own_file::limit_file_size(8 * PAGE);
        refused(&mut region, "raise `ulimit -f`");
    })
    .well();
}

/// On a file system that writes what is written again elsewhere, a full disk would have room for nothing.
#[test]
fn saves_go_on_in_the_free_places_of_a_full_btrfs() {
    in_child(here!(), "", || {
        let around = tempfile::tempdir().unwrap();
        let Some(disk) = formatted::mount(FileSystem::Btrfs, around.path(), 128 << 20) else { return };
        let named = disk.join("store");
        let stores = [FileStore::unnamed_in(&disk, 8 << 30), FileStore::create(&named, 1 << 20)].map(Result::unwrap);
        for store in &stores {
            // SAFETY: test: the store's own descriptor, which is open.
            let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(store.descriptors()[0]) };
            assert!(rustix::fs::ioctl_getflags(file).unwrap().contains(rustix::fs::IFlags::NOCOW), "{store:?}");
        }
        let [store, _named] = stores;
        let (first, len) = store.claim(512).unwrap();
        let bytes = Box::new(AlignedPage([7; PAGE]));
        let write_all = |round: u32| {
            for blok in first.0..first.0 + len {
                let mut writes = [WriteBlok { blok: Blok(blok), bytes: &bytes.0, outcome: Err(PagerError::NoStore) }];
                store.write(&mut writes);
                assert_eq!(writes[0].outcome, Ok(()), "blok {blok} in round {round}");
            }
        };
        write_all(0);
        let mut others = std::fs::File::create(disk.join("others")).unwrap();
        while std::io::Write::write_all(&mut others, &[1; 1 << 16]).is_ok() {}
        others.sync_all().unwrap();
        (1..10).for_each(write_all);
    })
    .well();
}

#[repr(align(4096))]
struct AlignedPage([u8; PAGE]);

#[test]
fn a_device_with_something_on_it_is_not_to_be_removed() {
    in_child(here!(), "", || {
        let around = tempfile::tempdir().unwrap();
        let Some(image) = formatted::image(FileSystem::Ext4, around.path(), 8 << 20) else { return };
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&image).output();
        let Some(made) = made.ok().filter(|made| made.status.success()) else {
            return skip("losetup", "a file cannot be made a device here: it takes losetup, and loop devices");
        };
        let device = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        let refused = FileStore::create(&device, 1 << 20).map_err(|error| error.to_string());
        assert!(formatted::done("losetup", &["--detach".as_ref(), device.as_ref()]));
        let says = refused.unwrap_err();
        assert!(says.contains("not a store's") && says.contains("wipefs") && !says.contains("remove it"), "{says}");
    })
    .well();
}
