//! `dirty`: which pages were written, by the kernel's notes, by mprotect traps, and against a fork's copy on write.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};
use selfpage_core::linux::probe;

use super::error::Error;
use super::job::{Bench, Job};
use super::raw::{Mapping, PAGE_BYTES, Paused};
use super::result::{Better, Sample, Unit, median};
use super::system::{Entry, Group, Systems};

/// The bench.
pub struct Tracking;

const CASES: [&str; 6] = ["arm-4k", "arm-2m", "scan", "scan-and-rearm", "first-write", "dirty"];
/// Pages written, in all of the memory.
const WRITTEN_PAGES: usize = 1000;
/// Rounds of one repetition. The median counts.
const ROUNDS: usize = 9;
/// Questions to the scan buffer in a round.
const QUESTIONS: usize = 1_000_000;

static SYSTEMS: Systems<Way> = Systems(&[
    (Entry::plain("selfpage", Group::Ours), Way::Notes(Mechanism::WriteProtection)),
    (Entry::plain("mprotect", Group::Mprotect), Way::Notes(Mechanism::Traps)),
    (Entry::plain("soft-dirty", Group::Kernel), Way::SoftDirty),
    (Entry::plain("fork", Group::Kernel), Way::Fork),
]);

/// How writes are noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By a tracker.
    Notes(Mechanism),
    /// By the kernel's soft-dirty bits, of the whole process. No tracker works by them: they lose what is written between look and clearing.
    SoftDirty,
    /// Not at all: a child holds the memory as it was.
    Fork,
}

impl Bench for Tracking {
    fn name(&self) -> &'static str {
        "dirty"
    }

    fn about(&self) -> &'static str {
        "which of 1 GiB of pages were written, 1,000 being so: arming, scanning, the first write, and asking"
    }

    fn cases(&self) -> Vec<String> {
        CASES.map(String::from).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn takes_part(&self, system: &Entry, case: &str) -> bool {
        match SYSTEMS.way(system) {
            Way::Notes(_) => true,
            Way::SoftDirty => case != "dirty",
            // A child is made and its memory is written against; there is nothing to scan.
            Way::Fork => case.starts_with("arm") || case == "first-write",
        }
    }

    fn unit(&self, case: &str) -> Unit {
        let name = match case {
            "first-write" => "ns/page",
            "dirty" => "ns/question",
            _ => "us",
        };
        Unit { name, better: Better::Lower }
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let way = SYSTEMS.way(job.system);
        let failed = |error: std::io::Error| Error::Failed(format!("map memory: {error}"));
        let len_bytes = job.sizes.data_bytes as usize / 2;
        let mapping = match job.case {
            "arm-2m" => Mapping::huge(len_bytes),
            _ => Mapping::anonymous(len_bytes),
        };
        let mapping = mapping.map_err(failed)?;
        let memory = mapping.memory();
        (0..memory.size_pages()).for_each(|page| memory.write(page, 0, 1));
        let rounds = (0..ROUNDS).map(|round| match way {
            Way::Notes(mechanism) => noted(job.case, mechanism, &mapping, round as u64),
            Way::SoftDirty => soft_dirty(job.case, &mapping, round as u64),
            Way::Fork => forked(job.case, &mapping, round as u64),
        });
        let rounds: Vec<f64> = rounds.collect::<Result<_, Error>>()?;
        let figures = rounds.iter().enumerate().map(|(round, value)| (format!("round_{round}"), *value)).collect();
        Ok(Sample { figures, ..Sample::of(median(rounds), &[]) })
    }
}

/// The pages that a round writes: some in each part of the memory.
fn pages(size_pages: usize) -> impl Iterator<Item = usize> {
    let step = size_pages / WRITTEN_PAGES;
    (0..WRITTEN_PAGES).map(move |index| index * step + index % step)
}

fn write(mapping: &Mapping, value: u64) -> f64 {
    let memory = mapping.memory();
    let begun = Instant::now();
    pages(memory.size_pages()).for_each(|page| memory.write(page, 1, value));
    begun.elapsed().as_nanos() as f64 / WRITTEN_PAGES as f64
}

fn us_since(begun: Instant) -> f64 {
    begun.elapsed().as_nanos() as f64 / 1000.0
}

fn noted(case: &str, mechanism: Mechanism, mapping: &Mapping, round: u64) -> Result<f64, Error> {
    let failed = |error| Error::of_library("dirty", error);
    let (tracker, range) = (DirtyTracker::with(mechanism).map_err(failed)?, mapping.addresses());
    let mut found = Dirty::new();
    let begun = Instant::now();
    mapping.arm(&tracker).map_err(failed)?;
    let armed_us = us_since(begun);
    if case.starts_with("arm") {
        // A write would split a huge page, for all rounds after this one.
        tracker.disarm(range).map_err(failed)?;
        return Ok(armed_us);
    }
    let write_ns = write(mapping, round);
    // Once for the buffer to grow.
    tracker.scan(range.clone(), &mut found).map_err(failed)?;
    let begun = Instant::now();
    tracker.scan(range.clone(), &mut found).map_err(failed)?;
    let scanned_us = us_since(begun);
    let begun = Instant::now();
    tracker.scan_and_rearm(range.clone(), &mut found).map_err(failed)?;
    let rearmed_us = us_since(begun);
    check_found(found.pages())?;
    let asked_ns = ask(mapping, &found)?;
    tracker.disarm(range).map_err(failed)?;
    Ok(match case {
        "scan" => scanned_us,
        "scan-and-rearm" => rearmed_us,
        "first-write" => write_ns,
        _ => asked_ns,
    })
}

fn check_found(size_pages: u64) -> Result<(), Error> {
    if size_pages != WRITTEN_PAGES as u64 {
        return Err(Error::Failed(format!("{size_pages} pages were found, {WRITTEN_PAGES} were written")));
    }
    Ok(())
}

/// As a collector or a checkpointer does it that has stopped all threads.
fn soft_dirty(case: &str, mapping: &Mapping, round: u64) -> Result<f64, Error> {
    probe::has_soft_dirty().map_err(|_| Error::skip("soft-dirty", "a kernel without CONFIG_MEM_SOFT_DIRTY"))?;
    let failed = |error: std::io::Error| Error::Failed(format!("soft-dirty bits: {error}"));
    let pagemap = File::open("/proc/self/pagemap").map_err(failed)?;
    let range = mapping.addresses();
    let mut words = vec![1u8; range.len() / PAGE_BYTES * 8];
    let mut look = || {
        pagemap.read_exact_at(&mut words, (range.start / PAGE_BYTES * 8) as u64)?;
        // Bit 55 of each.
        Ok(words.chunks_exact(8).filter(|word| word[6] & 0x80 != 0).count() as u64)
    };
    let clear = || std::fs::write("/proc/self/clear_refs", "4");
    let begun = Instant::now();
    clear().map_err(failed)?;
    let armed_us = us_since(begun);
    if case.starts_with("arm") {
        return Ok(armed_us);
    }
    let write_ns = write(mapping, round);
    let begun = Instant::now();
    look().map_err(failed)?;
    let scanned_us = us_since(begun);
    let begun = Instant::now();
    let found = look().and_then(|found| clear().map(|()| found)).map_err(failed)?;
    let rearmed_us = us_since(begun);
    check_found(found)?;
    Ok(match case {
        "scan" => scanned_us,
        "scan-and-rearm" => rearmed_us,
        _ => write_ns,
    })
}

/// Asks for pages in an order that no cache foresees.
fn ask(mapping: &Mapping, found: &Dirty) -> Result<f64, Error> {
    let (range, size_pages) = (mapping.addresses(), mapping.memory().size_pages());
    let mut yes = 0u64;
    let begun = Instant::now();
    for question in 0..QUESTIONS {
        let page = question.wrapping_mul(0x9e37_79b1) % size_pages;
        yes += u64::from(black_box(found).contains(range.start + page * PAGE_BYTES));
    }
    let took_ns = begun.elapsed().as_nanos() as f64 / QUESTIONS as f64;
    if yes == 0 { Err(Error::Failed("no page is found by asking".into())) } else { Ok(took_ns) }
}

fn forked(case: &str, mapping: &Mapping, round: u64) -> Result<f64, Error> {
    let begun = Instant::now();
    let child = Paused::fork().map_err(|error| Error::Failed(format!("fork: {error}")))?;
    let forked_us = us_since(begun);
    let value = if case == "first-write" { write(mapping, round) } else { forked_us };
    drop(child);
    Ok(value)
}
