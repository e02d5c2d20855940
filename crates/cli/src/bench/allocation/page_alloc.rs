//! `page-alloc`: what it costs to allocate a block, touch its pages, and free it, by its length.

use super::super::error::Error;
use super::super::job::{Bench, Job};
use super::super::raw::PAGE_BYTES;
use super::super::raw::blocks::{Block, Source, cycles};
use super::super::result::{Better, Sample, Unit, median};
use super::super::system::{Entry, Systems};
use super::{GLIBC, JEMALLOC, MIMALLOC, MMAP, OUR_MALLOC, OURS, POPULATE, TCMALLOC, THP};

/// The bench.
pub struct PageAlloc;

const LENGTHS: [(&str, usize); 11] = [
    ("4k", 4 << 10),
    ("8k", 8 << 10),
    ("16k", 16 << 10),
    ("64k", 64 << 10),
    ("256k", 256 << 10),
    ("1m", 1 << 20),
    ("4m", 4 << 20),
    ("16m", 16 << 20),
    ("64m", 64 << 20),
    ("256m", 256 << 20),
    ("512m", 512 << 20),
];

static SYSTEMS: Systems<Source> =
    Systems(&[OURS, OUR_MALLOC, GLIBC, JEMALLOC, MIMALLOC, TCMALLOC, MMAP, POPULATE, THP]);

/// Blocks of one pass have this many bytes together, or there is one.
const PASS_BYTES: usize = 16 << 20;
const PASSES: usize = 15;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// A block after the other, each touched and freed, after some that do not count.
    Warm,
    /// The first blocks of the process, all there at once.
    Cold,
    /// As warm, and not touched.
    Untouched,
    /// The first block of the process, not touched: its allocation alone.
    Fresh,
}

const WAYS: [(&str, Way); 4] =
    [("warm", Way::Warm), ("cold", Way::Cold), ("untouched", Way::Untouched), ("fresh", Way::Fresh)];

fn case(name: &str) -> Option<(Way, usize)> {
    let (way, length) = name.split_once('-')?;
    let (_, way) = WAYS.iter().find(|(name, _)| *name == way)?;
    let (_, len_bytes) = LENGTHS.iter().find(|(name, _)| *name == length)?;
    Some((*way, *len_bytes))
}

impl Bench for PageAlloc {
    fn name(&self) -> &'static str {
        "page-alloc"
    }

    fn about(&self) -> &'static str {
        "a block allocated, touched and freed, warm and cold, by its length; and blocks that are not touched"
    }

    fn quick_takes(&self) -> &'static str {
        "minutes"
    }

    fn cases(&self) -> Vec<String> {
        let all = WAYS.iter().flat_map(|way| LENGTHS.iter().map(move |length| (way, length)));
        all.map(|(way, length)| format!("{}-{}", way.0, length.0)).collect()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn unit(&self, name: &str) -> Unit {
        let touched = case(name).is_none_or(|(way, _)| matches!(way, Way::Warm | Way::Cold));
        Unit { name: if touched { "cycles/page" } else { "cycles/block" }, better: Better::Lower }
    }

    fn memory_bytes(&self, name: &str) -> usize {
        case(name).map_or(0, |(_, len_bytes)| 2 * len_bytes.max(PASS_BYTES))
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let source = SYSTEMS.way(job.system);
        let (way, len_bytes) = job.known(case(job.case))?;
        super::need(self.memory_bytes(job.case))?;
        // The allocator sets itself up.
        source.allocate(PAGE_BYTES).ok_or_else(super::no_memory)?.free();
        let blocks = (PASS_BYTES / len_bytes).max(1);
        match way {
            Way::Cold => cold(source, len_bytes, blocks),
            Way::Warm => repeated(source, len_bytes, blocks, |block| block.touch(0)),
            Way::Untouched => repeated(source, len_bytes, blocks, |_| ()).map(|mut sample| {
                sample.value *= (len_bytes / PAGE_BYTES) as f64;
                sample
            }),
            Way::Fresh => fresh(source, len_bytes),
        }
    }
}

fn fresh(source: Source, len_bytes: usize) -> Result<Sample, Error> {
    let begin = cycles();
    let block = source.allocate(len_bytes).ok_or_else(super::no_memory)?;
    let took = cycles() - begin;
    block.free();
    Ok(Sample::of(took as f64, &[]))
}

fn cold(source: Source, len_bytes: usize, blocks: usize) -> Result<Sample, Error> {
    let mut all = Vec::with_capacity(blocks);
    let begin = cycles();
    for _ in 0..blocks {
        let block = source.allocate(len_bytes).ok_or_else(super::no_memory)?;
        block.touch(0);
        all.push(block);
    }
    all.into_iter().for_each(Block::free);
    let took = cycles() - begin;
    Ok(Sample::of(took as f64 / (blocks * len_bytes / PAGE_BYTES) as f64, &[]))
}

fn repeated(source: Source, len_bytes: usize, blocks: usize, touch: impl Fn(&Block)) -> Result<Sample, Error> {
    let before = super::resident_bytes();
    let mut passes = Vec::new();
    for pass in 0..PASSES + 1 {
        let begin = cycles();
        for _ in 0..blocks {
            let block = source.allocate(len_bytes).ok_or_else(super::no_memory)?;
            touch(&block);
            block.free();
        }
        if pass > 0 {
            passes.push((cycles() - begin) as f64);
        }
    }
    let kept = super::resident_bytes().saturating_sub(before);
    let value = median(passes) / (blocks * len_bytes / PAGE_BYTES) as f64;
    Ok(Sample::of(value, &[("kept_bytes", kept as f64), ("kept_of_live", kept as f64 / len_bytes as f64)]))
}
