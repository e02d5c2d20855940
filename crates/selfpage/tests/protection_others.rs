//! Refusals that no protection domain has to do with, or no longer, where domains are by page tables. Each test in a process of its own: whose handler
//! comes first is settled once.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use selfpage::Kind;
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism as Found};
use selfpage::protection::{Ended, Mechanism, Memory, ProtectionDomain, Rights, mechanism};

mod child;
#[path = "../../../tests/filter.rs"]
mod filter;
#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;

/// A page of the process's own, never unmapped.
fn page() -> Range<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start as usize..start as usize + PAGE
}

fn write(page: &Range<usize>) {
    // SAFETY: mapped, and nobody holds a reference to it.
    unsafe { (page.start as *mut u8).write_volatile(1) };
}

/// A domain that has no right to a page of its own, by page tables on every machine.
fn domain() -> (ProtectionDomain, Memory) {
    // SAFETY: new keys, which no memory has.
    while unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) } > 0 {}
    assert_eq!(mechanism(), Mechanism::PageTables);
    // SAFETY: it stays mapped.
    let memory = unsafe { Memory::plain("others", page()) }.unwrap();
    (ProtectionDomain::new("inside"), memory)
}

#[test]
fn what_a_tracker_waits_for_is_no_stray_write() {
    child::forked(|| {
        let (tracker, tracked) = (DirtyTracker::with(Found::Traps).unwrap(), page());
        write(&tracked);
        // SAFETY: the memory is the test's.
        unsafe { tracker.arm(tracked.clone()) }.unwrap();
        let (domain, _others) = domain();
        let within = tracked.clone();
        assert!(matches!(domain.run(move || write(&within)).unwrap(), Ended::Well(())));
        let mut found = Dirty::new();
        tracker.scan(tracked, &mut found).unwrap();
        assert_eq!(found.pages(), 1);
    });
}

/// Has another thread write to memory that a domain keeps it from: what tells when it has written.
fn waiting(memory: &Memory) -> Receiver<()> {
    let (range, (tell, written)) = (memory.range(), mpsc::channel());
    std::thread::spawn(move || {
        write(&range);
        let _ = tell.send(());
    });
    assert!(written.recv_timeout(Duration::from_millis(200)).is_err(), "another domain's memory is open to all");
    written
}

/// Whoever is in the domain may wait for who waits there.
fn goes_on(written: &Receiver<()>) {
    written.recv_timeout(Duration::from_secs(20)).expect("who waited waits although the access is allowed");
}

#[test]
fn who_waits_at_memory_goes_on_when_it_is_given_back() {
    child::forked(|| {
        let (domain, others) = domain();
        let _entered = domain.enter().unwrap();
        let written = waiting(&others);
        drop(others);
        goes_on(&written);
    });
}

#[test]
fn who_waits_at_memory_goes_on_when_the_domain_gets_the_right() {
    child::forked(|| {
        let (domain, others) = domain();
        domain.set(&others, Rights::META).unwrap();
        let _entered = domain.enter().unwrap();
        let written = waiting(&others);
        domain.set(&others, Rights::READ | Rights::WRITE | Rights::META).unwrap();
        goes_on(&written);
        domain.set(&others, Rights::READ | Rights::META).unwrap();
        let written = waiting(&others);
        domain.set(&others, Rights::READ | Rights::WRITE | Rights::META).unwrap();
        goes_on(&written);
    });
}

static CLOSED: AtomicUsize = AtomicUsize::new(0);

/// The write barrier of a collector, say.
extern "C" fn opens(_: i32) {
    let flags = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the test's own page.
    assert_eq!(unsafe { libc::mprotect(CLOSED.load(SeqCst) as *mut libc::c_void, PAGE, flags) }, 0);
}

#[test]
fn what_no_domain_has_to_do_with_waits_for_none() {
    child::forked(|| {
        let closed = page();
        CLOSED.store(closed.start, SeqCst);
        // SAFETY: the handler opens memory of this test's, which is closed here.
        unsafe {
            libc::signal(libc::SIGSEGV, opens as *const () as usize);
            assert_eq!(libc::mprotect(closed.start as *mut libc::c_void, PAGE, libc::PROT_READ), 0);
        }
        let (domain, _others) = domain();
        let _entered = domain.enter().unwrap();
        // Joined while this thread is in the domain.
        std::thread::spawn(move || write(&closed)).join().unwrap();
    });
}

/// Through the handler of domains, that of the tracker and that of the program.
#[test]
fn a_fault_that_is_the_programs_leaves_errno_as_it_was() {
    child::forked(|| {
        let (closed, tracked) = (page(), page());
        CLOSED.store(closed.start, SeqCst);
        // SAFETY: the handler opens memory of this test's, which is closed here.
        unsafe {
            libc::signal(libc::SIGSEGV, opens as *const () as usize);
            assert_eq!(libc::mprotect(closed.start as *mut libc::c_void, PAGE, libc::PROT_READ), 0);
        }
        let tracker = DirtyTracker::with(Found::Traps).unwrap();
        // SAFETY: the memory is the test's.
        unsafe { tracker.arm(tracked) }.unwrap();
        let (domain, _others) = domain();
        drop(domain.enter().unwrap());
        // SAFETY: the thread's own.
        let errno = unsafe { &mut *libc::__errno_location() };
        *errno = libc::EAGAIN;
        write(&closed);
        assert_eq!(*errno, libc::EAGAIN);
    });
}

#[test]
fn a_name_with_a_nul_runs_like_others() {
    child::forked(|| {
        let domain = ProtectionDomain::new("plug\0in");
        assert!(matches!(domain.run(|| 7).unwrap(), Ended::Well(7)));
        assert_eq!(domain.name(), "plug\0in");
    });
}

/// As the companion of code that is not trusted ends it: a filter of system calls (`SECCOMP_RET_KILL_THREAD`). Or it does so itself.
#[test]
fn a_thread_that_ends_without_a_word_is_in_no_domain_any_more() {
    fn is_ended_by_a_filter() {
        filter::Call::any(libc::SYS_getppid).ends_its_thread().unwrap();
        // SAFETY: test: a call without arguments.
        unsafe { libc::getppid() };
    }
    fn ends_itself() {
        // SAFETY: test: ends this thread alone.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    for ends in [is_ended_by_a_filter, ends_itself] {
        child::forked(|| {
            // SAFETY: test: a number. Where it would wait for ever this ends it.
            unsafe { libc::alarm(60) };
            let (domain, memory) = domain();
            let (within, other) = (ProtectionDomain::new("within"), ProtectionDomain::new("other"));
            let why = domain.run(move || {
                let _within = within.enter().unwrap();
                ends();
            });
            let why = why.unwrap_err();
            assert!(why.kind() == Kind::Lost && why.to_string().contains("seccomp"), "{why}");
            drop(other.enter().unwrap());
            write(&memory.range());
        });
    }
}
