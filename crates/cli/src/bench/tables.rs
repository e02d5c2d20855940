//! `tables`: page tables built under the rules of capabilities, against the kernel's fastest way to map pages that exist.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use selfpage_core::capability::Type;
use selfpage_core::tables::PageSize;

use super::case::Access;
use super::error::Error;
use super::job::{Bench, Job};
use super::result::{Better, Sample, Unit, median};
use super::sizes::Sizes;
use super::system::{Entry, Group, Systems};
use super::systems::{populate, rules};

/// The bench.
pub struct Tables;

/// What a case does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Pages are mapped, protected against writing, and unmapped, again and again; one of the three is what counts.
    Mapping(Change, Way),
    /// RAM is made into objects, 63 in a call.
    Retype(Type),
    /// A capability is copied, once in a call.
    Copy,
    /// What came of a capability is taken back.
    Revoke {
        /// How many capabilities came of it.
        descendants: usize,
        /// And how.
        shape: Shape,
    },
}

/// A change of mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Maps to be read and written.
    Map,
    /// Leaves reading only.
    Protect,
    /// Unmaps.
    Unmap,
}

/// How much a call changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// All entries of a table, or as many as there is memory for.
    Batches(PageSize),
    /// One entry of a page table.
    Each,
    /// All 4 KiB pages of a range, in an address space that has no tables before it is mapped.
    Range,
}

/// What the descendants of a capability are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Copies of it.
    Flat,
    /// Each a copy of the one before.
    Chain,
}

const SMALL: Way = Way::Batches(PageSize::Small4KiB);
const LARGE: Way = Way::Batches(PageSize::Large2MiB);
const HUGE: Way = Way::Batches(PageSize::Huge1GiB);

const CASES: [(&str, Work); 22] = [
    ("map-4k", Work::Mapping(Change::Map, SMALL)),
    ("protect-4k", Work::Mapping(Change::Protect, SMALL)),
    ("unmap-4k", Work::Mapping(Change::Unmap, SMALL)),
    ("map-4k-each", Work::Mapping(Change::Map, Way::Each)),
    ("protect-4k-each", Work::Mapping(Change::Protect, Way::Each)),
    ("unmap-4k-each", Work::Mapping(Change::Unmap, Way::Each)),
    ("map-4k-range", Work::Mapping(Change::Map, Way::Range)),
    ("protect-4k-range", Work::Mapping(Change::Protect, Way::Range)),
    ("unmap-4k-range", Work::Mapping(Change::Unmap, Way::Range)),
    ("map-2m", Work::Mapping(Change::Map, LARGE)),
    ("protect-2m", Work::Mapping(Change::Protect, LARGE)),
    ("unmap-2m", Work::Mapping(Change::Unmap, LARGE)),
    ("map-1g", Work::Mapping(Change::Map, HUGE)),
    ("protect-1g", Work::Mapping(Change::Protect, HUGE)),
    ("unmap-1g", Work::Mapping(Change::Unmap, HUGE)),
    ("retype-frame", Work::Retype(Type::Frame)),
    ("retype-table", Work::Retype(Type::Pt)),
    ("copy", Work::Copy),
    ("revoke-1", Work::Revoke { descendants: 1, shape: Shape::Flat }),
    ("revoke-100", Work::Revoke { descendants: 100, shape: Shape::Flat }),
    ("revoke-10000", Work::Revoke { descendants: 10_000, shape: Shape::Flat }),
    ("revoke-10000-chain", Work::Revoke { descendants: 10_000, shape: Shape::Chain }),
];

/// Does the work of a case.
type Measure = fn(Work, Sizes) -> Result<Took, Error>;

static SYSTEMS: Systems<Measure> = Systems(&[
    (Entry::plain("selfpage-rules", Group::Ours), rules::measure),
    // Mapped to be written, each page is marked as written; mapped to be read, the kernel maps pages around a fault, too.
    (Entry::plain("mmap-populate", Group::Kernel), |work, sizes| populate::measure(Access::Write, work, sizes)),
    (Entry::plain("mmap-populate-read", Group::Kernel), |work, sizes| populate::measure(Access::Read, work, sizes)),
]);

/// Passes of one repetition. The median counts: other programs empty the caches in between.
pub const PASSES: usize = 9;

/// What the passes of a repetition took of the CPU.
pub struct Took {
    /// Each of them.
    pub passes: Vec<Duration>,
    /// Calls in a pass.
    pub calls: usize,
    /// Pages, objects or capabilities in a pass.
    pub things: usize,
}

impl Took {
    fn sample(self) -> Sample {
        let ns = median(self.passes.iter().map(|pass| pass.as_nanos() as f64).collect());
        let figures = [("ns_per_call", ns / self.calls as f64), ("calls", self.calls as f64)];
        Sample::of(ns / self.things as f64, &figures)
    }
}

/// Maps, protects and unmaps by `make`. How long the wanted one took.
pub fn one_pass(wanted: Change, mut make: impl FnMut(Change) -> Result<(), Error>) -> Result<Duration, Error> {
    let mut took = Duration::ZERO;
    for change in [Change::Map, Change::Protect, Change::Unmap] {
        let before = cpu_time();
        make(change)?;
        if change == wanted {
            took = cpu_time() - before;
        }
    }
    Ok(took)
}

/// What this thread has had of the CPU: long calls are interrupted by other programs more often than short ones, and nothing here waits.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn work(case: &str) -> Option<Work> {
    CASES.iter().find(|(name, _)| *name == case).map(|(_, work)| *work)
}

impl Bench for Tables {
    fn name(&self) -> &'static str {
        "tables"
    }

    fn about(&self) -> &'static str {
        "page tables under capabilities, on a machine in memory, and the kernel's mmap of pages that exist"
    }

    fn cases(&self) -> Vec<String> {
        CASES.map(|(name, _)| name.into()).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn takes_part(&self, system: &Entry, case: &str) -> bool {
        match work(case) {
            _ if system.group == Group::Ours => true,
            // What is mapped to be read only cannot be protected any more.
            Some(Work::Mapping(change, SMALL | Way::Range)) => {
                change == Change::Map || system.name != "mmap-populate-read"
            }
            _ => false,
        }
    }

    fn unit(&self, case: &str) -> Unit {
        let name = match work(case) {
            Some(Work::Mapping(..)) | None => "ns/page",
            Some(Work::Retype(_)) => "ns/object",
            Some(Work::Copy) => "ns/capability",
            Some(Work::Revoke { .. }) => "ns/descendant",
        };
        Unit { name, better: Better::Lower }
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let work = job.known(work(job.case))?;
        let measure = SYSTEMS.way(job.system);
        Ok(measure(work, job.sizes)?.sample())
    }
}
