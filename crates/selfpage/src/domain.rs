//! The domain: a contract, the frames under it, regions, and the threads that serve them.
//!
//! # Source
//! Nemesis §4 and §5: "require every application to deal with all its own memory faults using its own concrete resources".
#![allow(unsafe_code)]

pub(crate) mod threads;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use selfpage_core::addr::{PAGE_BYTES, PageBytes, PageNo, PageRange};
use selfpage_core::contract::Contract;
use selfpage_core::cut::{Cut, CutWait};
use selfpage_core::domain::DomainState;
use selfpage_core::fault::range::{self, Undone};
use selfpage_core::fault::{Failure, Outcome};
use selfpage_core::frame::{FrameSet, FrameTable, Table, Unpopulated};
use selfpage_core::linux::held::Held;
use selfpage_core::linux::mmu::{Descriptors, LinuxMmu};
use selfpage_core::linux::signal;
use selfpage_core::linux::uffd::Reach;
use selfpage_core::mmu::Refusal;
use selfpage_core::pager::Context;
use selfpage_core::policy::Policy;
use selfpage_core::region::RegionMap;
use selfpage_core::ring::{Ring, Slot};
use selfpage_core::shortage::FrameWait;
use selfpage_core::stack::FrameStack;
use selfpage_core::sync::{Event, Gate};
use selfpage_core::trace::Counters;
use selfpage_core::tracer::Tracer;

use crate::arena::Arena;
use crate::config::{Choice, Config, DescriptorTable, Settings};
use crate::error::{self, Error, Kind, Result};
use crate::fork::{self, lineage};
use crate::pager::PageHash;
use crate::pool::FramePool;
use crate::pthread::Pthread;
use crate::region::Bound;
use crate::snapshot::MOST_RUNS;
use crate::starved::Starved;
use crate::stats::Stats;
use crate::store::Nowhere;
use crate::trap::handlers::Handlers;
use crate::trap::{ask, errand, stack, thread};
use crate::turn::Turns;
use crate::{descriptors, trace};

mod child;
mod closer;
mod frames;
mod locks;
mod regions;

pub(crate) use child::{Open, Part};
pub(crate) use closer::Closer;
pub(crate) use regions::Regions;

pub(crate) const MOST_REGIONS: usize = 1024;
const REQUESTS: usize = 1024;
/// As many as there are runs of pages to be fetched when a snapshot is restored.
const ADVICE: usize = MOST_RUNS;
const ERRANDS: usize = 64;
const CALLS: usize = 256;
/// What the domain's threads and handles share.
pub(crate) struct Inner {
    state: DomainState,
    pub(crate) errands: Ring,
    pub(crate) writing: trace::Writing,
    pub(crate) config: Settings,
    pub(crate) pool: FramePool,
    pub(crate) mmu: &'static LinuxMmu,
    pub(crate) descriptors: Mutex<Descriptors>,
    /// Keeps the userfaultfds open until no thread is left that could touch a page; `None` where io_uring is refused.
    held: Mutex<Option<Held>>,
    /// Whether faults that the kernel takes reach the worker's userfaultfd.
    serves_system_calls: AtomicBool,
    /// A thread whose descriptor table has everything.
    pub(crate) table_thread: AtomicU32,
    /// The processes that have it: not a child that was made past the handlers of forks, which has a copy of all this.
    lineage: u32,
    /// What stands in its table where nothing does.
    nowhere: Nowhere,
    /// By first page. A region is added and removed by whoever holds this.
    pub(crate) regions: Mutex<BTreeMap<u64, Arc<Bound>>>,
    pub(crate) stop: AtomicBool,
    threads: Mutex<Vec<Pthread>>,
    pub(crate) handlers: Handlers,
    /// Whether a worker may run what can allocate, lock and wait: a pager or a store of the program's own.
    pub(crate) runs_own_code: AtomicBool,
    pub(crate) hash: Arc<PageHash>,
    /// Used by the evictor alone; fork holds it while it copies the process.
    pub(crate) policy: Mutex<Box<dyn Policy>>,
    standby_share: u8,
    /// The number of the last sample of pages; a fork takes one too.
    pub(crate) samples: AtomicU64,
    /// The number of the program's last sample, while the program has it and no fork has ended it; 0: none. A trace draws none beside it.
    pub(crate) own_sample: AtomicU64,
    /// One is drawn at a time.
    pub(crate) drawing: Turns,
    /// Whether a pager thread waits for a disk ([`Pager::syncs_over_forks`](selfpage_core::pager::Pager::syncs_over_forks)).
    pub(crate) syncing: Turns,
    /// Pages that fail because no frame could be had.
    pub(crate) starved: Starved,
    /// How often the saver has begun and ended a turn.
    pub(crate) saver_turns: AtomicU64,
    /// Whether the saver is to end all samples of pages: a fork waits for that.
    pub(crate) ends_samples: AtomicBool,
    /// Whether there is a [`crate::snapshot::Snapshots`] of its regions.
    pub(crate) snapshots: AtomicBool,
    /// Whether a thread arms pages or makes a cut.
    pub(crate) cutting: Turns,
    /// The tables of `state`, and `mmu`; dropped last.
    _arena: Arena,
}

/// A program's own memory: frames under a contract, and regions that they serve.
///
/// # Examples
/// ```no_run
/// # fn main() -> selfpage::Result<()> {
/// use selfpage::{Domain, store::MemoryStore};
/// let domain = Domain::with_frames(64 << 20).build()?;
/// let mut region = domain.region(1 << 30).stored(MemoryStore::new(2 << 30)?)?;
/// region.as_mut_slice::<u64>()[12345] = 7;
/// # Ok(()) }
/// ```
pub struct Domain {
    life: Arc<Life>,
}

/// Keeps the domain going as long as it has a handle or a region.
pub(crate) struct Life {
    pub(crate) inner: Arc<Inner>,
    /// At the end, and last: a handler of a signal that forked would leave its child in the middle of that, with threads to wait for that it
    /// does not have.
    quiet: Option<signal::Quiet>,
}

impl Domain {
    /// A domain of `frames_bytes` bytes of frames, rounded down to whole ones, to be configured further.
    pub fn with_frames(frames_bytes: usize) -> Config {
        Config::new(frames_bytes)
    }

    pub(crate) fn build(settings: Settings, policy: Choice) -> Result<Domain> {
        thread::may_make(|| "a domain".into())?;
        // Before there is a pager thread: a child that was forked while one is being started forgets them all.
        crate::fork::attend();
        let life = {
            // A handler that forked would leave its child waiting for threads that it does not have.
            let _quiet = signal::Quiet::begin();
            let inner = Arc::new(Inner::new(settings, policy)?);
            inner.start_threads(threads::Kept::default())?;
            crate::fork::enlist(&inner);
            Arc::new(Life { inner, quiet: None })
        };
        if life.inner.config.populated {
            life.inner.populate()?;
        }
        // Who listens may start threads, which would have the mask.
        let inner = &life.inner;
        tracing::info!(
            frames = inner.config.frames,
            workers = inner.config.workers,
            serves_system_calls = inner.serves_system_calls.load(Ordering::Relaxed),
            residence = ?inner.pool.residence(),
            "domain built"
        );
        Ok(Domain { life })
    }

    /// Begins a region of `len_bytes` bytes, rounded up to pages.
    pub fn region(&self, len_bytes: usize) -> crate::region::Builder<'_> {
        crate::region::Builder::new(&self.life, len_bytes)
    }

    /// The contract: frames guaranteed and at best.
    pub fn contract(&self) -> Contract {
        let budget = self.life.inner.state.stack.budget();
        Contract::new(budget, budget).unwrap_or_else(|| crate::die("a contract below its guarantee"))
    }

    /// The frame pool.
    pub fn pool(&self) -> &FramePool {
        &self.life.inner.pool
    }

    /// Waits until the trace, if there is one, has all that has happened so far.
    pub fn flush_trace(&self) {
        if self.life.inner.config.trace.is_some() {
            self.life.inner.writing.flush(&self.life.inner);
        }
    }

    pub(crate) fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// What the domain has counted so far.
    pub fn stats(&self) -> Stats {
        Stats::read(&self.life.inner)
    }

    /// Whether a child that the calling thread forked now could have what it needs of the domain: a thread that has limited itself since the
    /// domain was built (Landlock), or given up rights, may not open it, and a store has as many processes as it can. Such a child gets no
    /// regions, or ends: better not to fork.
    ///
    /// # Context
    /// Normal.
    ///
    /// # Errors
    /// [`Kind::OutOfSpace`](crate::Kind::OutOfSpace): there can be another child once one has ended. Else the system refuses a file, which the
    /// message names. What else a fork may lack is not looked at.
    pub fn check_fork(&self) -> Result<()> {
        fork::check(&self.life.inner)
    }

    /// Whether faults that the kernel takes inside a system call can be served by workers.
    pub fn serves_system_calls(&self) -> bool {
        self.life.inner.serves_system_calls.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Domain({} frames of at most {})",
            self.life.inner.state.stack.budget(),
            self.life.inner.pool.frames()
        )
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.quiet = Some(signal::Quiet::begin());
        if !self.inner.is_of_this_lineage() {
            // Its memory and its threads are its parent's alone: other memory may be in its places, and who had its locks is not here.
            return std::mem::forget(self.inner.clone());
        }
        crate::fork::delist(&self.inner);
        if !thread::is_a_domains() && self.inner.handlers.end_soon(&self.inner) {
            self.inner.end();
        } else {
            self.inner.end_elsewhere();
        }
    }
}

impl Inner {
    fn new(config: Settings, policy: Choice) -> Result<Inner> {
        // The first call finds the vDSO, which a trap could not.
        monotonic_ns();
        stack::lay_out()?;
        let hash = Arc::new(PageHash::new()?);
        let most = config.most_frames;
        let pool = FramePool::reserve(most)?;
        pool.lock(config.locking);
        let (descriptors, reach) = descriptors::open(&config)?;
        Inner::over(config, policy, hash, pool, descriptors, reach)
            .inspect_err(|_| descriptors::close_ours(&descriptors))
    }

    fn over(
        config: Settings,
        policy: Choice,
        hash: Arc<PageHash>,
        pool: FramePool,
        descriptors: Descriptors,
        reach: Reach,
    ) -> Result<Inner> {
        let most = config.most_frames;
        let lineage = lineage::begin()?;
        pool.register(descriptors.pool)?;
        // SAFETY: pool-owned, region-owned: `pool.rs` and `region.rs` map them so; nobody uses the machine after this value.
        let mmu = unsafe { LinuxMmu::new(pool.first_slot(), most, descriptors, monotonic_ns) };
        let frames = most as usize;
        let words = frames.div_ceil(64);
        let copies = (frames / 4).next_power_of_two().max(64);
        // A page that came back leaves its entry. There is room for as many of those as for pages on standby.
        let standby_share = policy.standby_share();
        let standby = copies.max((frames * usize::from(standby_share) / 128).next_power_of_two());
        let saves = (frames / 4).next_power_of_two().clamp(1024, 8192);
        let traced = config.trace.as_ref().map_or(0, |_| trace::PLACES);
        let bytes = Arena::bytes_for::<selfpage_core::frame::FrameRecord>(frames)
            + 2 * Arena::bytes_for::<u64>(words)
            + 2 * Arena::bytes_for::<u64>(words.div_ceil(64))
            + 2 * Arena::bytes_for::<selfpage_core::region::Line>(MOST_REGIONS)
            + [standby, copies, REQUESTS, ADVICE, saves, ERRANDS, CALLS, CALLS, CALLS, traced]
                .map(Arena::bytes_for::<Slot>)
                .iter()
                .sum::<usize>()
            + Arena::bytes_for::<selfpage_core::policy::Link>(frames)
            + Arena::bytes_for::<LinuxMmu>(1);
        let mut arena = Arena::new(bytes)?;
        // SAFETY: table-memory: the arena is dropped after `state` and `mmu`, with the last handle, when no thread is left.
        let mmu = unsafe { arena.put(mmu) };
        // SAFETY: table-memory: as above.
        let (state, errands, handlers, links) = unsafe {
            let tracer = match traced {
                0 => Tracer::off(),
                places => Tracer::over(Ring::new(arena.table(places)), monotonic_ns()),
            };
            let mut frame_set = || FrameSet::new(arena.table(words), arena.table(words.div_ceil(64)));
            let (free, unpopulated) = (frame_set(), Unpopulated::new(frame_set(), most));
            let state = DomainState {
                mmu,
                gate: Gate::default(),
                frames: FrameTable::new(arena.table(frames)),
                stack: FrameStack::new(free, unpopulated, Ring::new(arena.table(standby)), config.frames),
                regions: RegionMap::new([arena.table(MOST_REGIONS), arena.table(MOST_REGIONS)]),
                requests: Ring::new(arena.table(REQUESTS)),
                advice: Ring::new(arena.table(ADVICE)),
                requested: Event::default(),
                handovers: Default::default(),
                saves: Ring::new(arena.table(saves)),
                to_save: Event::default(),
                draining: AtomicBool::new(false),
                save_trouble: AtomicU32::new(0),
                hides: AtomicBool::new(false),
                cut: Cut::new(Ring::new(arena.table(copies))),
                counters: Counters::default(),
                tracer,
            };
            let links: Table<_> = arena.table(frames);
            let mut calls = || Ring::new(arena.table(CALLS));
            let handlers = Handlers::new(calls(), calls(), calls());
            (state, Ring::new(arena.table(ERRANDS)), handlers, links)
        };
        let policy = policy.over(links);
        let inner = Inner {
            state,
            errands,
            writing: trace::Writing::default(),
            pool,
            mmu,
            descriptors: Mutex::new(descriptors),
            held: Mutex::new(None),
            serves_system_calls: AtomicBool::new(reach == Reach::EveryFault),
            table_thread: AtomicU32::new(0),
            lineage,
            nowhere: Nowhere::new(),
            regions: Mutex::new(BTreeMap::new()),
            stop: AtomicBool::new(false),
            threads: Mutex::default(),
            handlers,
            runs_own_code: AtomicBool::new(false),
            hash,
            policy: Mutex::new(policy),
            standby_share,
            samples: AtomicU64::new(0),
            own_sample: AtomicU64::new(0),
            drawing: Turns::default(),
            syncing: Turns::default(),
            starved: Starved::new(),
            saver_turns: AtomicU64::new(0),
            ends_samples: AtomicBool::new(false),
            snapshots: AtomicBool::new(false),
            cutting: Turns::default(),
            config,
            _arena: arena,
        };
        inner.set_reserve();
        Ok(inner)
    }

    /// Core's part of the domain.
    pub(crate) fn state(&self) -> &DomainState {
        &self.state
    }

    fn threads(&self) -> MutexGuard<'_, Vec<Pthread>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many frames to keep ready: enough for the longest fetches to go on while pages are saved, never a large part. What is ready is not in
    /// core: each MiB of it is one that a loop over more than the frames reads again in every pass.
    pub(crate) fn set_reserve(&self) {
        let frames = self.state.stack.budget();
        let base = (frames / 32).clamp(4, 3 << 10).min(frames / 4);
        let standby = self.standby_target();
        self.state.stack.reserve.store(base + standby, Ordering::Relaxed);
        // A page gets its second chance only while it is on standby: new ones take the place of those used up.
        self.state.stack.wake_below.store(base / 2 + standby, Ordering::Relaxed);
        self.state.stack.demand.wanted.signal(self.state.mmu);
    }

    /// How many frames the policy wants on standby.
    pub(crate) fn standby_target(&self) -> u32 {
        (u64::from(self.state.stack.budget()) * u64::from(self.standby_share) / 256) as u32
    }

    /// Closes the gate, however often it must be tried. It does not come to that while a device that never answers keeps somebody inside.
    pub(crate) fn close_gate(&self) {
        let mut closer = Closer::default();
        while closer.close(&self.state.gate, self.state.mmu).is_err() {
            closer.pause();
        }
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Whether this process has its threads, and so its pages: not a child that was made past the handlers of forks, nor a forked one that did
    /// not get it.
    pub(crate) fn is_served(&self) -> bool {
        !self.stopping() && self.is_of_this_lineage()
    }

    fn is_of_this_lineage(&self) -> bool {
        self.lineage == lineage::own()
    }

    /// Whether this process has the domain.
    ///
    /// # Errors
    /// It is a child that did not get it.
    pub(crate) fn is_here(&self, operation: &'static str, object: impl FnOnce() -> String) -> Result<()> {
        if self.is_served() {
            return Ok(());
        }
        let cause = match self.is_of_this_lineage() {
            true => "this forked child did not get it from its parent; a line on standard error says why",
            false => {
                "this process was made past the C library's fork (clone, _Fork), and has none of its parent's domains: use fork"
            }
        };
        Err(Error::new(Kind::Lost, operation, object(), cause))
    }

    /// Does `work` here with no handler of a signal let in: one that touched a page which this thread has claimed would
    /// wait for its own thread. So would this thread where its stack lies in a region, and a page of that is gone: then `work`, which has
    /// moved into it what it uses, is done on a stack of ours. Every call that works on pages goes this way, or by a pager thread.
    pub(crate) fn undisturbed<T>(&self, work: impl FnOnce() -> T) -> T {
        let _quiet = signal::Quiet::begin();
        // By upcalls each domain is asked in turn, this one too: where it is of another's, the fault would wait for what `work` has closed.
        if fork::is_in_no_region(stack::here()) { work() } else { stack::run(work) }
    }

    /// Does `work` where the domain's descriptors are: here, as in a trap, since the program may have closed them; or on a pager thread,
    /// where nothing is left to another, and for which [`Inner::on_pager_thread`] says what `work` may touch.
    pub(crate) fn on_table<T: Send>(&self, work: impl FnOnce(Context) -> T + Send) -> T {
        match self.config.descriptor_table {
            DescriptorTable::Shared => self.undisturbed(|| work(Context::Trap)),
            DescriptorTable::Private => self.on_pager_thread(|| work(Context::Normal)),
        }
    }

    /// The same in a handler of the program's own, which no other handler of a signal interrupts as it is.
    pub(crate) fn in_handler<T: Send>(&self, work: impl FnOnce(Context) -> T + Send) -> T {
        match self.config.descriptor_table {
            DescriptorTable::Shared => work(Context::Trap),
            DescriptorTable::Private => self.on_pager_thread(|| work(Context::Normal)),
        }
    }

    /// What [`Inner::on_table`] does, and on a pager thread what failed there because the program has closed the descriptors.
    pub(crate) fn on_table_or_pager<T: Send>(
        &self,
        work: impl Fn() -> std::result::Result<T, Refusal> + Send + Copy,
    ) -> std::result::Result<T, Refusal> {
        match self.on_table(move |_| work()) {
            Err(Refusal::NoDescriptor) => self.on_pager_thread(work),
            done => done,
        }
    }

    /// Drops the contents of a range.
    ///
    /// # Errors
    /// The first page that stays as it was, because a clone needs it and cannot have it.
    pub(crate) fn discard(&self, range: PageRange) -> std::result::Result<(), (PageNo, Failure)> {
        let state = &self.state;
        let (mut next, mut result) = (range.first, Ok(()));
        // One wait for all of them: a wait for each page would go on for ever.
        let mut frame_wait = FrameWait::default();
        let discard = move |context, range, mut frame_wait| {
            let done = range::discard_waiting(state, context, range, &mut frame_wait);
            (done, frame_wait)
        };
        while next < range.end() {
            let rest = PageRange { first: next, count: range.end().0 - next.0 };
            let done;
            (done, frame_wait) = self.on_table(move |context| discard(context, rest, frame_wait));
            let Err((page, why)) = done else { break };
            let done = match why {
                Undone::Failed(Failure::Machine(Refusal::NoDescriptor)) => {
                    let one = PageRange { first: page, count: 1 };
                    let done;
                    (done, frame_wait) = self.on_pager_thread(move || discard(Context::Normal, one, frame_wait));
                    done.map_err(|(_, why)| why)
                }
                why => Err(why),
            };
            next = match done {
                Err(Undone::AwaitCut(wait)) => {
                    wait.sleep(&state.cut, state.mmu);
                    page
                }
                Err(Undone::Failed(failure)) => {
                    result = result.and(Err((page, failure)));
                    page.plus(1)
                }
                Ok(()) => page.plus(1),
            };
        }
        result
    }

    /// Ends what [`range::supply`] came to on a thread of the program's: on a pager thread, where that has to do it because it reads the
    /// store or has descriptors that the program has closed.
    pub(crate) fn go_on_supplying(
        &self,
        given: std::result::Result<Outcome, CutWait>,
        page: PageNo,
        contents: &PageBytes,
    ) -> Outcome {
        let state = &self.state;
        let on_pager_thread = || {
            let contents = *contents;
            self.on_pager_thread(move || range::supply(state, Context::Normal, page, &contents))
        };
        let mut given = match given {
            Ok(Outcome::Failed(Failure::Machine(Refusal::NoDescriptor))) => on_pager_thread(),
            given => given,
        };
        loop {
            match given {
                Ok(outcome) => return outcome,
                Err(wait) => wait.sleep(&state.cut, state.mmu),
            }
            given = on_pager_thread();
        }
    }

    /// Does `work` on a pager thread; where there are none (any more), here. The caller's stack may be managed, and a pager thread must not
    /// touch it: `work` has moved into it what it uses.
    pub(crate) fn on_pager_thread<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        if !self.is_served() {
            return work();
        }
        self.undisturbed(move || errand::send(&self.state, &self.errands, work))
    }

    /// Says why a fault failed, before the program is sent the signal of this name: to the program's own callback, else in one
    /// line on standard error.
    ///
    /// # Context
    /// Trap.
    pub(crate) fn report(&self, signal: &str, page: PageNo, failure: Failure) {
        if let Some(callback) = self.config.on_failure {
            return callback(page.addr().0, failure);
        }
        let inside = self.state.gate.enter(self.state.mmu);
        let Some(region) = self.state.regions.find(page) else { return };
        let (name, start, index) = (ask::name_of(region), region.range.first.addr().0, region.index(page));
        // Standard error may be slow.
        drop(inside);
        error::tell_of_signal(signal, &name, start, index as usize * PAGE_BYTES, failure);
    }
}

/// The monotonic clock, by the vDSO.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_domain_hashes_pages_with_a_secret_of_its_own() {
        let page = [7; PAGE_BYTES];
        let hashes = [(); 2].map(|()| {
            let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
            domain.life.inner.hash.of(&page)
        });
        assert_ne!(hashes[0], hashes[1], "whoever knows one domain's hashes can make contents collide in another");
    }
}
