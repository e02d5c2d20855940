//! `faults`: the first touch of each page, no I/O, frames free.

use selfpage::Trap;

use super::access::{self, Order};
use super::case::{Access, Case, Pattern};
use super::error::Error;
use super::job::{Bench, Job};
use super::raw::{self, PAGE_BYTES};
use super::result::{Better, Sample, Unit};
use super::sizes::Sizes;
use super::system::{Contents, Entry, Group, Setup, System, Systems};
use super::systems::anonymous::Anonymous;
use super::systems::bare::Bare;
use super::systems::selfpage::{Backing, Selfpage};

/// The bench.
pub struct Faults;

/// Page after page, where fetching more than the page pays; and scattered, where each fault brings one page.
const ORDERS: [(&str, Order); 2] =
    [("first-touch-4k", Order::Ascending), ("first-touch-4k-scattered", Order::Scattered)];

static SYSTEMS: Systems<fn() -> Box<dyn System>> = Systems(&[
    (Entry::plain("selfpage-upcall-physical", Group::Ours), || Selfpage::over(Trap::Upcall, Backing::Physical)),
    (Entry::plain("selfpage-upcall-zero", Group::Ours), || Selfpage::over(Trap::Upcall, Backing::Zero)),
    (Entry::plain("selfpage-worker-zero", Group::Ours), || Selfpage::over(Trap::Worker, Backing::Zero)),
    (Entry::plain("userfaultfd-alone", Group::Bare), || Bare::with(Contents::Undefined)),
    (Entry::plain("kernel", Group::Kernel), Anonymous::unmapped),
]);

impl Bench for Faults {
    fn name(&self) -> &'static str {
        "faults"
    }

    fn about(&self) -> &'static str {
        "a fault that needs no I/O, frames free: selfpage and the kernel's own first touch of 4 KiB"
    }

    fn cases(&self) -> Vec<String> {
        ORDERS.map(|(name, _)| name.into()).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn unit(&self, _: &str) -> Unit {
        Unit { name: "us/page", better: Better::Lower }
    }

    // Ours has its frames before the clock runs; the kernel's must not wait for the host's.
    fn memory_bytes(&self, _: &str) -> usize {
        Selfpage::frames_without_eviction(Sizes::FULL.frames_bytes as usize)
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let make = SYSTEMS.way(job.system);
        let mut system = make();
        // As many frames as pages: nothing is ever evicted.
        let len_bytes = job.sizes.frames_bytes as usize;
        let memory = system.map(&Setup {
            case: Case { pattern: Pattern::Sequential, access: Access::Write, threads: 1 },
            data_path: job.directory,
            directory: job.directory,
            data_bytes: len_bytes,
            frames_bytes: len_bytes,
        })?;
        let before = raw::usage();
        let (_, order) = job.known(ORDERS.into_iter().find(|(name, _)| *name == job.case))?;
        let run = access::first_touch(memory, order)?;
        let after = raw::usage();
        let counters = system.counters();
        system.finish()?;
        let pages = (len_bytes / PAGE_BYTES) as f64;
        let mut figures = vec![
            ("p50_us", run.latency.quantile_us(0.5)),
            ("p99_us", run.latency.quantile_us(0.99)),
            ("p99_9_us", run.latency.quantile_us(0.999)),
            ("max_us", run.latency.max_us()),
            ("elapsed_s", run.elapsed_s),
            ("kernel_faults", (after.minor_faults - before.minor_faults) as f64),
            ("cpu_s_per_million_faults", (after.cpu_s - before.cpu_s) / pages * 1e6),
        ];
        figures.extend(counters);
        Ok(Sample::of(run.elapsed_s * 1e6 / pages, &figures))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_touched_is_supplied_before() {
        for case in Faults.cases() {
            assert!(Faults.memory_bytes(&case) as u64 >= Sizes::FULL.frames_bytes, "{case}");
        }
    }
}
