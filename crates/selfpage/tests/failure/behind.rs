//! The program changes a region's mapping behind the library's back.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use selfpage::pager::UserPager;
use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{Answer, Config, Domain, FaultHandler, FileAccess, Locking, MemoryFault, Protection, Region, Trap};
use selfpage_core::addr::PageBytes;

use crate::descriptors::close_all;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages};
use crate::tried;

const FRAMES: usize = 64;
const ALL: usize = 4 * FRAMES;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

fn numbered(trap: Trap) -> (Domain, Region) {
    over(Domain::with_frames(FRAMES * PAGE), trap)
}

/// Locked pages are not dropped so easily.
fn numbered_and_not_locked(trap: Trap) -> (Domain, Region) {
    over(Domain::with_frames(FRAMES * PAGE).locking(Locking::Never), trap)
}

fn over(config: Config, trap: Trap) -> (Domain, Region) {
    let domain = config.build().unwrap();
    let mut region = domain.region(ALL * PAGE).trap(trap).stored(MemoryStore::new(1 << 30).unwrap()).unwrap();
    number_pages(&mut region);
    (domain, region)
}

/// The last pages of a region, which are in core after it was gone through.
const TAIL: usize = 16;

fn tail(region: &Region) -> *mut libc::c_void {
    // The evictor may still be at work for the pages before.
    let in_core = |page: &AtomicU8| page.load(Ordering::Relaxed) == 1;
    check_pages(region, ALL - TAIL..ALL);
    std::thread::sleep(Duration::from_millis(20));
    while !region.residency()[ALL - TAIL..].iter().all(in_core) {
        check_pages(region, ALL - TAIL..ALL);
        std::thread::sleep(Duration::from_millis(20));
    }
    region.as_ptr().wrapping_add((ALL - TAIL) * PAGE).cast()
}

/// All frames are there still: as many pages as ever can be in core at a time.
fn no_frame_is_lost(domain: &Domain) {
    let region = domain.region((FRAMES - 8) * PAGE).pinned().unwrap();
    assert!(region.as_slice::<u64>().iter().all(|word| *word == 0));
}

fn zero(region: &Region, pages: std::ops::Range<usize>) {
    for page in pages {
        assert!(region.as_slice::<[u64; 512]>()[page].iter().all(|word| *word == 0), "page {page}");
    }
}

#[test]
fn dropped() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, region) = numbered_and_not_locked(trap);
            // SAFETY: test: memory of the region.
            assert_eq!(unsafe { libc::madvise(tail(&region), TAIL * PAGE, libc::MADV_DONTNEED) }, 0);
            // Half of it is met by an access, the rest by the evictor.
            zero(&region, ALL - TAIL..ALL - TAIL / 2);
            for _ in 0..3 {
                check_pages(&region, 0..ALL - TAIL);
            }
            zero(&region, ALL - TAIL..ALL);
            assert_eq!(domain.stats().counts.lost_total, TAIL as u64);
            no_frame_is_lost(&domain);
        })
        .well();
    }
}

/// The kernel finds pinned pages in upcall regions too, whatever became of them before.
#[test]
fn dropped_and_pinned() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, region) = numbered_and_not_locked(trap);
            let tail = tail(&region);
            // SAFETY: test: memory of the region.
            assert_eq!(unsafe { libc::madvise(tail, TAIL * PAGE, libc::MADV_DONTNEED) }, 0);
            let offset = (ALL - TAIL) * PAGE;
            region.pin(offset, TAIL * PAGE).unwrap();
            let ones = tempfile::tempfile().unwrap();
            std::os::unix::fs::FileExt::write_all_at(&ones, &[1; TAIL * PAGE], 0).unwrap();
            // SAFETY: test: memory of the region.
            let read = unsafe { libc::pread(ones.as_raw_fd(), tail, TAIL * PAGE, 0) };
            assert_eq!(read, (TAIL * PAGE) as isize, "{}", io::Error::last_os_error());
            check_pages(&region, 0..ALL - TAIL);
            assert!(region.as_slice::<u8>()[offset..].iter().all(|byte| *byte == 1));
            region.unpin(offset, TAIL * PAGE).unwrap();
            assert!(region.unpin(offset, PAGE).is_err());
            assert_eq!(domain.stats().counts.lost_total, TAIL as u64);
            no_frame_is_lost(&domain);
        })
        .well();
    }
}

#[test]
fn dropped_while_others_use_it() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, region) = numbered_and_not_locked(trap);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for turn in 0..3000 {
                        let at = region.as_ptr().wrapping_add((ALL - TAIL + turn % TAIL) * PAGE);
                        // SAFETY: test: memory of the region.
                        unsafe { libc::madvise(at.cast(), PAGE, libc::MADV_DONTNEED) };
                    }
                });
                for thread in 0..2u64 {
                    let region = &region;
                    scope.spawn(move || {
                        for turn in 0..20 {
                            check_pages(region, 0..ALL - TAIL);
                            for index in ALL - TAIL..ALL {
                                let at = region.as_ptr().wrapping_add(index * PAGE).cast::<u64>();
                                // SAFETY: test: words of the region, one a thread.
                                unsafe { at.add(8 + thread as usize).write_volatile(turn) };
                                // SAFETY: test: as above.
                                let word = unsafe { at.read_volatile() };
                                assert!(word == 0 || word == index as u64 + 1, "{word}");
                            }
                        }
                    });
                }
            });
            drop(region);
            no_frame_is_lost(&domain);
        })
        .well();
    }
}

#[test]
fn unmapped() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let (domain, region) = numbered(trap);
            let hole = tail(&region);
            // SAFETY: test: memory of the region.
            assert_eq!(unsafe { libc::munmap(hole, TAIL * PAGE) }, 0);
            assert_eq!(tried::read(hole.cast()), Err(libc::SIGSEGV));
            for _ in 0..3 {
                check_pages(&region, 0..ALL - TAIL);
            }
            assert_eq!(tried::read(hole.cast()), Err(libc::SIGSEGV));
            assert_eq!(domain.stats().counts.lost_total, TAIL as u64);
            let absent = region.as_ptr().wrapping_add((ALL - 1) * PAGE);
            assert!(region.pin((ALL - 1) * PAGE, PAGE).is_err(), "{absent:?} is not there");
            drop(region);
            no_frame_is_lost(&domain);
        })
        .well();
    }
}

#[test]
fn mapped_over() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, region) = numbered(trap);
            let place = tail(&region);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: test: the program's own memory in place of the region's.
            let own = unsafe { libc::mmap(place, TAIL * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
            assert_eq!(own, place);
            for _ in 0..3 {
                check_pages(&region, 0..ALL - TAIL);
            }
            zero(&region, ALL - TAIL..ALL);
            assert_eq!(domain.stats().counts.lost_total, TAIL as u64);
            // What the program has there now is its own, and not the domain's to take.
            for page in 0..TAIL {
                // SAFETY: test: the program's own memory.
                unsafe { own.byte_add(page * PAGE).cast::<u64>().write_volatile(99) };
            }
            for _ in 0..3 {
                check_pages(&region, 0..ALL - TAIL);
            }
            let still_own = || {
                for page in 0..TAIL {
                    // SAFETY: test: the program's own memory.
                    assert_eq!(unsafe { own.byte_add(page * PAGE).cast::<u64>().read_volatile() }, 99);
                }
            };
            still_own();
            drop(region);
            no_frame_is_lost(&domain);
            still_own();
        })
        .well();
    }
}

/// Fills on a pager thread, as a pager of the program's own does.
struct Own;

impl UserPager for Own {
    fn fill(&self, _: u64, _: &mut PageBytes) -> io::Result<()> {
        Ok(())
    }
    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

/// Is asked of absent pages, and has nothing to say.
struct Passes;

impl FaultHandler for Passes {
    fn handle(&self, _: &MemoryFault<'_>) -> Answer {
        Answer::Pass
    }
    fn asks_first(&self) -> bool {
        true
    }
}

/// What fails of itself fails as it does without us, and not for ever again.
#[test]
fn mapped_over_by_a_file_that_is_cut_short() {
    for (trap, name) in TRAPS {
        for kind in ["in-core", "absent", "own-pager", "asking"] {
            in_child(here!(), &format!("{name}-{kind}"), || {
                tried::catch();
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let builder = domain.region(ALL * PAGE).trap(trap);
                let store = MemoryStore::new(1 << 30).unwrap();
                let region = match kind {
                    "own-pager" => builder.user(Own).unwrap(),
                    "asking" => builder.handler(Passes).stored(store).unwrap(),
                    _ => builder.stored(store).unwrap(),
                };
                let place: *mut libc::c_void = region.as_ptr().cast();
                if kind == "in-core" {
                    assert_eq!(tried::read(place.cast()), Ok(0));
                }
                let file = tempfile::tempfile().unwrap();
                file.set_len(PAGE as u64).unwrap();
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
                // SAFETY: test: the program's own memory in place of the region's.
                assert_eq!(unsafe { libc::mmap(place, PAGE, libc::PROT_READ, flags, file.as_raw_fd(), 0) }, place);
                assert_eq!(tried::read(place.cast()), Ok(0));
                file.set_len(0).unwrap();
                assert_eq!(tried::read(place.cast()), Err(libc::SIGBUS));
                assert_eq!(tried::read(place.wrapping_byte_add(PAGE).cast()), Ok(0), "its neighbour is the region's");
            })
            .well();
        }
    }
}

/// Maps memory of the program's own over [`TAIL`] pages of a region, and writes 99 into each of them.
fn replace(place: *mut libc::c_void, flags: libc::c_int, file: libc::c_int) -> *mut u64 {
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_PRIVATE | libc::MAP_FIXED);
    // SAFETY: test: the program's own memory in place of the region's.
    assert_eq!(unsafe { libc::mmap(place, TAIL * PAGE, rights, flags, file, 0) }, place);
    for page in 0..TAIL {
        // SAFETY: test: as above.
        unsafe { place.byte_add(page * PAGE).cast::<u64>().write_volatile(99) };
    }
    place.cast()
}

fn still_the_programs_own(own: *mut u64) {
    for page in 0..TAIL {
        // SAFETY: test: the program's own memory.
        assert_eq!(unsafe { own.byte_add(page * PAGE).read_volatile() }, 99, "page {page}");
    }
}

#[test]
fn mapped_over_what_is_in_core() {
    for (trap, name) in TRAPS {
        for kind in ["anonymous", "file"] {
            in_child(here!(), &format!("{name}-{kind}"), || {
                let (domain, mut region) = numbered(trap);
                let file = tempfile::tempfile().unwrap();
                file.set_len((TAIL * PAGE) as u64).unwrap();
                let own = match kind {
                    "file" => replace(tail(&region), 0, file.as_raw_fd()),
                    _ => replace(tail(&region), libc::MAP_ANONYMOUS, -1),
                };
                // A quarter of it is evicted by name and a quarter discarded by name, the rest is for the policy to choose.
                let _ = region.evict((ALL - TAIL) * PAGE, TAIL / 4 * PAGE);
                region.discard((ALL - TAIL / 4) * PAGE, TAIL / 4 * PAGE).unwrap();
                for _ in 0..3 {
                    check_pages(&region, 0..ALL - TAIL);
                    still_the_programs_own(own);
                }
                assert_eq!(domain.stats().counts.lost_total, TAIL as u64);
                assert!(region.pin((ALL - 1) * PAGE, PAGE).is_err());
                still_the_programs_own(own);
                drop(region);
                no_frame_is_lost(&domain);
            })
            .well();
        }
    }
}

/// No thread of the program's can tell then whose memory it is.
#[test]
fn mapped_over_what_is_in_core_where_our_descriptors_are_closed() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, mut region) = numbered(trap);
            let place = tail(&region);
            close_all();
            let own = replace(place, libc::MAP_ANONYMOUS, -1);
            region.discard((ALL - TAIL / 4) * PAGE, TAIL / 4 * PAGE).unwrap();
            still_the_programs_own(own);
            drop(region);
            still_the_programs_own(own);
            no_frame_is_lost(&domain);
        })
        .well();
    }
}

#[test]
fn mapped_over_and_flushed() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
            std::fs::write(file.path(), vec![1; ALL * PAGE]).unwrap();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = domain.region(0).trap(trap).file(file.path(), 0, FileAccess::ReadWrite).unwrap();
            assert!(region.as_slice::<u8>().iter().all(|byte| *byte == 1));
            let place = region.as_ptr().wrapping_add((ALL - TAIL) * PAGE);
            replace(place.cast(), libc::MAP_ANONYMOUS, -1);
            region.flush(0, ALL * PAGE).unwrap();
            assert!(std::fs::read(file.path()).unwrap().iter().all(|byte| *byte == 1), "it is not the file's");
        })
        .well();
    }
}

#[test]
fn mapped_over_a_page_that_could_not_be_had() {
    for (closes, name) in [(false, "worker"), (true, "worker, our descriptors are closed")] {
        in_child(here!(), name, || {
            tried::catch();
            let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
            std::fs::write(file.path(), vec![1; ALL * PAGE]).unwrap();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(0).file(file.path(), 0, FileAccess::ReadWrite).unwrap();
            file.as_file().set_len(((ALL - TAIL) * PAGE) as u64).unwrap();
            let place = region.as_ptr().wrapping_add((ALL - TAIL) * PAGE);
            for page in 0..TAIL {
                assert_eq!(tried::read(place.wrapping_add(page * PAGE).cast()), Err(libc::SIGBUS));
            }
            let _path = file.into_temp_path();
            if closes {
                close_all();
            }
            let own = replace(place.cast(), libc::MAP_ANONYMOUS, -1);
            for page in (ALL - TAIL..ALL).step_by(2) {
                assert!(region.pin(page * PAGE, PAGE).is_err());
            }
            still_the_programs_own(own);
            region.discard(0, ALL * PAGE).unwrap();
            still_the_programs_own(own);
        })
        .well();
    }
}

#[test]
fn protected() {
    for (trap, name) in TRAPS {
        for rights in [libc::PROT_NONE, libc::PROT_READ] {
            in_child(here!(), &format!("{name}-{rights}"), || {
                tried::catch();
                let (domain, region) = numbered(trap);
                let part = tail(&region);
                // SAFETY: test: memory of the region.
                assert_eq!(unsafe { libc::mprotect(part, TAIL * PAGE, rights) }, 0);
                for _ in 0..3 {
                    check_pages(&region, 0..ALL - TAIL);
                }
                let read = tried::read(part.cast());
                let wanted = if rights == libc::PROT_NONE { Err(libc::SIGSEGV) } else { Ok((ALL - TAIL) as u64 + 1) };
                assert_eq!(read, wanted);
                assert_eq!(tried::write(part.cast(), 1), Err(libc::SIGSEGV));
                // SAFETY: test: memory of the region.
                assert_eq!(unsafe { libc::mprotect(part, TAIL * PAGE, libc::PROT_READ | libc::PROT_WRITE) }, 0);
                check_pages(&region, 0..ALL);
                assert_eq!(domain.stats().counts.lost_total, 0);
                drop(region);
                no_frame_is_lost(&domain);
            })
            .well();
        }
    }
}

/// What is written the moment that it may be again must not be lost to an eviction that has copied the page by then.
#[test]
fn protected_and_written_again_while_it_is_evicted() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = numbered(trap);
            let page = region.as_ptr();
            let done = AtomicU8::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while done.load(Ordering::Relaxed) == 0 {
                        let _ = region.evict(0, PAGE);
                    }
                });
                let word = page.cast::<u64>();
                let rights = |rights| {
                    // SAFETY: test: memory of the region.
                    assert_eq!(unsafe { libc::mprotect(page.cast(), PAGE, rights) }, 0);
                };
                for turn in 1..30_000u64 {
                    rights(libc::PROT_READ);
                    // SAFETY: test: a word of the region.
                    unsafe { word.read_volatile() };
                    rights(libc::PROT_READ | libc::PROT_WRITE);
                    // SAFETY: test: as above, which may be written.
                    unsafe { word.write_volatile(turn) };
                    std::thread::yield_now();
                    // SAFETY: test: as above.
                    let read = unsafe { word.read_volatile() };
                    if read != turn {
                        done.store(1, Ordering::Relaxed);
                        panic!("a write was lost: {read} in place of {turn}");
                    }
                }
                done.store(1, Ordering::Relaxed);
            });
        })
        .well();
    }
}

#[test]
fn huge_pages_asked_for() {
    const MADV_COLLAPSE: libc::c_int = 25;
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(2048 * PAGE).build().unwrap();
            let mut region = domain.region(4096 * PAGE).trap(trap).stored(MemoryStore::new(1 << 30).unwrap()).unwrap();
            for advice in [libc::MADV_HUGEPAGE, MADV_COLLAPSE] {
                // SAFETY: test: memory of the region. The kernel may refuse it.
                let result = unsafe { libc::madvise(region.as_ptr().cast(), region.len_bytes(), advice) };
                println!("madvise {advice}: {result}");
                number_pages(&mut region);
                check_pages(&region, 0..pages(&region));
            }
            // A whole huge page's worth in core, then made one.
            region.pin(0, 1024 * PAGE).unwrap();
            // SAFETY: test: memory of the region.
            let result = unsafe { libc::madvise(region.as_ptr().cast(), 1024 * PAGE, MADV_COLLAPSE) };
            println!("collapse: {result}");
            region.unpin(0, 1024 * PAGE).unwrap();
            check_pages(&region, 0..pages(&region));
            check_pages(&region, 0..pages(&region));
            assert_eq!(domain.stats().counts.lost_total, 0);
        })
        .well();
    }
}

#[test]
fn freed_lazily() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = numbered_and_not_locked(trap);
            // SAFETY: test: memory of the region.
            assert_eq!(unsafe { libc::madvise(tail(&region), TAIL * PAGE, libc::MADV_FREE) }, 0);
            for _ in 0..3 {
                check_pages(&region, 0..ALL - TAIL);
            }
            for index in ALL - TAIL..ALL {
                let word = region.as_slice::<[u64; 512]>()[index][0];
                assert!(word == 0 || word == index as u64 + 1, "page {index}: {word}");
            }
        })
        .well();
    }
}

/// The clone loses what it would have had there; its source goes on.
#[test]
fn a_clone_that_lacks_its_pages_mapped_over() {
    for (trap, name) in TRAPS {
        for kind in ["own", "nothing"] {
            in_child(here!(), &format!("{name}-{kind}"), || {
                let domain = Domain::with_frames(4 * ALL * PAGE).build().unwrap();
                let store = || MemoryStore::new(1 << 30).unwrap();
                let mut source = domain.region(ALL * PAGE).trap(trap).stored(store()).unwrap();
                number_pages(&mut source);
                let clone = source.cow_clone(store()).unwrap();
                let place = clone.as_ptr().wrapping_add((ALL - TAIL) * PAGE).cast();
                let own = match kind {
                    "own" => Some(replace(place, libc::MAP_ANONYMOUS, -1)),
                    _ => {
                        // SAFETY: test: memory of the region.
                        assert_eq!(unsafe { libc::munmap(place, TAIL * PAGE) }, 0);
                        None
                    }
                };
                let half = ALL - TAIL / 2;
                (half..ALL).for_each(|page| source.as_mut_slice::<[u64; 512]>()[page][3] = 7);
                source.discard((ALL - TAIL) * PAGE, TAIL / 2 * PAGE).unwrap();
                zero(&source, ALL - TAIL..half);
                check_pages(&source, half..ALL);
                check_pages(&clone, 0..ALL - TAIL);
                own.into_iter().for_each(still_the_programs_own);
                drop(source);
                check_pages(&clone, 0..ALL - TAIL);
                own.into_iter().for_each(still_the_programs_own);
            })
            .well();
        }
    }
}

/// The kernel protects what lies before the program's own memory, and stops there.
#[test]
fn protected_around_what_was_mapped_over() {
    for (trap, name) in TRAPS {
        for protection in [Protection::Read, Protection::None] {
            in_child(here!(), &format!("{name}-{protection:?}"), || {
                tried::catch();
                let (_domain, region) = numbered(trap);
                let first = ALL - TAIL - 8;
                check_pages(&region, first..ALL);
                let own = replace(tail(&region), libc::MAP_ANONYMOUS, -1);
                check_pages(&region, first..ALL - TAIL);
                let word = region.as_ptr().wrapping_add(first * PAGE + 64).cast::<u64>();
                let protected = region.protect(first * PAGE, (8 + TAIL) * PAGE, protection);
                // It is as it was, or as it is wanted.
                let written = tried::write(word, 1);
                assert_eq!((protected.is_ok(), written), (true, Err(libc::SIGSEGV)));
                region.protect(first * PAGE, (8 + TAIL) * PAGE, Protection::ReadWrite).unwrap();
                assert_eq!(tried::write(word, 2), Ok(()));
                check_pages(&region, first..ALL - TAIL);
                still_the_programs_own(own);
            })
            .well();
        }
    }
}

#[test]
fn a_snapshot_around_what_was_mapped_over() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(2 * ALL * PAGE).build().unwrap();
            let store = MemoryStore::new(1 << 30).unwrap();
            let mut region = domain.region(ALL * PAGE).trap(trap).stored(store).unwrap();
            number_pages(&mut region);
            let own = replace(tail(&region), libc::MAP_ANONYMOUS, -1);
            let dir = tempfile::tempdir().unwrap();
            let mut snapshots = Snapshots::of(&[&region], dir.path().join("one.snap")).unwrap();
            for turn in 0..2 {
                snapshots.take().unwrap();
                (0..ALL - TAIL).for_each(|page| region.as_mut_slice::<[u64; 512]>()[page][3] = turn);
            }
            check_pages(&region, 0..ALL - TAIL);
            still_the_programs_own(own);
        })
        .well();
    }
}
