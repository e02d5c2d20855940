//! `realloc`: what it costs to make a block longer.

use super::super::error::Error;
use super::super::job::{Bench, Job};
use super::super::raw::PAGE_BYTES;
use super::super::raw::blocks::{Block, Source, cycles};
use super::super::result::{Better, Sample, Unit, median};
use super::super::system::{Entry, Systems};
use super::{GLIBC, JEMALLOC, MIMALLOC, MMAP, OUR_MALLOC, OURS, TCMALLOC};

/// The bench.
pub struct Resize;

static SYSTEMS: Systems<Source> = Systems(&[OURS, OUR_MALLOC, GLIBC, JEMALLOC, MIMALLOC, TCMALLOC, MMAP]);
const CASES: [&str; 3] = ["64k-1g-warm", "64k-1g-cold", "128k-256k"];
const PASSES: usize = 5;
const STEPS: usize = 64;

impl Bench for Resize {
    fn name(&self) -> &'static str {
        "realloc"
    }

    fn about(&self) -> &'static str {
        "a block grows: by doubling from 64 KiB to 1 GiB, what is new touched; from 128 to 256 KiB"
    }

    fn quick_takes(&self) -> &'static str {
        "minutes"
    }

    fn cases(&self) -> Vec<String> {
        CASES.map(String::from).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn unit(&self, case: &str) -> Unit {
        Unit { name: if case == "128k-256k" { "cycles" } else { "Mcycles" }, better: Better::Lower }
    }

    fn memory_bytes(&self, case: &str) -> usize {
        // While a copy is made there are one and a half.
        if case == "128k-256k" { 64 << 20 } else { 2 << 30 }
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let source = SYSTEMS.way(job.system);
        source.allocate(PAGE_BYTES).ok_or_else(super::no_memory)?.free();
        if job.case == "128k-256k" {
            return one_step(source);
        }
        super::need(self.memory_bytes(job.case))?;
        let passes = if job.case == "64k-1g-warm" { PASSES } else { 0 };
        let first = grow(source)?;
        let took = (0..passes).map(|_| grow(source)).collect::<Result<Vec<_>, _>>()?;
        let took = if took.is_empty() { vec![first] } else { took };
        Ok(Sample::of(median(took) / 1e6, &[]))
    }
}

fn grow(source: Source) -> Result<f64, Error> {
    let mut len_bytes = 64 << 10;
    let begin = cycles();
    let mut block = source.allocate(len_bytes).ok_or_else(super::no_memory)?;
    block.touch(0);
    while len_bytes < 1 << 30 {
        block = block.resize(2 * len_bytes).ok_or_else(super::no_memory)?;
        block.touch(len_bytes);
        len_bytes *= 2;
    }
    block.free();
    Ok((cycles() - begin) as f64)
}

/// Many blocks, so that no allocator has room behind all of them by chance.
fn one_step(source: Source) -> Result<Sample, Error> {
    let (before, after) = (128 << 10, 256 << 10);
    let mut took = Vec::new();
    for pass in 0..PASSES + 1 {
        let blocks: Option<Vec<Block>> = (0..STEPS).map(|_| source.allocate(before)).collect();
        let blocks = blocks.ok_or_else(super::no_memory)?;
        blocks.iter().for_each(|block| block.touch(0));
        let begin = cycles();
        let blocks: Option<Vec<Block>> = blocks.into_iter().map(|block| block.resize(after)).collect();
        // The first is cold.
        if pass > 0 {
            took.push((cycles() - begin) as f64 / STEPS as f64);
        }
        blocks.ok_or_else(super::no_memory)?.into_iter().for_each(Block::free);
    }
    Ok(Sample::of(median(took), &[]))
}
