//! Closures in a virtual machine: they page themselves, or are stopped with a reason.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]
#![cfg(target_arch = "x86_64")]

#[path = "../examples/paging_in_guest/domain.rs"]
mod domain;
mod possible;

use std::arch::asm;
use std::hint::black_box;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use domain::Domain;
use possible::run;
use selfpage_core::capability::Handle;
use selfpage_core::fault::{Failure, Fault, Outcome};
use selfpage_core::mmu::Refusal;
use selfpage_core::region::Access;
use selfpage_guest::{Call, Guest, Kind, Machine, Parts, Stopped, host_call};

/// 64 frames, and a region of 512 pages at an address where no process has anything.
const FRAMES_LOG2_BYTES: u8 = 18;
const PAGES: usize = 512;
const REGION: usize = 0x1234_5678_9000;

fn guest() -> Option<(Guest<'static>, Parts<'static>)> {
    possible::here(Guest::new(Box::leak(Box::new(Machine::new(16 << 20, 8 << 20).unwrap()))))
}

/// A word of page `page` of the region.
fn word(page: usize) -> *mut u64 {
    with_exposed_provenance_mut(REGION + page * 4096 + page % 512 * 8)
}

fn domain(parts: Parts<'static>) -> &'static Domain {
    Domain::new(parts, FRAMES_LOG2_BYTES, REGION, PAGES).unwrap()
}

const fn no_region(_fault: Fault) -> Outcome {
    Outcome::NotOurs
}

#[test]
fn a_closure_computes_what_it_would_outside() {
    let Some((guest, _)) = guest() else { return };
    let (first, numbers) = (0.1, [3u64; 100]);
    let roots = move || (1..1000).fold(first, |sum: f64, n| sum + f64::from(n).sqrt());
    let result = run(guest, no_region, move || {
        let mut copy = [0; 100];
        copy.copy_from_slice(black_box(&numbers));
        (roots(), black_box(copy).iter().sum::<u64>())
    });
    assert_eq!(result.unwrap(), (roots(), 300));
}

/// memcpy, memmove, memset and memcmp, which the compiler calls for slices, at every way that they have of going about it.
#[test]
fn slices_are_copied_moved_filled_and_compared() {
    const MOST: usize = 64 << 10;
    let Some((guest, _)) = guest() else { return };
    let work = || {
        let lengths = [0, 1, 7, 8, 15, 16, 31, 33, 64, 100, 255, 513, 4095, 4097, 20_000, MOST - 1];
        let mut sum = 0u64;
        for len in lengths.map(black_box) {
            let (mut from, mut to) = (black_box([0u8; MOST]), black_box([0xffu8; MOST]));
            from[..len].fill(black_box(len as u8 | 1));
            to[..len].copy_from_slice(&from[..len]);
            let is_same = black_box(&to[..len]) == black_box(&from[..len]);
            to.copy_within(..len, 1);
            let moved = to[1..=len].iter().filter(|byte| **byte == len as u8 | 1).count();
            let order = black_box(&to[..]).cmp(black_box(&from[..]));
            let seen = u64::from(is_same) + 2 * moved as u64 + u64::from(order as i8 as u8);
            sum = sum.rotate_left(5) ^ seen;
        }
        sum
    };
    assert_eq!(run(guest, no_region, work).unwrap(), work());
}

#[test]
fn a_closure_asks_the_process() {
    let Some((guest, _)) = guest() else { return };
    let mut asked = Vec::new();
    let answer = |call: Call| {
        asked.push(call);
        // SAFETY: it is on the closure's stack, which the process sees at the same address.
        let text = unsafe { with_exposed_provenance::<[u8; 5]>(call.arguments[0] as usize).read() };
        call.arguments[1] + u64::from(&text == b"hello")
    };
    // SAFETY: no test makes anything of what the guest has for itself.
    let result = unsafe {
        guest.run(no_region, answer, || {
            let text = black_box(*b"hello");
            (0..3u64).map(|turn| host_call(7 + turn, [text.as_ptr().addr() as u64, turn * 10, 9])).sum::<u64>()
        })
    };
    assert_eq!(result.unwrap(), 33);
    let seen: Vec<_> = asked.iter().map(|call| (call.number, call.arguments[1], call.arguments[2])).collect();
    assert_eq!(seen, [(7, 0, 9), (8, 10, 9), (9, 20, 9)]);
}

#[test]
fn a_closure_pages_itself_and_goes_on_in_other_frames() {
    let Some((guest, parts)) = guest() else { return };
    let domain = domain(parts);
    let guest_counts = guest.counts();
    let mut faults = 0;
    let answer = move |fault| {
        faults += 1;
        if faults % 400 == 0 {
            domain.clean();
            domain.revoke();
            domain.give_others(FRAMES_LOG2_BYTES);
        }
        domain.resolve(fault)
    };
    let wrong = run(guest, answer, || {
        let mut wrong = 0;
        for round in 0..4u64 {
            for step in 0..PAGES {
                // Each page once, in an order of no pattern.
                let page = step * 171 % PAGES;
                // SAFETY: a word of the region.
                let found = unsafe { word(page).read_volatile() };
                wrong += u64::from(found != round * (page as u64 + 1));
                // SAFETY: as above.
                unsafe { word(page).write_volatile((round + 1) * (page as u64 + 1)) };
            }
        }
        wrong
    });
    let counts = domain.state.counters.read();
    let (faults, exits) = (guest_counts.faults(), guest_counts.exits());
    println!("{faults} faults, {exits} exits, {counts:?}");
    assert_eq!((wrong.unwrap(), counts.lost_total), (0, 0));
    assert!(faults > 1000 && counts.evictions_total > PAGES as u64);
    // The end, and a few signals perhaps: the process has no part in a fault.
    assert!(exits < 100, "{exits} exits");
}

#[test]
fn without_frames_a_closure_gets_its_error() {
    let Some((guest, parts)) = guest() else { return };
    let domain = domain(parts);
    let mut faults = 0;
    let answer = move |fault| {
        faults += 1;
        if faults == 100 {
            domain.clean();
            domain.revoke();
        }
        domain.resolve(fault)
    };
    // SAFETY: words of the region.
    let stopped = run(guest, answer, || (0..PAGES).for_each(|page| unsafe { word(page).write_volatile(1) }));
    assert!(matches!(stopped, Err(Stopped::Failed(Failure::Machine(Refusal::Denied)))), "{stopped:?}");
}

#[test]
fn without_its_root_a_closure_goes_no_further() {
    let Some((guest, parts)) = guest() else { return };
    let Parts { mut kernel, space, .. } = parts;
    // SAFETY: the guest alone would see what is read there.
    let stopped = run(
        guest,
        move |_: Fault| {
            for place in (2..40).map(Handle::at_root) {
                kernel.revoke(&space, place, u64::MAX).ok();
            }
            Outcome::Retry
        },
        || unsafe { word(0).read_volatile() },
    );
    assert!(matches!(stopped, Err(Stopped::Revoked)), "{stopped:?}");
}

#[test]
fn memory_that_was_not_registered_stops_a_closure() {
    let Some((guest, _)) = guest() else { return };
    let heap: &'static u64 = Box::leak(Box::new(7));
    let stopped = run(guest, no_region, move || black_box(heap).wrapping_add(1)).unwrap_err();
    let Stopped::Unregistered { at, access: Access::Read, .. } = stopped else { panic!("{stopped:?}") };
    assert_eq!(at.0, std::ptr::from_ref(heap).addr());
}

#[test]
fn the_program_is_only_read() {
    static COUNT: AtomicU64 = AtomicU64::new(7);
    let Some((guest, _)) = guest() else { return };
    assert_eq!(run(guest, no_region, || COUNT.load(Ordering::Relaxed)).unwrap(), 7);
    let Some((guest, _)) = self::guest() else { return };
    let stopped = run(guest, no_region, || COUNT.fetch_add(1, Ordering::Relaxed)).unwrap_err();
    assert!(matches!(stopped, Stopped::Unregistered { access: Access::Write, .. }), "{stopped:?}");
    assert_eq!(COUNT.load(Ordering::Relaxed), 7);
}

#[test]
fn a_system_call_stops_a_closure() {
    let Some((guest, _)) = guest() else { return };
    let stopped = run(guest, no_region, || {
        let mut number = 39u64;
        // SAFETY: getpid changes nothing but these registers.
        unsafe { asm!("syscall", inout("rax") number, out("rcx") _, out("r11") _) };
        number
    });
    assert!(matches!(stopped, Err(Stopped::SystemCall { .. })), "{stopped:?}");
}

#[test]
fn faults_without_end_stop_a_closure() {
    let Some((guest, _)) = guest() else { return };
    // SAFETY: the guest alone would see what is read there.
    let stopped = run(guest, |_: Fault| Outcome::Resolved, || unsafe { word(0).read_volatile() });
    assert!(matches!(stopped, Err(Stopped::NoProgress { at }) if at.0 == word(0).addr()), "{stopped:?}");
}

#[test]
fn what_a_cpu_refuses_stops_a_closure() {
    let Some((guest, _)) = guest() else { return };
    // SAFETY: an exception, in the guest.
    let stopped = run(guest, no_region, || unsafe { asm!("hlt") });
    assert!(matches!(stopped, Err(Stopped::Exception { vector: 13, .. })), "{stopped:?}");
    let Some((guest, _)) = self::guest() else { return };
    let stopped = run(guest, no_region, || {
        if black_box(true) {
            panic!("in a guest")
        }
    });
    println!("a panic: {stopped:?}");
    assert!(stopped.is_err());
}

#[test]
fn the_process_takes_frames_back_while_a_closure_asks() {
    let Some((guest, parts)) = guest() else { return };
    let domain = domain(parts);
    let answer = |_: Call| {
        domain.clean();
        domain.revoke();
        domain.give_others(FRAMES_LOG2_BYTES);
        0
    };
    let closure = || {
        (0..3).for_each(|round: u64| {
            for page in 0..PAGES {
                // SAFETY: a word of the region; the closure asks in a guest.
                unsafe {
                    assert!(word(page).read_volatile() == round);
                    word(page).write_volatile(round + 1);
                    if page % 100 == 50 {
                        host_call(0, [0; 3]);
                        // It was mapped, where something else is now.
                        assert!(word(page).read_volatile() == round + 1);
                    }
                }
            }
        });
    };
    // SAFETY: no test makes anything of what the guest has for itself.
    let result = unsafe { guest.run(move |fault| domain.resolve(fault), answer, closure) };
    result.unwrap();
    assert_eq!(domain.state.counters.read().lost_total, 0);
}

#[test]
fn too_little_ram_is_refused() {
    for ram_bytes in [0, 4 << 20, 9 << 20] {
        assert_eq!(Machine::new(ram_bytes, 8 << 20).err().map(|error| error.kind()), Some(Kind::Invalid));
    }
}
