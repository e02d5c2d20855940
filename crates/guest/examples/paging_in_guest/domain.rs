//! A domain over a guest's page tables: frames that are the pages of one Frame capability, and one region.

use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock};

use selfpage_core::addr::{PAGE_BYTES, PageBytes, PageNo, PageRange};
use selfpage_core::capability::{Handle, Object, Progress, Space, Type};
use selfpage_core::cut::Cut;
use selfpage_core::domain::DomainState;
use selfpage_core::fault::evict::{evict, trim_standby};
use selfpage_core::fault::handover::Handovers;
use selfpage_core::fault::save::save;
use selfpage_core::fault::{self, Fault, Outcome};
use selfpage_core::frame::{FrameSet, FrameTable, Table, Unpopulated};
use selfpage_core::mmu::Trap;
use selfpage_core::pager::{Context, FillPage, Pager, PagerError, SavePage, Verdict};
use selfpage_core::policy::{self, Policy};
use selfpage_core::region::{Region, RegionMap, Rights};
use selfpage_core::ring::Ring;
use selfpage_core::shortage::Shortage;
use selfpage_core::stack::FrameStack;
use selfpage_core::sync::{AtomicU32, Event, Gate};
use selfpage_core::tables::TableMmu;
use selfpage_core::trace::Counters;
use selfpage_guest::Parts;

/// A domain, whose tables live as long as the process.
pub struct Domain {
    pub state: DomainState,
    pub mmu: &'static TableMmu<'static>,
    space: Space,
    root: Handle,
    ram: Handle,
    first_place: u8,
    policy: Mutex<Box<dyn Policy>>,
}

/// Pages while they are not in frames. What was never saved is zero.
struct Store(Mutex<Vec<Option<Box<PageBytes>>>>);

fn keep<T: 'static>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn table<T: Default + 'static>(len: usize) -> Table<T> {
    let entries = Box::leak((0..len).map(|_| T::default()).collect::<Box<[T]>>());
    // SAFETY: leaked, and used through the table alone.
    unsafe { Table::new(NonNull::from(entries).cast(), len) }
}

fn frame_set(frames: usize) -> FrameSet {
    let words = frames.div_ceil(64);
    FrameSet::new(table(words), table(words.div_ceil(64)))
}

impl Domain {
    /// `2^frames_log2_bytes` of frames, and a region of `pages` at an address where the process has nothing.
    pub fn new(parts: Parts<'static>, frames_log2_bytes: u8, first: usize, pages: usize) -> &'static Domain {
        let Parts { mut kernel, space, root, tables, ram, first_place } = parts;
        let object = Object { kind: Type::Frame, size_bits: frames_log2_bytes };
        kernel.retype(&space, ram, object, 1, root, first_place).expect("the RAM has room for the frames");
        let frames = Handle::at_root(first_place);
        let count = (1 << frames_log2_bytes) / PAGE_BYTES;

        let this: &'static OnceLock<&'static Domain> = keep(OnceLock::new());
        let idle = keep(move || this.get().into_iter().for_each(|domain| domain.make_room()));
        // SAFETY: that entries changed is noted in an atomic.
        let mmu = unsafe { TableMmu::new(kernel, space, tables, frames, table(count), table(count * 512), idle) };
        let mmu: &'static TableMmu<'static> = keep(mmu);

        let range = PageRange { first: PageNo((first / PAGE_BYTES) as u64), count: pages as u64 };
        let region = keep(Region::new(range, Trap::Worker, Rights::ReadWrite, table(pages), table(pages)));
        let pager = keep(keep(Store(Mutex::new(vec![None; pages]))) as &'static dyn Pager);
        let regions = RegionMap::new([table(2), table(2)]);
        // SAFETY: both are leaked.
        let bound = unsafe { region.bind(pager) && regions.insert(region) };
        assert!(bound, "a new region fits into a new map");
        let unpopulated = Unpopulated::new(frame_set(count), count as u32);
        let state = DomainState {
            mmu,
            gate: Gate::default(),
            frames: FrameTable::new(table(count)),
            stack: FrameStack::new(frame_set(count), unpopulated, Ring::new(table(count)), count as u32),
            regions,
            requests: Ring::new(table(16)),
            requested: Event::default(),
            handovers: Handovers::default(),
            // Core keeps two batches free.
            saves: Ring::new(table(1024)),
            to_save: Event::default(),
            save_trouble: AtomicU32::new(0),
            cut: Cut::new(Ring::none()),
            counters: Counters::default(),
        };
        let policy = Box::new(policy::by_name("lru", table(count)).expect("a name of core's"));
        let domain = keep(Domain { state, mmu, space, root, ram, first_place, policy: Mutex::new(policy) });
        assert!(this.set(domain).is_ok());
        domain
    }

    /// Answers a page fault of the guest.
    pub fn resolve(&self, fault: Fault) -> Outcome {
        while let Some(request) = fault::next_request(&self.state) {
            fault::serve(&self.state, request);
        }
        fault::resolve(&self.state, Context::PagerThread, fault)
    }

    /// Whoever lent the frames takes all that was made from their memory, and has it overwritten.
    pub fn revoke(&self) {
        self.mmu.with_kernel(|kernel| {
            let revoked = kernel.revoke(&self.space, self.ram, u64::MAX);
            assert_eq!(revoked, Ok(Progress::Done));
            let ram = kernel.identify(&self.space, self.ram).expect("it is still there itself");
            for offset in (0..ram.len_bytes()).step_by(8) {
                kernel.memory().store(ram.base.plus(offset), 0xdead_dead_dead_dead);
            }
        });
    }

    /// Gives the domain other frames: those behind the ones that it had.
    pub fn give_others(&self, frames_log2_bytes: u8) {
        self.mmu.with_kernel(|kernel| {
            let object = Object { kind: Type::Frame, size_bits: frames_log2_bytes };
            let made = kernel.retype(&self.space, self.ram, object, 2, self.root, self.first_place);
            made.expect("the RAM has room for both");
        });
        self.mmu.replace_frames(Handle::at_root(self.first_place + 1));
    }

    /// Saves and unmaps all pages, so that the frames can be taken back without loss.
    pub fn clean(&self) {
        let mut policy = self.policy.lock().expect("nobody panics with it");
        while evict(&self.state, &mut **policy, 256).queued > 0 {
            while save(&self.state) > 0 {}
        }
    }

    /// What evictor and saver do elsewhere.
    fn make_room(&self) {
        // Core may wait while it evicts.
        let Ok(mut policy) = self.policy.try_lock() else { return };
        let demand = &self.state.stack.demand;
        let asked = demand.wanted.count();
        let evicted = evict(&self.state, &mut **policy, 8);
        while save(&self.state) > 0 {}
        trim_standby(&self.state, self.state.stack.budget() * u32::from(policy.standby_share()) / 256);
        if evicted.ready + evicted.queued > 0 {
            demand.end_shortage();
        } else {
            demand.state_shortage(self.mmu, asked, Shortage::AllHeld);
        }
    }
}

impl Pager for Store {
    fn fills_in(&self) -> Context {
        Context::Trap
    }

    fn extent(&self, _index: u64, want: u32) -> u32 {
        want
    }

    fn fill(&self, _context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        let kept = self.0.lock().expect("nobody panics with it");
        for page in pages.iter_mut() {
            match &kept[page.index as usize] {
                Some(contents) => *page.bytes.get_mut() = **contents,
                None => page.bytes.clear(),
            }
        }
        Ok((pages.len() * PAGE_BYTES) as u64)
    }

    fn changed(&self, index: u64, bytes: &PageBytes) -> Verdict {
        match &self.0.lock().expect("nobody panics with it")[index as usize] {
            Some(contents) if **contents == *bytes => Verdict::Clean,
            None if bytes.iter().all(|byte| *byte == 0) => Verdict::Clean,
            _ => Verdict::Changed,
        }
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        let mut kept = self.0.lock().expect("nobody panics with it");
        for page in pages {
            kept[page.index as usize] = Some(Box::new(*page.bytes.get()));
            page.outcome = Ok(());
        }
    }

    fn forget(&self, index: u64, count: u64) {
        self.0.lock().expect("nobody panics with it")[index as usize..(index + count) as usize].fill(None);
    }
}
