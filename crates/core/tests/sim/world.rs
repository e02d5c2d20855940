//! A domain over the simulated machine, with its regions, pagers and policy.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Mutex;

use selfpage_core::addr::{PageNo, PageRange};
use selfpage_core::cut::{Cut, PageSets};
use selfpage_core::domain::DomainState;
use selfpage_core::fault::Failure;
use selfpage_core::fault::evict::Evicted;
use selfpage_core::fault::handover::Handovers;
use selfpage_core::fault::protect::{self, Protection};
use selfpage_core::fault::range;
use selfpage_core::frame::{FrameSet, FrameTable, Table, Unpopulated};
use selfpage_core::mmu::{Refusal, Trap};
use selfpage_core::pager::{Context, Pager};
use selfpage_core::pageset::PageSet;
use selfpage_core::region::{Region, RegionMap, Rights};
use selfpage_core::ring::Ring;
use selfpage_core::stack::FrameStack;
use selfpage_core::sync::{AtomicBool, AtomicU32, Event, Gate, Ordering};
use selfpage_core::trace::Counters;
use selfpage_core::tracer::Tracer;

use crate::dice;
use crate::machine::SimMmu;
use crate::pager::{Backing, SimPager};
use crate::policy::SimPolicy;
use crate::scheduler;
use crate::shadow::Shadow;
use crate::snapshots::Cuts;
use crate::tracker::Tracker;
use crate::weather::Weather;

/// Where the first region begins.
const FIRST: PageNo = PageNo(0x1000);
/// Places for pages to be saved: core keeps two batches of them free.
const SAVES: usize = 1024;

/// A region and its pager.
pub struct Part {
    pub region: &'static Region,
    pub pager: &'static SimPager,
}

/// How far the end has come. Who serves others ends after them.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub enum Stage {
    Programs,
    PagerThreads,
    Evictor,
    Saver,
}

/// What the program does that others do not.
#[derive(Clone, Copy, PartialEq)]
pub enum Habit {
    None,
    /// Handlers that are asked of absent pages before the pager give contents.
    Supply,
    /// Contents are moved to other pages.
    Relocate,
    /// A tracker looks for what was written.
    Track,
}

pub struct World {
    pub domain: DomainState,
    /// What core keeps beside it.
    pub cores: Vec<Stretch>,
    pub mmu: &'static SimMmu,
    pub weather: &'static Weather,
    pub parts: Vec<Part>,
    pub shadow: Shadow,
    pub tracker: Tracker,
    pub policy: Mutex<SimPolicy>,
    pub habit: Habit,
    pub steps_left: Cell<u32>,
    pub cuts: Cuts,
    /// Whether the clone has been made; before that nobody knows of its pages.
    pub cloned: Cell<bool>,
    /// The last value written anywhere.
    pub value: Cell<u64>,
    pub stage: Cell<Stage>,
    /// Threads of this stage that go on.
    pub left: Cell<usize>,
    /// Frames that the contract has been cut by, and whether somebody is cutting it just now.
    pub cut: Cell<u32>,
    pub cutting: Cell<bool>,
    /// What the program's threads wait for just now: pages, since when.
    waits: Mutex<Vec<Wait>>,
}

// SAFETY: one-real-thread: the simulated threads of a world all run on the one that made it.
unsafe impl Sync for World {}

/// Somebody works on pages.
struct Wait {
    thread: Option<usize>,
    range: PageRange,
    since_ns: u64,
}

/// What lives as long as a world.
#[derive(Default)]
pub struct Life {
    ends: Vec<Box<dyn FnOnce()>>,
    /// What core keeps: its tables and regions.
    cores: Vec<Stretch>,
}

/// A stretch of memory.
pub type Stretch = (NonNull<u8>, usize);

impl Life {
    fn keep_box<T: ?Sized + 'static>(&mut self, value: Box<T>) -> &'static T {
        let value = Box::into_raw(value);
        // SAFETY: world-outlives: freed by `end`, whose caller says that nobody looks any more.
        self.ends.push(Box::new(move || drop(unsafe { Box::from_raw(value) })));
        // SAFETY: world-outlives: as above.
        unsafe { &*value }
    }

    fn keep<T: 'static>(&mut self, value: T) -> &'static T {
        self.keep_box(Box::new(value))
    }

    fn table<T: Default + 'static>(&mut self, len: usize) -> Table<T> {
        let entries = self.keep_box((0..len).map(|_| T::default()).collect::<Box<[T]>>());
        self.cores.push((NonNull::from(entries).cast(), size_of_val(entries)));
        // SAFETY: table-memory: `len` entries that live as long as the world and are used through this table alone.
        unsafe { Table::new(NonNull::from(entries).cast(), len) }
    }

    /// # Safety
    /// *world-outlives*: nobody uses the world any more.
    pub unsafe fn end(self) {
        self.ends.into_iter().for_each(|free| free());
    }
}

impl World {
    /// Evicts all of a range, a batch after the other.
    pub fn evict(&self, mut range: PageRange) {
        let mut evicted = Evicted::default();
        while range.count > 0 {
            range = range::evict(&self.domain, range, &mut evicted);
            range::await_room(&self.domain);
        }
    }

    /// A world by chance.
    pub fn new(life: &mut Life, steps: u32, habit: Habit, cuts: Cuts) -> &'static World {
        let weather = life.keep(Weather::default());
        weather.begin();
        // From 64 frames on faults fetch ahead.
        let frames = if dice::once_in(4) { 64 + dice::below(96) } else { 8 + dice::below(33) } as u32;
        let pages = u64::from(frames) * if frames < 64 { 8 } else { 3 };
        let few = u64::from(frames / 8).max(1);
        let mut kinds = vec![
            (Trap::Worker, Context::PagerThread, Backing::Store, pages / 3),
            (Trap::Upcall, Context::Trap, Backing::Store, pages / 3),
            (Trap::Upcall, Context::PagerThread, Backing::Store, pages / 3),
            (Trap::Worker, Context::Trap, Backing::Nothing, few),
        ];
        if cuts == Cuts::WithAClone {
            // Of the first, whatever that is.
            kinds.rotate_left(dice::below(3) as usize);
            kinds.push(kinds[0]);
        }
        let total: u64 = kinds.iter().map(|kind| kind.3 + 1).sum();
        let mmu = life.keep(SimMmu::new(FIRST, total as usize, frames as usize, weather));
        let regions = RegionMap::new([life.table(8), life.table(8)]);
        let mut first = FIRST;
        let mut parts = Vec::new();
        for (trap, fills_in, backing, count) in kinds {
            let range = PageRange { first, count };
            let (words, residency) = (life.table(count as usize), life.table(count as usize));
            let region = Region::new(range, trap, Rights::ReadWrite, words, residency);
            let mut region = region.track(life.table(count as usize));
            let mut set = || PageSet::new(life.table(PageSet::words(count as usize)));
            let (unarmed, changed, pending, inherited) = (set(), set(), set(), set());
            region.sets = PageSets { unarmed, changed, pending, inherited, ..PageSets::none() };
            (region.guarded, region.given_up) = (set(), set());
            let region = life.keep(region);
            life.cores.push((NonNull::from(region).cast(), size_of_val(region)));
            let pager = life.keep(SimPager::new(backing, fills_in, count, weather));
            let dynamic = life.keep(pager as &'static dyn Pager);
            // SAFETY: pager-outlives, region-in-map: both live as long as the world.
            assert!(unsafe { region.bind(dynamic) && regions.insert(region) });
            parts.push(Part { region, pager });
            if parts.len() > 4 {
                // SAFETY: region-in-map: both live as long as the world.
                unsafe { region.clone_of(parts[0].region) };
            }
            first = range.end().plus(1); // A gap.
        }
        let words = (frames as usize).div_ceil(64);
        let free = FrameSet::new(life.table(words), life.table(words.div_ceil(64)));
        let given_up = FrameSet::new(life.table(words), life.table(words.div_ceil(64)));
        let stack = FrameStack::new(free, Unpopulated::new(given_up, frames), Ring::new(life.table(16)), frames);
        stack.reserve.store((frames / 8).max(1), Ordering::Relaxed);
        let domain = DomainState {
            mmu,
            gate: Gate::default(),
            frames: FrameTable::new(life.table(frames as usize)),
            stack,
            regions,
            requests: Ring::new(life.table(2)),
            advice: Ring::new(life.table(8)),
            requested: Event::default(),
            handovers: Handovers::default(),
            saves: Ring::new(life.table(SAVES)),
            to_save: Event::default(),
            draining: AtomicBool::new(false),
            save_trouble: AtomicU32::new(0),
            hides: AtomicBool::new(false),
            cut: Cut::new(Ring::new(life.table(4))),
            counters: Counters::default(),
            tracer: Tracer::off(),
        };
        let cores = std::mem::take(&mut life.cores);
        life.keep(World {
            domain,
            cores,
            mmu,
            weather,
            parts,
            shadow: Shadow::new(total as usize),
            tracker: Tracker::new(total as usize),
            policy: Mutex::new(SimPolicy::new(frames, weather)),
            habit,
            steps_left: Cell::new(steps),
            cuts,
            cloned: Cell::new(false),
            value: Cell::new(0),
            stage: Cell::new(Stage::Programs),
            left: Cell::new(0),
            cut: Cell::new(0),
            cutting: Cell::new(false),
            waits: Mutex::default(),
        })
    }

    /// The number of a page in this world.
    pub fn at(&self, page: PageNo) -> usize {
        (page.0 - FIRST.0) as usize
    }

    pub fn part(&self, page: PageNo) -> &Part {
        self.parts.iter().find(|part| part.region.range.contains(page)).expect("a page of a region")
    }

    /// The region that is made a clone of the first.
    pub fn clone_part(&self) -> Option<&Part> {
        self.parts.get(4)
    }

    /// Where the clone has the contents of a page of its source from that page still.
    pub fn heir(&self, page: PageNo) -> Option<PageNo> {
        let (source, clone) = (self.parts[0].region, self.clone_part()?.region);
        let inherits = source.range.contains(page) && clone.sets.inherited.contains(source.index(page));
        (inherits && clone.is_linked()).then(|| clone.range.first.plus(source.index(page)))
    }

    /// The page of the source that has the contents of a page of the clone.
    pub fn ancestor(&self, page: PageNo) -> Option<PageNo> {
        let clone = self.clone_part()?.region;
        let inherits = clone.range.contains(page) && clone.sets.inherited.contains(clone.index(page));
        (inherits && clone.is_linked()).then(|| self.parts[0].region.range.first.plus(clone.index(page)))
    }

    /// Whether a page is said to be in core.
    pub fn is_in_core(&self, page: PageNo) -> bool {
        let region = self.part(page).region;
        region.residency().get(region.index(page) as usize).expect("a byte a page").load(Ordering::Relaxed) != 0
    }

    /// What every handler here does: the page is the program's again.
    pub fn unprotect(&self, page: PageNo) {
        let _ = protect::protect(&self.domain, PageRange { first: page, count: 1 }, Protection::ReadWrite);
    }

    /// A page, more often one of a few.
    pub fn any_page(&self) -> PageNo {
        let part = match self.clone_part().filter(|_| self.cloned.get() && dice::once_in(3)) {
            Some(clone) => clone,
            None => &self.parts[dice::below(if dice::once_in(8) { 4 } else { 3 }) as usize],
        };
        let count = part.region.range.count;
        let hot = (count / 12).max(1);
        part.region.range.first.plus(if dice::once_in(2) { dice::below(count) } else { dice::below(hot) })
    }

    /// Does `work`, for which the running thread may wait for pages of `range`.
    pub fn waiting_for<R>(&self, range: PageRange, work: impl FnOnce() -> R) -> R {
        let wait = Wait { thread: scheduler::current(), range, since_ns: scheduler::now_ns() };
        self.waits.try_lock().expect("one thread at a time").push(wait);
        let result = work();
        let waits = &mut *self.waits.try_lock().expect("one thread at a time");
        let last = waits.iter().rposition(|wait| wait.thread == scheduler::current()).expect("pushed above");
        waits.remove(last);
        result
    }

    /// Whether a failure that the program is told of has a cause: one since somebody began to wait for the page.
    pub fn judge(&self, page: PageNo, failure: Failure) {
        let (part, climate) = (self.part(page), self.weather.climate());
        match failure {
            Failure::Pager(error) => {
                let own_ns = part.pager.failed_ns(part.region.index(page));
                // Of a clone's page it may have been the source's pager.
                let is_clone = self.clone_part().is_some_and(|clone| std::ptr::eq(clone, part));
                let source_ns = if is_clone { self.parts[0].pager.failed_ns(part.region.index(page)) } else { 0 };
                let failed_ns = own_ns.max(source_ns);
                let waits = self.waits.try_lock().expect("one thread at a time");
                let mut waits = waits.iter().filter(|wait| wait.range.contains(page));
                assert!(waits.any(|wait| wait.since_ns <= failed_ns), "{page:?}: {error:?} is old: of {failed_ns}");
            }
            Failure::Shortage(shortage) => assert!(climate.starves(), "{page:?}: {shortage:?} for no reason"),
            Failure::Machine(Refusal::NoMemory) | Failure::Writing(Refusal::NoMemory) => {
                assert!(climate.no_memory, "{page:?}: memory was to be had")
            }
            Failure::Machine(refusal) | Failure::Writing(refusal) => {
                panic!("{page:?}: {refusal:?} is nothing to tell the program")
            }
        }
    }

    /// Where the frames are, for a report.
    pub fn frames(&self) -> String {
        let stack = &self.domain.stack;
        format!(
            "{} frames ready of {}: {} free, {} on standby, {} claimed; {} to be saved, shortage {:?}, reserve {:?}",
            stack.ready(),
            stack.budget(),
            stack.free.count(),
            stack.on_standby(),
            stack.claimed(),
            self.domain.saves.len(),
            stack.demand.shortage(),
            stack.reserve,
        )
    }

    /// One thread of the present stage has ended.
    pub fn ended(&self, next: Stage, next_count: usize) {
        self.left.set(self.left.get() - 1);
        if self.left.get() == 0 {
            self.stage.set(next);
            self.left.set(next_count);
            for event in [&self.domain.requested, &self.domain.stack.demand.wanted, &self.domain.to_save] {
                event.signal(self.mmu);
            }
            scheduler::wake(u32::MAX, |_, state| state == scheduler::State::Reading);
        }
    }
}
