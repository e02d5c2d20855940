//! `batch`: many small items by one call against a call for each, and vectors that grow.

use selfpage::alloc::GrowVec;

use super::super::error::Error;
use super::super::job::{Bench, Job};
use super::super::raw::blocks::{Source, allocate_items, cycles, free_items};
use super::super::result::{Better, Sample, Unit, median};
use super::super::system::{Entry, Systems};
use super::{GLIBC, JEMALLOC, MIMALLOC, OURS, TCMALLOC};

/// The bench.
pub struct Batch;

static SYSTEMS: Systems<Source> = Systems(&[OURS, GLIBC, JEMALLOC, MIMALLOC, TCMALLOC]);
const CASES: [&str; 3] = ["allocate-4m-48b", "free-4m-48b", "vector-512m"];
const ITEMS: usize = 4_000_000;
const ITEM_BYTES: usize = 48;
const VECTOR_ITEMS: usize = (512 << 20) / size_of::<u64>();
const PASSES: usize = 5;

impl Bench for Batch {
    fn name(&self) -> &'static str {
        "batch"
    }

    fn about(&self) -> &'static str {
        "4 million items of 48 bytes by one call, and by a call for each; GrowVec and Vec, pushed full"
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
        for _ in 0..PASSES {
            let begin = cycles();
            if allocate_items(source, ITEM_BYTES, &mut items) < ITEMS {
                return Err(super::no_memory());
            }
            let between = cycles();
            free_items(source, &mut items);
            allocating.push((between - begin) as f64);
            freeing.push((cycles() - between) as f64);
        }
        let (first, took) = if job.case == "free-4m-48b" { (freeing[0], freeing) } else { (allocating[0], allocating) };
        Ok(Sample::of(median(took) / ITEMS as f64, &[("first", first / ITEMS as f64)]))
    }
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
    Sample::of(median(took) / VECTOR_ITEMS as f64, &[])
}
