//! A process that has as many mappings as it may: what is built goes on, and what cannot be made is an error.

use std::ptr;

use selfpage::protection::{Mechanism, Memory, ProtectionDomain, Rights, mechanism};
use selfpage::{Answer, Domain, FileAccess, Kind, MemoryFault, Protection, Trap};

use crate::filter::Call;
use crate::locked_file::on_ramfs;
use crate::own_file::numbered;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages};
use crate::skip::skip;

const FRAMES: usize = 64;
/// As many mappings as the kernel may be made to allow here: each takes a few hundred bytes of the kernel's.
const MOST_MAPPINGS: usize = 1 << 20;

/// How many mappings the process may have. `None`: they are too many to be made.
pub fn mappings() -> Option<usize> {
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse::<usize>().unwrap();
    if allowed > MOST_MAPPINGS {
        skip("mappings", &format!("{allowed} are allowed: sysctl -w vm.max_map_count={MOST_MAPPINGS}"));
    }
    (allowed <= MOST_MAPPINGS).then_some(allowed)
}

/// Has the process have as many mappings as it may, but for `free`. `false`: they are too many to be made.
pub fn use_up_mappings(free: usize) -> bool {
    let Some(allowed) = mappings() else { return false };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: test: fresh mappings, of which parts are protected.
    unsafe {
        let start = libc::mmap(ptr::null_mut(), (allowed + 16) * PAGE, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        let protect = |page: usize, access| libc::mprotect(start.byte_add(page * PAGE), PAGE, access) == 0;
        assert!((1..allowed + 16).step_by(2).any(|page| !protect(page, libc::PROT_READ)), "more mappings than allowed");
        // A new one needs no other to be split.
        let map = |access| libc::mmap(ptr::null_mut(), PAGE, access, flags, -1, 0) != libc::MAP_FAILED;
        assert!([libc::PROT_NONE, libc::PROT_READ].iter().cycle().take(16).any(|access| !map(*access)));
        // Each is one with its neighbours again.
        (0..free / 2).for_each(|index| assert!(protect(2 * index + 1, libc::PROT_NONE)));
    }
    true
}

fn unprotect(fault: &MemoryFault<'_>) -> Answer {
    fault.protect_page(Protection::ReadWrite).unwrap();
    Answer::Handled
}

/// A few are enough for another region, whoever answers its faults.
#[test]
fn regions_are_made_and_used_where_few_mappings_are_left() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        if !use_up_mappings(40) {
            return;
        }
        for trap in [Trap::Worker, Trap::Upcall] {
            let mut region = domain.region(4 * PAGE).trap(trap).zero().unwrap();
            number_pages(&mut region);
        }
        let mut handled = domain.region(4 * PAGE).trap(Trap::Upcall).handler(unprotect).zero().unwrap();
        handled.protect(0, 4 * PAGE, Protection::Read).unwrap();
        number_pages(&mut handled);
        check_pages(&handled, 0..4);
    })
    .well();
}

/// Where each comes by a mapping, it comes without one.
#[test]
fn pages_of_a_file_come_where_no_mappings_are_left() {
    for trap in [Trap::Worker, Trap::Upcall] {
        in_child(here!(), &format!("{trap:?}"), || {
            let Some(dir) = on_ramfs() else { return };
            let path = numbered(&dir, 4 * FRAMES);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = domain.region(0).trap(trap).file(&path, 0, FileAccess::Read).unwrap();
            if !use_up_mappings(0) {
                return;
            }
            for (index, page) in region.as_slice::<[u64; 512]>().iter().enumerate() {
                assert_eq!(page[511], index as u64 + 1);
            }
        })
        .well();
    }
}

#[test]
fn what_cannot_be_made_without_mappings_is_an_error() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let mut region = domain.region(4 * PAGE).trap(Trap::Upcall).zero().unwrap();
        if !use_up_mappings(0) {
            return;
        }
        let why = domain.region(4 * PAGE).trap(Trap::Upcall).handler(unprotect).zero().unwrap_err();
        let said = why.to_string();
        assert!(why.kind() == Kind::OutOfSpace, "{said}");
        assert!(["the stacks of handlers", "vm.max_map_count"].iter().all(|word| said.contains(word)), "{said}");
        let why = Domain::with_frames(FRAMES * PAGE).build().unwrap_err();
        assert_eq!(why.kind(), Kind::OutOfSpace, "{why}");
        number_pages(&mut region);
        check_pages(&region, 0..4);
        region.pin(0, 4 * PAGE).unwrap();
        region.unpin(0, 4 * PAGE).unwrap();
    })
    .well();
}

#[test]
fn a_first_domain_is_an_error_where_its_stacks_cannot_be_mapped() {
    in_child(here!(), "", || {
        if !use_up_mappings(0) {
            return;
        }
        let why = Domain::with_frames(FRAMES * PAGE).build().unwrap_err();
        let said = why.to_string();
        assert!(why.kind() == Kind::OutOfSpace, "{said}");
        assert!(["the stacks of traps", "vm.max_map_count"].iter().all(|word| said.contains(word)), "{said}");
    })
    .well();
}

#[test]
fn a_protection_domain_that_cannot_be_left_names_the_remedy() {
    let ended = in_child(here!(), "", || {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: test: a fresh mapping, which stays.
        let memory = unsafe {
            let start = libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) as usize;
            Memory::plain("vault", start..start + PAGE).unwrap()
        };
        let outside = ProtectionDomain::new("outside");
        outside.set(&memory, Rights::NONE).unwrap();
        let _entered = outside.enter().unwrap();
        // As where the mapping would have to be split.
        Call::any(libc::SYS_mprotect).fails_everywhere(libc::ENOMEM).unwrap();
    });
    match mechanism() {
        Mechanism::Keys => ended.well(),
        _ => ended.by(libc::SIGABRT, &["cannot be left", "memory vault", "vm.max_map_count"]),
    }
}
