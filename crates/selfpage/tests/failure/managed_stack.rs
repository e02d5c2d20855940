//! Calls of the library on a stack that lies in a region: what they hold must not be what brings a page of that stack back.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{Answer, DescriptorTable, Domain, FaultHandler, MemoryFault, Protection, Region};

use crate::child::forked;
use crate::locking::{LIMIT, bound_locking};
use crate::own_stack::{on_evicted_stack, on_stack_in};
use crate::scenario::{PAGE, here, in_child, number_pages};
use crate::tried;

const PAGES: usize = 256;
const TABLES: [(DescriptorTable, &str); 2] =
    [(DescriptorTable::Shared, "shared"), (DescriptorTable::Private, "private")];

fn store() -> MemoryStore {
    MemoryStore::new(4 << 20).unwrap()
}

fn domain_with(table: DescriptorTable) -> Domain {
    Domain::with_frames(PAGES * PAGE).descriptor_table(table).build().unwrap()
}

fn stack_of(domain: &Domain) -> Region {
    domain.region(PAGES * PAGE).stored(store()).unwrap()
}

/// Does `work` so far down on the stack, and by the depth at any place in a page.
#[inline(never)]
fn down(steps: usize, work: &mut dyn FnMut()) {
    let frame = black_box([0_u8; 200]);
    if steps == 0 {
        work()
    } else {
        down(steps - 1, work)
    }
    black_box(&frame);
}

/// Does `work` so often on a stack in a region, while another thread arms its pages again and again.
fn on_armed_stack(domain: &Domain, rounds: usize, mut work: impl FnMut()) {
    let (stack, ended) = (stack_of(domain), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(SeqCst) {
                drop(stack.cow_clone(store()).unwrap());
            }
        });
        on_stack_in(&stack, || (0..rounds).for_each(|round| down(round % 64, &mut work)));
        ended.store(true, SeqCst);
    });
}

#[test]
fn a_fork_on_a_stack_that_was_never_used_so_far_down() {
    for (table, name) in TABLES {
        in_child(here!(), name, || {
            let domain = domain_with(table);
            on_stack_in(&stack_of(&domain), || (0..20).for_each(|_| forked(|| {})));
            on_evicted_stack(&domain, 20, || forked(|| {}));
        })
        .well();
    }
}

/// The pages of another region, right below the stack's.
#[test]
fn a_fork_on_a_stack_brings_in_nothing_of_what_lies_below_it() {
    struct Numbers;
    impl FaultHandler for Numbers {
        fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
            let page = fault.offset_bytes() / PAGE;
            // SAFETY: test: nobody has a reference into it. One that is in core by now is as it should be.
            let _ = unsafe { fault.map(&[page as u8 + 1; PAGE]) };
            Answer::Handled
        }

        fn asks_first(&self) -> bool {
            true
        }
    }
    in_child(here!(), "", || {
        let domain = domain_with(DescriptorTable::Shared);
        let data = domain.region(4 * PAGE).far_from_all().handler(Numbers).zero().unwrap();
        let above = data.as_ptr().addr() + data.len_bytes();
        let stack = domain.region(14 * PAGE).at(above).zero().unwrap();
        on_stack_in(&stack, || {
            forked(|| ());
        });
        let pages = [0, 1, 2, 3].map(|page| tried::read(tried::word(&data, page)).unwrap() as u8);
        assert_eq!(pages, [1, 2, 3, 4]);
    })
    .well();
}

#[test]
fn a_fork_on_a_stack_that_is_armed() {
    in_child(here!(), "", || on_armed_stack(&domain_with(DescriptorTable::Shared), 100, || forked(|| {}))).well();
}

/// Its pages are armed, and the copies of the first writes find no place.
#[test]
fn a_fork_on_an_armed_stack_for_whose_copies_there_is_no_frame() {
    in_child(here!(), "", || (0..STEPS_A_PAGE).for_each(fork_on_owed_stack)).well();
}

/// Forks so far down on a stack of which a clone has nothing yet, and which is longer than there are frames for copies of it.
fn fork_on_owed_stack(steps: usize) {
    let domain = Domain::with_frames(96 * PAGE).build().unwrap();
    let (stack, pinned) = (domain.region(64 * PAGE).zero().unwrap(), domain.region(96 * PAGE).zero().unwrap());
    let mut clone = None;
    on_stack_in(&stack, || {
        // So much of it is in core.
        down(400, &mut || ());
        let resident = stack.residency().iter().filter(|page| page.load(SeqCst) != 0).count();
        down(steps, &mut || {
            std::thread::scope(|scope| {
                // On a stack of its own.
                let cloned = scope.spawn(|| {
                    let clone = stack.cow_clone(MemoryStore::new(PAGE as u64).unwrap()).unwrap();
                    pinned.pin(0, (96 - resident - 12) * PAGE).unwrap();
                    clone
                });
                clone = Some(cloned.join().unwrap());
            });
            forked(|| {});
        });
    });
}

/// How deep on a stack two calls must be for their frames to lie at any two places in a page.
const STEPS_A_PAGE: usize = 20;

/// The page that `fork` returns to is above the one that its handlers stand on, and is used for certain.
#[test]
fn a_fork_on_a_stack_that_cannot_be_kept_whole() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let pinned = domain.region(50 * PAGE).zero().unwrap();
        pinned.pin(0, 50 * PAGE).unwrap();
        for steps in 0..STEPS_A_PAGE {
            let stack = domain.region(64 * PAGE).stored(MemoryStore::new(64 * PAGE as u64).unwrap()).unwrap();
            on_stack_in(&stack, || down(steps, &mut || forked(|| {})));
        }
    })
    .well();
}

#[test]
fn a_cut_on_a_stack_that_was_armed_by_another_thread() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let domain = domain_with(DescriptorTable::Shared);
        let mut region = domain.region(32 * PAGE).stored(store()).unwrap();
        number_pages(&mut region);
        let mut snapshots = Snapshots::of(&[&region], dir.path().join("one.snap")).unwrap();
        on_armed_stack(&domain, 300, || assert!(snapshots.take().is_ok()));
    })
    .well();
}

#[test]
fn a_region_that_goes() {
    for (table, name) in TABLES {
        in_child(here!(), name, || {
            let domain = domain_with(table);
            on_evicted_stack(&domain, 1000, || drop(domain.region(PAGE).zero().unwrap()));
        })
        .well();
    }
}

#[test]
fn a_region_that_cannot_be_locked() {
    in_child(here!(), "", || {
        bound_locking();
        for round in 0..256 {
            let domain = domain_with(DescriptorTable::Shared);
            // The more there are the longer it takes to find them, and the more of the stack goes meanwhile.
            let _others = [(); 32].map(|()| domain.region(PAGE).zero().unwrap());
            let mut make = || drop(domain.region(LIMIT).zero().unwrap());
            on_evicted_stack(&domain, 1, || down(round % 64, &mut make));
        }
    })
    .well();
}

#[test]
fn a_call_on_one_domain_on_a_stack_of_anothers() {
    in_child(here!(), "", || {
        let [one, other] = [DescriptorTable::Shared; 2].map(domain_with);
        let mut region = one.region(32 * PAGE).stored(store()).unwrap();
        number_pages(&mut region);
        on_evicted_stack(&other, 5000, || region.flush(0, PAGE).unwrap());
    })
    .well();
}

#[test]
fn the_stack_itself_is_protected() {
    for (protection, name) in [(Protection::Read, "read"), (Protection::None, "none")] {
        in_child(here!(), name, || {
            let domain = domain_with(DescriptorTable::Shared);
            let allow = |fault: &MemoryFault<'_>| match fault.protect_page(Protection::ReadWrite) {
                Ok(()) => Answer::Handled,
                Err(_) => Answer::Refuse,
            };
            let stack = domain.region(PAGES * PAGE).handler(allow).stored(store()).unwrap();
            let mut protect = || stack.protect(0, stack.len_bytes(), protection).unwrap();
            on_stack_in(&stack, || (0..64).for_each(|steps| down(steps, &mut protect)));
        })
        .well();
    }
}

#[test]
fn a_region_that_lies_on_it_is_emptied() {
    in_child(here!(), "", || {
        let domain = domain_with(DescriptorTable::Shared);
        on_evicted_stack(&domain, 2000, || {
            let region = domain.region(PAGE).zero().unwrap();
            // SAFETY: test: nobody looks at the page.
            (0..10).for_each(|_| unsafe { region.while_empty(0, PAGE, || ()) }.unwrap());
        });
    })
    .well();
}
