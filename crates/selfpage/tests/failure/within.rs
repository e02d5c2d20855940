//! Pagers, policies and stores of the program's own that end regions of their domain, make others, and begin samples of it: they are inside
//! the gate that is closed for the first and by a fork, and have claimed a page that the last would wait for.

use std::fmt::Debug;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use selfpage::pager::UserPager;
use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{Domain, Error, Kind, Policy, Region, Sample, Sampling, Trap, Use};
use selfpage_core::addr::{Frame, PageBytes, PageNo};
use selfpage_core::pager::{Context, PagerError};

use crate::child;
use crate::scenario::{PAGE, here, in_child, until};

const FRAMES: usize = 64;

/// Whether it is refused to make something there.
#[track_caller]
fn is_refused<T: Debug>(made: Result<T, Error>) {
    let error = made.unwrap_err();
    assert!(error.kind() == Kind::Invalid && error.to_string().contains("the program's make it"), "{error}");
}

/// Whether it is refused to begin one there.
#[track_caller]
fn has_no_sample(begun: Result<Sample, Error>) {
    let error = begun.unwrap_err();
    assert!(error.kind() == Kind::Invalid && error.to_string().contains("the program's begin it"), "{error}");
}

/// What it does, with a region of the domain that it can drop.
type Within = fn(&Domain, &Mutex<Option<Region>>);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Fill,
    Save,
    Forget,
    Victim,
    Write,
}

/// Does it when it is called so for the second time.
#[derive(Clone)]
struct Does {
    within: Within,
    at: Call,
    called: Arc<AtomicU32>,
    domain: Arc<OnceLock<Domain>>,
    other: Arc<Mutex<Option<Region>>>,
}

impl Does {
    fn called(&self, how: Call) -> u32 {
        let count = if how == self.at { self.called.fetch_add(1, SeqCst) } else { 0 };
        if count == 1 {
            (self.within)(self.domain.get().unwrap(), &self.other);
        }
        count
    }
}

impl UserPager for Does {
    fn fill(&self, _: u64, _: &mut PageBytes) -> io::Result<()> {
        self.called(Call::Fill);
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        self.called(Call::Save);
        Ok(())
    }

    fn forget(&self, _: u64) {
        self.called(Call::Forget);
    }
}

impl Policy for Does {
    fn admitted(&mut self, _: Frame, _: PageNo, _: u8, _: Use) {}

    fn victim(&mut self) -> Option<Frame> {
        Some(Frame(self.called(Call::Victim) % FRAMES as u32))
    }
}

/// Keeps nothing: nobody reads a page twice.
impl BackingStore for Does {
    fn claim(&self, _: u32) -> Result<(Blok, u32), PagerError> {
        Ok((Blok(1), 1))
    }

    fn release(&self, _: Blok, _: u32) {}

    fn reads_in_trap(&self) -> bool {
        false
    }

    fn read(&self, _: Context, _: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        Ok(())
    }

    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        self.called(Call::Write);
        bloks.iter_mut().for_each(|write| write.outcome = Ok(()));
    }
}

fn store() -> MemoryStore {
    MemoryStore::new(1 << 26).unwrap()
}

const WITHIN: [(&str, Within); 4] = [
    ("drops", |_, other| drop(other.lock().unwrap().take())),
    ("makes", |domain, _| is_refused(domain.region(4 * PAGE).zero())),
    ("clones", |_, other| is_refused(other.lock().unwrap().as_ref().unwrap().cow_clone(store()))),
    ("samples", |domain, other| {
        let other = other.lock().unwrap();
        has_no_sample(domain.sample(Sampling::Whole));
        has_no_sample(other.as_ref().unwrap().sample(Sampling::Whole));
    }),
];

#[test]
fn own_code_that_ends_and_makes_regions_and_begins_samples() {
    for (trap, name) in [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")] {
        for (does, within) in WITHIN {
            for at in [Call::Fill, Call::Save, Call::Forget, Call::Victim, Call::Write] {
                in_child(here!(), &format!("{name}-{at:?}-{does}"), || {
                    let own =
                        Does { within, at, called: Arc::default(), domain: Arc::default(), other: Arc::default() };
                    let config = Domain::with_frames(FRAMES * PAGE);
                    let config = if at == Call::Victim { config.own_policy(Box::new(own.clone())) } else { config };
                    let domain = own.domain.get_or_init(|| config.build().unwrap());
                    let other = domain.region(4 * PAGE).trap(trap).stored(store()).unwrap();
                    let page = other.as_ptr();
                    *own.other.lock().unwrap() = Some(other);
                    let region = domain.region(4 * FRAMES * PAGE).trap(trap);
                    let mut region = match at {
                        Call::Fill | Call::Save | Call::Forget => region.user(own.clone()).unwrap(),
                        Call::Write => region.stored(own.clone()).unwrap(),
                        Call::Victim => region.stored(store()).unwrap(),
                    };
                    region.as_mut_slice::<u8>().iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
                    region.discard(0, region.len_bytes()).unwrap();
                    assert!(own.called.load(SeqCst) > 1);
                    // SAFETY: test: it tells of a page, and touches none.
                    let is_there = || unsafe { libc::mincore(page.cast(), PAGE, [0u8].as_mut_ptr()) } == 0;
                    until("the region ends that it dropped", || does != "drops" || !is_there());
                })
                .well();
            }
        }
    }
}

static FILLS: AtomicBool = AtomicBool::new(false);
static FORKS: AtomicBool = AtomicBool::new(false);

/// Before the library's own, which is older.
extern "C" fn a_fork_begins() {
    FORKS.store(true, SeqCst);
}

/// Makes what it can in the midst of a fork, with another domain and a region of that.
struct MakesBesideAFork(Domain, Region);

impl UserPager for &'static MakesBesideAFork {
    fn fill(&self, _: u64, _: &mut PageBytes) -> io::Result<()> {
        FILLS.store(true, SeqCst);
        until("a fork begins", || FORKS.load(SeqCst));
        // Time for the fork to come to this domain's gate.
        std::thread::sleep(Duration::from_millis(300));
        is_refused(self.0.region(4 * PAGE).zero());
        is_refused(Domain::with_frames(16 * PAGE).build());
        is_refused(self.1.cow_clone(store()));
        has_no_sample(self.0.sample(Sampling::Whole));
        has_no_sample(self.1.sample(Sampling::Whole));
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn own_code_that_makes_regions_of_another_domain_beside_a_fork() {
    for (trap, name) in [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")] {
        in_child(here!(), name, || {
            let [domain, other] = [(); 2].map(|()| Domain::with_frames(FRAMES * PAGE).build().unwrap());
            let of_other = other.region(4 * PAGE).stored(store()).unwrap();
            let pager: &'static _ = Box::leak(Box::new(MakesBesideAFork(other, of_other)));
            let region = domain.region(4 * PAGE).trap(trap).user(pager).unwrap();
            // SAFETY: test: a function without arguments.
            unsafe { libc::pthread_atfork(Some(a_fork_begins), None, None) };
            std::thread::scope(|scope| {
                scope.spawn(|| assert_eq!(region.as_slice::<u64>()[0], 0));
                until("it is asked for a page", || FILLS.load(SeqCst));
                assert_eq!(child::in_child(|| region.as_slice::<u64>()[0] == 0), 0);
            });
        })
        .well();
    }
}
