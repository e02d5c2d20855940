//! Fork: parent and child both go on with right contents, each within frames of its own.
//!
//! The parent comes to rest (nobody inside the gate, nothing on its way to a store), lets the child have its regions, and
//! shares its bloks with it. The kernel copies the tables and, page by page as they are written, the resident pages. The
//! child did not get the pool: it maps one of its own, opens userfaultfds of its own, registers its regions and starts
//! threads, all before its first instruction after fork(2). A child that was made behind our back has no region at all.
//!
//! # Source
//! None of the four papers has fork. Stock Linux leaves a child without our registration, and its absent pages silently
//! zero: that is what this prevents.
#![allow(unsafe_code)]

mod denied;
mod domains;
mod held;
pub(crate) mod lineage;
mod once;
mod sealed;
mod stack;
mod streams;
mod turn;

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use arrayvec::ArrayString;
use selfpage_core::addr::{Frame, PageBytes};
use selfpage_core::fault::protect;
use selfpage_core::linux::Errno;
use selfpage_core::linux::die;
use selfpage_core::linux::memory::Advice;
use selfpage_core::linux::signal::{self, SignalSet};
use selfpage_core::linux::thread as own_thread;
use selfpage_core::policy::Policy;

use crate::alloc;
use crate::cancel::Uncancelled;
use crate::doctor::limits::MORE_MAPPINGS;
use crate::domain::{Closer, Inner, Open, Part, Regions};
use crate::error::{Error, Kind};
use crate::patience::Patience;
use crate::placement::taken;
use crate::region::Bound;
use crate::store::{BackingStore, Descriptor, OwnFiles, Reserved, StoreError, forget_numbers};
use crate::trap::{thread, upcall};
use crate::undisturbed::{self, Locked};
use crate::{descriptors, dirty, protection, snapshot};

pub(crate) use denied::check;
use domains::DOMAINS;
pub(crate) use domains::{delist, enlist, is_in_no_region};
pub(crate) use held::OverFork;
pub(crate) use once::Once;
use stack::KeptStack;
use turn::Turn;

static ATTENDED: Once<()> = Once::new();
static PAUSE: OverFork<Pause> = OverFork::nothing();
static IS_CHILD: AtomicBool = AtomicBool::new(false);

struct Pause {
    mask: SignalSet,
    lineage: u32,
    domains: Vec<PausedDomain>,
    stores: Vec<PausedStore>,
    /// Those of which the child gets no region.
    withheld: Vec<PausedStore>,
    stack: Option<KeptStack>,
    taken: taken::Held,
    locks: Locks,
    turn: Turn,
    /// Last.
    _uncancelled: Uncancelled,
}

/// The library's own locks: whoever has one of them allocates, and may touch an absent page.
struct Locks {
    rights: protection::fork::Held,
    _traps: dirty::traps::Held,
    registry: Locked<'static, Vec<Weak<Inner>>>,
    snapshot_files: Locked<'static, Vec<Arc<Descriptor>>>,
}

/// A domain at rest. The guards borrow from `inner`, which comes last.
struct PausedDomain {
    policy: MutexGuard<'static, Box<dyn Policy>>,
    regions: Regions<'static>,
    /// What a child gets of its regions.
    parts: Vec<Part>,
    /// What is in frames alone, which the child does not get: pages that nobody may access.
    aside: Vec<(Frame, PageBytes)>,
    files: OwnFiles,
    /// Whether the child can have it, else why not.
    shared: Result<(), String>,
    inner: Arc<Inner>,
}

/// A store of one domain or of several, and whether a child can have it.
struct PausedStore {
    store: Arc<dyn BackingStore>,
    ready: Result<(), StoreError>,
}

/// Has forks attended to from here on, as the first domain does.
///
/// One set of handlers for all of the library, installed before the first of its locks is taken: a fork that was going on then does not call
/// them, and may take its time with others'.
///
/// Handlers of forks (`pthread_atfork`) that are installed later may touch managed memory: they come first before a fork, and last after
/// it. Those that were there before may not.
///
/// # Context
/// Normal.
pub fn attend() {
    // SAFETY: fork-handlers: three functions without arguments, which stay loaded as long as domains can exist.
    ATTENDED.get_or_make(|| unsafe {
        streams::attend();
        // Before ours, so that it comes to rest after the domains: a pager of the program's own may wait for it.
        alloc::fork::register();
        libc::pthread_atfork(Some(prepare), Some(parent), Some(child));
    });
}

/// Whether the process was forked since forks are attended to.
pub(crate) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

extern "C" fn prepare() {
    PAUSE.hold(pause);
}

fn pause() -> Pause {
    // It is inside a gate that is to be closed, or has the policy that is to be held: it would wait for itself.
    if thread::is_pager_thread(own_thread::id()) {
        crate::die("a pager, policy or store of the program's own forked on a pager thread");
    }
    // A handler of a signal that came now would meet a domain at rest, or fork itself, and wait for its own thread.
    let mask = signal::block_all();
    let uncancelled = Uncancelled::begin();
    // Before the gates close.
    let (turn, locks) = Turn::begin();
    // Only now: the first domain may have come while this waited, and each that is listed has begun it.
    let lineage = lineage::own();
    let alive: Vec<_> = locks.registry.iter().filter_map(Weak::upgrade).filter(|inner| inner.is_served()).collect();
    // While frames can be had for it.
    let stack = KeptStack::keep(&alive);
    let (mut domains, taken) = hold(alive);
    close_gates(&mut domains);
    let stores = ready_stores(&domains);
    domains.iter_mut().for_each(|domain| domain.give_to_child(&stores));
    let (stores, withheld) = take_back(stores, &domains);
    Pause { mask, lineage, domains, stores, withheld, stack, taken, locks, turn, _uncancelled: uncancelled }
}

extern "C" fn parent() {
    let Some(pause) = PAUSE.let_go() else { return };
    for paused in &pause.stores {
        paused.store.after_fork_in_parent();
    }
    for domain in pause.domains {
        domain.resume_in_parent();
    }
    pause.stack.into_iter().for_each(KeptStack::let_go);
    drop(pause.taken);
    drop(pause.locks);
    drop(pause.turn);
    signal::restore(pause.mask);
}

extern "C" fn child() {
    let Some(mut pause) = PAUSE.let_go() else { return };
    IS_CHILD.store(true, Ordering::Relaxed);
    lineage::go_on(pause.lineage);
    // The regions that a child does not get leave it.
    drop(pause.taken);
    thread::forget_all();
    forget_numbers();
    upcall::forget_users();
    // Their locks are on what was opened, and would be held as long as the child lives.
    pause.locks.snapshot_files.iter().for_each(|file| file.let_go());
    pause.withheld.iter().for_each(|paused| paused.store.let_go_in_child());
    // Every place first: what is mapped from here on, be it by an allocation, may come to lie in one.
    for domain in &pause.domains {
        if domain.shared.is_err() {
            domain.inner.reserve_in_child(&domain.parts);
        } else if let Err(why) = domain.inner.pool.map_in_child() {
            let remedy = match why.kind() {
                Kind::Unsupported => "allow mmap in the filter of system calls (seccomp)",
                _ => "a handler of forks (pthread_atfork) that maps memory must be installed after attend_forks",
            };
            crate::die(&format!("a forked child cannot go on: {why}; {remedy}"));
        }
    }
    // Before code of the program's opens anything.
    let stores = || pause.stores.iter().map(|paused| &paused.store);
    let named = || {
        let lost = pause.domains.iter().flat_map(|domain| domain.files.ways()).map(|way| way.1);
        lost.chain(stores().flat_map(|store| store.descriptors())).collect()
    };
    let mut reserved = Reserved::of(&named());
    stores().for_each(|store| store.after_fork_in_child());
    // Under a low limit on open files there is none to spare.
    reserved.keep_only(&named());
    for domain in pause.domains {
        domain.resume_in_child(&reserved);
    }
    drop(reserved);
    protection::fork::forked(&mut pause.locks.rights);
    dirty::traps::forked();
    pause.stack.into_iter().for_each(KeptStack::let_go_in_child);
    drop(pause.locks);
    pause.turn.end_in_child();
    signal::restore(pause.mask);
}

impl Locks {
    fn hold() -> Locks {
        Locks {
            rights: protection::fork::hold(),
            _traps: dirty::traps::hold(),
            registry: undisturbed::lock(&DOMAINS),
            snapshot_files: snapshot::files(),
        }
    }
}

/// Holds the domains' regions, the list of their addresses, and the policies. All before the first gate closes, and in this order: whoever has a domain's regions may
/// touch an absent page, perhaps of another domain, which takes a gate that is open and an evictor.
fn hold(inners: Vec<Arc<Inner>>) -> (Vec<PausedDomain>, taken::Held) {
    // SAFETY: fork-held: the guards are dropped before `inner`, which keeps what they borrow alive and in place.
    let still = |inner: &Arc<Inner>| -> &'static Inner { unsafe { &*Arc::as_ptr(inner) } };
    let mut held = Vec::new();
    for inner in inners {
        held.push((still(&inner).regions(), inner));
    }
    let mut with_parts = Vec::new();
    for (regions, inner) in held {
        let (own, map) = (&*inner, &*regions);
        // There, where the program has not closed the descriptors that tell what is ours.
        let (parts, openable) = own.on_pager_thread(move || (own.own_parts(map), descriptors::memory_can_be_opened()));
        // What fills the table of ours a child does not have: its pager threads begin with what this thread has.
        let openable = openable.or_else(|why| match why.kind() {
            Kind::OutOfSpace => descriptors::memory_can_be_opened(),
            _ => Err(why),
        });
        with_parts.push((regions, parts, openable, inner));
    }
    let taken = taken::hold();
    let mut domains = Vec::new();
    for (regions, parts, openable, inner) in with_parts {
        // Nothing more is evicted from here on.
        let policy = still(&inner).policy.lock().unwrap_or_else(PoisonError::into_inner);
        domains.push(PausedDomain {
            policy,
            regions,
            parts,
            aside: Vec::new(),
            files: OwnFiles::default(),
            shared: openable.map_err(|why| why.to_string()),
            inner,
        });
    }
    (domains, taken)
}

/// How long a fork waits while nothing of what a domain has in frames alone goes to where a child can have it: a filter of the program's may
/// forbid for good what would map it.
const PATIENCE: Duration = Duration::from_secs(10);

/// What keeps a fork from closing the gates.
struct Stuck {
    /// The first domain that is in the way, the least that it had left, and what it had saved.
    at: usize,
    least: usize,
    saved: u64,
    patience: Patience,
}

/// Closes the gates of all domains, or none and tries again: whoever is inside one may wait for a lock of the kernel's whose holder
/// waits to get into another. A child gets nothing of a domain that cannot be drained.
fn close_gates(domains: &mut [PausedDomain]) {
    let mut stuck: Option<Stuck> = None;
    let mut closer = Closer::default();
    while let Some((at, why)) = first_open(domains, &mut closer) {
        for domain in &domains[..at] {
            domain.open_gate();
        }
        if let Open::Undrained(pages) = why {
            let saved = domains[at].inner.state().counters.read().bytes_saved;
            let same = stuck.filter(|stuck| stuck.at == at && stuck.least <= pages && stuck.saved >= saved);
            let fresh = || Stuck { at, least: pages, saved, patience: Patience::of(PATIENCE) };
            let mut now = same.unwrap_or_else(fresh);
            if !now.patience.lasts() {
                domains[at].shared = Err(format!("{pages} of its pages can neither be saved nor mapped"));
            }
            stuck = Some(now);
        }
        domains[at].inner.drain();
        closer.pause();
    }
    // Whoever waits for room to evict waits at the gate from here on.
    domains.iter().for_each(|domain| domain.inner.state().draining.store(false, Ordering::SeqCst));
}

/// Closes gates up to the first that stays open.
fn first_open(domains: &[PausedDomain], closer: &mut Closer) -> Option<(usize, Open)> {
    domains.iter().enumerate().find_map(|(at, domain)| Some((at, domain.try_close_gate(closer).err()?)))
}

/// Has each store get ready, once, however many domains use it.
fn ready_stores(domains: &[PausedDomain]) -> Vec<PausedStore> {
    let mut stores: Vec<PausedStore> = Vec::new();
    for domain in domains {
        let table_of = domain.inner.table_thread.load(Ordering::Acquire) as i32;
        for store in domain.stores() {
            if !stores.iter().any(|known| known.is(store)) {
                stores.push(PausedStore { store: store.clone(), ready: store.before_fork(table_of) });
            }
        }
    }
    stores
}

/// The stores of which the child gets regions, and the others: of those it would hold what the parent has, as long as it lives.
fn take_back(stores: Vec<PausedStore>, domains: &[PausedDomain]) -> (Vec<PausedStore>, Vec<PausedStore>) {
    let given: Vec<_> = domains.iter().filter(|domain| domain.shared.is_ok()).flat_map(PausedDomain::stores).collect();
    let is_given = |paused: &PausedStore| given.iter().any(|store| paused.is(store));
    let (stores, withheld): (_, Vec<_>) = stores.into_iter().partition(is_given);
    withheld.iter().for_each(|paused| paused.store.after_fork_in_parent());
    (stores, withheld)
}

impl PausedStore {
    /// Whether it is this store, by whatever handle.
    fn is(&self, store: &Arc<dyn BackingStore>) -> bool {
        self.store.identity() == store.identity()
    }
}

impl PausedDomain {
    fn stores(&self) -> impl Iterator<Item = &Arc<dyn BackingStore>> {
        self.regions.values().filter_map(|bound| bound.store())
    }

    fn try_close_gate(&self, closer: &mut Closer) -> Result<(), Open> {
        match self.shared {
            Ok(()) => self.inner.try_close_gate_drained(closer),
            Err(_) => {
                let state = self.inner.state();
                closer.close(&state.gate, state.mmu).map_err(|_| Open::InUse)
            }
        }
    }

    fn open_gate(&self) {
        let state = self.inner.state();
        state.gate.open(state.mmu);
    }

    fn let_child_have_parts(&self) -> Result<(), Errno> {
        self.parts.iter().try_for_each(|(bound, part)| bound.give_to_child(part, Advice::ForChild))
    }

    /// Has a child get all of the domain, or nothing of it.
    fn give_to_child(&mut self, stores: &[PausedStore]) {
        if self.shared.is_ok() {
            let refusal =
                |store: &Arc<dyn BackingStore>| stores.iter().find(|known| known.is(store))?.ready.as_ref().err();
            let refused = self.stores().find_map(refusal);
            self.shared = match refused {
                Some(why) => Err(why.to_string()),
                None => self.find_files().and_then(|()| self.let_child_have()),
            };
        }
        if self.shared.is_err() {
            self.keep_from_child();
        }
        let aside = &mut self.aside;
        protect::each_aside(self.inner.state(), |frame, contents| aside.push((frame, *contents)));
    }

    fn let_child_have(&mut self) -> Result<(), String> {
        let given = self.let_child_have_parts().or_else(|_| {
            // The program may have unmapped some of it meanwhile.
            self.parts = self.inner.own_parts(&self.regions);
            self.let_child_have_parts()
        });
        given.map_err(|why| Error::system("fork with", "its regions", why).to_string())
    }

    fn find_files(&mut self) -> Result<(), String> {
        let table_of = self.inner.table_thread.load(Ordering::Acquire);
        // Two regions may use one file.
        let numbers = self.regions.values().flat_map(|bound| bound.own_descriptors()).collect();
        self.files = OwnFiles::of(table_of, &numbers).map_err(|why| {
            let remedy = match why.raw_os_error() {
                Some(libc::ENOENT) => ": mount /proc",
                Some(libc::EMFILE | libc::ENFILE) => ": raise ulimit -n",
                Some(libc::EACCES | libc::EPERM) => ": keep the right to open it, and allow pidfd_getfd",
                _ => "",
            };
            format!("a file of its regions cannot be had for it ({why}){remedy}")
        })?;
        Ok(())
    }

    fn keep_from_child(&self) {
        let kept = keep_parts_from_child(&self.parts);
        // The program may have unmapped some of it meanwhile.
        let kept = kept.or_else(|_| keep_parts_from_child(&self.inner.own_parts(&self.regions)));
        if let Err((bound, why)) = kept {
            die_inherited(&bound, why);
        }
    }

    fn resume_in_parent(self) {
        self.keep_from_child();
        self.open_gate();
    }

    fn resume_in_child(self, reserved: &Reserved) {
        if let Err(why) = &self.shared {
            // The regions are not here: an access is a SIGSEGV, and never a zero that was not written.
            // Past std's lock: a thread that the child does not have may have had it.
            die::tell(&[&format!("selfpage: this forked child does not get its parent's regions: {why}\n")]);
            self.inner.abandon(&self.regions);
            return self.open_gate();
        }
        let _ = keep_parts_from_child(&self.parts);
        let rebuilt = self.inner.rebuild_in_child(&self.regions, &self.parts, &self.aside, &self.files, reserved);
        if let Err(why) = rebuilt {
            crate::die(&format!("a forked child cannot go on: {why}"));
        }
        drop(self.policy);
        let state = self.inner.state();
        state.gate.open(state.mmu);
        self.inner.set_reserve();
    }
}

/// `Err`: the region that it cannot be done for, and why.
fn keep_parts_from_child(parts: &[Part]) -> Result<(), (Arc<Bound>, Errno)> {
    parts
        .iter()
        .try_for_each(|(bound, part)| sealed::keep_rest_from_child(bound, part).map_err(|why| (bound.clone(), why)))
}

/// Nothing is allocated: another handler of the fork may have the heap locked.
fn die_inherited(bound: &Bound, why: Errno) -> ! {
    let remedy = match why {
        Errno::AGAIN | Errno::NOMEM => MORE_MAPPINGS,
        _ => "let the filter of system calls allow it",
    };
    let mut epitaph = ArrayString::<512>::new();
    let _ = write!(epitaph, "after a fork madvise(MADV_DONTFORK) fails with {why}; {remedy}: region {}", bound.name);
    crate::die(&epitaph)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use selfpage_core::addr::{Frame, PAGE_BYTES, PageNo};
    use selfpage_core::policy::{Policy, Use};
    use selfpage_core::shortage::Shortage;

    use super::*;
    use crate::config::DescriptorTable;
    use crate::domain::Domain;
    use crate::handler::Protection;
    use crate::region::Region;

    /// Forks while another thread has what `hold` takes, and then touches an absent page of the region.
    fn fork_while_held<Guard>(hold: impl FnOnce() -> Guard + Send, region: &Region) {
        let (held, is_held) = channel();
        let words = region.as_slice::<u64>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let guard = hold();
                held.send(()).unwrap();
                // Time for the fork to come to it.
                std::thread::sleep(Duration::from_millis(300));
                assert_eq!(words[512], 0);
                drop(guard);
            });
            is_held.recv().unwrap();
            // Without the child, which would have copies of what other tests have locked.
            prepare();
            parent();
        });
    }

    #[test]
    fn whoever_holds_the_files_may_touch_an_absent_page() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        fork_while_held(snapshot::files, &domain.region(4 * PAGE_BYTES).zero().unwrap());
    }

    /// It lists no frame.
    struct Idle;

    impl Policy for Idle {
        fn admitted(&mut self, _: Frame, _: PageNo, _: u8, _: Use) {}

        fn victim(&mut self) -> Option<Frame> {
            None
        }
    }

    /// Nothing is evicted while a fork has the policy, so it must need none of them.
    #[test]
    fn a_fork_ends_while_all_pager_threads_wait_for_frames() {
        let config = Domain::with_frames(16 * PAGE_BYTES).descriptor_table(DescriptorTable::Private);
        let domain = config.own_policy(Box::new(Idle)).build().unwrap();
        let inner = &domain.life().inner;
        let mut all = domain.region(16 * PAGE_BYTES).zero().unwrap();
        let more = domain.region(3 * PAGE_BYTES).zero().unwrap();
        let evictor = inner.policy.lock().unwrap();
        all.as_mut_slice::<u64>().fill(7);
        // A page that is aside as if it were sampled.
        all.protect(0, PAGE_BYTES, Protection::None).unwrap();
        all.protect(0, PAGE_BYTES, Protection::ReadWrite).unwrap();
        assert_eq!((inner.state().stack.ready(), inner.state().stack.sampled()), (0, 1));
        let waits = |at: usize| {
            assert_eq!(more.pin(at * PAGE_BYTES, PAGE_BYTES).unwrap_err().kind(), Kind::Held);
        };
        let a_moment = || std::thread::sleep(Duration::from_millis(100));
        std::thread::scope(|scope| {
            let waits = &waits;
            scope.spawn(move || waits(0));
            scope.spawn(move || waits(1));
            a_moment();
            let (tell, told) = channel();
            scope.spawn(move || {
                prepare();
                parent();
                tell.send(()).unwrap();
            });
            // One pager thread tells it what is there, and then waits, too.
            a_moment();
            scope.spawn(move || waits(2));
            a_moment();
            drop(evictor);
            let forked = told.recv_timeout(Duration::from_secs(10));
            let demand = &inner.state().stack.demand;
            demand.state_shortage(inner.state().mmu, demand.wanted.count(), Shortage::AllHeld);
            forked.unwrap();
        });
        assert!(all.as_slice::<u64>().iter().all(|word| *word == 7));
    }

    #[test]
    fn a_fork_comes_between_pages_of_a_region_that_is_protected() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let region = domain.region((1 << 22) * PAGE_BYTES).zero().unwrap();
        let (state, range, mut between) = (domain.life().inner.state(), region.core().range, 0);
        let is_protected = |page| protect::protection(state, page) == Some(Protection::Read);
        std::thread::scope(|scope| {
            scope.spawn(|| region.protect(0, region.len_bytes(), Protection::Read).unwrap());
            while !is_protected(PageNo(range.end().0 - 1)) {
                let begun = is_protected(range.first);
                prepare();
                parent();
                between += u32::from(begun && !is_protected(PageNo(range.end().0 - 1)));
            }
        });
        assert!(between > 0, "it waits until all of them are protected");
    }

    /// A child that was forked while the first domain was being made may have them twice.
    #[test]
    fn handlers_that_are_installed_twice_do_their_work_once() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let region = domain.region(4 * PAGE_BYTES).zero().unwrap();
        prepare();
        prepare();
        assert!(DOMAINS.try_lock().is_err());
        parent();
        parent();
        assert_eq!(region.as_slice::<u64>()[512], 0);
    }

    #[test]
    fn whoever_holds_a_domains_regions_may_touch_an_absent_page_of_another() {
        let [one, other] = [(); 2].map(|()| Domain::with_frames(16 * PAGE_BYTES).build().unwrap());
        let regions = [&one, &other].map(|domain| domain.region(4 * PAGE_BYTES).zero().unwrap());
        fork_while_held(|| one.life().inner.regions(), &regions[1]);
        fork_while_held(|| other.life().inner.regions(), &regions[0]);
    }
}
