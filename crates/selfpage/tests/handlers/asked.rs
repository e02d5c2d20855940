//! What a handler is asked, what it may do, and what becomes of its answer.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};

use selfpage::store::MemoryStore;
use selfpage::{Access, Answer, Domain, FaultHandler, FaultKind, MemoryFault, Protection, Trap};

use crate::scenario::{here, in_child, until};
use crate::{PAGE, TRAPS, handled, read, thread_id, tried, unprotect, word, write};

#[test]
fn a_write_to_a_protected_page_asks_the_handler_once() {
    for (trap, name) in TRAPS {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = seen.clone();
        let (_domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
            let what = (fault.offset_bytes(), fault.access(), fault.kind(), fault.thread(), fault.context().is_some());
            noted.lock().unwrap().push(what);
            unprotect(fault)
        });
        region.protect(5 * PAGE, 2 * PAGE, Protection::Read).unwrap();
        assert_eq!((read(&region, 5), read(&region, 6)), (6, 7), "{name}");
        // SAFETY: test: a byte of the region.
        unsafe { region.as_ptr().add(5 * PAGE + 123).write_volatile(1) };
        write(&region, 5, 50);
        write(&region, 4, 40);
        let upcall = trap == Trap::Upcall;
        let expected = vec![(5 * PAGE + 123, Access::Write, FaultKind::Protection, thread_id(), upcall)];
        assert_eq!(*seen.lock().unwrap(), expected, "{name}");
        assert_eq!((read(&region, 5), read(&region, 6)), (50, 7), "{name}");
        assert_eq!(region.protection(5 * PAGE).unwrap(), Protection::ReadWrite, "{name}");
        assert_eq!(region.protection(6 * PAGE).unwrap(), Protection::Read, "{name}");
    }
}

#[test]
fn every_access_to_a_page_without_any_asks_the_handler() {
    for (trap, name) in TRAPS {
        let asked = Arc::new(AtomicU32::new(0));
        let noted = asked.clone();
        let (_domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
            noted.fetch_add(1, SeqCst);
            unprotect(fault)
        });
        for state in ["in core", "evicted"] {
            for page in [3, 4] {
                write(&region, page, 77);
                if state == "evicted" {
                    let _ = region.evict(page * PAGE, PAGE);
                }
                region.protect(page * PAGE, PAGE, Protection::None).unwrap();
                assert_eq!(region.residency()[page].load(SeqCst), 0, "{name}, {state}");
            }
            asked.store(0, SeqCst);
            assert_eq!(read(&region, 3), 77, "{name}, {state}");
            write(&region, 4, 78);
            assert_eq!(read(&region, 4), 78, "{name}, {state}");
            assert_eq!(asked.load(SeqCst), 2, "{name}, {state}");
        }
    }
}

#[test]
fn regions_without_a_store_can_be_protected_too() {
    for (trap, name) in TRAPS {
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let region = domain.region(8 * PAGE).trap(trap).handler(unprotect).zero().unwrap();
        write(&region, 1, 11);
        for protection in [Protection::None, Protection::Read] {
            region.protect(0, 8 * PAGE, protection).unwrap();
            write(&region, 1, read(&region, 1) + 1);
            assert_eq!(region.protection(PAGE).unwrap(), Protection::ReadWrite, "{name}");
            assert_eq!(region.protection(2 * PAGE).unwrap(), protection, "{name}");
        }
        assert_eq!((read(&region, 1), read(&region, 2)), (13, 0), "{name}");

        // One page that must stay mapped, and nothing is changed.
        region.protect(0, 8 * PAGE, Protection::ReadWrite).unwrap();
        region.pin(5 * PAGE, PAGE).unwrap();
        assert_eq!(region.protect(0, 8 * PAGE, Protection::None).unwrap_err().kind(), selfpage::Kind::Held, "{name}");
        assert_eq!(region.protection(0).unwrap(), Protection::ReadWrite, "{name}");
        region.unpin(5 * PAGE, PAGE).unwrap();

        let pinned = domain.region(4 * PAGE).trap(trap).handler(unprotect).pinned().unwrap();
        pinned.protect(0, PAGE, Protection::Read).unwrap();
        write(&pinned, 0, 5);
        let why = pinned.protect(0, PAGE, Protection::None).unwrap_err();
        assert_eq!(why.kind(), selfpage::Kind::Held, "{why}");
        assert_eq!(read(&pinned, 0), 5, "{name}");
    }
}

struct Gives {
    asked: AtomicU32,
}

impl FaultHandler for Gives {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        assert_eq!(fault.kind(), FaultKind::Missing);
        self.asked.fetch_add(1, SeqCst);
        match fault.offset_bytes() / PAGE {
            0 => {
                let mut contents = [0; PAGE];
                contents[..8].copy_from_slice(&4711u64.to_ne_bytes());
                // SAFETY: test: nobody refers to the page.
                unsafe { fault.map(&contents) }.unwrap();
                Answer::Handled
            }
            1 => Answer::Pass,
            _ => Answer::Refuse,
        }
    }
    fn asks_first(&self) -> bool {
        true
    }
}

#[test]
fn a_handler_gives_a_missing_page_its_contents() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let domain = Domain::with_frames(64 * PAGE).build().unwrap();
            let gives = Gives { asked: AtomicU32::new(0) };
            let builder = domain.region(256 * PAGE).trap(trap).handler(gives);
            let region = builder.stored(MemoryStore::new(1 << 24).unwrap()).unwrap();
            assert_eq!((read(&region, 0), read(&region, 1)), (4711, 0), "given, and as the pager has it");
            assert_eq!(tried::read(word(&region, 2)), Err(libc::SIGSEGV));
            // What was given is saved as anything else.
            region.evict(0, PAGE).unwrap();
            region.pin(0, PAGE).unwrap();
            assert_eq!(read(&region, 0), 4711);
        })
        .well();
    }
}

#[test]
fn handlers_fault_within_handlers() {
    for (trap, name) in TRAPS {
        let deepest = Arc::new(AtomicUsize::new(0));
        let base = Arc::new(AtomicUsize::new(0));
        let (from, depth) = (base.clone(), deepest.clone());
        let (_domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
            let page = fault.offset_bytes() / PAGE;
            depth.fetch_max(page, SeqCst);
            // A protected page, while there is one more, and an absent one.
            for other in [page + 1, page + 100].into_iter().filter(|other| page < 5 || *other > 6) {
                // SAFETY: test: a page of the region.
                unsafe { ((from.load(SeqCst) + other * PAGE) as *mut u64).write_volatile(other as u64 + 1) };
            }
            unprotect(fault)
        });
        base.store(region.as_ptr() as usize, SeqCst);
        region.protect(0, 6 * PAGE, Protection::Read).unwrap();
        let _ = region.evict(100 * PAGE, 20 * PAGE);
        write(&region, 0, 1);
        assert_eq!(deepest.load(SeqCst), 5, "{name}");
        assert!((0..256).all(|page| read(&region, page) == page as u64 + 1), "{name}");
    }
}

#[test]
fn four_threads_share_protected_pages() {
    for (trap, name) in TRAPS {
        let asked = Arc::new(AtomicU64::new(0));
        let noted = asked.clone();
        let (domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
            noted.fetch_add(1, SeqCst);
            unprotect(fault)
        });
        for round in 0..20u64 {
            // Before: a thread that was let go by another's answer has its own fault told late, perhaps of this round's page.
            let before = asked.load(SeqCst);
            region.protect(0, 256 * PAGE, Protection::Read).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let region = &region;
                    scope.spawn(move || {
                        for at in 0..256 {
                            let at = if thread % 2 == 0 { at } else { 255 - at };
                            // SAFETY: test: a word of each thread's own.
                            unsafe { word(region, at).add(1 + thread).write_volatile(round + 1) };
                        }
                    });
                }
            });
            let all = asked.load(SeqCst) - before;
            assert!((256..=1024 + 4).contains(&all), "{name}: {all}");
        }
        let words = region.as_slice::<u64>();
        assert!(
            words.chunks(512).enumerate().all(|(at, words)| words[..5] == [at as u64 + 1, 20, 20, 20, 20]),
            "{name}"
        );
        drop(domain);
    }
}

/// To unprotect a page that another has unprotected changes nothing, and is no error.
#[test]
fn two_handlers_unprotect_one_page_at_once() {
    for (trap, name) in TRAPS {
        let (asked, unprotected) = (AtomicU64::new(0), Arc::new(AtomicU64::new(0)));
        let (noted, both) = (unprotected.clone(), Barrier::new(2));
        let (domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
            // A worker may ask once more about the same access.
            if asked.fetch_add(1, SeqCst) < 2 {
                both.wait();
            }
            noted.fetch_add(u64::from(fault.protect_page(Protection::ReadWrite).is_ok()), SeqCst);
            Answer::Handled
        });
        region.protect(0, PAGE, Protection::Read).unwrap();
        std::thread::scope(|scope| {
            for thread in 1..3 {
                let region = &region;
                // SAFETY: test: a word of each thread's own.
                scope.spawn(move || unsafe { word(region, 0).add(thread).write_volatile(7) });
            }
        });
        assert_eq!(region.as_slice::<u64>()[..3], [1, 7, 7], "{name}");
        // The other's access may go on before its own handler is done.
        until("both have unprotected it", || unprotected.load(SeqCst) >= 2);
        drop(domain);
    }
}

#[test]
fn what_is_refused_goes_to_the_handler_that_was_there_before() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let strict = Arc::new(AtomicBool::new(true));
            let asks = strict.clone();
            let (_domain, region) = handled(trap, move |fault: &MemoryFault<'_>| match asks.load(SeqCst) {
                true => Answer::Refuse,
                false => unprotect(fault),
            });
            region.protect(3 * PAGE, PAGE, Protection::Read).unwrap();
            region.protect(4 * PAGE, PAGE, Protection::None).unwrap();
            for _ in 0..2 {
                assert_eq!(tried::write(word(&region, 3), 1), Err(libc::SIGSEGV));
                assert_eq!(tried::read(word(&region, 3)), Ok(4));
                assert_eq!(tried::read(word(&region, 4)), Err(libc::SIGSEGV));
            }
            // Whoever protects it otherwise takes the refusal back.
            region.protect(3 * PAGE, 2 * PAGE, Protection::ReadWrite).unwrap();
            assert_eq!((tried::write(word(&region, 3), 9), tried::read(word(&region, 4))), (Ok(()), Ok(5)));
            strict.store(false, SeqCst);
            region.protect(3 * PAGE, PAGE, Protection::Read).unwrap();
            assert_eq!(tried::write(word(&region, 3), 10), Ok(()));
        })
        .well();
    }
}

#[test]
fn a_page_that_was_unprotected_before_its_handler_refused_is_not_refused() {
    in_child(here!(), "worker", || {
        tried::catch();
        let [asked, unprotected] = [(); 2].map(|()| Arc::new(Barrier::new(2)));
        let (is_asked, is_unprotected) = (asked.clone(), unprotected.clone());
        let (_domain, region) = handled(Trap::Worker, move |_: &MemoryFault<'_>| {
            is_asked.wait();
            is_unprotected.wait();
            Answer::Refuse
        });
        for page in 0..8 {
            region.protect(page * PAGE, PAGE, Protection::Read).unwrap();
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| tried::write(word(&region, page), 9));
                asked.wait();
                region.protect(page * PAGE, PAGE, Protection::ReadWrite).unwrap();
                unprotected.wait();
                assert_eq!(writer.join().unwrap(), Ok(()), "page {page}");
            });
        }
    })
    .well();
}

#[test]
fn a_protected_page_without_a_handler_is_the_programs_own_fault() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let domain = Domain::with_frames(64 * PAGE).build().unwrap();
            let region = domain.region(8 * PAGE).trap(trap).zero().unwrap();
            write(&region, 1, 3);
            region.protect(0, 8 * PAGE, Protection::Read).unwrap();
            assert_eq!(tried::write(word(&region, 1), 4), Err(libc::SIGSEGV));
            assert_eq!(tried::write(word(&region, 2), 4), Err(libc::SIGSEGV), "absent");
            region.protect(PAGE, PAGE, Protection::ReadWrite).unwrap();
            assert_eq!((tried::read(word(&region, 1)), tried::write(word(&region, 1), 5)), (Ok(3), Ok(())));
        })
        .well();
    }
}

#[test]
fn a_handler_that_panics_refuses() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = handled(trap, |_: &MemoryFault<'_>| -> Answer { panic!("no idea") });
            region.protect(3 * PAGE, PAGE, Protection::Read).unwrap();
            write(&region, 3, 1);
        })
        .by(libc::SIGSEGV, &["no idea", "SIGSEGV: region handled at 0x", "offset 12288: its handler panicked"]);
    }
}

/// What panics as it is dropped.
struct Twice;

impl Drop for Twice {
    fn drop(&mut self) {
        panic!("once more");
    }
}

#[test]
fn a_handler_that_panics_with_what_panics_refuses() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let panics = |_: &MemoryFault<'_>| -> Answer { std::panic::panic_any(Twice) };
            let (_domain, region) = handled(trap, panics);
            region.protect(3 * PAGE, PAGE, Protection::Read).unwrap();
            write(&region, 3, 1);
        })
        .by(libc::SIGSEGV, &["once more", "SIGSEGV: region handled at 0x", "offset 12288: its handler panicked"]);
    }
}

#[test]
fn a_handler_that_faults_on_its_own_page_is_named() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = handled(trap, |fault: &MemoryFault<'_>| {
                // SAFETY: test: the page at hand.
                unsafe { (fault.address() as *mut u8).write_volatile(1) };
                Answer::Handled
            });
            region.protect(3 * PAGE, PAGE, Protection::Read).unwrap();
            write(&region, 3, 1);
        })
        .by(libc::SIGSEGV, &["region handled", "offset 12288: its handler faults within itself"]);
    }
}

#[test]
fn a_handler_that_follows_a_wild_pointer_ends_the_process() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let nowhere = std::hint::black_box(0usize);
            let (_domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
                // SAFETY: test: there is none; nothing is mapped there.
                unsafe { (nowhere as *mut u64).write_volatile(1) };
                unprotect(fault)
            });
            region.protect(3 * PAGE, PAGE, Protection::Read).unwrap();
            write(&region, 3, 1);
        })
        .by(libc::SIGSEGV, &[]);
    }
}

#[test]
fn a_handler_that_changes_nothing_is_named() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = handled(trap, |_: &MemoryFault<'_>| Answer::Handled);
            region.protect(3 * PAGE, PAGE, Protection::Read).unwrap();
            write(&region, 3, 1);
        })
        .by(libc::SIGSEGV, &["region handled", "offset 12288: its handler says that it has handled the fault"]);
    }
}

type Does = fn(&MemoryFault<'_>);

/// What a handler does that says then that it has handled the write: all of it in vain.
const IN_VAIN: [(&str, Does); 3] = [
    ("protects as before", |fault| fault.protect_page(Protection::Read).unwrap()),
    // SAFETY: test: the page is there.
    ("gives what is there", |fault| assert!(unsafe { fault.map(&[7; PAGE]) }.is_err())),
    ("protects another page", |fault| fault.protect(9 * PAGE, PAGE, Protection::Read).unwrap()),
];

#[test]
fn a_handler_that_changes_nothing_for_the_access_is_named() {
    for (trap, name) in TRAPS {
        for (what, does) in IN_VAIN {
            in_child(here!(), &format!("{name}, {what}"), || {
                let (_domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
                    does(fault);
                    Answer::Handled
                });
                region.pin(3 * PAGE, PAGE).unwrap();
                region.protect(3 * PAGE, PAGE, Protection::Read).unwrap();
                write(&region, 3, 1);
            })
            .by(libc::SIGSEGV, &["region handled", "offset 12288: its handler says that it has handled the fault"]);
        }
    }
}

#[test]
fn a_handler_may_jump_out() {
    in_child(here!(), "upcall", || {
        let (domain, region) = handled(Trap::Upcall, |_: &MemoryFault<'_>| -> Answer { tried::out(libc::SIGUSR1) });
        region.protect(3 * PAGE, PAGE, Protection::Read).unwrap();
        for _ in 0..200 {
            assert_eq!(tried::write(word(&region, 3), 1), Err(libc::SIGUSR1));
        }
        region.protect(3 * PAGE, PAGE, Protection::ReadWrite).unwrap();
        // Nothing is held: all goes on, and comes to its end.
        write(&region, 3, 4);
        assert!((0..256).all(|page| read(&region, page) == page as u64 + 1));
        drop(region);
        drop(domain);
    })
    .well();
}

#[test]
fn more_threads_than_were_given_stacks_at_first_jump_out() {
    const THREADS: usize = 80;
    in_child(here!(), "upcall", || {
        let jumping = Arc::new(AtomicBool::new(true));
        let jumps = jumping.clone();
        let (_domain, region) = handled(Trap::Upcall, move |fault: &MemoryFault<'_>| match jumps.load(SeqCst) {
            true => tried::out(libc::SIGUSR1),
            false => unprotect(fault),
        });
        region.protect(0, THREADS * PAGE, Protection::Read).unwrap();
        let (region, together) = (&region, &Barrier::new(THREADS));
        let jumping = &jumping;
        std::thread::scope(|scope| {
            for page in 0..THREADS {
                scope.spawn(move || {
                    for _ in 0..3 {
                        assert_eq!(tried::write(word(region, page), 1), Err(libc::SIGUSR1));
                    }
                    together.wait();
                    jumping.store(false, SeqCst);
                    // All of them live on, and each handler of theirs runs.
                    together.wait();
                    write(region, page, 1000 + page as u64);
                    assert_eq!(read(region, page), 1000 + page as u64);
                });
            }
        });
    })
    .well();
}

#[test]
fn a_handler_sends_the_thread_elsewhere() {
    extern "C" fn landing() -> ! {
        std::process::exit(0)
    }
    in_child(here!(), "upcall", || {
        let (_domain, region) = handled(Trap::Upcall, |fault: &MemoryFault<'_>| {
            let context = fault.context().expect("an upcall").cast::<libc::ucontext_t>();
            // SAFETY: test: the thread goes on in a function that never returns, on a stack aligned as at its beginning.
            unsafe {
                let registers = &mut (*context.as_ptr()).uc_mcontext.gregs;
                registers[libc::REG_RIP as usize] = landing as *const () as i64;
                registers[libc::REG_RSP as usize] = (registers[libc::REG_RSP as usize] & !15) - 1032;
            }
            Answer::Handled
        });
        region.protect(0, PAGE, Protection::Read).unwrap();
        write(&region, 0, 1);
        panic!("the write went through");
    })
    .well();
}

#[test]
fn a_handler_gives_the_thread_another_address_as_often_as_it_likes() {
    in_child(here!(), "upcall", || {
        static ELSEWHERE: [u64; 1] = [7];
        let (_domain, region) = handled(Trap::Upcall, |fault: &MemoryFault<'_>| {
            let context = fault.context().expect("an upcall").cast::<libc::ucontext_t>();
            // SAFETY: test: the register that the address is in.
            unsafe { (*context.as_ptr()).uc_mcontext.gregs[libc::REG_RDI as usize] = (&raw const ELSEWHERE) as i64 };
            Answer::Handled
        });
        region.protect(0, PAGE, Protection::None).unwrap();
        for turn in 0..10_010 {
            let read: u64;
            // SAFETY: test: a word of the region, or the one above.
            unsafe { std::arch::asm!("mov {}, [rdi]", out(reg) read, inout("rdi") word(&region, 0) => _) };
            assert_eq!(read, 7, "{turn}");
        }
    })
    .well();
}

/// More threads at once than there are for handlers, and in each handler's turn a fault of its own.
#[test]
fn a_handler_that_others_wait_for_is_answered_when_it_faults() {
    const THREADS: usize = 120;
    for case in ["first", "second", "third", "fourth"] {
        in_child(here!(), case, || {
            let (turn, base) = (Mutex::new(()), Arc::new(AtomicUsize::new(0)));
            let from = base.clone();
            let (_domain, region) = handled(Trap::Worker, move |fault: &MemoryFault<'_>| {
                if fault.offset_bytes() < THREADS * PAGE {
                    let _turn = turn.lock().unwrap();
                    let other = from.load(SeqCst) + fault.offset_bytes() + THREADS * PAGE;
                    // SAFETY: test: a word of the region.
                    unsafe { (other as *mut u64).write_volatile(1) };
                }
                unprotect(fault)
            });
            base.store(region.as_ptr() as usize, SeqCst);
            region.protect(0, 2 * THREADS * PAGE, Protection::Read).unwrap();
            let (region, together) = (&region, &Barrier::new(THREADS));
            std::thread::scope(|scope| {
                for page in 0..THREADS {
                    scope.spawn(move || {
                        together.wait();
                        write(region, page, 2);
                    });
                }
            });
            assert!((0..2 * THREADS).all(|page| read(region, page) == if page < THREADS { 2 } else { 1 }));
        })
        .well();
    }
}

#[test]
fn protecting_over_what_the_program_has_mapped_there_leaves_that_out() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            // Of the pages around it none is asked of for ever, and none is missed.
            for (before, after, expected) in
                [(Protection::ReadWrite, Protection::Read, 7), (Protection::Read, Protection::ReadWrite, 0)]
            {
                let asked = Arc::new(AtomicU32::new(0));
                let noted = asked.clone();
                let (_domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
                    noted.fetch_add(1, SeqCst);
                    unprotect(fault)
                });
                (0..8).for_each(|page| write(&region, page, 1));
                region.protect(0, 8 * PAGE, before).unwrap();
                let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                // SAFETY: test: a page of the region, which nobody holds a reference into.
                let over = unsafe { libc::mmap(word(&region, 4).cast(), PAGE, access, flags | libc::MAP_FIXED, -1, 0) };
                assert_eq!(over, word(&region, 4).cast());
                region.protect(0, 8 * PAGE, after).unwrap();
                assert!((0..8).all(|page| region.protection(page * PAGE).unwrap() == after), "{name}");
                (0..8).for_each(|page| write(&region, page, 2));
                assert_eq!(asked.load(SeqCst), expected, "{name}, {after:?}");
            }
        })
        .well();
    }
}

#[test]
fn handlers_within_a_handler_may_jump_out_of_their_own() {
    in_child(here!(), "upcall", || {
        let base = Arc::new(AtomicUsize::new(0));
        let from = base.clone();
        let (_domain, region) = handled(Trap::Upcall, move |fault: &MemoryFault<'_>| {
            if fault.offset_bytes() / PAGE == 1 {
                tried::out(libc::SIGUSR1);
            }
            for _ in 0..100 {
                assert_eq!(tried::write((from.load(SeqCst) + PAGE) as *mut u64, 1), Err(libc::SIGUSR1));
            }
            unprotect(fault)
        });
        base.store(region.as_ptr() as usize, SeqCst);
        region.protect(0, 2 * PAGE, Protection::Read).unwrap();
        write(&region, 0, 7);
        assert_eq!((read(&region, 0), read(&region, 1)), (7, 2));
    })
    .well();
}
