//! `gcbench`: the Boehm collector on our dirty bits, and on its own ways to know what was written.

use selfpage_collector::gcbench::{self, Lists, Outcome, Size};
use selfpage_collector::{Library, Writes};

use super::error::Error;
use super::job::{Bench, Job};
use super::result::{Better, Sample, Unit};
use super::sizes::Sizes;
use super::system::{Entry, Group, Systems};

/// The bench.
pub struct Gcbench;

/// Five configurations; each allocates twice as much as the one before, and a little more.
const CASES: [&str; 5] = ["c1", "c2", "c3", "c4", "c5"];

// The collector's manual mode, which ours uses, fills the lists of a thread with one object at a time; so ours takes objects from
// the shared lists. Each of the collector's own ways runs with both, and the better one is what we are compared with.
static SYSTEMS: Systems<(Writes, Lists)> = Systems(&[
    (Entry::plain("selfpage-dirty", Group::Ours), (Writes::Tracked, Lists::Shared)),
    (Entry::plain("selfpage-dirty-malloc", Group::Ours), (Writes::Tracked, Lists::Thread)),
    (Entry::plain("boehm-mprotect", Group::Mprotect), (Writes::Own, Lists::Shared)),
    (Entry::plain("boehm-mprotect-malloc", Group::Mprotect), (Writes::Own, Lists::Thread)),
    (Entry::plain("boehm-full", Group::Kernel), (Writes::Unknown, Lists::Shared)),
    (Entry::plain("boehm-full-malloc", Group::Kernel), (Writes::Unknown, Lists::Thread)),
]);

/// The depth of the tree that stretches the heap, 18 in the original.
fn size(case: &str, sizes: Sizes) -> Option<Size> {
    let step = CASES.iter().position(|name| *name == case)? as u32;
    Some(Size { stretch_depth: sizes.least_tree_depth + step })
}

impl Bench for Gcbench {
    fn name(&self) -> &'static str {
        "gcbench"
    }

    fn about(&self) -> &'static str {
        "GCBench in five sizes: the Boehm collector on our dirty bits, on mprotect, and without"
    }

    fn cases(&self) -> Vec<String> {
        CASES.map(String::from).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn unit(&self, _: &str) -> Unit {
        Unit { name: "s", better: Better::Lower }
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let (writes, lists) = SYSTEMS.way(job.system);
        let size = job.known(size(job.case, job.sizes))?;
        let library = Library::load().map_err(|error| Error::skip("libgc", error.to_string()))?;
        let run = || {
            selfpage_collector::start(&library, writes)?;
            gcbench::run(&library, size, lists)
        };
        run().map(sample).map_err(|error| match error {
            selfpage_collector::Error::Tracker(error) => Error::skip("uffd", error.to_string()),
            error => Error::Failed(error.to_string()),
        })
    }
}

fn sample(outcome: Outcome) -> Sample {
    let figures = [
        ("collections", outcome.collections as f64),
        ("pauses", outcome.pauses.count as f64),
        ("pause_max_ms", outcome.pauses.longest.as_secs_f64() * 1e3),
        ("pause_total_ms", outcome.pauses.total.as_secs_f64() * 1e3),
        ("heap_bytes", outcome.heap_bytes as f64),
        ("live_objects", outcome.live_objects as f64),
        ("reachable_objects", outcome.reachable_objects as f64),
    ];
    Sample::of(outcome.elapsed.as_secs_f64(), &figures)
}
