//! A domain over page tables of its own: capabilities, tables, frames, a region eight times as large, a policy.

use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock};

use selfpage_core::addr::{PageNo, PageRange, VirtAddr};
use selfpage_core::capability::{Handle, Kernel, Object, Progress, Space, Type};
use selfpage_core::cut::Cut;
use selfpage_core::domain::DomainState;
use selfpage_core::fault::evict::{Evicted, evict, trim_standby};
use selfpage_core::fault::flush;
use selfpage_core::fault::handover::Handovers;
use selfpage_core::fault::protect::{self, Protection};
use selfpage_core::fault::save::save;
use selfpage_core::fault::{self, Failure, Fault, Outcome, sample};
use selfpage_core::frame::{FrameSet, FrameTable, Table, Unpopulated};
use selfpage_core::mmu::Trap;
use selfpage_core::page::State;
use selfpage_core::pager::{Context, Pager};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::policy::{self, Policy};
use selfpage_core::region::{self, Region, RegionMap, Rights};
use selfpage_core::ring::Ring;
use selfpage_core::shortage::Shortage;
use selfpage_core::stack::FrameStack;
use selfpage_core::sync::{AtomicBool, AtomicU32, Event, Gate, Ordering};
use selfpage_core::tables::walk::{Access, WalkFault, translate};
use selfpage_core::tables::{AddressSpace, TableMmu, Tlb};
use selfpage_core::trace::Counters;
use selfpage_core::tracer::Tracer;

use crate::machine::{self, Cpu};
use crate::store::Store;

pub const ROOT: Handle = Handle::at_root(1);
/// Where the frames' capability is, and what it was made from.
pub const FRAMES: Handle = Handle::at_root(40);
const FRAMES_LOG2_BYTES: u8 = 18;
pub const FRAMES_OBJECT: Object = Object { kind: Type::Frame, size_bits: FRAMES_LOG2_BYTES };
/// What memory holds that is not the domain's, or was not.
const SECRET: u64 = 0x5ec2_e75e_c2e7;
/// 64 frames.
const FRAME_COUNT: usize = (1 << FRAMES_LOG2_BYTES) / 4096;
pub const PAGES: u64 = 8 * FRAME_COUNT as u64;
/// The region lies in two page tables.
const FIRST: PageNo = PageNo((0x40_0000_0000 >> 12) + 300);

/// The only CPU of a machine.
pub struct OneCpu(pub Cpu);

// SAFETY: a world is used by the thread that made it.
unsafe impl Sync for OneCpu {}

impl Tlb for OneCpu {
    fn forget_all(&self) {
        self.0.forget_all();
    }

    fn forget(&self, page: VirtAddr) {
        self.0.forget(page);
    }

    fn leave(&self, root: PhysAddr) {
        self.0.leave(root);
    }
}

pub struct World {
    pub memory: &'static PhysMemory,
    pub cpu: &'static OneCpu,
    pub mmu: &'static TableMmu<'static>,
    pub space: Space,
    /// What the frames were made from.
    pub ram: Handle,
    pub root: PhysAddr,
    pub domain: DomainState,
    pub range: PageRange,
    pub store: &'static Store,
    policy: Mutex<Box<dyn Policy>>,
}

// SAFETY: used by the thread that made it.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

/// Memory that was lent to another, or is not the domain's yet.
pub struct Theirs {
    memory: &'static PhysMemory,
    pub base: PhysAddr,
}

impl Theirs {
    fn words(&self) -> impl Iterator<Item = PhysAddr> + use<> {
        let base = self.base;
        (0..1 << FRAMES_LOG2_BYTES).step_by(8).map(move |offset| base.plus(offset))
    }

    pub fn is_untouched(&self) -> bool {
        self.words().all(|at| self.memory.load(at) == SECRET)
    }
}

fn keep<T: 'static>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn table<T: Default + 'static>(len: usize) -> Table<T> {
    let entries = Box::leak((0..len).map(|_| T::default()).collect::<Box<[T]>>());
    // SAFETY: leaked, and used through the table alone.
    unsafe { Table::new(NonNull::from(entries).cast(), len) }
}

fn frame_set() -> FrameSet {
    FrameSet::new(table(FRAME_COUNT.div_ceil(64)), table(1))
}

impl World {
    pub fn new(policy: &str) -> &'static World {
        let memory = keep(machine::memory(16 << 20));
        let cpu = keep(OneCpu(Cpu::default()));
        let (mut kernel, space) = Kernel::boot(memory, cpu, &[]).unwrap();
        let mut blocks: Vec<_> = (2..40)
            .map(Handle::at_root)
            .filter_map(|handle| kernel.identify(&space, handle).ok().map(|ram| (ram.size_bits, handle)))
            .collect();
        blocks.sort_by_key(|block| block.0);
        let (tables_ram, ram) = (blocks[blocks.len() - 1].1, blocks[blocks.len() - 2].1);
        kernel.retype(&space, ram, FRAMES_OBJECT, 1, ROOT, 40).unwrap();
        let tables = AddressSpace::new(&mut kernel, space, tables_ram, ROOT, 50).unwrap();
        let root = kernel.root_table(&space, tables.pml4()).unwrap();

        let this: &'static OnceLock<&'static World> = keep(OnceLock::new());
        let idle = keep(move || {
            if let Some(world) = this.get() {
                world.make_room();
            }
        });
        // SAFETY: the CPU is told by the thread that made the world, and there is no other.
        let mmu =
            unsafe { TableMmu::new(kernel, space, tables, FRAMES, table(FRAME_COUNT), table(FRAME_COUNT * 512), idle) };
        let mmu: &'static TableMmu<'static> = keep(mmu);

        let range = PageRange { first: FIRST, count: PAGES };
        let regions = RegionMap::new([table(2), table(2)]);
        let region = Region::new(range, Trap::Worker, Rights::ReadWrite, table(PAGES as usize), table(PAGES as usize));
        let region = keep(region);
        let store = keep(Store::new(PAGES));
        let pager: &'static &'static dyn Pager = keep(store as &'static dyn Pager);
        // SAFETY: both are leaked.
        assert!(unsafe { region.bind(pager) && regions.insert(region) });
        let count = FRAME_COUNT as u32;
        let stack =
            FrameStack::new(frame_set(), Unpopulated::new(frame_set(), count), Ring::new(table(FRAME_COUNT)), count);
        let domain = DomainState {
            mmu,
            gate: Gate::default(),
            frames: FrameTable::new(table(FRAME_COUNT)),
            stack,
            regions,
            requests: Ring::new(table(16)),
            advice: Ring::new(table(16)),
            requested: Event::default(),
            handovers: Handovers::default(),
            // Core keeps two batches free.
            saves: Ring::new(table(1024)),
            to_save: Event::default(),
            draining: AtomicBool::new(false),
            save_trouble: AtomicU32::new(0),
            hides: AtomicBool::new(false),
            cut: Cut::new(Ring::none()),
            counters: Counters::default(),
            tracer: Tracer::off(),
        };
        let policy = Mutex::new(Box::new(policy::by_name(policy, table(FRAME_COUNT)).unwrap()) as Box<dyn Policy>);
        let world = keep(World { memory, cpu, mmu, space, ram, root, domain, range, store, policy });
        assert!(this.set(world).is_ok());
        world
    }

    pub fn address(&self, word: u64) -> VirtAddr {
        VirtAddr(self.range.first.addr().0 + word as usize * 8)
    }

    pub fn read(&self, word: u64) -> Result<u64, Failure> {
        self.reach(self.address(word), Access::Read).map(|at| self.memory.load(at))
    }

    pub fn write(&self, word: u64, value: u64) -> Result<(), Failure> {
        self.reach(self.address(word), Access::Write).map(|at| self.memory.store(at, value))
    }

    /// An access at ring 3: the CPU tries it, and faults until it may.
    fn reach(&self, at: VirtAddr, access: Access) -> Result<PhysAddr, Failure> {
        for _ in 0..100 {
            let code = match self.cpu.0.access(self.memory, self.root, at, access) {
                Ok(found) => return Ok(found),
                Err(WalkFault::Page(code)) => code,
                Err(WalkFault::NotCanonical) => panic!("{at:?} is canonical"),
            };
            let access = if code & 2 == 0 { region::Access::Read } else { region::Access::Write };
            match fault::resolve(&self.domain, Context::PagerThread, Fault { addr: at, access, thread: 0 }) {
                Outcome::Resolved | Outcome::Retry | Outcome::Busy => {}
                Outcome::Failed(failure) => return Err(failure),
                other => panic!("{at:?} is {other:?}"),
            }
            if let Some(request) = fault::next_request(&self.domain) {
                fault::serve(&self.domain, request);
            }
        }
        panic!("{at:?} faults for ever")
    }

    /// Leaves changed pages on their way to the store.
    pub fn evict_only(&self, want: u32) -> Evicted {
        evict(&self.domain, &mut **self.policy.lock().unwrap(), want)
    }

    /// What evictor and saver do elsewhere.
    pub fn make_room(&self) {
        // Core may wait while it evicts.
        let Ok(mut policy) = self.policy.try_lock() else { return };
        let demand = &self.domain.stack.demand;
        let asked = demand.wanted.count();
        let evicted = evict(&self.domain, &mut **policy, 8);
        self.save_all();
        trim_standby(&self.domain, self.domain.stack.budget() * u32::from(policy.standby_share()) / 256);
        if evicted.ready + evicted.queued > 0 {
            demand.end_shortage();
        } else {
            let memory = self.domain.stack.no_memory();
            demand.state_shortage(self.mmu, asked, if memory { Shortage::NoMemory } else { Shortage::AllHeld });
        }
    }

    /// Leaves nothing on its way to the store.
    pub fn save_all(&self) {
        while save(&self.domain).taken > 0 {}
    }

    pub fn flush(&self, index: u64) -> Result<(), Failure> {
        flush::flush(&self.domain, self.one(index)).map(drop).map_err(|(_, failure)| failure)
    }

    pub fn protect(&self, index: u64, protection: Protection) {
        protect::protect(&self.domain, self.one(index), protection).unwrap();
    }

    /// Unmaps a page to see whether it is used.
    pub fn sample(&self, index: u64) {
        let found = sample::in_core(&self.domain, 0..FRAME_COUNT as u32, self.one(index));
        assert_eq!(sample::begin(&self.domain, found.pages()).pages(), found.pages());
    }

    fn one(&self, index: u64) -> PageRange {
        PageRange { first: self.range.first.plus(index), count: 1 }
    }

    pub fn is_mapped(&self, index: u64) -> bool {
        translate(self.memory, self.root, self.range.first.plus(index).addr()).is_some()
    }

    pub fn mapped(&self) -> usize {
        (0..PAGES).filter(|index| self.is_mapped(*index)).count()
    }

    /// Pages in this state.
    pub fn pages(&self, state: State) -> Vec<u64> {
        let region = self.domain.regions.find(self.range.first).unwrap();
        let is_in_it = |page: &PageNo| region.word(*page).unwrap().load().state() == state;
        self.range.pages().filter(is_in_it).map(|page| region.index(page)).collect()
    }

    /// Whoever lent the frames takes them back, and gives them to another, who writes into them.
    pub fn lend_to_another(&self) -> Theirs {
        self.mmu.with_kernel(|kernel| {
            let base = kernel.identify(&self.space, FRAMES).unwrap().base;
            assert_eq!(kernel.revoke(&self.space, self.ram, u64::MAX), Ok(Progress::Done));
            kernel.retype(&self.space, self.ram, FRAMES_OBJECT, 1, ROOT, 41).unwrap();
            let theirs = Theirs { memory: self.memory, base };
            theirs.words().for_each(|at| self.memory.store(at, SECRET));
            theirs
        })
    }

    /// Other frames, with something in them, come to where the domain's were.
    pub fn lend_anew(&self) -> Theirs {
        self.mmu.with_kernel(|kernel| {
            kernel.retype(&self.space, self.ram, FRAMES_OBJECT, 1, ROOT, 40).unwrap();
            let frames = Theirs { memory: self.memory, base: kernel.identify(&self.space, FRAMES).unwrap().base };
            frames.words().for_each(|at| self.memory.store(at, SECRET));
            frames
        })
    }

    pub fn resident(&self) -> usize {
        let region = self.domain.regions.find(self.range.first).unwrap();
        region.residency().iter().filter(|byte| byte.load(Ordering::Relaxed) == 1).count()
    }
}
