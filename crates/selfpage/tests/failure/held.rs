//! Pages that the program or the kernel holds when they should go.

use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use io_uring::IoUring;
use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{Config, Domain, Kind, Locking, Protection, Region, Trap};
use selfpage_core::linux::memory::Access;

use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages, until};
use crate::store::Failing;
use crate::tried;

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

fn four_times_the_frames(trap: Trap) -> (Domain, Region) {
    over(Domain::with_frames(FRAMES * PAGE), trap)
}

fn over(config: Config, trap: Trap) -> (Domain, Region) {
    let domain = config.build().unwrap();
    let store = MemoryStore::new(1 << 30).unwrap();
    let mut region = domain.region(4 * FRAMES * PAGE).name("heap").trap(trap).stored(store).unwrap();
    number_pages(&mut region);
    (domain, region)
}

/// Has the kernel hold the first `count` pages until the ring is dropped. `None`: there is no io_uring here.
fn register(region: &Region, count: usize) -> Option<IoUring> {
    let ring = IoUring::new(2).ok()?;
    let buffers: Vec<libc::iovec> = [libc::iovec { iov_base: region.as_ptr().cast(), iov_len: count * PAGE }].into();
    // SAFETY: test: the buffers are the region's, which lives longer than the ring.
    unsafe { ring.submitter().register_buffers(&buffers) }.ok()?;
    Some(ring)
}

#[test]
fn by_the_kernel() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, mut region) = four_times_the_frames(trap);
            region.pin(0, 8 * PAGE).unwrap();
            let Some(ring) = register(&region, 8) else {
                return crate::skip::skip("io_uring", "no buffers can be registered");
            };
            region.unpin(0, 8 * PAGE).unwrap();
            for _ in 0..3 {
                check_pages(&region, 0..pages(&region));
            }
            assert!(domain.stats().counts.pinned_skips_total > 0, "{:?}", domain.stats());
            let error = region.evict(0, 8 * PAGE).unwrap_err();
            assert_eq!(error.kind(), Kind::Held, "{error}");
            assert!(error.to_string().contains("bytes 0..32768"), "{error}");
            let resident = |region: &Region| {
                region.residency()[..8].iter().all(|byte| byte.load(std::sync::atomic::Ordering::Relaxed) == 1)
            };
            assert!(resident(&region));
            drop(ring);
            for _ in 0..3 {
                check_pages(&region, 0..pages(&region));
            }
            crate::scenario::until("the kernel lets go of them, and they go", || {
                number_pages(&mut region);
                region.residency()[..8].iter().all(|byte| byte.load(std::sync::atomic::Ordering::Relaxed) == 0)
            });
        })
        .well();
    }
}

#[test]
fn some_by_the_kernel_whatever_the_policy() {
    // More than are tried at a time, and a policy may suggest them first, again and again.
    const HELD: usize = FRAMES / 2;
    for policy in selfpage_core::policy::NAMES {
        in_child(here!(), policy, || {
            let (domain, region) = over(Domain::with_frames(FRAMES * PAGE).policy(policy), Trap::Upcall);
            // They come in last.
            region.flush(0, region.len_bytes()).unwrap();
            region.evict(0, HELD * PAGE).unwrap();
            check_pages(&region, HELD..FRAMES);
            region.pin(0, HELD * PAGE).unwrap();
            let Some(_ring) = register(&region, HELD) else {
                return crate::skip::skip("io_uring", "no buffers can be registered");
            };
            region.unpin(0, HELD * PAGE).unwrap();
            for _ in 0..3 {
                check_pages(&region, 0..pages(&region));
            }
            assert!(domain.stats().counts.pinned_skips_total > 0, "{:?}", domain.stats());
        })
        .well();
    }
}

#[test]
fn all_by_the_kernel() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let (_domain, region) = four_times_the_frames(trap);
            region.pin(0, FRAMES / 2 * PAGE).unwrap();
            let Some(ring) = register(&region, FRAMES / 2) else {
                return crate::skip::skip("io_uring", "no buffers can be registered");
            };
            let mut held = FRAMES / 2;
            let error = loop {
                match region.pin(held * PAGE, PAGE) {
                    Ok(()) => held += 1,
                    Err(error) => break error,
                }
            };
            assert!(held > FRAMES - 8, "{held}");
            assert_eq!(error.kind(), Kind::Held, "{error}");
            assert!(error.to_string().contains("ENOMEM"), "{error}");
            let absent = region.as_ptr().wrapping_add((pages(&region) - 1) * PAGE).cast();
            assert_eq!(tried::read(absent), Err(libc::SIGBUS));
            drop(ring);
            region.unpin(0, held * PAGE).unwrap();
            // At once: nobody is told of a shortage that has just ended.
            check_pages(&region, 1..pages(&region) - 1);
            // Nobody asks for the page that failed, and by then it has a frame again.
            let last = pages(&region) as u64;
            crate::scenario::until("the page that failed is had", || tried::read(absent) == Ok(last));
            check_pages(&region, 0..pages(&region));
        })
        .well();
    }
}

/// Fewer frames than the reserve, which the evictor cannot make more of: no page can go.
#[test]
fn a_page_that_failed_is_had_with_one_frame() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(4 * FRAMES * PAGE).trap(trap).zero().unwrap();
            let used =
                (0..pages(&region)).take_while(|page| tried::write(tried::word(&region, *page), 7).is_ok()).count();
            let failed = tried::word(&region, used);
            assert_eq!(tried::read(failed), Err(libc::SIGBUS));
            region.discard(0, PAGE).unwrap();
            crate::scenario::until("the page that failed is had", || tried::read(failed) == Ok(0));
            let error = region.pin((used + 1) * PAGE, PAGE).unwrap_err();
            assert_eq!(error.kind(), Kind::Held, "that was the only one: {error}");
        })
        .well();
    }
}

/// Changes the rights of many pages until it is to stop: whoever changes another mapping waits.
fn keep_mappings_busy(stop: &AtomicBool) {
    const LEN: usize = 16 << 20;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    // SAFETY: test: a mapping of its own.
    unsafe {
        let own = libc::mmap(std::ptr::null_mut(), LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        while !stop.load(SeqCst) {
            for prot in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
                assert_eq!(libc::mprotect(own, LEN, prot), 0);
            }
        }
    }
}

/// What other threads write to a part that is mapped anew, before its region hears of that, is in those pages alone. One that cannot have a
/// frame then is lost: it may not come back as zero when there are frames, or when it is asked for by name.
#[test]
fn what_was_written_as_a_part_was_restored_never_reads_as_zero() {
    // Locked pages take no guard.
    for locking in [Locking::WherePermitted, Locking::Never] {
        in_child(here!(), &format!("{locking:?}"), || {
            tried::catch();
            let (_domain, mut region) = over(Domain::with_frames(FRAMES * PAGE).locking(locking), Trap::Worker);
            let (part, stop) = ((pages(&region) - 1) * PAGE, AtomicBool::new(false));
            let word = region.as_ptr().addr() + part;
            let mut held = 0;
            while region.pin(held * PAGE, PAGE).is_ok() {
                held += 1;
            }
            let map_over = move || {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                let prot = libc::PROT_READ | libc::PROT_WRITE;
                // SAFETY: test: the page is not used any more.
                unsafe { libc::mmap(word as *mut libc::c_void, PAGE, prot, flags, -1, 0).addr() }
            };
            let writes_until_it_fails = |begun: &AtomicBool| {
                while tried::write(word as *mut u64, 7).is_ok() {
                    begun.store(true, SeqCst);
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(|| keep_mappings_busy(&stop));
                let began = Instant::now();
                let mut tries = std::iter::repeat(()).take_while(|()| began.elapsed() < Duration::from_secs(20));
                let lost = tries.any(|()| {
                    // SAFETY: test: nobody holds a reference into the page.
                    assert_eq!(unsafe { region.while_empty(part, PAGE, map_over) }.unwrap(), word);
                    let begun = AtomicBool::new(false);
                    std::thread::scope(|scope| {
                        scope.spawn(|| writes_until_it_fails(&begun));
                        while !begun.load(SeqCst) {
                            std::thread::yield_now();
                        }
                        // SAFETY: test: as above.
                        unsafe { region.restore(part, PAGE, Access::ReadWrite) }.unwrap();
                    });
                    // Else the other thread came too late, and nothing of it is lost.
                    region.pin(part, PAGE).unwrap_err().kind() == Kind::Lost
                });
                stop.store(true, SeqCst);
                assert!(lost, "nobody wrote in time");
            });
            region.unpin(0, held * PAGE).unwrap();
            // As long as it takes to find out that there are frames, and more.
            std::thread::sleep(Duration::from_secs(2));
            assert!(tried::read(word as *const u64).is_err());
            assert_eq!(region.pin(part, PAGE).unwrap_err().kind(), Kind::Lost);
            check_pages(&region, 0..pages(&region) - 1);
            region.discard(part, PAGE).unwrap();
            assert_eq!(tried::read(word as *const u64), Ok(0));
        })
        .well();
    }
}

#[test]
fn all_by_pins_when_a_clone_needs_a_frame() {
    for (trap, name) in TRAPS {
        let signal = if trap == Trap::Upcall { libc::SIGBUS } else { libc::SIGSEGV };
        let clone = || {
            let (domain, region) = four_times_the_frames(trap);
            let clone = region.cow_clone(MemoryStore::new(1 << 30).unwrap()).unwrap();
            let held = (0..pages(&region)).take_while(|page| region.pin(page * PAGE, PAGE).is_ok()).count();
            assert!(held > FRAMES - 8, "{held}");
            (domain, region, clone, held)
        };
        in_child(here!(), name, || {
            tried::catch();
            let (_domain, region, clone, held) = clone();
            let first = region.as_ptr().cast::<u64>();
            for _ in 0..2 {
                assert_eq!(tried::write(first, 7), Err(signal));
                // SAFETY: test: a page of the region, which nobody holds a reference into.
                let page = unsafe { std::slice::from_raw_parts_mut(first.cast::<u8>(), PAGE) };
                let error = std::fs::File::open("/dev/zero").unwrap().read(page).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "a system call");
                assert_eq!(tried::read(first), Ok(1), "what is there can be read");
            }
            region.unpin(0, held * PAGE).unwrap();
            // Whoever asks for it by name has it anew.
            region.pin(0, PAGE).unwrap();
            region.unpin(0, PAGE).unwrap();
            assert_eq!((tried::write(first, 7), tried::read(first)), (Ok(()), Ok(7)));
            check_pages(&region, 1..pages(&region));
            check_pages(&clone, 0..pages(&clone));
        })
        .well();
        in_child(here!(), &format!("{name}, told"), || {
            let (_domain, region, _clone, _held) = clone();
            let third = region.as_ptr().wrapping_add(2 * PAGE);
            // SAFETY: test: a page of the region, which nobody holds a reference into.
            unsafe { third.write_volatile(7) };
        })
        .by(signal, &["region heap", "offset 8192: no frame: every page in core is held there"]);
    }
}

#[test]
fn dropped_while_held() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, region) = four_times_the_frames(trap);
            region.pin(0, 8 * PAGE).unwrap();
            let ring = register(&region, 8);
            drop(region);
            // Its frames are there again, all of them.
            let pinned = domain.region((FRAMES - 8) * PAGE).trap(trap).pinned().unwrap();
            assert!(pinned.as_slice::<u64>().iter().all(|word| *word == 0));
            drop(ring);
        })
        .well();
    }
}

#[test]
fn a_pinned_page_goes_into_a_pipe() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = four_times_the_frames(trap);
            let mut ends = [0; 2];
            // SAFETY: test: two descriptors come out.
            assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
            // SAFETY: test: just opened.
            let [read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
            // vmsplice(2) does not hold a page as a device does: the program pins it until the pipe is read.
            region.pin(0, PAGE).unwrap();
            let page = libc::iovec { iov_base: region.as_ptr().cast(), iov_len: PAGE };
            // SAFETY: test: the kernel takes the page.
            assert_eq!(unsafe { libc::vmsplice(write.as_raw_fd(), &page, 1, 0) }, PAGE as isize);
            check_pages(&region, 0..pages(&region));
            let mut got = [0u64; 512];
            // SAFETY: test: a page of memory.
            assert_eq!(unsafe { libc::read(read.as_raw_fd(), got.as_mut_ptr().cast(), PAGE) }, PAGE as isize);
            region.unpin(0, PAGE).unwrap();
            assert_eq!((got[0], got[511]), (1, !0));
        })
        .well();
    }
}

#[test]
fn pins_that_end_end_the_shortage() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = four_times_the_frames(trap);
            for _ in 0..3 {
                let mut held = 0;
                while region.pin(held * PAGE, PAGE).is_ok() {
                    held += 1;
                }
                assert!(held > FRAMES - 8, "{held}");
                region.unpin(0, held * PAGE).unwrap();
                check_pages(&region, (0..pages(&region)).rev());
            }
        })
        .well();
    }
}

#[test]
fn locked_pages_stay() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, region) = over(Domain::with_frames(FRAMES * PAGE).locking(Locking::Never), trap);
            region.pin(0, 8 * PAGE).unwrap();
            // SAFETY: test: locks memory of the region.
            if unsafe { libc::mlock(region.as_ptr().cast(), 8 * PAGE) } != 0 {
                return crate::skip::skip("mlock", "RLIMIT_MEMLOCK is below 32 KiB");
            }
            region.unpin(0, 8 * PAGE).unwrap();
            for _ in 0..3 {
                check_pages(&region, 0..pages(&region));
            }
            println!("{:?}", domain.stats());
            // SAFETY: test: unlocks it again.
            unsafe { libc::munlock(region.as_ptr().cast(), 8 * PAGE) };
            for _ in 0..3 {
                check_pages(&region, 0..pages(&region));
            }
        })
        .well();
    }
}

#[test]
fn by_the_image_of_a_snapshot_when_regions_are_emptied() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir().unwrap();
        let domain = Domain::with_frames(16 * FRAMES * PAGE).build().unwrap();
        // As many as there are pager threads, which the image is read on.
        let regions = [(); 2].map(|()| domain.region(4 * FRAMES * PAGE).zero().unwrap());
        let mut snapshots = Snapshots::of(&regions.each_ref(), dir.path().join("held.snap")).unwrap();
        let stop = AtomicBool::new(false);
        let emptied = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for region in &regions {
                let (stop, emptied) = (&stop, &emptied);
                scope.spawn(move || {
                    let first = region.as_ptr() as usize;
                    while !stop.load(SeqCst) {
                        for page in 0..pages(region) {
                            // SAFETY: test: a page of the region, which nobody holds a reference into.
                            unsafe { ((first + page * PAGE) as *mut u64).write_volatile(7) };
                        }
                        // SAFETY: test: as above.
                        unsafe { region.while_empty(0, region.len_bytes(), || emptied.fetch_add(1, SeqCst)) }.unwrap();
                        // SAFETY: test: as above.
                        assert_eq!(unsafe { (first as *const u64).read_volatile() }, 0);
                    }
                });
            }
            for _ in 0..20 {
                snapshots.take().unwrap();
            }
            stop.store(true, SeqCst);
        });
        assert!(emptied.load(SeqCst) >= 2);
    })
    .well();
}

/// Pages that have no frame are protected as they stand, those in core by the machine.
#[test]
fn what_lies_behind_a_page_that_cannot_be_protected_is_as_it_was() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(8 * PAGE).trap(trap).zero().unwrap();
            region.as_mut_slice::<u64>()[2 * 512] = 7;
            region.pin(2 * PAGE, PAGE).unwrap();
            let ring = IoUring::new(2).ok();
            let held = [libc::iovec { iov_base: region.as_ptr().wrapping_add(2 * PAGE).cast(), iov_len: PAGE }];
            // SAFETY: test: the buffer is the region's, which lives longer than the ring.
            let Some(ring) = ring.filter(|ring| unsafe { ring.submitter().register_buffers(&held) }.is_ok()) else {
                return crate::skip::skip("io_uring", "no buffers can be registered");
            };
            region.unpin(2 * PAGE, PAGE).unwrap();
            let error = region.protect(0, 8 * PAGE, Protection::None).unwrap_err();
            assert!(error.kind() == Kind::Held && error.to_string().contains("bytes 8192..12288"), "{error}");
            let protections: Vec<_> = (0..8).map(|page| region.protection(page * PAGE).unwrap()).collect();
            assert_eq!(protections[..2], [Protection::None; 2]);
            assert_eq!(protections[2..], [Protection::ReadWrite; 6]);
            drop(ring);
        })
        .well();
    }
}

/// They wait for a store that has had enough for now.
#[test]
fn evictions_at_once_leave_pager_threads_for_others() {
    const CHANGED: usize = 3600;
    in_child(here!(), "", || {
        let store = Failing::new();
        let domain = Domain::with_frames(4096 * PAGE).build().unwrap();
        let mut region = domain.region(CHANGED * PAGE).stored_in(store.clone()).unwrap();
        number_pages(&mut region);
        store.holds_writes.store(true, SeqCst);
        std::thread::scope(|scope| {
            // As many as there are pager threads.
            let third = CHANGED / 3 * PAGE;
            let evictions = [0, 1, 2].map(|part| {
                let region = &region;
                scope.spawn(move || region.evict(part * third, third).unwrap())
            });
            until("writes have begun", || store.begun_writes.load(SeqCst) > 0);
            let made = || {
                std::thread::sleep(Duration::from_millis(1));
                domain.region(PAGE).zero().unwrap()
            };
            let others: Vec<_> = (0..100).map(|_| made()).collect();
            assert!(!evictions.iter().all(|eviction| eviction.is_finished()));
            store.holds_writes.store(false, SeqCst);
            drop(others);
        });
        check_pages(&region, 0..CHANGED);
    })
    .well();
}
