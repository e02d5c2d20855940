//! The kernel swaps out pages that are protected. It keeps the protection there, and takes it along when such a page moves.

use selfpage::store::MemoryStore;
use selfpage::{Domain, Locking, Protection, Region, Trap};

use crate::scenario::{Ended, PAGE, check_pages, here, in_child, inside, number_pages, until};
use crate::swap::{Swap, swapped};

const FRAMES: usize = 32;
/// Pages in core that are protected.
const PROTECTED: std::ops::Range<usize> = 0..8;

/// Four times as many pages as frames, numbered; the first are in core, protected, and swapped out.
fn swapped_out(trap: Trap) -> (Domain, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).locking(Locking::Never).build().unwrap();
    let store = MemoryStore::new(1 << 30).unwrap();
    let mut region = domain.region(4 * FRAMES * PAGE).trap(trap).stored(store).unwrap();
    number_pages(&mut region);
    check_pages(&region, PROTECTED);
    let (start, len) = (PROTECTED.start * PAGE, PROTECTED.len() * PAGE);
    region.pin(start, len).unwrap();
    region.protect(start, len, Protection::Read).unwrap();
    let advised = region.as_ptr().wrapping_add(start).cast();
    until("all is swapped out", || {
        // SAFETY: test: the contents stay as they are.
        assert_eq!(unsafe { libc::madvise(advised, len, libc::MADV_PAGEOUT) }, 0);
        swapped(region.as_ptr().addr() + start, PROTECTED.len()) == PROTECTED.len()
    });
    region.unpin(start, len).unwrap();
    (domain, region)
}

fn each_trap(test: &str, scenario: fn(Trap)) {
    let swap = if inside() { None } else { Swap::on() };
    if inside() || swap.is_some() {
        for (trap, case) in [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")] {
            Ended::well(in_child(test, case, || scenario(trap)));
        }
    }
}

#[test]
fn a_protected_page_that_was_swapped_out_protects_no_frame() {
    each_trap(here!(), |trap| {
        let (_domain, mut region) = swapped_out(trap);
        region.evict(0, PROTECTED.len() * PAGE).unwrap();
        // Through each frame, by the library's own writes.
        for _ in 0..3 {
            check_pages(&region, 0..4 * FRAMES);
        }
        region.protect(0, PROTECTED.len() * PAGE, Protection::ReadWrite).unwrap();
        number_pages(&mut region);
        check_pages(&region, 0..4 * FRAMES);
    });
}

#[test]
fn a_protection_that_ends_while_the_page_is_elsewhere_has_ended() {
    each_trap(here!(), |trap| {
        let (_domain, mut region) = swapped_out(trap);
        let len = PROTECTED.len() * PAGE;
        // Without any access the pages lie in the pool, as they are.
        region.protect(0, len, Protection::None).unwrap();
        region.protect(0, len, Protection::ReadWrite).unwrap();
        number_pages(&mut region);
        check_pages(&region, 0..4 * FRAMES);
    });
}
