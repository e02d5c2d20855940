//! Policies, pagers and stores of the program's own that lie, panic, fail or take their time.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use selfpage::pager::{Context, PagerError, UserPager};
use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{DescriptorTable, Domain, Failure, Kind, Policy, Region, Trap, Use};
use selfpage_core::addr::{Frame, PageBytes, PageNo};

use crate::over_memory::over_memory;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, number_what_fits, pages, until};
use crate::tried;

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

/// What a policy says when it is asked for a victim.
struct Liar(Lie, u32);

/// From a state of its own.
type Lie = fn(&mut u32) -> Option<u32>;

impl Policy for Liar {
    fn admitted(&mut self, _: Frame, _: PageNo, _: u8, _: Use) {}
    fn victim(&mut self) -> Option<Frame> {
        (self.0)(&mut self.1).map(Frame)
    }
}

fn numbered_under(trap: Trap, liar: Lie) -> (Domain, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).own_policy(Box::new(Liar(liar, 1))).build().unwrap();
    let store = MemoryStore::new(1 << 26).unwrap();
    let mut region = domain.region(4 * FRAMES * PAGE).name("heap").trap(trap).stored(store).unwrap();
    number_pages(&mut region);
    (domain, region)
}

fn next(seed: &mut u32) -> u32 {
    *seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
    *seed >> 8
}

#[test]
fn policies_that_lie_but_help() {
    let liars: [(&str, Lie); 3] = [
        // Mostly nonsense, some of it right by chance.
        ("any", |seed| Some(next(seed) % (4 * FRAMES as u32))),
        // Each frame many times over.
        ("again", |seed| {
            *seed += 1;
            Some(*seed / 8 % FRAMES as u32)
        }),
        // Often nothing at all.
        ("seldom", |seed| next(seed).is_multiple_of(4).then(|| next(seed) % FRAMES as u32)),
    ];
    for (trap, name) in TRAPS {
        for (lie, liar) in liars {
            in_child(here!(), &format!("{name}-{lie}"), || {
                let (domain, region) = numbered_under(trap, liar);
                for _ in 0..3 {
                    check_pages(&region, 0..pages(&region));
                }
                println!("{:?}", domain.stats());
            })
            .well();
        }
    }
}

#[test]
fn policies_that_never_name_a_victim() {
    let liars: [(&str, Lie); 3] =
        [("none", |_| None), ("beyond", |_| Some(u32::MAX)), ("no-frame", |_| Some(FRAMES as u32))];
    for (trap, name) in TRAPS {
        for (lie, liar) in liars {
            in_child(here!(), &format!("{name}-{lie}"), || {
                numbered_under(trap, liar);
            })
            .by(libc::SIGBUS, &["heap", "no frame"]);
        }
    }
}

struct Panics;

impl Policy for Panics {
    fn admitted(&mut self, _: Frame, _: PageNo, _: u8, _: Use) {}
    fn victim(&mut self) -> Option<Frame> {
        panic!("a policy of the program's own")
    }
}

#[test]
fn a_policy_that_panics() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).own_policy(Box::new(Panics)).build().unwrap();
        let mut region = domain.region(4 * FRAMES * PAGE).stored(MemoryStore::new(1 << 26).unwrap()).unwrap();
        number_pages(&mut region);
    })
    .by(libc::SIGABRT, &["a policy of the program's own", "selfpage: a pager thread panicked"]);
}

/// Keeps pages in memory, and fails as told.
#[derive(Default)]
struct Own {
    kept: MapOfPages,
    fails: Arc<Fails>,
}

type MapOfPages = std::sync::Mutex<std::collections::HashMap<u64, Box<PageBytes>>>;

#[derive(Default)]
struct Fails {
    /// Every page of this number, when it is filled: 1 panics, 2 is an error, 3 takes 50 ms, 4 panics twice.
    fill: AtomicU32,
    page: AtomicU64,
    save: AtomicU32,
    busy: AtomicBool,
}

impl Fails {
    fn act(&self, how: u32) -> io::Result<()> {
        match how {
            1 => panic!("a pager of the program's own"),
            2 => Err(io::Error::from_raw_os_error(libc::ENXIO)),
            3 => {
                std::thread::sleep(Duration::from_millis(50));
                Ok(())
            }
            4 => std::panic::panic_any(Twice),
            _ => Ok(()),
        }
    }
}

/// What panics as it is dropped.
struct Twice;

impl Drop for Twice {
    fn drop(&mut self) {
        panic!("once more");
    }
}

impl UserPager for Own {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        assert!(bytes.iter().all(|byte| *byte == 0));
        if let Some(kept) = self.kept.lock().unwrap().get(&index) {
            *bytes = **kept;
        }
        if index == self.fails.page.load(SeqCst) {
            return self.fails.act(self.fails.fill.load(SeqCst));
        }
        Ok(())
    }
    fn save(&self, index: u64, bytes: &PageBytes) -> io::Result<()> {
        self.fails.busy.store(true, SeqCst);
        self.fails.act(self.fails.save.load(SeqCst))?;
        self.kept.lock().unwrap().insert(index, Box::new(*bytes));
        Ok(())
    }
    fn forget(&self, index: u64) {
        self.kept.lock().unwrap().remove(&index);
    }
}

#[test]
fn fills_that_fail() {
    for (trap, name) in TRAPS {
        for (how, words) in [(1, "the pager panicked"), (2, "the pager failed with ENXIO"), (4, "the pager panicked")] {
            in_child(here!(), &format!("{name}-{how}"), || {
                let fails = Arc::<Fails>::default();
                fails.page.store(100, SeqCst);
                fails.fill.store(how, SeqCst);
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let own = Own { fails: fails.clone(), ..Own::default() };
                let mut region = domain.region(4 * FRAMES * PAGE).name("mine").trap(trap).user(own).unwrap();
                number_pages(&mut region);
            })
            .by(libc::SIGBUS, &["region mine at 0x", "offset 409600", words]);
        }
    }
}

#[test]
fn fills_that_fail_and_then_do_not() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let fails = Arc::<Fails>::default();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let own = Own { fails: fails.clone(), ..Own::default() };
            let mut region = domain.region(4 * FRAMES * PAGE).trap(trap).user(own).unwrap();
            number_pages(&mut region);
            fails.page.store(100, SeqCst);
            for how in [1, 2] {
                fails.fill.store(how, SeqCst);
                check_pages(&region, 101..pages(&region));
                check_pages(&region, 0..100);
                let at = region.as_ptr().wrapping_add(100 * PAGE).cast::<u64>();
                // Several threads at the same page: each is told.
                std::thread::scope(|scope| {
                    for _ in 0..4 {
                        let at = at as usize;
                        scope.spawn(move || assert_eq!(tried::read(at as *const u64), Err(libc::SIGBUS)));
                    }
                });
                let error = region.pin(99 * PAGE, 3 * PAGE).unwrap_err();
                assert!(error.to_string().contains("bytes 409600..413696"), "{error}");
                assert_eq!(error.kind(), if how == 1 { Kind::Lost } else { Kind::Io }, "{error}");
                assert!(region.unpin(99 * PAGE, PAGE).is_err(), "nothing of it stayed pinned");
                fails.fill.store(0, SeqCst);
                region.pin(100 * PAGE, PAGE).unwrap();
                region.unpin(100 * PAGE, PAGE).unwrap();
                check_pages(&region, 0..pages(&region));
            }
        })
        .well();
    }
}

/// How many threads have told of a failure, and whether the second may go on.
static TOLD: AtomicU32 = AtomicU32::new(0);
static GOES_ON: AtomicBool = AtomicBool::new(false);

/// The first goes on once another has come, and that one when it may. Others are of threads that have tried again, and nobody else is there
/// to serve what these wait for.
fn tell_late(_: usize, _: Failure) {
    match TOLD.fetch_add(1, SeqCst) {
        0 => until("another has come", || TOLD.load(SeqCst) >= 2),
        1 => until("it may", || GOES_ON.load(SeqCst)),
        _ => {}
    }
}

/// Since then the page was had, and is with its pager again.
#[test]
fn a_failure_that_is_told_of_late_is_not_met_again() {
    in_child(here!(), "worker", || {
        tried::catch();
        let fails = Arc::<Fails>::default();
        let domain = Domain::with_frames(FRAMES * PAGE).workers(2).on_failure(tell_late).build().unwrap();
        let own = Own { fails: fails.clone(), ..Own::default() };
        let mut region = domain.region(4 * FRAMES * PAGE).trap(Trap::Worker).user(own).unwrap();
        number_pages(&mut region);
        fails.page.store(0, SeqCst);
        fails.fill.store(2, SeqCst);
        let at = region.as_ptr() as usize;
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(move || assert_eq!(tried::read(at as *const u64), Err(libc::SIGBUS)));
            }
        });
        assert!(TOLD.load(SeqCst) >= 2);
        fails.fill.store(0, SeqCst);
        region.pin(0, PAGE).unwrap();
        region.unpin(0, PAGE).unwrap();
        // Out of core, and then off the list of those that come back as they are.
        for _ in 0..2 {
            region.evict(0, PAGE).unwrap();
        }
        GOES_ON.store(true, SeqCst);
        std::thread::sleep(Duration::from_millis(100));
        check_pages(&region, 0..pages(&region));
    })
    .well();
}

#[test]
fn saves_that_fail_and_then_do_not() {
    for (trap, name) in TRAPS {
        for how in [1, 2] {
            in_child(here!(), &format!("{name}-{how}"), || {
                let fails = Arc::<Fails>::default();
                fails.page.store(u64::MAX, SeqCst);
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let own = Own { fails: fails.clone(), ..Own::default() };
                let mut region = domain.region(4 * FRAMES * PAGE).trap(trap).user(own).unwrap();
                fails.save.store(how, SeqCst);
                let written = number_what_fits(&mut region);
                assert!(written > FRAMES - 8, "{written}");
                fails.save.store(0, SeqCst);
                number_pages(&mut region);
                check_pages(&region, 0..pages(&region));
            })
            .well();
        }
    }
}

#[test]
fn a_pager_that_takes_its_time() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let fails = Arc::<Fails>::default();
            fails.page.store(3, SeqCst);
            fails.fill.store(3, SeqCst);
            fails.save.store(3, SeqCst);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let own = Own { fails: fails.clone(), ..Own::default() };
            let slow = domain.region(8 * PAGE).trap(trap).user(own).unwrap();
            let store = MemoryStore::new(1 << 26).unwrap();
            let mut quick = domain.region(4 * FRAMES * PAGE).trap(trap).stored(store).unwrap();
            number_pages(&mut quick);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..20 {
                        check_pages(&quick, 0..pages(&quick));
                    }
                });
                for turn in 0..10u64 {
                    // SAFETY: test: a word of the region.
                    unsafe { slow.as_ptr().add(3 * PAGE).cast::<u64>().write_volatile(turn) };
                    let _ = slow.evict(0, 8 * PAGE);
                    // SAFETY: test: a word of the region.
                    assert_eq!(unsafe { slow.as_ptr().add(3 * PAGE).cast::<u64>().read_volatile() }, turn);
                }
            });
            // On a busy machine all of its evictions may have come too early or too late.
            until("a page is saved slowly", || {
                // SAFETY: test: a word of the region.
                unsafe { *slow.as_ptr().add(3 * PAGE).cast::<u64>() += 1 };
                let _ = slow.evict(0, 8 * PAGE);
                fails.busy.load(SeqCst)
            });
        })
        .well();
    }
}

/// Zeros. It reads a number in another domain's memory for each page that is discarded.
struct Curious {
    number: usize,
    seen: Arc<AtomicU64>,
}

impl UserPager for Curious {
    fn fill(&self, _: u64, bytes: &mut PageBytes) -> io::Result<()> {
        bytes.fill(0);
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }

    fn forget(&self, index: u64) {
        // SAFETY: test: a page of a region that outlives this one.
        let number = unsafe { (self.number as *const u64).add(512 * index as usize).read_volatile() };
        self.seen.fetch_add(number, SeqCst);
    }
}

#[test]
fn a_pager_that_touches_another_domain_in_a_call_of_the_program() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let other = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut numbers =
                other.region(4 * FRAMES * PAGE).trap(trap).stored(MemoryStore::new(1 << 26).unwrap()).unwrap();
            number_pages(&mut numbers);
            let seen = Arc::new(AtomicU64::new(0));
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let pager = Curious { number: numbers.as_ptr().addr(), seen: seen.clone() };
            let mut region = domain.region(numbers.len_bytes()).user(pager).unwrap();
            // No handler of the program's may come between, and the faults of the pager's own must all the same.
            region.discard(0, numbers.len_bytes()).unwrap();
            let all = pages(&numbers) as u64;
            assert_eq!(seen.load(SeqCst), all * (all + 1) / 2);
        })
        .well();
    }
}

/// Each of them waits for a pager thread, and is on one.
#[test]
fn pins_of_a_private_domain_at_the_same_time() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(4 * FRAMES * PAGE).descriptor_table(DescriptorTable::Private).build().unwrap();
        let region = domain.region(2 * FRAMES * PAGE).user(Own::default()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let region = &region;
                scope.spawn(move || {
                    for page in (thread..2 * FRAMES).step_by(4) {
                        region.pin(page * PAGE, PAGE).unwrap();
                        region.unpin(page * PAGE, PAGE).unwrap();
                    }
                });
            }
        });
    })
    .well();
}

/// A store of which the call of this name panics, the next time it comes.
struct PanicsIn(MemoryStore, std::sync::Mutex<&'static str>);

impl PanicsIn {
    fn called(&self, name: &str) {
        let mut panics_in = self.1.lock().unwrap();
        if *panics_in == name {
            *panics_in = "";
            drop(panics_in);
            panic!("a store of the program's own");
        }
    }
}

impl BackingStore for PanicsIn {
    over_memory!(0: reads_in_trap);

    fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError> {
        self.called("claim");
        self.0.claim(want)
    }

    fn release(&self, first: Blok, count: u32) {
        self.called("release");
        self.0.release(first, count);
    }

    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        self.called("read");
        self.0.read(context, bloks)
    }

    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        self.called("write");
        self.0.write(bloks);
    }
}

/// Page 0 is with the store, and in no frame, while `then` has the region.
fn over_a_store_that_panics(trap: Trap, then: impl FnOnce(&mut Region, &PanicsIn)) {
    tried::catch();
    let domain = Domain::with_frames(FRAMES * PAGE).descriptor_table(DescriptorTable::Shared).build().unwrap();
    let store = Arc::new(PanicsIn(MemoryStore::new(1 << 26).unwrap(), "".into()));
    let mut region = domain.region(4 * PAGE).name("mine").trap(trap).stored_in(store.clone()).unwrap();
    number_pages(&mut region);
    region.flush(0, 4 * PAGE).unwrap();
    // Out of core, and then off the list of those that come back as they are.
    (0..2).for_each(|_| _ = region.evict(0, PAGE).unwrap());
    then(&mut region, &store);
}

#[test]
fn a_store_that_panics_as_a_page_is_dropped_keeps_a_blok_and_nothing_else() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            over_a_store_that_panics(trap, |region, store| {
                *store.1.lock().unwrap() = "release";
                region.discard(0, PAGE).unwrap();
                assert_eq!(*store.1.lock().unwrap(), "", "it was called");
                assert_eq!(region.as_slice::<u64>()[0], 0);
                check_pages(region, 1..4);
            });
        })
        .well();
    }
}

#[test]
fn a_store_that_panics_as_it_reads_fails_that_access() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            over_a_store_that_panics(trap, |region, store| {
                *store.1.lock().unwrap() = "read";
                let error = region.pin(0, PAGE).unwrap_err();
                assert_eq!(error.kind(), Kind::Lost, "{error}");
                *store.1.lock().unwrap() = "read";
                assert_eq!(tried::read(region.as_ptr().cast()), Err(libc::SIGBUS));
                region.pin(0, PAGE).unwrap();
                region.unpin(0, PAGE).unwrap();
                check_pages(region, 0..4);
            });
        })
        .well();
    }
}

#[test]
fn a_store_that_panics_as_it_saves_leaves_the_page_in_core() {
    for (trap, name) in TRAPS {
        for call in ["claim", "write"] {
            in_child(here!(), &format!("{name}-{call}"), || {
                over_a_store_that_panics(trap, |region, store| {
                    region.as_mut_slice::<u64>()[0] = 7;
                    *store.1.lock().unwrap() = call;
                    let error = region.flush(0, PAGE).unwrap_err();
                    assert_eq!(error.kind(), Kind::Lost, "{error}");
                    region.flush(0, PAGE).unwrap();
                    (0..2).for_each(|_| _ = region.evict(0, PAGE).unwrap());
                    assert_eq!(region.as_slice::<u64>()[0], 7);
                    check_pages(region, 1..4);
                });
            })
            .well();
        }
    }
}
