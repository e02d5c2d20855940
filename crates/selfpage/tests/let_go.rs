//! A region, and a domain, that are dropped while a handler is at work in an upcall: nothing is freed in the trap, since the thread may
//! have been stopped in the middle of its allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use selfpage::{Answer, Domain, MemoryFault, Protection, Trap};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;

/// The thread that is in a trap, in which nothing of the test's own allocates or frees; 0: none.
static IN_TRAP: AtomicU32 = AtomicU32::new(0);
/// How often it allocated or freed there.
static SEEN: AtomicU32 = AtomicU32::new(0);
/// It came back from the trap, to an access that fails.
static BACK: AtomicBool = AtomicBool::new(false);

struct Watch;

fn look() {
    let watched = IN_TRAP.load(SeqCst);
    // SAFETY: test: takes nothing.
    if watched != 0 && watched == unsafe { libc::gettid() } as u32 {
        SEEN.fetch_add(1, SeqCst);
    }
}

// SAFETY: test: the system's own, looked at.
unsafe impl GlobalAlloc for Watch {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        look();
        // SAFETY: test: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        look();
        // SAFETY: test: passed on.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static WATCH: Watch = Watch;

static BEGUN: AtomicBool = AtomicBool::new(false);
static GONE: AtomicBool = AtomicBool::new(false);

fn until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(20), "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The access that the trap was for fails: the thread stops here for good.
extern "C" fn back(_: libc::c_int) {
    IN_TRAP.store(0, SeqCst);
    BACK.store(true, SeqCst);
    loop {
        // SAFETY: test: waits for ever.
        unsafe { libc::pause() };
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Dropped {
    Region,
    Both,
}

fn drop_while_asked(dropped: Dropped) {
    [&BEGUN, &GONE, &BACK].iter().for_each(|flag| flag.store(false, SeqCst));
    let domain = match Domain::with_frames(256 * PAGE).build() {
        Err(why) => return skip::skip("uffd", &why.to_string()),
        Ok(domain) => domain,
    };
    let handler = |_: &MemoryFault<'_>| {
        BEGUN.store(true, SeqCst);
        while !GONE.load(SeqCst) {
            std::hint::spin_loop();
        }
        // SAFETY: test: takes nothing.
        IN_TRAP.store(unsafe { libc::gettid() } as u32, SeqCst);
        Answer::Handled
    };
    let region = domain.region(PAGE).trap(Trap::Upcall).handler(handler).zero().unwrap();
    region.protect(0, PAGE, Protection::Read).unwrap();
    let at = region.as_ptr() as usize;
    // SAFETY: test: a word of the region, as long as there is one.
    std::thread::spawn(move || unsafe { (at as *mut u64).write_volatile(1) });
    until("the handler is asked", || BEGUN.load(SeqCst));
    drop(region);
    // The domain goes with it, or later.
    let kept = (dropped == Dropped::Region).then_some(domain);
    GONE.store(true, SeqCst);
    until("the thread is back", || BACK.load(SeqCst));
    drop(kept);
    assert_eq!(SEEN.load(SeqCst), 0, "the trap allocated or freed");
}

#[test]
fn nothing_is_freed_in_a_trap_and_all_is_freed_in_the_end() {
    for signal in [libc::SIGBUS, libc::SIGSEGV] {
        // SAFETY: test: installs a handler, before the first upcall region.
        unsafe { libc::signal(signal, back as *const () as usize) };
    }
    goes_when_it_is_dropped();
    drop_while_asked(Dropped::Region);
    drop_while_asked(Dropped::Both);
}

/// A region, and its domain, go when they are dropped, however often its handler was asked.
fn goes_when_it_is_dropped() {
    let domain = match Domain::with_frames(256 * PAGE).build() {
        Err(why) => return skip::skip("uffd", &why.to_string()),
        Ok(domain) => domain,
    };
    let there = |at: usize| {
        let mut byte = 0u8;
        // SAFETY: test: says whether a page is mapped.
        unsafe { libc::mincore(at as *mut libc::c_void, PAGE, &raw mut byte) == 0 }
    };
    let handler = |fault: &MemoryFault<'_>| match fault.protect_page(Protection::ReadWrite) {
        Ok(()) => Answer::Handled,
        Err(_) => Answer::Refuse,
    };
    let mut region = domain.region(4 * PAGE).trap(Trap::Upcall).handler(handler).zero().unwrap();
    for _ in 0..1000 {
        region.protect(0, PAGE, Protection::Read).unwrap();
        region.as_mut_slice::<u64>()[0] += 1;
    }
    let at = region.as_ptr() as usize;
    assert!(there(at));
    drop(region);
    assert!(!there(at), "its addresses are free again");
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    drop(domain);
    assert!(threads() < before, "and the domain is gone");
}
