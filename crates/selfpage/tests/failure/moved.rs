//! Contents that move while their store fails.

use std::fs::OpenOptions;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};

use selfpage::store::{BackingStore, FileStore, MemoryStore};
use selfpage::{Domain, FileAccess, Guards, Kind, Locking, Region, Trap};

use crate::child::forked;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, number_what_fits, pages};
use crate::skip::skip;
use crate::store::Failing;
use crate::tried;

const FRAMES: usize = 64;
const PAGES: usize = 4 * FRAMES;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];
const EIO: u32 = libc::EIO as u32;

/// Two regions of one store; the pages of the first are numbered.
fn two(trap: Trap, store: Arc<dyn BackingStore>) -> (Domain, Region, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).most_frames(2 * FRAMES * PAGE).build().unwrap();
    let region = |name| domain.region(PAGES * PAGE).name(name).trap(trap).stored_in(store.clone()).unwrap();
    let (old, new) = (region("old"), region("new"));
    (domain, old, new)
}

fn move_all(from: &Region, to: &Region) {
    // SAFETY: test: no reference into either range is held, and both may be read and written.
    unsafe { from.move_contents(0, PAGES * PAGE, to, 0) }.unwrap();
}

/// Nothing is read for a move. What cannot be read then says so by its new name, and is right when it can be read again.
#[test]
fn pages_that_cannot_be_read_move() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let store = Failing::new();
            let (domain, mut old, mut new) = two(trap, store.clone());
            number_pages(&mut old);
            number_pages(&mut new);
            new.as_mut_slice::<u64>().iter_mut().for_each(|word| *word = 5);
            // Some have failed already when they move.
            store.read.store(EIO, SeqCst);
            let failed = (0..8).filter(|page| tried::read(old.as_ptr().wrapping_add(page * PAGE).cast()).is_err());
            assert_eq!(failed.count(), 8);
            move_all(&old, &new);
            let mut unread = 0;
            for page in 0..PAGES {
                match tried::read(new.as_ptr().wrapping_add(page * PAGE).cast()) {
                    Ok(word) => assert_eq!(word, page as u64 + 1),
                    Err(signal) => {
                        assert_eq!(signal, libc::SIGBUS);
                        let error = new.pin(page * PAGE, PAGE).unwrap_err();
                        assert_eq!(error.kind(), Kind::Io, "{error}");
                        assert!(error.to_string().contains("region new"), "{error}");
                        unread += 1;
                    }
                }
            }
            assert!(unread > 2 * FRAMES, "{unread} could not be read");
            store.read.store(0, SeqCst);
            for page in 0..PAGES {
                new.pin(page * PAGE, PAGE).unwrap();
                new.unpin(page * PAGE, PAGE).unwrap();
            }
            check_pages(&new, 0..PAGES);
            assert!(old.as_slice::<u64>().iter().all(|word| *word == 0));
            assert_eq!(domain.stats().counts.lost_total, 0);
        })
        .well();
    }
}

/// The evictor has pages on their way to the store all the time, from which they come back.
#[test]
fn pages_that_cannot_be_saved_move() {
    for (trap, name) in TRAPS {
        for write_ms in [0, 5] {
            in_child(here!(), &format!("{name} {write_ms}"), || {
                let store = Failing::new();
                let (domain, mut old, new) = two(trap, store.clone());
                store.write.store(EIO, SeqCst);
                store.write_ms.store(write_ms, SeqCst);
                let written = number_what_fits(&mut old);
                let other = domain.region(PAGE).zero().unwrap();
                let done = AtomicBool::new(false);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        while !done.load(Relaxed) {
                            assert_eq!(other.pin(0, PAGE).unwrap_err().kind(), Kind::Io);
                        }
                    });
                    for _ in 0..20 {
                        move_all(&old, &new);
                        move_all(&new, &old);
                    }
                    move_all(&old, &new);
                    done.store(true, Relaxed);
                });
                store.write.store(0, SeqCst);
                check_pages(&new, 0..written);
                new.flush(0, PAGES * PAGE).unwrap();
                check_pages(&new, 0..written);
                assert!(old.as_slice::<u64>().iter().all(|word| *word == 0));
                assert_eq!(domain.stats().counts.lost_total, 0);
            })
            .well();
        }
    }
}

/// Moving takes no room, and gives back what was at the new place.
#[test]
fn a_move_in_a_full_store_makes_room() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let store = MemoryStore::new(((2 * PAGES - 2 * FRAMES) * PAGE) as u64).unwrap();
            let (_domain, mut old, mut new) = two(trap, Arc::new(store));
            number_pages(&mut old);
            let filled = number_what_fits(&mut new);
            assert!((FRAMES..PAGES).contains(&filled), "{filled}");
            move_all(&old, &new);
            check_pages(&new, 0..PAGES);
            let filled = number_what_fits(&mut old) - 16;
            assert!(filled >= FRAMES, "{filled}");
            // Every frame holds the only copy of something: room must be made first.
            old.discard(filled * PAGE, 16 * PAGE).unwrap();
            check_pages(&old, 0..filled);
            check_pages(&new, 0..PAGES);
        })
        .well();
    }
}

/// Writable and executable pages are copied where they are in core.
fn make_executable(region: &Region, pages: Range<usize>) {
    let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    // SAFETY: test: pages of the region, which stay as accessible as they were.
    let made = unsafe { libc::mprotect(region.as_ptr().add(pages.start * PAGE).cast(), pages.len() * PAGE, all) };
    assert_eq!(made, 0);
}

/// Those between them that are not move, and are not read.
#[test]
fn absent_pages_among_those_that_are_copied_are_not_read() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let store = Failing::new();
            let (domain, mut old, new) = two(trap, store.clone());
            domain.add_frames(FRAMES as u32).unwrap();
            number_pages(&mut old);
            let few = PAGES - 32..PAGES;
            old.flush(0, PAGES * PAGE).unwrap();
            // They stay in core, however long the evictor has not had a CPU, until they can no longer go.
            let stay = few.clone().skip(1).step_by(2);
            stay.clone().for_each(|page| old.pin(page * PAGE, PAGE).unwrap());
            // Out of core, and then off the list of those that come back without being read.
            for page in [few.clone().step_by(2), few.clone().step_by(2)].into_iter().flatten() {
                old.evict(page * PAGE, PAGE).unwrap();
            }
            assert!(few.clone().all(|page| old.residency()[page].load(Relaxed) == (page % 2) as u8));
            make_executable(&old, few);
            stay.for_each(|page| old.unpin(page * PAGE, PAGE).unwrap());
            store.read.store(EIO, SeqCst);
            move_all(&old, &new);
            store.read.store(0, SeqCst);
            check_pages(&new, 0..PAGES);
            assert_eq!(domain.stats().counts.lost_total, 0);
        })
        .well();
    }
}

/// Where there is no frame for a copy, the pages before it come back.
#[test]
fn a_page_that_cannot_be_copied_leaves_all_where_it_was() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let store = Failing::new();
            let (domain, mut old, new) = two(trap, store.clone());
            store.write.store(EIO, SeqCst);
            let written = number_what_fits(&mut old);
            make_executable(&old, written / 2..written);
            for _ in 0..3 {
                // SAFETY: test: no reference into either range is held, and both may be read and written.
                let error = unsafe { old.move_contents(0, PAGES * PAGE, &new, 0) }.unwrap_err();
                assert_eq!(error.kind(), Kind::Io, "{error}");
                assert!(error.to_string().contains("move region old, bytes "), "{error}");
                check_pages(&old, 0..written);
            }
            store.write.store(0, SeqCst);
            domain.add_frames(FRAMES as u32).unwrap();
            move_all(&old, &new);
            check_pages(&new, 0..written);
            assert_eq!(domain.stats().counts.lost_total, 0);
        })
        .well();
    }
}

/// Between two stores pages are copied, for which there is no frame.
#[test]
fn a_move_for_which_there_is_no_frame_says_why() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = |name, pages| {
                let store = MemoryStore::new((pages * PAGE) as u64).unwrap();
                domain.region(PAGES * PAGE).name(name).trap(trap).stored(store).unwrap()
            };
            let (mut old, new) = (region("old", PAGES), region("new", FRAMES));
            number_pages(&mut old);
            move_all(&old, &new);
        })
        .by(libc::SIGBUS, &["region ", "no frame, because pages cannot be saved", "the store is full (ENOSPC)"]);
    }
}

#[test]
fn what_a_file_has_no_more_is_no_zero_when_it_moves() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let path = dir.path().join("data");
            std::fs::write(&path, vec![7; PAGES * PAGE]).unwrap();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let file = domain.region(0).trap(trap).file(&path, 0, FileAccess::Read).unwrap();
            let new = domain.region(PAGES * PAGE).zero().unwrap();
            OpenOptions::new().write(true).open(&path).unwrap().set_len((10 * PAGE) as u64).unwrap();
            drop(dir);
            move_all(&file, &new);
        })
        .by(libc::SIGBUS, &["/data at 0x", "the file ends before this page"]);
    }
}

/// A store's file that somebody cuts has pages no more, which are no zeros either, wherever they are by then.
#[test]
fn what_a_cut_store_has_no_more_is_lost() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let path = dir.path().join("store");
            let store = FileStore::create(&path, (8 * FRAMES * PAGE) as u64).unwrap();
            let (_domain, mut old, new) = two(trap, Arc::new(store));
            number_pages(&mut old);
            OpenOptions::new().write(true).open(&path).unwrap().set_len((8 * PAGE) as u64).unwrap();
            move_all(&old, &new);
            let mut lost = 0;
            for page in 0..pages(&new) {
                match tried::read(new.as_ptr().wrapping_add(page * PAGE).cast()) {
                    Ok(word) => assert_eq!(word, page as u64 + 1),
                    Err(_) => {
                        let error = new.pin(page * PAGE, PAGE).unwrap_err();
                        assert_eq!(error.kind(), Kind::Lost, "{error}");
                        lost += 1;
                    }
                }
            }
            assert!(lost > 2 * FRAMES, "{lost}");
        })
        .well();
    }
}

/// The frame of what was at the new place is enough for the copy, and none is left for the clone that needs the page too.
#[test]
fn a_copied_page_that_a_clone_cannot_be_given_stays() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let store = Failing::new();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = |name| domain.region(8 * PAGE).name(name).trap(trap).stored_in(store.clone()).unwrap();
            let (mut old, mut new) = (region("old"), region("new"));
            number_pages(&mut old);
            new.as_mut_slice::<u64>().iter_mut().for_each(|word| *word = 5);
            let clone = old.cow_clone(store.clone()).unwrap();
            store.write.store(EIO, SeqCst);
            let others = domain.region(FRAMES * PAGE).zero().unwrap();
            let pinned = (0..FRAMES).take_while(|page| others.pin(page * PAGE, PAGE).is_ok()).count();
            assert!(pinned >= FRAMES / 2, "{pinned}");
            for _ in 0..2 {
                // SAFETY: test: no reference into either range is held, and both may be read and written.
                let error = unsafe { old.move_contents(0, 8 * PAGE, &new, 0) }.unwrap_err();
                assert_eq!(error.kind(), Kind::Io, "{error}");
                assert!(error.to_string().contains("region old, bytes "), "{error}");
                check_pages(&old, 0..8);
            }
            store.write.store(0, SeqCst);
            drop(others);
            assert!([0, 5].contains(&new.as_slice::<u64>()[0]), "a copy stays behind");
            check_pages(&clone, 0..8);
            // No pin is left: every frame can be had.
            let all = domain.region(FRAMES * PAGE).zero().unwrap();
            all.pin(0, FRAMES * PAGE).unwrap();
        })
        .well();
    }
}

/// Has the program have a guard in the place of a page. Not where the kernel has none.
fn install_guard(region: &Region, page: usize) -> bool {
    const MADV_GUARD_INSTALL: libc::c_int = 102;
    let at = region.as_ptr().addr() + page * PAGE;
    // SAFETY: test: nobody refers to the page.
    let installed = unsafe {
        region.while_empty(page * PAGE, PAGE, || {
            let refused = libc::madvise(at as *mut libc::c_void, PAGE, MADV_GUARD_INSTALL);
            (refused == 0).then(|| region.set_guards(page * PAGE, PAGE, Guards::Installed))
        })
    };
    match installed.unwrap() {
        Some(noted) => noted.unwrap(),
        None => skip("guards", "the kernel has none (MADV_GUARD_INSTALL, Linux 6.13)"),
    }
    tried::read(at as *const u64).is_err()
}

/// A guard of the program's own keeps nothing where it is: at the old place it is no contents, and at the new one it goes like what was there.
#[test]
fn contents_move_past_guards() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let domain = Domain::with_frames(FRAMES * PAGE).locking(Locking::Never).build().unwrap();
            let mut old = domain.region(8 * PAGE).name("old").trap(trap).zero().unwrap();
            let new = domain.region(8 * PAGE).name("new").trap(trap).zero().unwrap();
            number_pages(&mut old);
            if !install_guard(&old, 2) || !install_guard(&new, 1) {
                return;
            }
            let move_pages = |from: &Region, to: &Region| {
                // SAFETY: test: no reference into either range is held, and both may be read and written.
                unsafe { from.move_contents(0, 8 * PAGE, to, 0) }.unwrap();
            };
            let moved = || (0..8).filter(|page| *page != 2);
            move_pages(&old, &new);
            forked(|| check_pages(&new, moved()));
            assert_eq!(new.evict(0, 8 * PAGE).unwrap_err().kind(), Kind::Held);
            check_pages(&new, moved());
            assert_eq!(tried::read(new.as_ptr().wrapping_add(2 * PAGE).cast()), Ok(0));
            assert!(tried::read(old.as_ptr().wrapping_add(2 * PAGE).cast()).is_err());
            move_pages(&new, &old);
            check_pages(&old, moved());
            assert_eq!(tried::read(old.as_ptr().wrapping_add(2 * PAGE).cast()), Ok(0));
            assert_eq!(domain.stats().counts.lost_total, 0);
        })
        .well();
    }
}

/// A clone needs what is at the new place, and no frame can be had for it.
#[test]
fn contents_do_not_move_to_a_page_that_its_clone_needs_and_cannot_have() {
    in_child(here!(), "", || {
        let (domain, mut old, mut new) = two(Trap::Worker, Failing::new());
        let filler = domain.region(PAGES * PAGE).zero().unwrap();
        let at = |region: &mut Region, page: usize, word| region.as_mut_slice::<[u64; 512]>()[page][0] = word;
        at(&mut old, 1, 5);
        at(&mut new, 2, 6);
        let clone = new.cow_clone(MemoryStore::new((PAGES * PAGE) as u64).unwrap()).unwrap();
        old.pin(PAGE, PAGE).unwrap();
        new.pin(2 * PAGE, PAGE).unwrap();
        let pinned = (0..).take_while(|page| filler.pin(page * PAGE, PAGE).is_ok()).count();
        // SAFETY: test: no reference into either range is held, and both may be read and written.
        let error = unsafe { old.move_contents(PAGE, PAGE, &new, 2 * PAGE) }.unwrap_err();
        assert_eq!(error.kind(), Kind::Held, "{error}");
        assert!(error.to_string().contains("a clone needs what is there"), "{error}");
        assert!(pinned > 0);
        drop(filler);
        assert_eq!([&old, &new, &clone].map(|region| region.as_slice::<[u64; 512]>()[1][0]), [5, 0, 0]);
        assert_eq!([&old, &new, &clone].map(|region| region.as_slice::<[u64; 512]>()[2][0]), [0, 6, 6]);
    })
    .well();
}
