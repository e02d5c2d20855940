//! `faults`: the first touch of each page, no I/O, frames free.

use selfpage::Trap;

use super::access::{self, Order};
use super::case::{Access, Case, Pattern};
use super::error::Error;
use super::host;
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

/// Page after page, where fetching more than the page pays.
const ASCENDING: &str = "first-touch-4k";
/// Each fault brings one page. With several threads `-<threads>t` follows.
const SCATTERED: &str = "first-touch-4k-scattered";

fn case(name: &str) -> Option<(Order, usize)> {
    if name == ASCENDING {
        return Some((Order::Ascending, 1));
    }
    match name.strip_prefix(SCATTERED)? {
        "" => Some((Order::Scattered, 1)),
        suffix => Some((Order::Scattered, suffix.strip_prefix('-')?.strip_suffix('t')?.parse().ok()?)),
    }
}

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
        let several = host::thread_counts().skip(1).map(|threads| format!("{SCATTERED}-{threads}t"));
        [ASCENDING, SCATTERED].map(String::from).into_iter().chain(several).collect()
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
        let (order, threads) = job.known(case(job.case))?;
        let make = SYSTEMS.way(job.system);
        let mut system = make();
        // As many frames as pages: nothing is ever evicted.
        let len_bytes = job.sizes.frames_bytes as usize;
        let memory = system.map(&Setup {
            case: Case { pattern: Pattern::Sequential, access: Access::Write, threads },
            data_path: job.directory,
            directory: job.directory,
            data_bytes: len_bytes,
            frames_bytes: len_bytes,
        })?;
        let before = raw::usage();
        let run = access::first_touch(memory, order, threads)?;
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
            ("cpu_s_per_million_pages", (after.cpu_s - before.cpu_s) / pages * 1e6),
        ];
        figures.extend(counters);
        // Of a thread's time: the same for any number of threads where they do not wait for each other.
        Ok(Sample::of(run.elapsed_s * 1e6 * threads as f64 / pages, &figures))
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
