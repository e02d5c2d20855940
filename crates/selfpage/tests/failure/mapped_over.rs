//! Pages that the program unmaps, or maps over, while they are in their frames: what was in them is lost, no frame is, and nothing waits
//! for them.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

use selfpage::pager::UserPager;
use selfpage::store::MemoryStore;
use selfpage::{Domain, FileAccess, Region, Sampling, Trap};

use crate::child::forked;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages, until};
use crate::store::Failing;

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

/// Unmaps a page of a region, or puts a mapping of the program's own over it.
fn take_place(region: &Region, page: usize, mapped: bool) {
    let at = region.as_slice::<u8>().as_ptr().wrapping_add(page * PAGE).cast_mut().cast();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: test: the page is not used any more.
    unsafe {
        match mapped {
            true => assert_eq!(libc::mmap(at, PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0), at),
            false => assert_eq!(libc::munmap(at, PAGE), 0),
        }
    }
}

/// All of the domain's frames can be had, a child is forked, and the region goes.
fn all_goes_on(domain: &Domain, region: Region, kept: impl IntoIterator<Item = usize>) {
    check_pages(&region, kept);
    forked(|| ());
    drop(region);
    let mut other = domain.region(FRAMES * PAGE).zero().unwrap();
    number_pages(&mut other);
    other.pin(0, FRAMES * PAGE).unwrap();
    check_pages(&other, 0..FRAMES);
}

#[test]
fn a_page_that_is_aside_and_cannot_be_saved() {
    for (trap, name) in TRAPS {
        for mapped in [false, true] {
            in_child(here!(), &format!("{name} {mapped}"), || {
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let mut region = domain.region(8 * PAGE).trap(trap).zero().unwrap();
                number_pages(&mut region);
                let sample = region.sample(Sampling::Whole).unwrap();
                take_place(&region, 3, mapped);
                region.evict(3 * PAGE, PAGE).unwrap();
                drop(sample);
                assert_eq!(domain.stats().counts.lost_total, 1);
                all_goes_on(&domain, region, (0..8).filter(|page| *page != 3));
            })
            .well();
        }
    }
}

/// The kernel's list of mappings is a file.
#[test]
fn a_mapping_over_a_page_outlives_the_region_where_no_file_can_be_opened() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = domain.region(8 * PAGE).trap(trap).zero().unwrap();
            let pages = [0, 3, 4, 7].map(|page| region.as_ptr().wrapping_add(page * PAGE));
            [3, 4].iter().for_each(|page| take_place(&region, *page, true));
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: test: a value of ours.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) }, 0);
            drop(region);
            let mut resident = 0;
            // SAFETY: test: one page, and a byte for what is known of it.
            let is_there = |at: *mut u8| unsafe { libc::mincore(at.cast(), PAGE, &mut resident) } == 0;
            assert_eq!(pages.map(is_there), [false, true, true, false]);
        })
        .well();
    }
}

#[test]
fn a_page_whose_save_fails() {
    for (trap, name) in TRAPS {
        for mapped in [false, true] {
            in_child(here!(), &format!("{name} {mapped}"), || {
                let store = Failing::new();
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let mut region = domain.region(8 * PAGE).trap(trap).stored_in(store.clone()).unwrap();
                number_pages(&mut region);
                store.write.store(libc::EIO as u32, SeqCst);
                store.write_ms.store(200, SeqCst);
                let errors = || domain.stats().counts.save_errors_total;
                let before = errors();
                std::thread::scope(|scope| {
                    scope.spawn(|| region.evict(0, 8 * PAGE));
                    // It is being saved now.
                    until("it is unmapped", || region.residency()[3].load(SeqCst) == 0);
                    take_place(&region, 3, mapped);
                });
                until("the save has failed", || errors() > before);
                until("it is lost", || domain.stats().counts.lost_total == 1);
                store.write.store(0, SeqCst);
                store.write_ms.store(0, SeqCst);
                all_goes_on(&domain, region, (0..8).filter(|page| *page != 3));
            })
            .well();
        }
    }
}

/// What a child changes of a file stays with it, also where it has nowhere to stay.
#[test]
fn a_childs_page_of_a_file() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let file = tempfile::tempfile_in("/var/tmp").unwrap();
            file.write_all_at(&[1; 8 * PAGE], 0).unwrap();
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region =
                domain.region(0).trap(trap).file(std::path::Path::new(&path), 0, FileAccess::ReadWrite).unwrap();
            forked(|| {
                region.as_mut_slice::<u8>()[3 * PAGE] = 2;
                let sample = region.sample(Sampling::Whole).unwrap();
                take_place(&region, 3, false);
                region.evict(0, region.len_bytes()).unwrap();
                drop(sample);
                std::thread::sleep(std::time::Duration::from_millis(50));
            });
            let mut bytes = vec![0; 8 * PAGE];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 1), "a child has written to its parent's file");
        })
        .well();
    }
}

/// Keeps one page, and says that it failed to, once.
#[derive(Default)]
struct Halfway {
    kept: AtomicU32,
    fails: AtomicBool,
}

impl UserPager for Halfway {
    fn fill(&self, _: u64, bytes: &mut [u8; PAGE]) -> std::io::Result<()> {
        bytes[..4].copy_from_slice(&self.kept.load(SeqCst).to_ne_bytes());
        Ok(())
    }
    fn save(&self, _: u64, bytes: &[u8; PAGE]) -> std::io::Result<()> {
        self.kept.store(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]), SeqCst);
        if self.fails.load(SeqCst) { Err(std::io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }
}

/// What a save that failed has left behind is nobody's contents: the page is not the clean one that it was, when it is again what it was.
#[test]
fn contents_that_come_back_after_a_save_that_failed() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let halfway = Arc::new(Halfway { kept: 7.into(), ..Halfway::default() });
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(PAGE).trap(trap).user(halfway.clone()).unwrap();
            assert_eq!(region.as_slice::<u32>()[0], 7);
            region.as_mut_slice::<u32>()[0] = 8;
            halfway.fails.store(true, SeqCst);
            region.evict(0, PAGE).unwrap();
            until("the save has failed", || domain.stats().counts.save_errors_total > 0);
            until("it is back", || region.residency()[0].load(SeqCst) != 0);
            region.as_mut_slice::<u32>()[0] = 7;
            halfway.fails.store(false, SeqCst);
            region.evict(0, PAGE).unwrap();
            region.flush(0, PAGE).unwrap();
            region.evict(0, PAGE).unwrap();
            assert_eq!(region.as_slice::<u32>()[0], 7);
        })
        .well();
    }
}

/// A region is over one file, also where its name becomes another's as it is made.
#[test]
fn a_file_that_is_replaced_as_it_is_mapped() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (path, done) = (dir.path().join("file"), AtomicBool::new(false));
        let made = |byte: u8, pages: usize, name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, vec![byte; pages * PAGE]).unwrap();
            path
        };
        std::fs::rename(made(4, 4, "first"), &path).unwrap();
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let ways = [made(4, 4, "a"), made(8, 8, "b")];
                while !done.load(SeqCst) {
                    for file in &ways {
                        let new = dir.path().join("new");
                        std::fs::hard_link(file, &new).unwrap();
                        std::fs::rename(&new, &path).unwrap();
                    }
                }
            });
            for _ in 0..1000 {
                let region = domain.region(0).file(&path, 0, FileAccess::Read).unwrap();
                let (first, count) = (region.as_slice::<u8>()[0], pages(&region));
                if usize::from(first) != count {
                    done.store(true, SeqCst);
                    panic!("{count} pages, and the contents of the other file");
                }
            }
            done.store(true, SeqCst);
        });
    })
    .well();
}

/// A sparse region's tables take memory where its pages were used, also when it goes.
#[test]
fn a_large_region_of_which_little_was_used() {
    in_child(here!(), "", || {
        const LEN: usize = 1 << 38;
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = MemoryStore::new(1 << 20).unwrap();
        let most_kib = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
            line.trim_end_matches("kB").trim().parse::<usize>().unwrap()
        };
        let mut region = domain.region(LEN).stored(store).unwrap();
        for at in (0..LEN).step_by(LEN / 16) {
            region.as_mut_slice::<u8>()[at] = 1;
        }
        let before = most_kib();
        region.discard(0, LEN / 2).unwrap();
        region.evict(LEN / 2, LEN / 2).unwrap();
        assert!((0..LEN).step_by(LEN / 16).all(|at| region.as_slice::<u8>()[at] == u8::from(at >= LEN / 2)));
        drop(region);
        assert!(most_kib() < before + 16 * 1024, "{} KiB more", most_kib() - before);
    })
    .well();
}
