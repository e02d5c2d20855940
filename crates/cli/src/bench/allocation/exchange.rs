//! `exchange`: two blocks swap what they hold, by frames and by copying.

use super::super::error::Error;
use super::super::job::{Bench, Job};
use super::super::raw::blocks::{Source, cycles};
use super::super::result::{Better, Sample, Unit, median};
use super::super::system::{Entry, Systems};
use super::{GLIBC, OURS};

/// The bench.
pub struct Exchange;

static SYSTEMS: Systems<Source> = Systems(&[OURS, GLIBC]);
const LENGTHS: [(&str, usize); 4] = [("2m", 2 << 20), ("16m", 16 << 20), ("64m", 64 << 20), ("256m", 256 << 20)];
const PASSES: usize = 9;

fn len_bytes(case: &str) -> usize {
    LENGTHS.iter().find(|(name, _)| *name == case).map_or(0, |(_, len_bytes)| *len_bytes)
}

impl Bench for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn about(&self) -> &'static str {
        "two blocks swap what they hold: by frames (selfpage), and by copying (glibc)"
    }

    fn cases(&self) -> Vec<String> {
        LENGTHS.map(|(name, _)| name.into()).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn unit(&self, _: &str) -> Unit {
        Unit { name: "kcycles", better: Better::Lower }
    }

    fn memory_bytes(&self, case: &str) -> usize {
        3 * len_bytes(case)
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let source = SYSTEMS.way(job.system);
        let len_bytes = len_bytes(job.case);
        super::need(self.memory_bytes(job.case))?;
        let (Some(a), Some(b)) = (source.allocate(len_bytes), source.allocate(len_bytes)) else {
            return Err(super::no_memory());
        };
        a.fill(1);
        b.fill(2);
        let mut took = Vec::new();
        for _ in 0..PASSES {
            let begin = cycles();
            if source == Source::Pages {
                if !a.exchange(&b) {
                    return Err(super::no_memory());
                }
            } else {
                a.copy_across(&b);
            }
            took.push((cycles() - begin) as f64);
        }
        // An odd number of times: each has what the other had.
        if [0, len_bytes / 2, len_bytes - 1].iter().any(|at| (a.byte(*at), b.byte(*at)) != (2, 1)) {
            return Err(Error::Failed("the blocks do not hold what they should".into()));
        }
        [a, b].into_iter().for_each(|block| block.free());
        Ok(Sample::of(median(took) / 1e3, &[]))
    }
}
