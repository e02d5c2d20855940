//! Protection domains, and a handler of `SIGSEGV` that the program had before. Each test in a process of its own: whose handler comes first
//! is settled once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use selfpage::protection::{Mechanism, Memory, ProtectionDomain, Rights, mechanism};
use selfpage::{Domain, FileAccess, Kind, Trap};

mod child;
#[path = "../../../tests/skip.rs"]
mod skip;
#[path = "failure/tried.rs"]
mod tried;

const PAGE: usize = 4096;

fn plain(name: &str) -> Memory {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping, never unmapped.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        Memory::plain(name, start as usize..start as usize + PAGE).unwrap()
    }
}

static TO_SEE: AtomicUsize = AtomicUsize::new(0);

extern "C" fn looks(_: i32) {
    // SAFETY: mapped; the child ends.
    unsafe { libc::_exit((TO_SEE.load(SeqCst) as *const u8).read_volatile().into()) };
}

#[test]
fn the_programs_own_handler_has_the_rights_of_its_thread() {
    child::forked(|| {
        // SAFETY: the handler reads memory and ends the child.
        unsafe { libc::signal(libc::SIGSEGV, looks as *const () as usize) };
        let (own, others) = (plain("own"), plain("others"));
        let domain = ProtectionDomain::new("faulting");
        domain.set(&own, Rights::READ).unwrap();
        TO_SEE.store(own.range().start, SeqCst);
        let _entered = domain.enter().unwrap();
        // SAFETY: it is refused.
        unsafe { (others.range().start as *mut u8).write_volatile(1) };
        panic!("a domain without the right has written");
    });
}

/// Whether anybody may read a page of the range.
fn is_open(range: std::ops::Range<usize>) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        range.contains(&usize::from_str_radix(start, 16).unwrap()) && rest.split_once(' ').unwrap().1.starts_with('r')
    })
}

#[test]
fn a_page_that_refuses_a_write_is_opened_to_no_domain() {
    const PAGES: usize = 64;
    child::forked(|| {
        tried::catch();
        // By page tables, on every machine.
        // SAFETY: new keys, which no memory has.
        while unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) } > 0 {}
        assert_eq!(mechanism(), Mechanism::PageTables);
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len((PAGES * PAGE) as u64).unwrap();
        let domain = match Domain::with_frames(256 * PAGE).build() {
            Err(why) if why.kind() == Kind::Unsupported => return skip::skip("uffd", &why.to_string()),
            domain => domain.unwrap(),
        };
        for trap in [Trap::Worker, Trap::Upcall] {
            let region = Arc::new(domain.region(0).trap(trap).file(file.path(), 0, FileAccess::Read).unwrap());
            let memory = Memory::of(&region).unwrap();
            let (start, stranger, stop) =
                (memory.range().start, ProtectionDomain::new("stranger"), AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for page in (0..PAGES).cycle().take_while(|_| !stop.load(SeqCst)) {
                        assert_eq!(tried::write((start + page * PAGE) as *mut u64, 1), Err(libc::SIGSEGV), "{trap:?}");
                    }
                });
                let opened = (0..400u64).any(|turn| {
                    std::thread::sleep(Duration::from_micros(turn % 50 * 10));
                    let _entered = stranger.enter().unwrap();
                    std::thread::sleep(Duration::from_micros(300));
                    is_open(memory.range())
                });
                stop.store(true, SeqCst);
                assert!(!opened, "{trap:?}");
            });
        }
    });
}

/// A word of memory that a domain may not touch, as an address.
static REFUSED: AtomicUsize = AtomicUsize::new(0);
static HANDLED: AtomicUsize = AtomicUsize::new(0);

/// Writes beside it.
extern "C" fn writes(_: i32) {
    // SAFETY: mapped, and nobody holds a reference to it.
    unsafe { (REFUSED.load(SeqCst) as *mut u64).add(1).write_volatile(2) };
    HANDLED.fetch_add(1, SeqCst);
}

extern "C" fn waits(_: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: as above.
    unsafe { (REFUSED.load(SeqCst) as *mut u64).write_volatile(1) };
    std::ptr::null_mut()
}

#[test]
fn a_handler_that_comes_while_an_access_waits_may_wait_as_well() {
    child::forked(|| {
        // By page tables, on every machine.
        // SAFETY: new keys, which no memory has.
        while unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) } > 0 {}
        assert_eq!(mechanism(), Mechanism::PageTables);
        // SAFETY: the handler writes to memory of this test's.
        unsafe { libc::signal(libc::SIGUSR1, writes as *const () as usize) };
        let (own, others) = (plain("own"), plain("others"));
        REFUSED.store(others.range().start, SeqCst);
        let domain = ProtectionDomain::new("inside");
        domain.set(&own, Rights::READ).unwrap();
        let entered = domain.enter().unwrap();
        let mut thread = 0;
        // On its own stack: std's threads have an alternate one, which is small.
        // SAFETY: it is joined below.
        assert_eq!(unsafe { libc::pthread_create(&mut thread, std::ptr::null(), waits, std::ptr::null_mut()) }, 0);
        std::thread::sleep(Duration::from_millis(50));
        // SAFETY: the thread is not joined yet.
        assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(HANDLED.load(SeqCst), 0, "another domain's memory is open to all");
        drop(entered);
        // SAFETY: it runs or has ended, and is joined once.
        assert_eq!(unsafe { libc::pthread_join(thread, std::ptr::null_mut()) }, 0);
        // SAFETY: mapped, and the thread has ended.
        let words = unsafe { [0, 1].map(|at| (REFUSED.load(SeqCst) as *const u64).add(at).read_volatile()) };
        assert_eq!((words, HANDLED.load(SeqCst)), ([1, 2], 1));
    });
}
