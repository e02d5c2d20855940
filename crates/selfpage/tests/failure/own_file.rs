//! Files under regions: cut short, or written to from the very pages that map them.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use selfpage::pager::UserPager;
use selfpage::{Domain, FileAccess, Kind, Region, Trap};
use selfpage_core::addr::PageBytes;

use crate::formatted::{Kind as FileSystem, mount};
use crate::lent::Names;
use crate::scenario::{PAGE, here, in_child, pages, until};
use crate::tried;

pub const FRAMES: usize = 64;
pub const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

/// A file whose pages hold their numbers all over.
pub fn numbered(dir: &tempfile::TempDir, count: usize) -> std::path::PathBuf {
    let path = dir.path().join("data");
    let bytes: Vec<u8> = (0..count).flat_map(|index| [index as u64 + 1; 512]).flat_map(u64::to_le_bytes).collect();
    std::fs::write(&path, bytes).unwrap();
    path
}

fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

#[test]
fn cut_short_under_us() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let dir = on_disk();
            let path = numbered(&dir, 4 * FRAMES);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = domain.region(0).trap(trap).file(&path, 0, FileAccess::Read).unwrap();
            OpenOptions::new().write(true).open(&path).unwrap().set_len(10 * PAGE as u64 + 100).unwrap();
            drop(dir);
            for (index, page) in region.as_slice::<[u64; 512]>().iter().enumerate() {
                println!("page {index} holds {}", page[0]);
                assert_eq!(page[0], index as u64 + 1);
            }
        })
        .by(libc::SIGBUS, &["page 10 holds 11", "/data at 0x", "offset 45056: the file ends before this page"]);
    }
}

#[test]
fn cut_short_with_changes_behind_the_end() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let dir = on_disk();
            let path = numbered(&dir, 2 * FRAMES);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(0).trap(trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
            for page in &mut region.as_mut_slice::<[u64; 512]>()[FRAMES..FRAMES + 8] {
                page[1] = 77;
            }
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len((FRAMES * PAGE) as u64).unwrap();
            let error = region.flush(0, region.len_bytes()).unwrap_err();
            assert_eq!(error.kind(), Kind::Lost, "{error}");
            assert_eq!(file.metadata().unwrap().len(), (FRAMES * PAGE) as u64, "saves gave the file its old length");
            // The rest goes on, and what cannot be saved stays in core.
            for round in 0..3 {
                for (index, page) in region.as_slice::<[u64; 512]>()[..FRAMES].iter().enumerate() {
                    assert_eq!(page[0], index as u64 + 1, "round {round}");
                }
            }
            assert!(region.as_slice::<[u64; 512]>()[FRAMES..FRAMES + 8].iter().all(|page| page[1] == 77));
            let beyond = region.as_ptr().wrapping_add((2 * FRAMES - 1) * PAGE).cast();
            assert_eq!(tried::read(beyond), Err(libc::SIGBUS));
            file.set_len((2 * FRAMES * PAGE) as u64).unwrap();
            region.flush(0, region.len_bytes()).unwrap();
            drop(region);
            let mut word = [0; 8];
            File::open(&path).unwrap().read_exact_at(&mut word, (FRAMES * PAGE + 8) as u64).unwrap();
            assert_eq!(u64::from_le_bytes(word), 77);
        })
        .well();
    }
}

/// How many pages of the file the kernel's cache holds.
fn cached_pages(file: &File) -> usize {
    let len_bytes = file.metadata().unwrap().len() as usize;
    let mut held = vec![0u8; len_bytes / PAGE];
    // SAFETY: test: a mapping that is only asked about.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), len_bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::mincore(at, len_bytes, held.as_mut_ptr()), 0);
        libc::munmap(at, len_bytes);
    }
    held.iter().filter(|byte| **byte & 1 == 1).count()
}

/// What regions over files are tried on.
pub const FILE_SYSTEMS: [FileSystem; 3] = [FileSystem::Ext4, FileSystem::Xfs, FileSystem::Btrfs];

/// A directory on such a file system: on the disk of all other tests, or on one of this process's own. `None`: there is none here, and that is
/// said.
pub fn on(kind: FileSystem) -> Option<tempfile::TempDir> {
    let dir = on_disk();
    // SAFETY: test: the kernel writes to what is ours.
    let found = unsafe {
        let (file, mut about) = (File::open(dir.path()).unwrap(), std::mem::zeroed::<libc::statfs>());
        assert_eq!(libc::fstatfs(file.as_raw_fd(), &mut about), 0);
        about.f_type
    };
    match found == libc::EXT4_SUPER_MAGIC && kind == FileSystem::Ext4 {
        true => Some(dir),
        false => on_its_own(kind),
    }
}

/// The same, on a disk of this process's own.
pub fn on_its_own(kind: FileSystem) -> Option<tempfile::TempDir> {
    // The parent takes it away: here the disk is in it.
    let around = tempfile::tempdir().unwrap().keep();
    mount(kind, &around, 256 << 20).map(|disk| tempfile::tempdir_in(disk).unwrap())
}

#[test]
fn a_file_that_nobody_has_written_to_yet_is_saved_past_the_cache() {
    in_child(here!(), "", nobody_has_written_to_it).well();
}

fn nobody_has_written_to_it() {
    // Others let such a file be written to at once.
    let Some(dir) = on(FileSystem::Ext4) else { return };
    let path = numbered(&dir, 4 * FRAMES);
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // What the kernel knows of an inode that it has just read: it has the set-user bit looked for at the next write.
    for mode in [0o4600, 0o600] {
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    }
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let mut region = domain.region(0).file(&path, 0, FileAccess::ReadWrite).unwrap();
    let mut round = 0;
    until("saves go past the cache", || {
        round += 1;
        region.as_mut_slice::<[u64; 512]>().iter_mut().for_each(|page| page[1] = round);
        region.flush(0, region.len_bytes()).unwrap();
        // SAFETY: test: advice on a file.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        region.as_mut_slice::<[u64; 512]>().iter_mut().for_each(|page| page[2] = round);
        region.flush(0, region.len_bytes()).unwrap();
        cached_pages(&file) < FRAMES
    });
    drop(region);
    let mut page = [0; PAGE];
    file.read_exact_at(&mut page, (3 * FRAMES * PAGE) as u64).unwrap();
    let words: Vec<u64> = page.as_chunks().0.iter().take(3).map(|word| u64::from_le_bytes(*word)).collect();
    assert_eq!(words, [3 * FRAMES as u64 + 1, round, round]);
}

#[test]
fn the_last_part_of_a_page() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let dir = on_disk();
            let path = dir.path().join("data");
            std::fs::write(&path, vec![7; 3 * PAGE + 100]).unwrap();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(0).trap(trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
            assert_eq!(region.len_bytes(), 4 * PAGE);
            let bytes = region.as_mut_slice::<u8>();
            assert!(bytes[..3 * PAGE + 100].iter().all(|byte| *byte == 7));
            assert!(bytes[3 * PAGE + 100..].iter().all(|byte| *byte == 0));
            bytes[3 * PAGE + 99] = 8;
            bytes[3 * PAGE + 100] = 9;
            region.evict(0, region.len_bytes()).unwrap();
            region.flush(0, region.len_bytes()).unwrap();
            let written = std::fs::read(&path).unwrap();
            assert_eq!((written.len(), written[3 * PAGE + 99]), (3 * PAGE + 100, 8));
        })
        .well();
    }
}

/// Takes what changed out of core, and waits until it is saved.
fn evict(region: &Region) {
    region.evict(0, region.len_bytes()).unwrap();
    region.flush(0, region.len_bytes()).unwrap();
}

#[test]
fn appended_to_while_its_last_page_is_in_core() {
    for (trap, name) in TRAPS {
        for how in ["evicted", "flushed"] {
            // The file ends in the same page still, or in a later one.
            for more in [50, 2 * PAGE] {
                in_child(here!(), &format!("{name}-{how}-{more}"), || {
                    let (dir, old) = (on_disk(), 3 * PAGE + 100);
                    let path = dir.path().join("data");
                    std::fs::write(&path, vec![7; old]).unwrap();
                    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                    let mut region = domain.region(0).trap(trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
                    region.as_mut_slice::<u8>()[old - 1] = 8;
                    OpenOptions::new().append(true).open(&path).unwrap().write_all(&vec![5; more]).unwrap();
                    // What the program itself writes there is the file's, too: it was there already.
                    region.as_mut_slice::<u8>()[old + 20] = 9;
                    for round in 0..2 {
                        match how {
                            "evicted" => evict(&region),
                            _ => region.flush(0, region.len_bytes()).unwrap(),
                        }
                        let mut wanted = [vec![7; old], vec![5; more]].concat();
                        (wanted[old - 1], wanted[old + 20]) = (8 + round, 9);
                        assert!(std::fs::read(&path).unwrap() == wanted, "round {round}");
                        region.as_mut_slice::<u8>()[old - 1] = 9;
                    }
                    evict(&region);
                    region.evict(0, region.len_bytes()).unwrap();
                    assert_eq!(region.as_slice::<u8>()[old - 1..][..3], [9, 5, 5], "it is read anew");
                })
                .well();
            }
        }
    }
}

/// Bytes of the file that the kernel has in memory alone, or on their way to the disk. `None`: it does not say.
fn not_on_disk(file: &File) -> Option<u64> {
    /// `cachestat`, since Linux 6.5: the same number on every processor.
    const CACHESTAT: libc::c_long = 451;
    // All of it, and how many pages are: in the cache, dirty, being written, evicted, evicted lately.
    let (range, mut pages) = ([0u64; 2], [0u64; 5]);
    // SAFETY: test: the kernel reads the one and writes the other.
    let result = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), pages.as_mut_ptr(), 0) };
    (result == 0).then_some((pages[1] + pages[2]) * PAGE as u64)
}

#[test]
fn flushed_is_on_disk() {
    let dir = on_disk();
    let path = dir.path().join("data");
    std::fs::write(&path, vec![7; 3 * PAGE + 100]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.sync_all().unwrap();
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let mut region = domain.region(0).file(&path, 0, FileAccess::ReadWrite).unwrap();
    // The last page is saved by way of the kernel's cache. So is what others write; a flush takes that along.
    region.as_mut_slice::<u8>()[3 * PAGE] = 8;
    file.write_all_at(&[9; 100], 0).unwrap();
    if not_on_disk(&file).is_none_or(|bytes| bytes == 0) {
        return crate::skip::skip("cachestat", "the file system does not say what is not on disk yet");
    }
    region.flush(0, region.len_bytes()).unwrap();
    assert_eq!(not_on_disk(&file), Some(0), "bytes are not on disk");
}

/// Writes `len` bytes of the region at `from` into the file at `to`, in one call.
pub fn write_own(file: &File, region: &Region, from: usize, len: usize, to: usize) -> isize {
    let at = region.as_ptr().wrapping_add(from);
    // SAFETY: test: the kernel reads the region's memory.
    unsafe { libc::pwrite(file.as_raw_fd(), at.cast(), len, to as i64) }
}

/// A region over a file of `count` numbered pages, and the file, if system calls on absent pages are served.
fn over_its_own(dir: &tempfile::TempDir, count: usize) -> Option<(Domain, Region, File)> {
    let path = numbered(dir, count);
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    if !domain.serves_system_calls() {
        crate::skip::skip("uffd", "faults inside system calls cannot be served");
        return None;
    }
    let region = domain.region(0).file(&path, 0, FileAccess::ReadWrite).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    Some((domain, region, file))
}

#[test]
fn written_into_its_own_file_while_absent() {
    for kind in FILE_SYSTEMS {
        in_child(here!(), kind.name(), || {
            let Some(dir) = on(kind) else { return };
            let count = 8 * FRAMES;
            let Some((domain, mut region, file)) = over_its_own(&dir, count) else { return };
            // The second half changes all the time: there is always something to save, to the very file.
            for round in 0..3u64 {
                for page in &mut region.as_mut_slice::<[u64; 512]>()[count / 2..] {
                    page[1] = 1000 + round;
                }
                let shared = &region;
                std::thread::scope(|scope| {
                    for thread in 0..4 {
                        let (file, region) = (&file, shared);
                        scope.spawn(move || {
                            // Many pages in one call, each of them absent: onto themselves.
                            let part = count / 2 / 4;
                            let from = thread * part * PAGE;
                            for step in 0..4 {
                                let len = part / 4 * PAGE;
                                let at = from + step * len;
                                assert_eq!(write_own(file, region, at, len, at), len as isize);
                            }
                            // And what has changed, and may be on its way to the file just now.
                            let at = (count / 2 + thread * part) * PAGE;
                            assert_eq!(write_own(file, region, at, part * PAGE, at), (part * PAGE) as isize);
                        });
                    }
                });
                for (index, page) in region.as_slice::<[u64; 512]>().iter().enumerate() {
                    assert_eq!(page[0], index as u64 + 1, "page {index}");
                    assert!(index < count / 2 || page[1] == 1000 + round, "page {index}: {}", page[1]);
                }
            }
            region.flush(0, region.len_bytes()).unwrap();
            println!("{:?}", domain.stats().counts);
        })
        .well();
    }
}

#[test]
fn written_into_its_own_file_while_others_change_everything() {
    for kind in FILE_SYSTEMS {
        in_child(here!(), kind.name(), || {
            let Some(dir) = on(kind) else { return };
            let count = 4 * FRAMES;
            let Some((domain, region, file)) = over_its_own(&dir, count) else { return };
            let stop = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let (region, stop) = (&region, &stop);
                    scope.spawn(move || {
                        let mut turn = 0u64;
                        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                            turn += 1;
                            for index in (thread..count).step_by(3) {
                                // SAFETY: test: a word of the region that this thread alone writes.
                                unsafe { region.as_ptr().add(index * PAGE + 8).cast::<u64>().write_volatile(turn) };
                            }
                        }
                    });
                }
                for round in 0..40 {
                    let from = round % 4 * FRAMES * PAGE;
                    // Behind the region's part of the file, so that only the lock is shared.
                    assert_eq!(write_own(&file, &region, from, FRAMES * PAGE, count * PAGE), (FRAMES * PAGE) as isize);
                }
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            for index in 0..pages(&region) {
                assert_eq!(region.as_slice::<[u64; 512]>()[index][0], index as u64 + 1, "page {index}");
            }
            println!("{:?}", domain.stats().counts);
        })
        .well();
    }
}

/// Of such a file no single page can be mapped. A hole in it is read without there being any huge page.
#[test]
fn a_file_of_huge_pages_is_read_and_not_written() {
    in_child(here!(), "", || {
        // SAFETY: test: a name that ends, and a descriptor that nobody else has.
        let file = unsafe {
            match libc::memfd_create(c"huge".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_HUGETLB) {
                -1 => return crate::skip::skip("hugetlb", "this kernel has no files of huge pages (CONFIG_HUGETLBFS)"),
                number => File::from_raw_fd(number),
            }
        };
        file.set_len(4 << 20).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        for (trap, _) in TRAPS {
            let region = domain.region(0).trap(trap).file(&path, 0, FileAccess::Read).unwrap();
            assert!(region.as_slice::<u8>().iter().all(|byte| *byte == 0));
        }
        let refused = domain.region(0).file(&path, 0, FileAccess::ReadWrite).map(drop).unwrap_err();
        assert!(refused.kind() == Kind::Unsupported && refused.to_string().contains("FileAccess::Read"), "{refused}");
    })
    .well();
}

/// Says that a page is wanted, which comes once the test has seen enough.
pub struct Later(Mutex<(Sender<()>, Receiver<()>)>);

impl Later {
    /// It, where it says so, and what the test drops once it has seen enough.
    pub fn new() -> (Later, Receiver<()>, Sender<()>) {
        let ((wants, wanted), (enough, told)) = (channel(), channel());
        (Later(Mutex::new((wants, told))), wanted, enough)
    }
}

impl UserPager for Later {
    fn fill(&self, _: u64, _: &mut PageBytes) -> io::Result<()> {
        let (wanted, enough) = &*self.0.lock().unwrap();
        let _ = wanted.send(());
        let _ = enough.recv();
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

/// Whoever waits for a file's lock has no number that the program lends another at.
#[test]
fn files_are_lent_while_another_is_locked() {
    in_child(here!(), "", || {
        let Some(dir) = on(FileSystem::Ext4) else { return };
        let Some((domain, mut region, file)) = over_its_own(&dir, 2 * FRAMES) else { return };
        let (later, wanted, enough) = Later::new();
        let other = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let later = other.region(PAGE).user(later).unwrap();
        std::thread::scope(|scope| {
            // So that it goes on whatever becomes of this thread.
            let (enough, file) = (enough, &file);
            let writer = scope.spawn(|| write_own(file, &later, 0, PAGE, 2 * FRAMES * PAGE));
            wanted.recv().unwrap();
            region.as_mut_slice::<u64>()[1] = 7;
            region.evict(0, PAGE).unwrap();
            until("somebody waits for the lock", || {
                let tasks = std::fs::read_dir("/proc/self/task").unwrap();
                let comm = |task: io::Result<std::fs::DirEntry>| std::fs::read_to_string(task?.path().join("comm"));
                tasks.map(comm).any(|name| name.is_ok_and(|name| name.trim() == "selfpage-way"))
            });
            for number in 3..30 {
                // SAFETY: test: a number that is free, and then a descriptor that nobody else has.
                unsafe {
                    if libc::fcntl(number, libc::F_GETFD) < 0 {
                        assert_eq!(libc::dup2(file.as_raw_fd(), number), number);
                    }
                }
                drop(domain.region(PAGE).user(Names(number)).unwrap());
            }
            drop(enough);
            assert_eq!(writer.join().unwrap(), PAGE as isize);
        });
        assert_eq!(region.as_slice::<u64>()[1], 7);
    })
    .well();
}

#[test]
fn saved_after_the_first_thread_has_ended() {
    in_child(here!(), "", || {
        let dir = on_disk();
        let path = dir.path().join("data");
        std::fs::write(&path, vec![7; 3 * PAGE + 100]).unwrap();
        // A process whose first thread is this one's copy, and not the harness's.
        // SAFETY: test: the child goes on by itself, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(0).file(&path, 0, FileAccess::ReadWrite).unwrap();
            std::thread::spawn(move || {
                let _domain = domain;
                until("the first thread has ended", || {
                    std::fs::read_to_string("/proc/self/stat").unwrap().contains(") Z ")
                });
                region.as_mut_slice::<u8>()[3 * PAGE + 99] = 8;
                let flushed = region.flush(0, region.len_bytes());
                // SAFETY: test: the child's end.
                unsafe { libc::_exit(flushed.inspect_err(|error| eprintln!("{error}")).is_err().into()) };
            });
            // SAFETY: test: ends this thread, and no other.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
        let mut status = 0;
        // SAFETY: test: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(std::fs::read(&path).unwrap()[3 * PAGE + 99], 8);
    })
    .well();
}

/// Has files of this process come to so many bytes and no more.
pub fn limit_file_size(len_bytes: usize) {
    let limit = libc::rlimit { rlim_cur: len_bytes as libc::rlim_t, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: test: a limit for this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
}

/// It is no store that has no room there.
#[test]
fn a_save_that_finds_no_room_names_what_is_in_the_way() {
    let refused = |region: &mut Region, remedy: &str| {
        region.as_mut_slice::<u64>().fill(9);
        let error = region.flush(0, region.len_bytes()).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(remedy) && !said.contains("store"), "{said}");
        assert_eq!(error.kind(), Kind::OutOfSpace, "{said}");
    };
    for (trap, name) in TRAPS {
        in_child(here!(), &format!("{name} limit"), || {
            let dir = on_disk();
            let path = numbered(&dir, FRAMES / 2);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(0).trap(trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
            limit_file_size(8 * PAGE);
            refused(&mut region, "raise `ulimit -f`");
        })
        .well();
        in_child(here!(), &format!("{name} disk"), || {
            let dir = tempfile::tempdir().unwrap();
            if let Err(error) = crate::disk::mount(dir.path(), 4 * FRAMES * PAGE) {
                return crate::skip::skip("mount", &format!("{error}: run as root"));
            }
            let path = dir.path().join("data");
            File::create(&path).unwrap().set_len((FRAMES / 2 * PAGE) as u64).unwrap();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(0).trap(trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
            let mut others = File::create(dir.path().join("others")).unwrap();
            while others.write_all(&[1; PAGE]).is_ok() {}
            refused(&mut region, "free space on the disk");
        })
        .well();
    }
}

/// Each saves pages whole: what the other has flushed would be undone without a word.
#[test]
fn pages_of_a_file_are_one_regions_where_one_may_write() {
    in_child(here!(), "worker", || {
        let dir = on_disk();
        let (path, link) = (numbered(&dir, 8), dir.path().join("link"));
        std::fs::hard_link(&path, &link).unwrap();
        let domains = [(); 2].map(|()| Domain::with_frames(FRAMES * PAGE).build().unwrap());
        let map = |domain: usize, path: &std::path::Path, pages: std::ops::Range<usize>, access| {
            domains[domain].region(pages.len() * PAGE).file(path, (pages.start * PAGE) as u64, access)
        };
        let mut first = map(0, &path, 0..4, FileAccess::ReadWrite).unwrap();
        first.as_mut_slice::<u64>()[1] = 11;
        first.flush(0, PAGE).unwrap();
        for (domain, path, access) in
            [(0, &path, FileAccess::ReadWrite), (1, &path, FileAccess::Read), (1, &link, FileAccess::ReadWrite)]
        {
            let held = map(domain, path, 3..8, access).map(drop).unwrap_err();
            let said = held.to_string();
            assert_eq!(held.kind(), Kind::Held, "{said}");
            let words = [path.to_str().unwrap(), "bytes 0..16384 are region", "drop that region first"];
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        }
        // Pages of their own, another file of that name, and what is gone.
        drop(map(1, &path, 4..8, FileAccess::ReadWrite).unwrap());
        std::fs::remove_file(&link).unwrap();
        std::fs::copy(&path, &link).unwrap();
        drop(map(1, &link, 0..8, FileAccess::ReadWrite).unwrap());
        // A child's own do not write to the file.
        crate::child::forked(|| drop(map(1, &path, 0..8, FileAccess::ReadWrite).unwrap()));
        drop(first);
        let again = map(1, &path, 0..8, FileAccess::ReadWrite).unwrap();
        assert_eq!(again.as_slice::<u64>()[1], 11);
        drop(again);
        let readers = [0, 1].map(|domain| map(domain, &path, 0..8, FileAccess::Read).unwrap());
        assert!(readers.iter().all(|reader| reader.as_slice::<u64>()[1] == 11));
    })
    .well();
}
