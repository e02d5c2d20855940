//! What answers a closure's page faults in the guest: what it may do, what the closure may not, and what becomes of either when it
//! does not end.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]
#![cfg(target_arch = "x86_64")]

mod possible;

use std::arch::asm;
use std::hint::black_box;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use possible::run;
use selfpage_core::addr::{PAGE_BYTES, PageNo, PageRange, VirtAddr};
use selfpage_core::capability::{Handle, Object, Rights, Type};
use selfpage_core::fault::{Fault, Outcome};
use selfpage_core::region::Access;
use selfpage_core::tables::{PageSize, Range};
use selfpage_guest::{
    Call, Guest, Handler, Machine, Parts, Side, Stopped, answer, clear_dirty_bits, handler_call, host_call, protect,
};

/// Where the process has nothing.
const REGION: usize = 0x1234_5678_9000;
const VIEW: usize = 0x2345_6789_a000;
const PAGES: usize = 64;
const ALL: PageRange = PageRange { first: PageNo((REGION / PAGE_BYTES) as u64), count: PAGES as u64 };
/// What begins has long begun then, also on a machine with much to do.
const LIMIT: Duration = Duration::from_secs(2);

fn guest() -> Option<(Guest<'static>, Parts<'static>)> {
    possible::here(Guest::new(Box::leak(Box::new(Machine::new(16 << 20, 1 << 20).unwrap()))))
}

fn word(page: usize) -> *mut u64 {
    with_exposed_provenance_mut(REGION + page * PAGE_BYTES)
}

const fn page(page: usize) -> Range {
    Range { at: VirtAddr(REGION + page * PAGE_BYTES), len_bytes: PAGE_BYTES as u64, pages: PageSize::Small4KiB }
}

/// Gives each page a frame of its own when it is touched first, and makes it writable when it is written.
struct Pages {
    parts: Parts<'static>,
    frames: Handle,
}

impl Pages {
    fn new(mut parts: Parts<'static>, rights: Rights) -> Pages {
        let object = Object { kind: Type::Frame, size_bits: 18 };
        let (all, frames) = (parts.first_place, parts.first_place + 1);
        parts.kernel.retype(&parts.space, parts.ram, object, 1, parts.root, all).unwrap();
        parts.kernel.copy(&parts.space, Handle::at_root(all), parts.root, frames, rights).unwrap();
        Pages { parts, frames: Handle::at_root(frames) }
    }
}

impl Handler for Pages {
    fn fault(&mut self, fault: Fault) -> Outcome {
        let index = fault.addr.0.wrapping_sub(REGION) / PAGE_BYTES;
        if index >= PAGES {
            return Outcome::NotOurs;
        }
        let Parts { kernel, tables, .. } = &mut self.parts;
        let rights = match fault.access {
            Access::Read => Rights::READ,
            Access::Write => Rights::READ | Rights::WRITE,
        };
        let mapped = tables.map(kernel, page(index), self.frames, (index * PAGE_BYTES) as u64, rights);
        match mapped.or_else(|_| tables.protect(kernel, page(index), rights)) {
            Ok(()) => Outcome::Resolved,
            Err(_) => Outcome::Violation,
        }
    }

    fn answer(&mut self, call: Call) -> u64 {
        let Parts { kernel, space, tables, .. } = &mut self.parts;
        answer(kernel, space, tables, call).unwrap_or_else(|| call.arguments.iter().sum::<u64>() + call.number)
    }
}

#[test]
fn a_closure_that_does_not_end_is_stopped() {
    let Some((mut guest, _)) = guest() else { return };
    guest.set_limit(LIMIT);
    let stopped = run(
        guest,
        |_: Fault| Outcome::NotOurs,
        || {
            while black_box(true) {
                std::hint::spin_loop();
            }
        },
    );
    assert!(matches!(stopped, Err(Stopped::TimedOut { side: Side::Closure, .. })), "{stopped:?}");
}

#[test]
fn a_handler_that_does_not_end_is_stopped() {
    let Some((mut guest, _)) = guest() else { return };
    guest.set_limit(LIMIT);
    let handler = |_: Fault| {
        while black_box(true) {
            std::hint::spin_loop();
        }
        Outcome::Resolved
    };
    // SAFETY: the guest alone would see what is read there.
    let stopped = run(guest, handler, || unsafe { word(0).read_volatile() });
    assert!(matches!(stopped, Err(Stopped::TimedOut { side: Side::Handler, .. })), "{stopped:?}");
}

#[test]
fn faults_and_questions_without_end_are_stopped() {
    let Some((guest, parts)) = guest() else { return };
    let mut pages = Pages::new(parts, Rights::READ | Rights::WRITE);
    let handler = move |fault| match pages.fault(fault) {
        Outcome::Resolved => {
            pages
                .parts
                .tables
                .unmap(&mut pages.parts.kernel, page(fault.addr.0.wrapping_sub(REGION) / PAGE_BYTES))
                .unwrap();
            Outcome::Resolved
        }
        outcome => outcome,
    };
    // SAFETY: words of the region.
    let stopped = run(guest, handler, || unsafe { word(0).read_volatile() });
    assert!(matches!(stopped, Err(Stopped::NoProgress { .. })), "{stopped:?}");

    let Some((mut guest, _)) = self::guest() else { return };
    guest.set_limit(LIMIT);
    // SAFETY: the closure asks in a guest; no test makes anything of what the guest has for itself.
    let stopped = unsafe {
        guest.run(
            |_: Fault| Outcome::NotOurs,
            |_| 1,
            || {
                while host_call(0, [0; 3]) == 1 {}
            },
        )
    };
    assert!(matches!(stopped, Err(Stopped::TimedOut { side: Side::Closure, .. })), "{stopped:?}");
}

#[test]
fn a_limit_that_is_not_reached_leaves_no_trace() {
    let Some((mut guest, _)) = guest() else { return };
    guest.set_limit(Duration::MAX);
    assert_eq!(run(guest, |_: Fault| Outcome::NotOurs, || black_box(7)).unwrap(), 7);
    // A timer that went on would end the process here: nobody handles its signal.
    let Some((mut guest, _)) = self::guest() else { return };
    guest.set_limit(Duration::from_millis(1));
    let _ = run(guest, |_: Fault| Outcome::NotOurs, || black_box(7));
    std::thread::sleep(Duration::from_millis(50));
}

#[test]
fn a_fault_of_the_handler_stops_the_closure() {
    let heap: &'static u64 = Box::leak(Box::new(7));
    let Some((guest, _)) = guest() else { return };
    let handler = move |_: Fault| if *black_box(heap) == 7 { Outcome::Retry } else { Outcome::NotOurs };
    // SAFETY: the guest alone would see what is read there.
    let stopped = run(guest, handler, || unsafe { word(0).read_volatile() }).unwrap_err();
    let Stopped::Handler { vector: 14, at: Some(at), .. } = stopped else { panic!("{stopped:?}") };
    assert_eq!(at.0, std::ptr::from_ref(heap).addr());

    let Some((guest, _)) = self::guest() else { return };
    // SAFETY: an exception, in the guest.
    let handler = |_: Fault| unsafe {
        asm!("hlt");
        Outcome::Retry
    };
    // SAFETY: as above.
    let stopped = run(guest, handler, || unsafe { word(0).read_volatile() });
    assert!(matches!(stopped, Err(Stopped::Handler { vector: 13, at: None, .. })), "{stopped:?}");

    #[allow(unconditional_recursion)]
    fn deeper(depth: u64) -> u64 {
        let here = black_box([depth; 64]);
        deeper(depth + 1) + here[depth as usize % 64]
    }
    let Some((guest, parts)) = self::guest() else { return };
    let kept = std::ptr::from_mut(parts.private.keep(0u8).unwrap()).addr();
    let handler = |_: Fault| if deeper(0) == 0 { Outcome::Retry } else { Outcome::NotOurs };
    // SAFETY: as above.
    let stopped = run(guest, handler, || unsafe { word(0).read_volatile() }).unwrap_err();
    let Stopped::Handler { vector: 14, at: Some(at), .. } = stopped else { panic!("{stopped:?}") };
    // Below what is kept lie a page for registers, the stack, and then nothing: not what ring 0 needs.
    assert!((65 * PAGE_BYTES..67 * PAGE_BYTES).contains(&(kept - at.0)), "{:#x} below", kept - at.0);
}

#[test]
fn the_closure_cannot_write_what_its_handler_works_on() {
    let Some((guest, parts)) = guest() else { return };
    let kept: &'static AtomicU64 = parts.private.keep(AtomicU64::new(7)).unwrap();
    let stopped = run(guest, |_: Fault| Outcome::NotOurs, || kept.fetch_add(1, Ordering::Relaxed)).unwrap_err();
    assert!(matches!(stopped, Stopped::Unregistered { .. }), "{stopped:?}");
    assert_eq!(kept.load(Ordering::Relaxed), 7);

    let Some((guest, parts)) = self::guest() else { return };
    let descriptors = guest.descriptors().at;
    let stopped = run(guest, Pages::new(parts, Rights::ALL), move || {
        let first: *mut u64 = with_exposed_provenance_mut(descriptors.0);
        // SAFETY: the closure may read it, and asks in a guest.
        unsafe {
            let (null, code) = (first.read_volatile(), first.add(1).read_volatile());
            let own = PageRange { first: descriptors.page(), count: 1 };
            if (null, code >> 40 & 1) != (0, 1) || protect(own, Rights::READ | Rights::WRITE) != 0 {
                return;
            }
            first.write_volatile(1);
        }
    });
    let Err(Stopped::Unregistered { at, access: Access::Write, .. }) = stopped else { panic!("{stopped:?}") };
    assert_eq!(at, descriptors);

    let Some((guest, mut parts)) = self::guest() else { return };
    parts.show_tables(ALL, VirtAddr(VIEW)).unwrap();
    let stopped = run(guest, Pages::new(parts, Rights::ALL), move || {
        let view = PageRange { first: VirtAddr(VIEW).page(), count: 1 };
        let entry: *mut u64 = with_exposed_provenance_mut(VIEW);
        // SAFETY: a table that is shown; the closure asks in a guest.
        unsafe {
            if protect(view, Rights::READ | Rights::WRITE) == 0 {
                entry.write_volatile(7);
            }
        }
    });
    assert!(matches!(stopped, Err(Stopped::Unregistered { access: Access::Write, .. })), "{stopped:?}");
}

#[test]
fn registers_are_the_same_after_a_fault() {
    let Some((guest, parts)) = guest() else { return };
    let mut pages = Pages::new(parts, Rights::ALL);
    let handler = move |fault| {
        // SAFETY: it changes what a function may change.
        unsafe { asm!("pcmpeqd xmm7, xmm7", "std", "cld", "mov r11, -1", out("xmm7") _, out("r11") _) };
        pages.fault(fault)
    };
    let closure = || {
        let (mut wide, mut rax, mut r11, mut carry): (u64, u64, u64, u64) = (0x1234, 5, 6, 0);
        // SAFETY: a word of the region.
        unsafe {
            asm!(
                "movq xmm7, {wide}",
                "stc",
                "mov [{at}], rax",
                "adc {carry}, 0",
                "movq {wide}, xmm7",
                at = in(reg) word(3),
                wide = inout(reg) wide,
                carry = inout(reg) carry,
                inout("rax") rax,
                inout("r11") r11,
                out("xmm7") _,
            );
            (wide, rax, r11, carry, word(3).read_volatile())
        }
    };
    assert_eq!(run(guest, handler, closure).unwrap(), (0x1234, 5, 6, 1, 5));
}

#[test]
fn a_closure_sees_accessed_and_dirty_bits_and_protects_its_pages() {
    let Some((guest, mut parts)) = guest() else { return };
    let view = parts.show_tables(ALL, VirtAddr(VIEW)).unwrap();
    let counts = guest.counts();
    let bits = move |page: usize| {
        // SAFETY: a table that is shown.
        let entry = unsafe { view.entry(ALL.first.plus(page as u64)) }.unwrap();
        (entry.is_present(), entry.is_accessed(), entry.is_dirty())
    };
    let result = run(guest, Pages::new(parts, Rights::READ | Rights::WRITE), move || {
        // SAFETY: words of the region; the closure asks in a guest.
        unsafe {
            let mut seen = [(false, false, false); 6];
            seen[0] = bits(0);
            word(0).read_volatile();
            seen[1] = bits(0);
            word(0).write_volatile(1);
            seen[2] = bits(0);
            word(1).write_volatile(1);
            let cleared = clear_dirty_bits(ALL);
            seen[3] = bits(0);
            word(0).write_volatile(2);
            (seen[4], seen[5]) = (bits(0), bits(1));
            let both = PageRange { count: 2, ..ALL };
            let changed = [
                protect(both, Rights::READ),
                protect(both, Rights::READ | Rights::EXECUTE),
                // The third page was never touched.
                protect(PageRange { count: 3, ..ALL }, Rights::READ),
                protect(PageRange { first: PageNo(u64::MAX), count: u64::MAX }, Rights::READ),
            ];
            // A fault, that the handler answers.
            word(0).write_volatile(3);
            (
                seen,
                cleared,
                changed,
                word(0).read_volatile(),
                view.entry(ALL.end()).is_none(),
                handler_call(1, [2, 3, 4]),
            )
        }
    });
    let (seen, cleared, changed, value, none, sum) = result.unwrap();
    let (absent, read, written) = ((false, false, false), (true, true, false), (true, true, true));
    assert_eq!(seen, [absent, read, written, read, written, read]);
    assert_eq!((cleared, changed, value, none, sum), (2, [2, 0, 0, 0], 3, true, 10));
    // Page 0 read, then written; page 1; page 0 after it was protected. Five calls for pages, and one more.
    assert_eq!((counts.faults(), counts.calls()), (4, 6));
    // The end, and a signal perhaps.
    assert!(counts.exits() < counts.faults(), "{} exits", counts.exits());
}

#[test]
fn a_handler_asks_the_process_for_contents() {
    let Some((guest, parts)) = guest() else { return };
    let buffer = parts.private.keep([0u64; 512]).unwrap();
    let (at, frames_at) = (buffer.as_mut_ptr().expose_provenance(), parts.first_place);
    let mut pages = Pages::new(parts, Rights::ALL);
    let handler = move |fault: Fault| {
        let index = (fault.addr.0.wrapping_sub(REGION) / PAGE_BYTES) as u64;
        // SAFETY: the handler asks in a guest.
        if unsafe { host_call(index, [at as u64, 0, 0]) } != 0 {
            return Outcome::NotOurs;
        }
        let parts = &pages.parts;
        let base = parts.kernel.identify(&parts.space, Handle::at_root(frames_at)).unwrap().base;
        for offset in 0..512 {
            // SAFETY: the buffer, which the process has filled.
            let word = unsafe { with_exposed_provenance::<u64>(at).add(offset).read() };
            parts.kernel.memory().store(base.plus(index * 4096 + offset as u64 * 8), word);
        }
        pages.fault(fault)
    };
    let answer = |call: Call| {
        let buffer: *mut u64 = with_exposed_provenance_mut(call.arguments[0] as usize);
        // SAFETY: the handler waits for us to fill it.
        (0..512).for_each(|word| unsafe { buffer.add(word).write(call.number * 1000 + word as u64) });
        0
    };
    // SAFETY: words of the region; no test makes anything of what the guest has for itself.
    let found = unsafe { guest.run(handler, answer, || [0, 5, 9].map(|page| word(page).add(7).read_volatile())) };
    assert_eq!(found.unwrap(), [7, 5007, 9007]);
}
