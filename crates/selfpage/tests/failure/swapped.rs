//! Where there is swap and memory is short: locked frames stay. Of others the kernel swaps out those that are protected, too. It keeps the
//! protection there, and takes it along when such a page moves.

use std::fs;

use selfpage::store::{FileStore, MemoryStore};
use selfpage::{Domain, Locking, Protection, Region, Trap};

use crate::limited_group::{Group, REASON};
use crate::locking::may_lock;
use crate::scenario::{Ended, PAGE, check_pages, here, in_child, inside, number_pages, pages, until};
use crate::skip::skip;
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

/// Bytes of pools and regions that lie in swap now, of all that a userfaultfd serves.
fn swapped_frames() -> usize {
    let (mut kib, mut sum) = (0, 0);
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        match line.split_once(':') {
            Some(("Swap", len)) => kib = len.trim().trim_end_matches(" kB").parse().unwrap(),
            Some(("VmFlags", flags)) if flags.split(' ').any(|flag| ["um", "uw"].contains(&flag)) => sum += kib << 10,
            _ => {}
        }
    }
    sum
}

/// Has the kernel take back all that it can of the group's memory.
fn press(group: &Group) {
    let pressed = fs::write(group.path.join("memory.force_empty"), "0");
    // In the unified tree one asks for an amount, and hears that there is less.
    let _ = pressed.or_else(|_| fs::write(group.path.join("memory.reclaim"), "1G"));
}

/// Has `look` look at 1024 frames under pressure, while pages are in them and while they are free. Nothing is lost.
fn under_pressure(trap: Trap, locking: Locking, look: impl Fn(&Group)) {
    let Some(group) = Group::limited(1 << 30) else { return skip("cgroup", REASON) };
    group.join();
    let domain = Domain::with_frames(1024 * PAGE).locking(locking).build().unwrap();
    let store = FileStore::unnamed_in("/var/tmp", 1 << 24).unwrap();
    let mut region = domain.region(2048 * PAGE).trap(trap).stored(store).unwrap();
    number_pages(&mut region);
    look(&group);
    check_pages(&region, 0..pages(&region));
    region.flush(0, region.len_bytes()).unwrap();
    region.evict(0, region.len_bytes()).unwrap();
    look(&group);
    check_pages(&region, 0..pages(&region));
}

#[test]
fn frames_that_are_locked_are_never_swapped_out() {
    each_trap(here!(), |trap| {
        if !may_lock() {
            return;
        }
        under_pressure(trap, Locking::WherePermitted, |group| {
            let others = std::hint::black_box(vec![[1u8; PAGE]; 256]);
            let mut pressed = 0;
            // Others go first, and frames in use at the third or fourth time, were they not locked.
            until("most of the program's own is swapped out", || {
                press(group);
                pressed += 1;
                assert_eq!(swapped_frames(), 0);
                pressed > 20 && swapped(others.as_ptr().addr(), 256) > 200
            });
        });
    });
}

#[test]
fn frames_that_are_not_locked_are_swapped_out_and_come_back() {
    each_trap(here!(), |trap| {
        under_pressure(trap, Locking::Never, |group| {
            until("many frames are swapped out", || {
                press(group);
                swapped_frames() > 100 * PAGE
            });
        });
    });
}
