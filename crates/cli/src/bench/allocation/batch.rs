//! `batch`: many small items by one call against a call for each, and vectors that grow.

use selfpage::alloc::GrowVec;

use super::super::error::Error;
use super::super::job::{Bench, Job};
use super::super::raw::blocks::{Source, allocate_items, allocate_written_items, cycles, free_items};
use super::super::result::{Better, Sample, Unit, median};
use super::super::system::{Entry, Systems};
use super::objects::Random;
use super::{GLIBC, JEMALLOC, MIMALLOC, OURS, TCMALLOC};

/// The bench.
pub struct Batch;

static SYSTEMS: Systems<Source> = Systems(&[OURS, GLIBC, JEMALLOC, MIMALLOC, TCMALLOC]);
/// Of the first two no item is written: what is left is the calls.
const CASES: [&str; 5] =
    ["allocate-4m-48b", "free-4m-48b", "allocate-4m-48b-written", "free-4m-48b-shuffled", "vector-512m"];
const ITEMS: usize = 4_000_000;
const ITEM_BYTES: usize = 48;
const VECTOR_ITEMS: usize = (512 << 20) / size_of::<u64>();
const PASSES: usize = 5;

impl Bench for Batch {
    fn name(&self) -> &'static str {
        "batch"
    }

    fn about(&self) -> &'static str {
        "4 million items of 48 bytes by one call, and by a call for each: not written, freed in order; written once; freed in no order; \
         GrowVec and Vec, pushed full"
    }

    fn cases(&self) -> Vec<String> {
        CASES.map(String::from).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn unit(&self, _: &str) -> Unit {
        Unit { name: "cycles/item", better: Better::Lower }
    }

    fn memory_bytes(&self, _: &str) -> usize {
        1 << 30
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let source = SYSTEMS.way(job.system);
        super::need(self.memory_bytes(job.case))?;
        if job.case == "vector-512m" {
            return Ok(vector(source));
        }
        // Written with something other than zeros: the places have memory before anything is measured.
        let mut items = vec![Some(std::ptr::NonNull::dangling()); ITEMS];
        let (mut allocating, mut freeing) = (Vec::new(), Vec::new());
        let allocate = if job.case == "allocate-4m-48b-written" { allocate_written_items } else { allocate_items };
        for _ in 0..PASSES {
            let begin = cycles();
            let count = allocate(source, ITEM_BYTES, &mut items);
            let allocated = cycles();
            if count < ITEMS {
                return Err(super::no_memory());
            }
            if job.case == "free-4m-48b-shuffled" {
                shuffle(&mut items);
            }
            let between = cycles();
            free_items(source, &mut items);
            allocating.push((allocated - begin) as f64);
            freeing.push((cycles() - between) as f64);
        }
        let (first, took) =
            if job.case.starts_with("free") { (freeing[0], freeing) } else { (allocating[0], allocating) };
        Ok(Sample::of(median(took) / ITEMS as f64, &[("first", first / ITEMS as f64)]))
    }
}

/// Into an order that looks random, the same in each run.
fn shuffle<T>(items: &mut [T]) {
    let mut random = Random::of(0);
    (1..items.len()).rev().for_each(|at| items.swap(at, random.below(at + 1)));
}

fn vector(source: Source) -> Sample {
    let mut took = Vec::new();
    for _ in 0..PASSES {
        let begin = cycles();
        if source == Source::Pages {
            let mut vector = GrowVec::new();
            (0..VECTOR_ITEMS as u64).for_each(|item| vector.push(item));
            std::hint::black_box(&vector);
        } else {
            let mut vector = Vec::new();
            (0..VECTOR_ITEMS as u64).for_each(|item| vector.push(item));
            std::hint::black_box(&vector);
        }
        took.push((cycles() - begin) as f64);
    }
    let first = took[0] / VECTOR_ITEMS as f64;
    Sample::of(median(took) / VECTOR_ITEMS as f64, &[("first", first)])
}
