//! Contents that move to other pages, of one region and of two: by their frames, and by where the store has them.

use std::sync::Arc;

use io_uring::IoUring;
use selfpage::dirty::{Dirty, DirtyTracker};
use selfpage::store::{BackingStore, FileStore, MemoryStore};
use selfpage::{Domain, Kind, Region, Trap};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
const FRAMES: usize = 256;
/// Pages that move: more than there are frames.
const PAGES: usize = 3 * FRAMES;
const TRAPS: [Trap; 2] = [Trap::Worker, Trap::Upcall];

fn domain() -> Option<Domain> {
    Domain::with_frames(FRAMES * PAGE).build().map_err(|why| skip::skip("uffd", &why.to_string())).ok()
}

fn store() -> Arc<dyn BackingStore> {
    Arc::new(FileStore::unnamed_in("/var/tmp", (8 * PAGES * PAGE) as u64).unwrap())
}

/// Something on every page but each eighth, from another one on for each salt.
fn number(region: &mut Region, first: usize, salt: u64) {
    for page in 0..PAGES {
        region.as_mut_slice::<u64>()[(first + page) * WORDS] = wanted(page, salt);
    }
}

fn wanted(page: usize, salt: u64) -> u64 {
    if (page as u64 + salt).is_multiple_of(8) { 0 } else { salt + page as u64 }
}

fn check(region: &Region, first: usize, salt: u64) {
    for page in 0..PAGES {
        let seen = region.as_slice::<u64>()[(first + page) * WORDS];
        assert_eq!(seen, wanted(page, salt), "page {page} from {first} on");
    }
}

fn move_pages(from: &Region, first: usize, to: &Region, there: usize) {
    // SAFETY: test: no reference into either range is held, and both may be read and written.
    unsafe { from.move_contents(first * PAGE, PAGES * PAGE, to, there * PAGE) }.unwrap();
}

/// What is at the new place before is in core, in the store, or nowhere; what moves is, too.
#[test]
fn frames_and_places_in_the_store_move() {
    for trap in TRAPS {
        let Some(domain) = domain() else { return };
        let store = store();
        // A handle of its own to the store.
        let mut one = domain.region(3 * PAGES * PAGE).trap(trap).stored(store.clone()).unwrap();
        let mut other = domain.region(PAGES * PAGE).trap(Trap::Worker).stored_in(store).unwrap();
        number(&mut one, 2 * PAGES, 5000);
        number(&mut other, 0, 9000);
        number(&mut one, 0, 1);
        let before = domain.stats().counts;
        move_pages(&one, 0, &one, PAGES);
        move_pages(&one, PAGES, &other, 0);
        move_pages(&one, 2 * PAGES, &one, 0);
        move_pages(&other, 0, &one, PAGES);
        let counts = domain.stats().counts;
        assert!(counts.moved_total - before.moved_total > FRAMES as u64, "{trap:?}: {counts:?}");
        // What is read ahead of the last write may still come.
        let filled = counts.bytes_filled - before.bytes_filled;
        assert!(filled < (64 * PAGE) as u64, "{trap:?}: {filled} bytes came from the store");
        check(&one, PAGES, 1);
        check(&one, 0, 5000);
        number(&mut one, PAGES, 7);
        number(&mut other, 0, 11);
        check(&one, PAGES, 7);
        check(&one, 0, 5000);
        check(&other, 0, 11);
        assert_eq!(domain.stats().counts.lost_total, 0);
    }
}

#[test]
fn what_is_kept_elsewhere_is_copied() {
    let (Some(domain), Some(second)) = (domain(), self::domain()) else { return };
    let stored = |domain: &Domain| domain.region(PAGES * PAGE).stored(MemoryStore::new(64 << 20).unwrap()).unwrap();
    let (mut one, other, far) = (stored(&domain), stored(&domain), stored(&second));
    number(&mut one, 0, 1);
    move_pages(&one, 0, &other, 0);
    check(&other, 0, 1);
    move_pages(&other, 0, &far, 0);
    check(&far, 0, 1);
    assert_eq!(domain.stats().counts.moved_total, 0);
}

#[test]
fn memory_without_a_store_moves() {
    let Some(domain) = domain() else { return };
    let mut region = domain.region(64 * PAGE).zero().unwrap();
    (0..16).for_each(|page| region.as_mut_slice::<u64>()[page * WORDS] = page as u64);
    // SAFETY: test: as above.
    unsafe { region.move_contents(0, 32 * PAGE, &region, 32 * PAGE) }.unwrap();
    assert!(domain.stats().counts.moved_total >= 16);
    assert!((0..16).all(|page| region.as_slice::<u64>()[(32 + page) * WORDS] == page as u64));
    assert!((16..32).all(|page| region.as_slice::<u64>()[(32 + page) * WORDS] == 0));
}

/// Those that the kernel holds are copied, the others go.
#[test]
fn pages_that_the_kernel_holds_are_copied() {
    for trap in TRAPS {
        let Some(domain) = domain() else { return };
        let mut region = domain.region(2 * PAGES * PAGE).trap(trap).stored_in(store()).unwrap();
        number(&mut region, 0, 1);
        let (first, count) = (PAGES - 40, 8);
        region.pin(first * PAGE, count * PAGE).unwrap();
        let Ok(ring) = IoUring::new(2) else { return skip::skip("io_uring", "there is none here") };
        let start = region.as_ptr().wrapping_add(first * PAGE);
        let buffers = [libc::iovec { iov_base: start.cast(), iov_len: count * PAGE }];
        // SAFETY: test: the buffer is the region's, which lives longer than the ring.
        if unsafe { ring.submitter().register_buffers(&buffers) }.is_err() {
            return skip::skip("io_uring", "no buffers can be registered");
        }
        let before = domain.stats().counts.moved_total;
        move_pages(&region, 0, &region, PAGES);
        let moved = domain.stats().counts.moved_total - before;
        assert!(moved > 32 && moved < FRAMES as u64 + 64, "{trap:?}: {moved} moved");
        drop(ring);
        check(&region, PAGES, 1);
    }
}

#[test]
fn a_page_that_moved_counts_as_written() {
    for trap in TRAPS {
        let Some(domain) = domain() else { return };
        let made = domain.region(128 * PAGE).trap(trap).tracked().stored_in(store());
        let mut region = made.unwrap();
        (0..128).for_each(|page| region.as_mut_slice::<u64>()[page * WORDS] = 1);
        // Some of what moves, and what is at the new place, is in the store when it is armed.
        region.evict(10 * PAGE, 2 * PAGE).unwrap();
        region.evict(100 * PAGE, 4 * PAGE).unwrap();
        let mut flood = domain.region(4 * FRAMES * PAGE).stored_in(store()).unwrap();
        (0..4 * FRAMES).for_each(|page| flood.as_mut_slice::<u64>()[page * WORDS] = 1);
        let start = region.as_ptr() as usize;
        let (tracker, mut found) = (DirtyTracker::new().unwrap(), Dirty::new());
        tracker.scan_and_rearm(start..start + 128 * PAGE, &mut found).unwrap();
        // SAFETY: test: as above.
        unsafe { region.move_contents(8 * PAGE, 4 * PAGE, &region, 100 * PAGE) }.unwrap();
        tracker.scan(start..start + 128 * PAGE, &mut found).unwrap();
        for page in (8..12).chain(100..104) {
            let address = start + page * PAGE;
            assert!(found.ranges().any(|range| range.contains(&address)), "{trap:?}: page {page}: {found:?}");
        }
        assert!(found.pages() < 64, "{trap:?}: {found:?}");
    }
}

/// A clone has what its source had, wherever that has moved since; and what it inherits itself moves.
#[test]
fn a_clone_keeps_what_its_source_moves() {
    let Some(domain) = domain() else { return };
    let mut source = domain.region(2 * PAGES * PAGE).stored_in(store()).unwrap();
    number(&mut source, 0, 1);
    number(&mut source, PAGES, 3000);
    let clone = source.cow_clone(MemoryStore::new(64 << 20).unwrap()).unwrap();
    move_pages(&source, 0, &source, PAGES);
    check(&clone, 0, 1);
    check(&clone, PAGES, 3000);
    check(&source, PAGES, 1);
    let second = source.cow_clone(MemoryStore::new(64 << 20).unwrap()).unwrap();
    move_pages(&second, PAGES, &second, 0);
    check(&second, 0, 1);
    check(&source, PAGES, 1);
}

#[test]
fn bad_places_are_refused_and_nothing_moves() {
    let Some(domain) = domain() else { return };
    let mut region = domain.region(2 * PAGES * PAGE).stored_in(store()).unwrap();
    number(&mut region, 0, 1);
    let cases = [
        (0, PAGE + 1, PAGES * PAGE),
        (8, PAGE, PAGES * PAGE),
        (0, PAGE, PAGES * PAGE + 8),
        (0, 2 * PAGE, PAGE),
        (PAGE, 2 * PAGE, 0),
        (0, PAGES * PAGE, PAGES * PAGE + PAGE),
        (0, usize::MAX / PAGE * PAGE, 0),
    ];
    for (offset, len, there) in cases {
        // SAFETY: test: as above.
        let error = unsafe { region.move_contents(offset, len, &region, there) }.unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid, "{offset} {len} {there}: {error}");
    }
    // SAFETY: test: as above.
    unsafe { region.move_contents(0, 0, &region, 0) }.unwrap();
    check(&region, 0, 1);
}
