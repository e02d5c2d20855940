//! A domain over a guest's page tables, for its handler: frames that are the pages of one Frame capability, and one region.

use std::cell::UnsafeCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use selfpage_core::addr::{PAGE_BYTES, PageBytes, PageNo, PageRange};
use selfpage_core::capability::{Handle, Object, Progress, Space, Type};
use selfpage_core::cut::Cut;
use selfpage_core::domain::DomainState;
use selfpage_core::fault::evict::{evict, trim_standby};
use selfpage_core::fault::handover::Handovers;
use selfpage_core::fault::save::save;
use selfpage_core::fault::{self, Fault, Outcome};
use selfpage_core::frame::{FrameSet, FrameTable, Unpopulated};
use selfpage_core::mmu::Trap;
use selfpage_core::pager::{Context, FillPage, Pager, PagerError, SavePage, Verdict};
use selfpage_core::policy::{self, Named, Policy};
use selfpage_core::region::{Region, RegionMap, Rights};
use selfpage_core::ring::Ring;
use selfpage_core::shortage::Shortage;
use selfpage_core::stack::FrameStack;
use selfpage_core::sync::{AtomicU32, Event, Gate};
use selfpage_core::tables::TableMmu;
use selfpage_core::trace::Counters;
use selfpage_core::tracer::Tracer;
use selfpage_guest::{Error, Parts, Private};

/// A domain. All of it lies where the handler can use it.
pub struct Domain {
    pub state: DomainState,
    pub mmu: &'static TableMmu<'static>,
    space: Space,
    root: Handle,
    ram: Handle,
    first_place: u8,
    policy: Alone<Named>,
}

/// What is worked on by one at a time: std's locks look at thread-local data, which a guest does not have.
struct Alone<T> {
    is_taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: whoever set the mark has the value alone.
unsafe impl<T: Send> Sync for Alone<T> {}

impl<T> Alone<T> {
    const fn new(value: T) -> Alone<T> {
        Alone { is_taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// `None`: somebody is at it, who waits for us.
    fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.is_taken.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: the mark is ours.
        let result = work(unsafe { &mut *self.value.get() });
        self.is_taken.store(false, Ordering::Release);
        Some(result)
    }
}

/// Pages while they are not in frames. What was never saved is zero.
struct Store(Alone<&'static mut [Kept]>);

struct Kept {
    saved: bool,
    bytes: PageBytes,
}

fn frame_set(private: &'static Private, frames: usize) -> Result<FrameSet, Error> {
    let words = frames.div_ceil(64);
    Ok(FrameSet::new(private.table(words)?, private.table(words.div_ceil(64))?))
}

impl Domain {
    /// `2^frames_log2_bytes` of frames, and a region of `pages` at an address where the process has nothing.
    pub fn new(
        parts: Parts<'static>,
        frames_log2_bytes: u8,
        first: usize,
        pages: usize,
    ) -> Result<&'static Domain, Error> {
        let Parts { mut kernel, space, root, tables, ram, first_place, private, .. } = parts;
        let object = Object { kind: Type::Frame, size_bits: frames_log2_bytes };
        kernel.retype(&space, ram, object, 1, root, first_place).expect("the RAM has room for the frames");
        let frames = Handle::at_root(first_place);
        let count = (1 << frames_log2_bytes) / PAGE_BYTES;

        let this: &'static OnceLock<&'static Domain> = private.keep(OnceLock::new())?;
        let idle = private.keep(move || this.get().into_iter().for_each(|domain: &&Domain| domain.make_room()))?;
        let (slots, spare) = (private.table(count)?, private.table(count * 512)?);
        // SAFETY: that entries changed is noted in an atomic.
        let mmu = unsafe { TableMmu::new(kernel, space, tables, frames, slots, spare, idle) };
        let mmu: &'static TableMmu<'static> = private.keep(mmu)?;

        let range = PageRange { first: PageNo((first / PAGE_BYTES) as u64), count: pages as u64 };
        let region = Region::new(range, Trap::Worker, Rights::ReadWrite, private.table(pages)?, private.table(pages)?);
        let region = private.keep(region)?;
        let kept = private.keep_each(pages, || Kept { saved: false, bytes: [0; PAGE_BYTES] })?;
        let pager = private.keep(private.keep(Store(Alone::new(kept)))? as &'static dyn Pager)?;
        let regions = RegionMap::new([private.table(2)?, private.table(2)?]);
        // SAFETY: both stay as long as the process.
        let bound = unsafe { region.bind(pager) && regions.insert(region) };
        assert!(bound, "a new region fits into a new map");
        let unpopulated = Unpopulated::new(frame_set(private, count)?, count as u32);
        let listed = Ring::new(private.table(count)?);
        let state = DomainState {
            mmu,
            gate: Gate::default(),
            frames: FrameTable::new(private.table(count)?),
            stack: FrameStack::new(frame_set(private, count)?, unpopulated, listed, count as u32),
            regions,
            requests: Ring::new(private.table(16)?),
            advice: Ring::new(private.table(16)?),
            requested: Event::default(),
            handovers: Handovers::default(),
            // Core keeps two batches free.
            saves: Ring::new(private.table(1024)?),
            to_save: Event::default(),
            draining: AtomicBool::new(false),
            save_trouble: AtomicU32::new(0),
            hides: AtomicBool::new(false),
            cut: Cut::new(Ring::none()),
            counters: Counters::default(),
            tracer: Tracer::off(),
        };
        let policy = policy::by_name("lru", private.table(count)?).expect("a name of core's");
        let policy = Alone::new(policy);
        let domain = private.keep(Domain { state, mmu, space, root, ram, first_place, policy })?;
        assert!(this.set(domain).is_ok());
        Ok(domain)
    }

    /// Answers a page fault of the closure, in the guest.
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
        let cleaned = self.policy.with(|policy| {
            while evict(&self.state, policy, 256).queued > 0 {
                while save(&self.state).taken > 0 {}
            }
        });
        assert!(cleaned.is_some(), "nobody evicts meanwhile");
    }

    /// What evictor and saver do elsewhere. Core may wait while it evicts: then somebody is at it already.
    fn make_room(&self) {
        let demand = &self.state.stack.demand;
        let asked = demand.wanted.count();
        let evicted = self.policy.with(|policy| (evict(&self.state, policy, 8), policy.standby_share()));
        let Some((evicted, standby_share)) = evicted else { return };
        while save(&self.state).taken > 0 {}
        trim_standby(&self.state, self.state.stack.budget() * u32::from(standby_share) / 256);
        if evicted.ready + evicted.queued > 0 {
            demand.end_shortage();
        } else {
            demand.state_shortage(self.mmu, asked, Shortage::AllHeld);
        }
    }
}

impl Store {
    fn with<R>(&self, work: impl FnOnce(&mut [Kept]) -> R) -> R {
        self.0.with(|kept| work(kept)).expect("nobody else is at it while a page is copied")
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
        self.with(|kept| {
            for page in pages.iter_mut() {
                let Kept { saved, bytes } = &kept[page.index as usize];
                if *saved {
                    *page.bytes.get_mut() = *bytes;
                } else {
                    page.bytes.clear();
                }
            }
        });
        Ok((pages.len() * PAGE_BYTES) as u64)
    }

    fn changed(&self, index: u64, bytes: &PageBytes) -> Verdict {
        let is_same = self.with(|kept| {
            let kept = &kept[index as usize];
            if kept.saved { kept.bytes == *bytes } else { bytes.iter().all(|byte| *byte == 0) }
        });
        if is_same { Verdict::Clean } else { Verdict::Changed }
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        self.with(|kept| {
            for page in pages {
                kept[page.index as usize] = Kept { saved: true, bytes: *page.bytes };
                page.outcome = Ok(());
            }
        });
    }

    fn forget(&self, index: u64, count: u64) {
        self.with(|kept| kept[index as usize..(index + count) as usize].iter_mut().for_each(|kept| kept.saved = false));
    }
}
