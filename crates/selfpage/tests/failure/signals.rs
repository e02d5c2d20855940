//! Signals: the program's own faults, its handlers, and system calls on absent pages.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::SeqCst};

use selfpage::dirty::{DirtyTracker, Mechanism};
use selfpage::protection::ProtectionDomain;
use selfpage::store::MemoryStore;
use selfpage::{Domain, FileAccess, Region, Trap};

use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages, sevens};
use crate::tried;

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

fn four_times_the_frames(trap: Trap) -> (Domain, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let mut region = domain.region(4 * FRAMES * PAGE).trap(trap).stored(MemoryStore::new(1 << 30).unwrap()).unwrap();
    number_pages(&mut region);
    (domain, region)
}

/// read(2) into the absent page 0: it works where the kernel's faults can be served; else it is `EFAULT`, and works with the
/// page pinned.
pub fn read_into_absent(domain: &Domain, trap: Trap, region: &Region) {
    let (pipe, _write) = sevens();
    check_pages(region, pages(region) / 2..pages(region));
    let _ = region.evict(0, PAGE);
    assert_eq!(region.residency()[0].load(SeqCst), 0);
    let read = |region: &Region| {
        // SAFETY: test: the kernel writes into the region.
        let count = unsafe { libc::read(pipe.as_raw_fd(), region.as_ptr().cast(), PAGE) };
        if count < 0 { Err(std::io::Error::last_os_error().raw_os_error().unwrap()) } else { Ok(count as usize) }
    };
    let served = domain.serves_system_calls() && trap == Trap::Worker;
    match read(region) {
        Ok(count) => assert!(served && count == PAGE, "{count}"),
        Err(errno) => {
            assert!(!served && errno == libc::EFAULT, "{errno}");
            region.pin(0, PAGE).unwrap();
            assert_eq!(read(region), Ok(PAGE));
            region.unpin(0, PAGE).unwrap();
        }
    }
    check_pages(region, 1..pages(region));
    assert!(region.as_slice::<u8>()[..PAGE].iter().all(|byte| *byte == 7));
}

#[test]
fn system_calls_on_absent_pages() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, region) = four_times_the_frames(trap);
            read_into_absent(&domain, trap, &region);
        })
        .well();
    }
}

#[test]
fn a_null_pointer_is_still_the_programs_own() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, _region) = four_times_the_frames(trap);
            std::thread::spawn(|| {
                // SAFETY: test: there is nothing there.
                unsafe { std::hint::black_box(std::ptr::without_provenance::<u64>(8)).read_volatile() }
            })
            .join()
            .ok();
        })
        .by(libc::SIGSEGV, &[]);
    }
}

#[test]
fn a_file_of_the_programs_own_that_was_cut_is_its_own_sigbus() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, _region) = four_times_the_frames(trap);
            let file = tempfile::tempfile().unwrap();
            file.set_len(PAGE as u64).unwrap();
            // SAFETY: test: a mapping of its own, whose file is then cut.
            unsafe {
                let at = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
                file.set_len(0).unwrap();
                at.cast::<u64>().read_volatile();
            }
        })
        .by(libc::SIGBUS, &[]);
    }
}

/// A region over a file of ones that may not be written.
fn read_only(domain: &Domain, trap: Trap) -> Region {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    std::fs::write(file.path(), vec![1; 4 * FRAMES * PAGE]).unwrap();
    domain.region(0).trap(trap).file(file.path(), 0, FileAccess::Read).unwrap()
}

fn poke(region: &Region, page: usize) {
    // SAFETY: test: it must not be allowed.
    unsafe { region.as_ptr().add(page * PAGE).write_volatile(2) };
}

#[test]
fn writing_what_may_only_be_read() {
    for (trap, name) in TRAPS {
        for resident in [false, true] {
            in_child(here!(), &format!("{name}-{resident}"), || {
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let region = read_only(&domain, trap);
                if resident {
                    assert_eq!(region.as_slice::<u8>()[0], 1);
                }
                poke(&region, 0);
            })
            .by(libc::SIGSEGV, &[]);
        }
    }
}

static SEEN: AtomicU64 = AtomicU64::new(0);
static CODE: AtomicU64 = AtomicU64::new(0);
static AT: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn allow(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    SEEN.fetch_add(1, SeqCst);
    // SAFETY: test: the kernel's own, and a mapping in place of the page: the program's answer to its fault.
    unsafe {
        CODE.store((*info).si_code as u64, SeqCst);
        let at = (*info).si_addr();
        AT.store(at.cast(), SeqCst);
        let page = at.map_addr(|at| at & !(PAGE - 1));
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        libc::mmap(page, PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
    }
}

fn handle(signal: libc::c_int, handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void)) {
    // SAFETY: test: installs a handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
    }
}

#[test]
fn a_program_that_answers_its_own_sigsegv() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = read_only(&domain, trap);
            handle(libc::SIGSEGV, allow);
            for page in [3, 100] {
                assert_eq!(region.as_slice::<u8>()[0], 1);
                poke(&region, page);
                assert_eq!(AT.load(SeqCst), region.as_ptr().wrapping_add(page * PAGE));
                assert_eq!(CODE.load(SeqCst), 2, "SEGV_ACCERR");
                // SAFETY: test: memory that the handler put there.
                assert_eq!(unsafe { region.as_ptr().add(page * PAGE).read_volatile() }, 2);
            }
            assert_eq!(SEEN.load(SeqCst), 2);
            assert!(
                region
                    .as_slice::<[u8; PAGE]>()
                    .iter()
                    .enumerate()
                    .all(|(at, page)| at == 3 || at == 100 || page[0] == 1)
            );
        })
        .well();
    }
}

/// Says so, and has the access tried again, as crash reporters do that are to be called once.
extern "C" fn say_once(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let call = SEEN.fetch_add(1, SeqCst);
    eprintln!("call {call}");
    if call > 0 {
        // SAFETY: test: ends the process, and not by a signal.
        unsafe { libc::_exit(1) };
    }
}

fn handle_once(signal: libc::c_int) {
    // SAFETY: test: installs a handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = say_once as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESETHAND;
        assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
    }
}

#[test]
fn a_handler_that_is_to_be_called_once_is() {
    for signal in [libc::SIGBUS, libc::SIGSEGV] {
        in_child(here!(), &format!("{signal}"), || {
            handle_once(signal);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let (file, path) = tempfile::NamedTempFile::new_in("/var/tmp").unwrap().into_parts();
            file.set_len(4 * PAGE as u64).unwrap();
            let region = domain.region(0).trap(Trap::Upcall).file(&path, 0, FileAccess::ReadWrite).unwrap();
            // Gone before the end that comes.
            drop(path);
            if signal == libc::SIGBUS {
                file.set_len(0).unwrap();
            } else {
                region.protect(0, PAGE, selfpage::Protection::Read).unwrap();
            }
            poke(&region, 0);
        })
        .by(signal, &["call 0"]);
    }
}

#[repr(align(4096))]
struct Page([u8; PAGE]);

#[test]
fn a_handler_that_is_to_be_called_once_is_behind_one_of_ours() {
    for ours in ["tracker", "protection"] {
        in_child(here!(), ours, || {
            handle_once(libc::SIGSEGV);
            let page = Box::new(Page([0; PAGE]));
            let start = page.0.as_ptr().addr();
            match ours {
                // SAFETY: test: a page that nobody else has, and that is not freed before the end.
                "tracker" => unsafe { DirtyTracker::with(Mechanism::Traps).unwrap().arm(start..start + PAGE).unwrap() },
                _ => drop(ProtectionDomain::new("one")),
            }
            // SAFETY: test: there is nothing there.
            unsafe { std::hint::black_box(std::ptr::without_provenance_mut::<u64>(8)).write_volatile(1) };
        })
        .by(libc::SIGSEGV, &["call 0"]);
    }
}

#[test]
fn an_access_that_is_refused_ends_a_thread_that_blocks_the_signal_for_it() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = domain.region(PAGE).trap(trap).zero().unwrap();
            region.protect(0, PAGE, selfpage::Protection::Read).unwrap();
            // SAFETY: test: this thread's own mask.
            unsafe {
                let mut mask: libc::sigset_t = std::mem::zeroed();
                libc::sigaddset(&mut mask, libc::SIGSEGV);
                assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &mask, std::ptr::null_mut()), 0);
            }
            poke(&region, 0);
        })
        .by(libc::SIGSEGV, &[]);
    }
}

/// A worker serves it; an upcall cannot come, and the kernel ends the process.
#[test]
fn an_absent_page_and_sigbus_blocked() {
    for (trap, name) in TRAPS {
        let ended = in_child(here!(), name, || {
            let (_domain, region) = four_times_the_frames(trap);
            // SAFETY: test: this thread's own mask.
            unsafe {
                let mut mask: libc::sigset_t = std::mem::zeroed();
                libc::sigaddset(&mut mask, libc::SIGBUS);
                assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &mask, std::ptr::null_mut()), 0);
            }
            check_pages(&region, 0..pages(&region));
        });
        match trap {
            Trap::Upcall => ended.by(libc::SIGBUS, &[]),
            _ => ended.well(),
        }
    }
}

/// The kernel begins a handler by writing to its stack: a fault of its own, for which no upcall can come.
#[test]
fn an_alternate_stack_on_absent_pages() {
    for (trap, name) in TRAPS {
        let ended = in_child(here!(), name, || {
            let (domain, region) = four_times_the_frames(trap);
            MANAGED.store(region.as_ptr().cast(), SeqCst);
            handle(libc::SIGUSR1, sum_managed);
            let room = domain.region(16 * PAGE).trap(trap).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
            if trap == Trap::Worker && !domain.serves_system_calls() {
                // As an upcall.
                // SAFETY: test: what the parent waits for otherwise.
                unsafe { libc::_exit(0) };
            }
            let stack = libc::stack_t { ss_sp: room.as_ptr().cast(), ss_flags: 0, ss_size: room.len_bytes() };
            // SAFETY: test: a stack that nothing else uses, and a signal for this thread.
            unsafe {
                assert_eq!(libc::sigaltstack(&stack, std::ptr::null_mut()), 0);
                assert_eq!(libc::raise(libc::SIGUSR1), 0);
            }
            assert_eq!(SEEN.load(SeqCst), 1);
            check_pages(&region, 0..pages(&region));
        });
        match trap {
            Trap::Upcall => ended.by(libc::SIGSEGV, &[]),
            _ => ended.well(),
        }
    }
}

#[test]
fn a_page_that_may_only_be_read_can_be_read_after_a_write_failed() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = read_only(&domain, trap);
            for page in [0, 1, 0, 1] {
                let at = region.as_ptr().wrapping_add(page * PAGE).cast();
                assert_eq!(tried::write(at, 2), Err(libc::SIGSEGV));
                assert_eq!(tried::read(at), Ok(0x0101_0101_0101_0101));
                // Everything else comes and goes.
                assert!(region.as_slice::<u8>().iter().all(|byte| *byte == 1));
            }
        })
        .well();
    }
}

static MANAGED: AtomicPtr<[u64; 512]> = AtomicPtr::new(std::ptr::null_mut());

/// Reads managed memory, a quarter of it far from what was read last.
extern "C" fn sum_managed(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let turn = SEEN.fetch_add(1, SeqCst) as usize;
    let first = MANAGED.load(SeqCst);
    for step in 0..4 {
        let index = (turn * 37 + step * FRAMES) % (4 * FRAMES);
        // SAFETY: test: a page of the region.
        let word = unsafe { (&raw const (*first.add(index))[0]).read_volatile() };
        assert_eq!(word, index as u64 + 1);
    }
}

#[test]
fn a_storm_of_signals_whose_handler_faults() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, region) = four_times_the_frames(trap);
            MANAGED.store(region.as_ptr().cast(), SeqCst);
            handle(libc::SIGUSR1, sum_managed);
            let stop = AtomicBool::new(false);
            let read: [AtomicUsize; 2] = Default::default();
            std::thread::scope(|scope| {
                let targets: Vec<_> = read
                    .iter()
                    .map(|read| {
                        let (send, receive) = std::sync::mpsc::channel();
                        let (region, stop) = (&region, &stop);
                        scope.spawn(move || {
                            // SAFETY: test: this thread's own name.
                            send.send(unsafe { libc::pthread_self() }).unwrap();
                            for _ in 0..30 {
                                for page in 0..pages(region) {
                                    check_pages(region, page..page + 1);
                                    read.fetch_add(1, SeqCst);
                                }
                            }
                            stop.store(true, SeqCst);
                            // It must be here as long as it is sent signals.
                            while SEEN.load(SeqCst) < 1000 {
                                std::thread::sleep(std::time::Duration::from_millis(1));
                            }
                            std::thread::sleep(std::time::Duration::from_millis(100));
                        });
                        receive.recv().unwrap()
                    })
                    .collect();
                let mut sent_at = [usize::MAX; 2];
                while !stop.load(SeqCst) || SEEN.load(SeqCst) < 1000 {
                    for ((target, read), sent_at) in targets.iter().zip(&read).zip(&mut sent_at) {
                        // On a busy machine a handler may take longer than the time to the next signal: the thread must get on.
                        let now = read.load(SeqCst);
                        if now != *sent_at || stop.load(SeqCst) {
                            *sent_at = now;
                            // SAFETY: test: the thread lives until the scope's end.
                            unsafe { libc::pthread_kill(*target, libc::SIGUSR1) };
                        }
                    }
                    std::thread::sleep(std::time::Duration::from_micros(200));
                }
            });
            println!("{} signals, {:?}", SEEN.load(SeqCst), domain.stats());
        })
        .well();
    }
}

/// Reads managed memory that may have been discarded.
extern "C" fn look_at_managed(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let turn = SEEN.load(SeqCst) as usize;
    for step in 0..4 {
        let index = (turn * 37 + step * 5) % FRAMES;
        // SAFETY: test: a page of the region.
        let word = unsafe { (&raw const (*MANAGED.load(SeqCst).add(index))[0]).read_volatile() };
        assert!(word == 0 || word == index as u64 + 1, "page {index}: {word}");
    }
    SEEN.fetch_add(1, SeqCst);
}

/// One of each call that works on pages, over those that the handler reads.
fn every_call(domain: &Domain, region: &mut Region, turn: usize) {
    let at = turn % (FRAMES / 4) * 4 * PAGE;
    region.prefetch(at, 4 * PAGE).unwrap();
    let _ = region.evict(at, 4 * PAGE);
    region.pin(at, 4 * PAGE).unwrap();
    region.unpin(at, 4 * PAGE).unwrap();
    region.discard(at, 4 * PAGE).unwrap();
    if turn.is_multiple_of(8) {
        domain.remove_frames(8).unwrap();
        domain.add_frames(8).unwrap();
        number_pages(&mut domain.region(8 * PAGE).zero().unwrap());
    }
}

#[test]
fn a_storm_of_signals_into_calls_of_the_library() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, mut region) = four_times_the_frames(trap);
            MANAGED.store(region.as_ptr().cast(), SeqCst);
            handle(libc::SIGUSR1, look_at_managed);
            // SAFETY: test: this thread's own name.
            let target = unsafe { libc::pthread_self() };
            let (stop, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut sent, mut sent_at) = (0, usize::MAX);
                    while !stop.load(SeqCst) {
                        let now = turns.load(SeqCst);
                        // A few in each turn, one after the other, and never so many that the calls do not get on.
                        if SEEN.load(SeqCst) == sent && (sent_at != now || sent % 4 != 0) {
                            (sent, sent_at) = (sent + 1, now);
                            // SAFETY: test: the thread lives until the scope's end.
                            unsafe { libc::pthread_kill(target, libc::SIGUSR1) };
                        }
                        std::thread::yield_now();
                    }
                });
                while SEEN.load(SeqCst) < 2000 || turns.load(SeqCst) < 500 {
                    every_call(&domain, &mut region, turns.fetch_add(1, SeqCst));
                }
                stop.store(true, SeqCst);
            });
            println!("{} signals in {} turns", SEEN.load(SeqCst), turns.load(SeqCst));
        })
        .well();
    }
}

extern "C" fn sum_and_allow(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    for _ in 0..10 {
        sum_managed(signal, info, context);
    }
    allow(signal, info, context);
}

#[test]
fn a_handler_of_faults_that_faults() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            // Before the domain, as a program would have it: ours hands on what is not ours.
            handle(libc::SIGBUS, sum_and_allow);
            handle(libc::SIGSEGV, sum_and_allow);
            let (_domain, region) = four_times_the_frames(trap);
            MANAGED.store(region.as_ptr().cast(), SeqCst);
            let file = tempfile::tempfile().unwrap();
            file.set_len(PAGE as u64).unwrap();
            // SAFETY: test: a mapping of its own, whose file is cut; the handler puts memory there.
            unsafe {
                let shared =
                    libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
                file.set_len(0).unwrap();
                assert_eq!(shared.cast::<u64>().read_volatile(), 0);
                let none = libc::PROT_NONE;
                let guard =
                    libc::mmap(std::ptr::null_mut(), PAGE, none, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
                assert_eq!(guard.cast::<u64>().read_volatile(), 0);
            }
            assert_eq!(SEEN.load(SeqCst), 22);
            check_pages(&region, 0..pages(&region));
        })
        .well();
    }
}

unsafe extern "C" {
    fn getauxval(kind: libc::c_ulong) -> libc::c_ulong;
}

#[test]
fn a_small_alternate_stack() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = four_times_the_frames(trap);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // SAFETY: test: a stack of the least size, with a page below it that may not be touched.
                    unsafe {
                        let least = (getauxval(libc::AT_MINSIGSTKSZ) as usize).max(libc::MINSIGSTKSZ);
                        let len = (least + 2048).next_multiple_of(PAGE);
                        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                        let base = libc::mmap(
                            std::ptr::null_mut(),
                            len + PAGE,
                            libc::PROT_READ | libc::PROT_WRITE,
                            flags,
                            -1,
                            0,
                        );
                        libc::mprotect(base, PAGE, libc::PROT_NONE);
                        let top = base.byte_add(PAGE + len - (least + 2048));
                        let stack = libc::stack_t { ss_sp: top, ss_flags: 0, ss_size: least + 2048 };
                        assert_eq!(libc::sigaltstack(&stack, std::ptr::null_mut()), 0);
                    }
                    for _ in 0..3 {
                        check_pages(&region, 0..pages(&region));
                    }
                });
            });
        })
        .well();
    }
}

#[test]
fn no_alternate_stack_and_little_stack() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = four_times_the_frames(trap);
            std::thread::scope(|scope| {
                let thread = std::thread::Builder::new().stack_size(64 << 10);
                let run = || {
                    let none = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
                    // SAFETY: test: this thread's handlers run on its own stack from here on.
                    assert_eq!(unsafe { libc::sigaltstack(&none, std::ptr::null_mut()) }, 0);
                    for _ in 0..3 {
                        check_pages(&region, 0..pages(&region));
                    }
                };
                thread.spawn_scoped(scope, run).unwrap();
            });
        })
        .well();
    }
}

/// Has the page end in the kernel's "hardware lost it", through whichever userfaultfd of this process it belongs to.
fn poison(at: *mut u8) -> bool {
    const UFFDIO_POISON: libc::c_ulong = 0xc020_aa08;
    // SAFETY: test: memory of the region, and requests that others than a userfaultfd of the region refuse.
    unsafe { libc::madvise(at.cast(), PAGE, libc::MADV_DONTNEED) };
    std::fs::read_dir("/proc/self/fd").unwrap().flatten().any(|entry| {
        let fd: libc::c_int = entry.file_name().to_str().unwrap().parse().unwrap();
        let mut argument = [at.addr() as u64, PAGE as u64, 0, 0];
        // SAFETY: test: as above.
        unsafe { libc::ioctl(fd, UFFDIO_POISON, argument.as_mut_ptr()) == 0 }
    })
}

#[test]
fn a_page_that_the_hardware_lost() {
    // In a worker region the kernel tells the program without us.
    in_child(here!(), "upcall", || {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        if !meminfo.contains("HardwareCorrupted") {
            // Such a kernel tells it like any other fault, and never has one.
            crate::skip::skip("hwpoison", "the kernel was built without CONFIG_MEMORY_FAILURE");
            // SAFETY: test: what the parent waits for.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        let (_domain, region) = four_times_the_frames(Trap::Upcall);
        assert_eq!(region.as_slice::<u64>()[0], 1);
        assert!(poison(region.as_ptr()), "no userfaultfd of ours has the region");
        println!("read {}", region.as_slice::<u64>()[0]);
    })
    .by_one_of(&[libc::SIGBUS, libc::SIGKILL], &[]);
}
