//! The stacks that upcalls run on, and the signals that come meanwhile.

use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use selfpage::protection::ProtectionDomain;
use selfpage::{MemoryFault, Protection, Trap};

use crate::child;
use crate::scenario::{here, in_child};
use crate::{PAGE, handled, read, thread_id, unprotect, word, write};

/// Which signals of those that matter are blocked now: of faults, and of others.
fn blocked() -> (bool, bool) {
    // SAFETY: test: fills in a value of its own.
    unsafe {
        let mut mask: libc::sigset_t = mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, ptr::null(), &mut mask);
        let has = |signal| libc::sigismember(&mask, signal) == 1;
        let faults = [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];
        (faults.into_iter().any(has), has(libc::SIGUSR1) && has(libc::SIGTERM))
    }
}

fn alternate() -> libc::stack_t {
    // SAFETY: test: fills in a value of its own.
    unsafe {
        let mut stack: libc::stack_t = mem::zeroed();
        assert_eq!(libc::sigaltstack(ptr::null(), &mut stack), 0);
        stack
    }
}

fn block(signal: libc::c_int) {
    // SAFETY: test: a set of this thread's signals.
    unsafe {
        let mut set: libc::sigset_t = mem::zeroed();
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, ptr::null_mut());
    }
}

fn set_alternate(room: &mut [u8], flags: libc::c_int) {
    let stack = libc::stack_t { ss_sp: room.as_mut_ptr().cast(), ss_flags: flags, ss_size: room.len() };
    // SAFETY: test: memory that outlives its use.
    assert_eq!(unsafe { libc::sigaltstack(&stack, ptr::null_mut()) }, 0);
}

#[test]
fn every_handler_runs_with_faults_let_in_and_all_else_blocked() {
    in_child(here!(), "upcall", || {
        let asked = Arc::new(AtomicUsize::new(0));
        let noted = asked.clone();
        let (_domain, region) = handled(Trap::Upcall, move |fault: &MemoryFault<'_>| {
            assert_eq!(blocked(), (false, true));
            noted.fetch_add(1, SeqCst);
            unprotect(fault)
        });
        region.protect(0, 8 * PAGE, Protection::Read).unwrap();
        (0..8).for_each(|page| write(&region, page, 1));
        assert_eq!((asked.load(SeqCst), blocked()), (8, (false, false)));
        block(libc::SIGSEGV);
        region.protect(0, 8 * PAGE, Protection::Read).unwrap();
        (0..8).for_each(|page| write(&region, page, 1));
        assert_eq!((asked.load(SeqCst), blocked()), (16, (true, false)));
    })
    .well();
}

#[test]
fn a_trap_leaves_errno_as_it_was() {
    in_child(here!(), "upcall", || {
        // SAFETY: test: this thread's own.
        let errno = || unsafe { &mut *libc::__errno_location() };
        let (_domain, region) = handled(Trap::Upcall, move |fault: &MemoryFault<'_>| {
            *errno() = libc::EINTR;
            unprotect(fault)
        });
        region.protect(0, 8 * PAGE, Protection::Read).unwrap();
        let writes = || {
            for page in 0..8 {
                *errno() = libc::ERANGE;
                write(&region, page, 1);
                assert_eq!(*errno(), libc::ERANGE, "page {page}");
            }
        };
        writes();
        region.protect(0, 8 * PAGE, Protection::Read).unwrap();
        // A thread's first trap gives it a stack.
        std::thread::scope(|scope| drop(scope.spawn(writes)));
    })
    .well();
}

#[test]
fn an_alternate_stack_of_the_programs_own_serves_as_well() {
    const SS_AUTODISARM: libc::c_int = 1 << 31;
    in_child(here!(), "upcall", || {
        let (_domain, region) = handled(Trap::Upcall, unprotect);
        let mut room = vec![0; 1 << 20];
        let set = room.as_ptr() as usize;
        for (len_bytes, flags, stays) in [
            (1 << 16, 0, false),
            (1 << 16, SS_AUTODISARM, true),
            (1 << 16, 0, false),
            // Ours is no larger.
            (1 << 20, 0, true),
        ] {
            set_alternate(&mut room[..len_bytes], flags);
            region.protect(0, 8 * PAGE, Protection::Read).unwrap();
            (0..8).for_each(|page| write(&region, page, 1));
            assert_eq!(alternate().ss_sp as usize == set, stays, "{len_bytes} {flags}");
        }
    })
    .well();
}

#[test]
fn a_fault_that_asks_nobody_gives_the_thread_its_stack_too() {
    in_child(here!(), "upcall", || {
        let (_domain, region) = handled(Trap::Upcall, unprotect);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let before = alternate().ss_sp;
                assert!((0..256).all(|page| read(&region, page) == page as u64 + 1));
                assert_ne!(alternate().ss_sp, before);
            });
        });
    })
    .well();
}

static AT: AtomicPtr<u64> = AtomicPtr::new(ptr::null_mut());
static SENT: AtomicUsize = AtomicUsize::new(0);

/// Touches pages of the region at any moment in which it is let in.
extern "C" fn touch(_: libc::c_int) {
    let page = SENT.load(SeqCst) * 7 % 256;
    // SAFETY: test: a page of the region.
    let first = unsafe { AT.load(SeqCst).cast::<u8>().add(page * PAGE).cast::<u64>().read_volatile() };
    assert_eq!(first, page as u64 + 1);
    SENT.fetch_add(1, SeqCst);
}

#[test]
fn a_sigbus_that_somebody_sends_waits_until_core_is_done() {
    in_child(here!(), "upcall", || {
        // SAFETY: test: installs a handler, before the one that hands on to it.
        unsafe {
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = touch as *const () as usize;
            action.sa_flags = libc::SA_ONSTACK | libc::SA_RESTART;
            assert_eq!(libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()), 0);
        }
        let (_domain, region) = handled(Trap::Upcall, unprotect);
        AT.store(word(&region, 0), SeqCst);
        let (done, calls) = (AtomicBool::new(false), Mutex::new(()));
        // The thread's own alternate stack has no room for a second signal.
        region.protect(0, PAGE, Protection::Read).unwrap();
        write(&region, 0, 1);
        // SAFETY: test: the calling thread, which outlives the other.
        let this = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(SeqCst) {
                    let before = SENT.load(SeqCst);
                    let no_call = calls.lock().unwrap();
                    // SAFETY: test: a thread that lives.
                    unsafe { libc::pthread_kill(this, libc::SIGBUS) };
                    drop(no_call);
                    // Its handler lets the next one in, and stacks end somewhere. One that is sent while a fault's own waits is lost.
                    let sent = Instant::now();
                    while SENT.load(SeqCst) == before && sent.elapsed() < Duration::from_millis(2) {
                        std::hint::spin_loop();
                    }
                }
            });
            let deadline = Instant::now() + Duration::from_secs(60);
            for turn in 0.. {
                if SENT.load(SeqCst) > 300 || Instant::now() > deadline {
                    break;
                }
                // A handler of a signal must not come into a call that works on pages.
                let no_signal = calls.lock().unwrap();
                region.protect(0, 256 * PAGE, Protection::Read).unwrap();
                drop(no_signal);
                for page in (0..256).map(|page| (page * 37 + turn) % 256) {
                    assert_eq!(read(&region, page), page as u64 + 1);
                    write(&region, page, page as u64 + 1);
                }
            }
            done.store(true, SeqCst);
        });
        assert!(SENT.load(SeqCst) > 300, "{SENT:?}");
    })
    .well();
}

#[test]
fn a_fault_signal_that_the_program_ignores_may_be_sent() {
    for (signal, name) in [(libc::SIGBUS, "SIGBUS"), (libc::SIGSEGV, "SIGSEGV")] {
        in_child(here!(), name, || {
            // SAFETY: test: signals without handlers.
            let sent = || unsafe { libc::raise(signal) };
            // SAFETY: test: as above.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
            let (_domain, _region) = handled(Trap::Upcall, unprotect);
            let _rights = ProtectionDomain::new("ours");
            (0..2).for_each(|_| assert_eq!(sent(), 0));
        })
        .well();
    }
}

/// Two threads that are in handlers at the same time, each with something of its own on its stack.
fn meet(in_handlers: &AtomicUsize) {
    let own = [const { AtomicU32::new(0) }; 1024];
    let mine = thread_id();
    own.iter().for_each(|word| word.store(mine, SeqCst));
    in_handlers.fetch_add(1, SeqCst);
    while in_handlers.load(SeqCst) < 2 {
        std::thread::yield_now();
    }
    assert!(own.iter().all(|word| word.load(SeqCst) == mine), "another thread was on this stack");
}

#[test]
fn a_forked_child_keeps_the_stack_of_its_thread() {
    in_child(here!(), "upcall", || {
        let in_handlers = Arc::new(AtomicUsize::new(2));
        let counted = in_handlers.clone();
        let (_domain, region) = handled(Trap::Upcall, move |fault: &MemoryFault<'_>| {
            meet(&counted);
            unprotect(fault)
        });
        region.protect(0, 8 * PAGE, Protection::Read).unwrap();
        write(&region, 0, 1);
        let ended = child::in_child(|| {
            in_handlers.store(0, SeqCst);
            std::thread::scope(|scope| {
                scope.spawn(|| write(&region, 1, 7));
                write(&region, 2, 8);
            });
            (read(&region, 1), read(&region, 2)) == (7, 8)
        });
        assert_eq!(ended, 0);
    })
    .well();
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

#[test]
fn threads_that_end_leave_their_stacks_to_others() {
    in_child(here!(), "upcall", || {
        let (_domain, region) = handled(Trap::Upcall, unprotect);
        let mut seen = [0; 2];
        for seen in &mut seen {
            for turn in 0..200 {
                region.protect(0, PAGE, Protection::Read).unwrap();
                std::thread::scope(|scope| {
                    scope.spawn(|| write(&region, 0, turn));
                });
            }
            *seen = mappings();
        }
        // 64 of them are mapped together, and each is a mapping and a guard.
        assert!(seen[1] < seen[0] + 64, "{seen:?}");
    })
    .well();
}
