//! Forks in the middle of what the library does: by a handler of a signal, and by the program's own code on a pager thread.

use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use selfpage::alloc::GrowVec;
use selfpage::pager::{Context, PagerError, UserPager};
use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{Domain, Policy, Use};
use selfpage_core::addr::{Frame, PageBytes, PageNo};

use crate::child::{FORKS, IS_CHILD, fork, fork_here};
use crate::over_memory::over_memory;
use crate::places::{map_own, probe};
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages};

const FRAMES: usize = 64;
const ROUNDS: u32 = 100;

/// Rounds that have begun, and those whose signal was sent.
static BEGUN: AtomicU32 = AtomicU32::new(0);
static SENT: AtomicU32 = AtomicU32::new(0);

fn let_in(how: libc::c_int) {
    // SAFETY: test: a set of its own.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGUSR1);
        assert_eq!(libc::pthread_sigmask(how, &set, std::ptr::null_mut()), 0);
    }
}

/// Does `work`, with a handler let in that forks.
fn let_fork<T>(work: impl FnOnce() -> T) -> T {
    BEGUN.fetch_add(1, SeqCst);
    let_in(libc::SIG_UNBLOCK);
    let done = work();
    if IS_CHILD.load(SeqCst) {
        // SAFETY: test: ends the child.
        unsafe { libc::_exit(0) };
    }
    let_in(libc::SIG_BLOCK);
    done
}

/// Does each round of `work`, which calls [`let_fork`] once, while another thread sends the signal some time after it has begun.
fn forking(mut work: impl FnMut()) {
    let_in(libc::SIG_BLOCK);
    // SAFETY: test: a handler for a signal that nobody else uses, and this thread's own name.
    let own = unsafe {
        libc::signal(libc::SIGUSR1, fork_here as *const () as libc::sighandler_t);
        libc::pthread_self()
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for round in 0..ROUNDS {
                while BEGUN.load(SeqCst) <= round {
                    std::hint::spin_loop();
                }
                std::thread::sleep(Duration::from_micros(u64::from(round) * 37 % 1000));
                // SAFETY: test: the thread lives until the scope's end.
                unsafe { libc::pthread_kill(own, libc::SIGUSR1) };
                SENT.fetch_add(1, SeqCst);
            }
        });
        for round in 0..ROUNDS {
            work();
            // The other thread may get no CPU for some time.
            while SENT.load(SeqCst) <= round {
                std::thread::yield_now();
            }
        }
    });
    // The last may come late.
    let_in(libc::SIG_UNBLOCK);
    // Of signals that wait the kernel keeps one.
    assert!(FORKS.load(SeqCst) > ROUNDS / 4, "{FORKS:?} forks");
}

#[test]
fn a_handler_forks_while_a_domain_is_made() {
    in_child(here!(), "", || {
        let _attended = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        forking(|| {
            let config = Domain::with_frames(FRAMES * PAGE);
            drop(let_fork(|| config.build()).unwrap());
        });
    })
    .well();
}

#[test]
fn a_handler_forks_while_a_domain_ends() {
    in_child(here!(), "", || {
        let _attended = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        forking(|| {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let_fork(|| drop(domain));
        });
    })
    .well();
}

#[test]
fn a_handler_forks_while_a_region_is_looked_through() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = MemoryStore::new(1 << 22).unwrap();
        let region = domain.region(1 << 30).stored(store).unwrap();
        forking(|| assert_eq!(let_fork(|| region.first_held(0, 1 << 30)).unwrap(), None));
    })
    .well();
}

#[test]
fn a_handler_forks_while_a_trace_is_flushed() {
    in_child(here!(), "", || {
        let place = tempfile::tempdir().unwrap();
        let domain = Domain::with_frames(FRAMES * PAGE).trace(place.path().join("trace"), Duration::ZERO);
        let domain = domain.build().unwrap();
        forking(|| let_fork(|| domain.flush_trace()));
    })
    .well();
}

/// A store that raises a signal when a region is asked which descriptors it has: where it joins its domain, and where it leaves that.
struct Raising {
    store: MemoryStore,
    is_armed: AtomicBool,
}

impl Raising {
    fn new() -> Arc<Raising> {
        Arc::new(Raising { store: MemoryStore::new(1 << 20).unwrap(), is_armed: AtomicBool::new(false) })
    }

    /// Does `work` with a handler for the signal.
    fn raise_in<T>(&self, handler: extern "C" fn(libc::c_int), work: impl FnOnce() -> T) -> T {
        // SAFETY: test: a handler for a signal that nobody else uses.
        unsafe { libc::signal(libc::SIGUSR1, handler as *const () as libc::sighandler_t) };
        self.is_armed.store(true, SeqCst);
        work()
    }
}

impl BackingStore for Raising {
    over_memory!(store: claim, release, reads_in_trap, read, write);

    fn descriptors(&self) -> Vec<RawFd> {
        if self.is_armed.swap(false, SeqCst) {
            // SAFETY: test: the handler calls what a handler may.
            unsafe { libc::raise(libc::SIGUSR1) };
        }
        Vec::new()
    }
}

/// Does `work`, in the middle of which a child is forked that does the rest of it as well.
fn and_in_a_child(work: impl FnOnce()) {
    let done = catch_unwind(AssertUnwindSafe(work));
    if IS_CHILD.load(SeqCst) {
        // SAFETY: test: ends the child, of which a panic would end this thread alone.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    done.unwrap();
    assert_eq!(FORKS.load(SeqCst), 1);
}

/// Its handler comes when the region has its addresses, and is in no list.
#[test]
fn a_handler_forks_while_a_region_is_made() {
    for case in ["new", "clone"] {
        let make = || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut source = domain.region(16 * PAGE).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
            number_pages(&mut source);
            let store = Raising::new();
            let made = store.raise_in(fork_here, || match case {
                "clone" => source.cow_clone(store.clone()),
                _ => domain.region(16 * PAGE).stored_in(store.clone()),
            });
            let mut region = made.unwrap();
            if case == "new" {
                number_pages(&mut region);
            }
            check_pages(&region, 0..16);
            region.evict(0, 16 * PAGE).unwrap();
            check_pages(&region, 0..16);
        };
        in_child(here!(), case, || and_in_a_child(make)).well();
    }
}

/// Where a region was whose handle is dropped.
static PLACE: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn fork_and_map(signal: libc::c_int) {
    fork_here(signal);
    if IS_CHILD.load(SeqCst) {
        map_own(PLACE.load(SeqCst));
    }
}

#[test]
fn a_child_that_was_forked_as_a_region_left_keeps_what_it_maps_there() {
    let leave = || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = Raising::new();
        let mut region = domain.region(16 * PAGE).stored_in(store.clone()).unwrap();
        number_pages(&mut region);
        let place = region.as_ptr();
        PLACE.store(place, SeqCst);
        store.raise_in(fork_and_map, || drop(region));
        assert_eq!(probe(place.addr()), IS_CHILD.load(SeqCst).then_some(7));
    };
    in_child(here!(), "", || and_in_a_child(leave)).well();
}

/// A program of its own, by a fork: what is to be done in between is no affair of posix_spawn's.
fn run_true() -> io::Result<()> {
    let mut command = Command::new("/bin/true");
    // SAFETY: test: it does nothing.
    unsafe { command.pre_exec(|| Ok(())) };
    command.status().map(drop)
}

struct Runs;

impl UserPager for Runs {
    fn fill(&self, _: u64, _: &mut PageBytes) -> io::Result<()> {
        run_true()
    }
    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

impl Policy for Runs {
    fn admitted(&mut self, _: Frame, _: PageNo, _: u8, _: Use) {}
    fn victim(&mut self) -> Option<Frame> {
        run_true().ok()?;
        None
    }
}

#[test]
fn a_pager_that_forks_is_told() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        println!("{}", domain.region(PAGE).user(Runs).unwrap().as_slice::<u8>()[0]);
    })
    .by(libc::SIGABRT, &["forked on a pager thread"]);
}

#[test]
fn a_policy_that_forks_is_told() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).own_policy(Box::new(Runs)).build().unwrap();
        number_pages(&mut domain.region(4 * FRAMES * PAGE).stored(MemoryStore::new(1 << 22).unwrap()).unwrap());
    })
    .by(libc::SIGABRT, &["forked on a pager thread"]);
}

/// Numbers, each of them by way of a vector.
struct Grows;

impl UserPager for Grows {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        let mut vec = GrowVec::with_capacity(256 * PAGE);
        vec.extend_from_slice(&(index + 1).to_ne_bytes());
        bytes[..8].copy_from_slice(&vec);
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

/// The fork waits for the pager, which waits for the allocator: nobody may have that already.
#[test]
fn a_pager_grows_vectors_beside_forks() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let region = domain.region(4 * FRAMES * PAGE).user(Grows).unwrap();
        let is_right = |page: usize| region.as_slice::<[u64; 512]>()[page][0] == page as u64 + 1;
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(SeqCst) {
                    assert!((0..4 * FRAMES).all(is_right));
                }
            });
            let failed = (0..ROUNDS).map(|_| fork(|| is_right(0)).wait()).find(|ended| *ended != 0);
            ends.store(true, SeqCst);
            assert_eq!(failed, None, "how the child ended");
        });
    })
    .well();
}
