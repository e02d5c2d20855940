//! Protection domains, and a handler of `SIGSEGV` that the program had before. Each test in a process of its own: whose handler comes first
//! is settled once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use selfpage::protection::{Ended, Mechanism, Memory, ProtectionDomain, Rights, mechanism};
use selfpage::{Domain, FileAccess, Kind, Trap};

mod child;
mod keyed;
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

/// Writes to it, and beside it.
extern "C" fn writes(_: i32) {
    for at in [0, 1] {
        // SAFETY: mapped, and nobody holds a reference to it.
        unsafe { (REFUSED.load(SeqCst) as *mut u64).add(at).write_volatile(2) };
    }
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
        // An access that is refused ends the child.
        tried::catch();
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

/// Whether nobody counts as being in the domain, which then ends with all its memory.
fn ends(domain: ProtectionDomain, memory: Memory) -> bool {
    let range = memory.range();
    drop((domain, memory));
    // SAFETY: it stays mapped.
    unsafe { Memory::plain("again", range) }.is_ok()
}

/// Whether a thread in the domain that writes to the memory is stopped there.
fn is_stopped(domain: &ProtectionDomain, memory: &Memory) -> bool {
    let start = memory.range().start;
    // SAFETY: it stays mapped, and nobody holds a reference to it.
    let ended = domain.run(move || unsafe { (start as *mut u64).write_volatile(1) });
    matches!(ended.unwrap(), Ended::Stopped(_))
}

/// A domain that may read two pieces of memory, one of which is returned.
fn reader() -> (ProtectionDomain, Memory) {
    let (own, other) = (plain("own"), plain("other"));
    let domain = ProtectionDomain::new("reader");
    domain.set(&own, Rights::READ).unwrap();
    domain.set(&other, Rights::READ).unwrap();
    (domain, other)
}

#[test]
fn nobody_is_in_a_domain_that_was_left_around_a_fork_in_a_handler() {
    const FORKS: u32 = 60;
    child::forked(|| {
        // By page tables, on every machine.
        // SAFETY: new keys, which no memory has.
        while unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) } > 0 {}
        assert_eq!(mechanism(), Mechanism::PageTables);
        // SAFETY: a handler that does what the test is about, and this thread's own name.
        let own = unsafe {
            libc::signal(libc::SIGUSR1, child::fork_here as *const () as usize);
            libc::pthread_self()
        };
        let mut reader = Some(reader());
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                for sent in 1..=FORKS {
                    std::thread::sleep(Duration::from_micros(150));
                    // SAFETY: the thread lives until the scope's end.
                    unsafe { libc::pthread_kill(own, libc::SIGUSR1) };
                    // One that is pending when the handler returns would come in the same place.
                    while child::FORKS.load(SeqCst) < sent {
                        std::thread::sleep(Duration::from_micros(50));
                    }
                }
            });
            // In a child, which has no sender, until a turn that ends it.
            while !sender.is_finished() {
                child::child_ends_after(|| {
                    drop(reader.as_ref().unwrap().0.enter().unwrap());
                    if child::IS_CHILD.load(SeqCst) {
                        let (domain, memory) = reader.take().unwrap();
                        assert!(is_stopped(&domain, &memory), "a domain without the right has written");
                        assert!(ends(domain, memory), "a domain that nobody is in keeps its memory");
                    }
                });
            }
        });
    });
}

/// By keys a domain is entered and left without a system call, and so a handler may come between any two instructions.
#[cfg(target_arch = "x86_64")]
mod steps {
    use std::arch::asm;
    use std::cell::Cell;
    use std::hint::black_box;
    use std::sync::OnceLock;

    use super::keyed::has_keys;
    use super::*;

    const TRAP: i64 = 0x100;

    /// Forks after each instruction of the parent's. The child goes on at full speed.
    extern "C" fn forks(signal: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        child::fork_here(signal);
        if child::IS_CHILD.load(SeqCst) {
            // SAFETY: the kernel passed the context.
            unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_EFL as usize] &= !TRAP };
        }
    }

    type OnStep = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

    /// Has `on_step` called after each instruction of `work`, and `check` in the children that it forks.
    fn step<T>(on_step: OnStep, on: T, work: impl FnOnce(&T), check: impl FnOnce(T)) {
        // SAFETY: a handler that does what the test is about.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_step as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGTRAP, &action, std::ptr::null_mut()), 0);
        }
        child::child_ends_after(|| {
            // SAFETY: the CPU traps after each instruction from here on, which `on_step` answers.
            unsafe { asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq") };
            work(&on);
            // SAFETY: and no longer.
            unsafe { asm!("pushfq", "and qword ptr [rsp], ~0x100", "popfq") };
            if child::IS_CHILD.load(SeqCst) {
                check(on);
            }
        });
        let forks = child::FORKS.load(SeqCst);
        assert!(forks > 20, "{forks} forks");
        println!("{forks} forks");
    }

    #[test]
    fn nobody_is_in_a_domain_that_was_left_around_a_fork_after_any_instruction() {
        if !has_keys() {
            return;
        }
        child::forked(|| {
            let (domain, memory) = reader();
            // The first time is slow.
            drop(domain.enter().unwrap());
            let leaves = |domain: &ProtectionDomain| drop(black_box(domain.enter()));
            let check = |domain| assert!(ends(domain, memory), "a domain that nobody is in keeps its memory");
            step(forks, domain, leaves, check);
        });
    }

    /// Domains with memory of their own, for which there is no key left where a thread is in all of them and in one more.
    static OTHERS: OnceLock<Vec<(ProtectionDomain, Memory)>> = OnceLock::new();

    /// Forks, and the child is in as many of the others at once as it can before it goes on.
    extern "C" fn forks_and_takes_keys(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        forks(signal, info, context);
        if child::IS_CHILD.load(SeqCst) {
            let others = OTHERS.get().into_iter().flatten();
            let mut entered: Vec<_> = others.map_while(|(domain, _)| domain.enter().ok()).collect();
            while entered.pop().is_some() {}
        }
    }

    #[test]
    fn a_domain_that_is_entered_around_a_fork_has_its_own_keys() {
        if !has_keys() {
            return;
        }
        child::forked(|| {
            tried::catch();
            let (own, domain) = (plain("own"), ProtectionDomain::new("own"));
            domain.set(&own, Rights::READ | Rights::WRITE).unwrap();
            let others = OTHERS.get_or_init(|| {
                let other = |_| {
                    let (memory, domain) = (plain("other"), ProtectionDomain::new("other"));
                    domain.set(&memory, Rights::READ | Rights::WRITE).unwrap();
                    (domain, memory)
                };
                (0..15).map(other).collect()
            });
            // The first time is slow.
            drop(domain.enter().unwrap());
            let word = |memory: &Memory| memory.range().start as *const u64;
            let check = |_within| {
                assert_eq!(tried::read(word(&own)), Ok(0), "its own");
                for (at, (_, memory)) in others.iter().enumerate() {
                    assert_eq!(tried::read(word(memory)), Err(libc::SIGSEGV), "other {at}");
                }
            };
            step(forks_and_takes_keys, Cell::new(None), |within| within.set(black_box(domain.enter()).ok()), check);
        });
    }
}
