//! Code of the program's own, on a pager thread or in a trap, that touches managed memory: the process ends, and does not hang.

use std::io;
use std::sync::{Arc, Barrier, OnceLock};
use std::time::Duration;

use selfpage::pager::UserPager;
use selfpage::store::MemoryStore;
use selfpage::{Answer, Domain, FaultHandler, MemoryFault, PageBytes, PageNo, Policy, Region, Trap, Use};
use selfpage_core::addr::Frame;
use selfpage_core::pager::{Context, FillPage, Pager, PagerError};

use crate::scenario::{PAGE, here, in_child, number_pages};

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];
const EPITAPH: &str = "selfpage: a pager thread touched managed memory";

/// Where there is a page that nobody has touched yet.
type Place = Arc<OnceLock<usize>>;

fn touch(place: &Place) {
    if let Some(at) = place.get() {
        // SAFETY: test: a word of a region, which must not be touched here.
        unsafe { std::ptr::with_exposed_provenance::<u64>(*at).read_volatile() };
    }
}

/// A region whose pages are absent, and its first page's place.
fn absent(domain: &Domain, trap: Trap, place: &Place) -> Region {
    let region = domain.region(PAGE).trap(trap).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
    place.set(region.as_ptr().expose_provenance()).unwrap();
    region
}

struct Touching(Place);

impl Policy for Touching {
    fn admitted(&mut self, _: Frame, _: PageNo, _: u8, _: Use) {}
    fn victim(&mut self) -> Option<Frame> {
        touch(&self.0);
        None
    }
}

impl UserPager for Touching {
    fn fill(&self, _: u64, _: &mut PageBytes) -> io::Result<()> {
        touch(&self.0);
        Ok(())
    }
    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

impl Pager for Touching {
    fn fills_in(&self) -> Context {
        Context::Trap
    }
    fn extent(&self, _: u64, _: u32) -> u32 {
        1
    }
    fn fill(&self, _: Context, _: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        touch(&self.0);
        Ok(PAGE as u64)
    }
    fn forget(&self, _: u64, _: u64) {}
}

/// What the process says, and by what it ends: a pager thread has all signals blocked, so an upcall cannot reach it.
fn end(trap: Trap) -> (libc::c_int, &'static [&'static str]) {
    match trap {
        Trap::Upcall => (libc::SIGBUS, &[]),
        _ => (libc::SIGABRT, &[EPITAPH]),
    }
}

#[test]
fn a_policy_that_touches_managed_memory() {
    for (trap, name) in TRAPS {
        let (signal, words) = end(trap);
        in_child(here!(), name, || {
            let place = Place::default();
            let policy = Touching(place.clone());
            let domain = Domain::with_frames(FRAMES * PAGE).own_policy(Box::new(policy)).build().unwrap();
            let _touched = absent(&domain, trap, &place);
            let store = MemoryStore::new(1 << 26).unwrap();
            number_pages(&mut domain.region(4 * FRAMES * PAGE).stored(store).unwrap());
        })
        .by(signal, words);
    }
}

/// Whichever thread fills, and whosever memory it is.
#[test]
fn a_pager_that_touches_managed_memory() {
    for (trap, name) in TRAPS {
        for other in [false, true] {
            let (signal, words) = end(trap);
            in_child(here!(), &format!("{name}-{other}"), || {
                let place = Place::default();
                let domain = Domain::with_frames(FRAMES * PAGE).workers(2).build().unwrap();
                let neighbour = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let _touched = absent(if other { &neighbour } else { &domain }, trap, &place);
                let region = domain.region(FRAMES * PAGE).user(Touching(place)).unwrap();
                println!("read {}", region.as_slice::<u64>()[0]);
            })
            .by(signal, words);
        }
    }
}

/// Waits until so many of them fill at once.
struct Together(Barrier, Place);

impl Pager for Together {
    fn fills_in(&self) -> Context {
        Context::PagerThread
    }
    fn extent(&self, _: u64, _: u32) -> u32 {
        1
    }
    fn fill(&self, _: Context, _: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        self.0.wait();
        touch(&self.1);
        Ok(PAGE as u64)
    }
    fn forget(&self, _: u64, _: u64) {}
}

/// Whoever waits for the page cannot say so.
#[test]
fn all_workers_touch_managed_memory() {
    for workers in [1, 2, 4] {
        in_child(here!(), &format!("{workers}"), || {
            let place = Place::default();
            // So few that a fault fetches its page alone: whoever fetched another's with it would leave the barrier one short.
            let domain = Domain::with_frames(FRAMES / 2 * PAGE).workers(workers as u32).build().unwrap();
            let _touched = absent(&domain, Trap::Worker, &place);
            let pager = Together(Barrier::new(workers), place);
            let region = domain.region(FRAMES * PAGE).pager(Box::new(pager)).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..workers {
                    let region = &region;
                    scope.spawn(move || std::hint::black_box(region.as_slice::<[u64; 512]>()[thread][0]));
                }
            });
        })
        .by(libc::SIGABRT, &[EPITAPH]);
    }
}

/// Takes its time; a page holds its number.
struct Slow;

impl UserPager for Slow {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        std::thread::sleep(Duration::from_millis(5));
        bytes[..8].copy_from_slice(&index.to_ne_bytes());
        Ok(())
    }
    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

/// What a worker leaves to others, so as to read the next one, they do.
#[test]
fn more_faults_than_workers() {
    for workers in [1, 2] {
        in_child(here!(), &format!("{workers}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).workers(workers).build().unwrap();
            let region = domain.region(FRAMES * PAGE).user(Slow).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..8 {
                    let region = &region;
                    scope.spawn(move || {
                        for page in (0..FRAMES).map(|page| (page * 5 + thread * 7) % FRAMES) {
                            assert_eq!(region.as_slice::<[u64; 512]>()[page][0], page as u64);
                        }
                    });
                }
            });
        })
        .well();
    }
}

/// Has nothing to say.
struct Passes;

impl FaultHandler for Passes {
    fn handle(&self, _: &MemoryFault<'_>) -> Answer {
        Answer::Pass
    }
}

/// The thread has `SIGBUS` blocked while it resolves its fault, unless a handler of faults may be called for it.
#[test]
fn a_pager_that_touches_managed_memory_in_a_trap() {
    for handlers in [false, true] {
        let (signal, words): (_, &[&str]) =
            if handlers { (libc::SIGABRT, &["selfpage: in a trap, code of a pager"]) } else { (libc::SIGBUS, &[]) };
        in_child(here!(), &format!("{handlers}"), || {
            let place = Place::default();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = domain.region(FRAMES * PAGE).trap(Trap::Upcall);
            let region = if handlers { region.handler(Passes) } else { region };
            let region = region.pager(Box::new(Touching(place.clone()))).unwrap();
            // From its first trap on a thread has a stack of ours for those that may call handlers.
            println!("read {}", region.as_slice::<u64>()[0]);
            let _touched = absent(&domain, Trap::Upcall, &place);
            println!("read {}", region.as_slice::<u64>()[512]);
        })
        .by(signal, words);
    }
}
