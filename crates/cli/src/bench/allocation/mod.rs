//! The benches of the allocator: what a block costs, against the allocators that programs have.

pub mod batch;
pub mod exchange;
pub mod page_alloc;
pub mod resize;

use std::path::{Path, PathBuf};

use super::error::Error;
use super::job::Job;
use super::raw::blocks::{Filled, Source};
use super::result::Sample;
use super::system::{Condition, Drive, Entry, Group};

/// A library that stands in for the C library's `malloc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preload {
    /// As in skips.
    name: &'static str,
    /// The file, in one of [`LIBRARIES`].
    file: &'static str,
    /// Who has it.
    package: &'static str,
}

/// Where Debian and others put shared libraries.
const LIBRARIES: [&str; 4] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];

impl Preload {
    /// Where the library is.
    pub fn path(self) -> Result<PathBuf, Error> {
        let places = LIBRARIES.iter().map(|directory| Path::new(directory).join(self.file));
        places
            .into_iter()
            .find(|path| path.exists())
            .ok_or_else(|| Error::skip(self.name, format!("no {} here: install {}", self.file, self.package)))
    }
}

const fn entry(name: &'static str, group: Group, source: Source, preload: Option<Preload>) -> Entry {
    Entry { name, group, condition: Condition::Plain, drive: Drive::Allocator { source, preload } }
}

const fn malloc(name: &'static str, file: &'static str, package: &'static str) -> Entry {
    entry(name, Group::Malloc, Source::Malloc, Some(Preload { name, file, package }))
}

pub const OURS: Entry = entry("selfpage", Group::Ours, Source::Pages, None);
pub const GLIBC: Entry = entry("glibc", Group::Glibc, Source::Malloc, None);
pub const JEMALLOC: Entry = malloc("jemalloc", "libjemalloc.so.2", "libjemalloc2");
pub const MIMALLOC: Entry = malloc("mimalloc", "libmimalloc.so.2.0", "libmimalloc2.0");
pub const TCMALLOC: Entry = malloc("tcmalloc", "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4");
pub const MMAP: Entry = entry("mmap", Group::Kernel, Source::Mmap(Filled::AsTouched), None);
pub const POPULATE: Entry = entry("mmap-populate", Group::Kernel, Source::Mmap(Filled::AtOnce), None);
pub const THP: Entry = entry("mmap-thp", Group::Kernel, Source::Mmap(Filled::Huge), None);

/// Where the job's blocks come from.
fn source(job: &Job<'_>) -> Result<Source, Error> {
    match job.system.drive {
        Drive::Allocator { source, .. } => Ok(source),
        _ => Err(Error::Failed(format!("{} allocates nothing", job.system.name))),
    }
}

/// Refuses lengths that the machine has no memory for.
fn need(bytes: usize) -> Result<(), Error> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let available = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(usize::MAX >> 10);
    if available < bytes >> 10 {
        return Err(Error::skip(
            "memory",
            format!("{} MiB are available, {} are needed", available >> 10, bytes >> 20),
        ));
    }
    Ok(())
}

fn no_memory() -> Error {
    Error::Failed("no memory".into())
}

/// Bytes of the process that are in memory.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * super::raw::PAGE_BYTES
}

fn sample(value: f64, figures: &[(&str, f64)]) -> Sample {
    Sample { value, counts: true, figures: figures.iter().map(|(name, value)| (name.to_string(), *value)).collect() }
}

fn median(mut values: Vec<u64>) -> f64 {
    values.sort_unstable();
    values.get(values.len() / 2).map_or(f64::NAN, |value| *value as f64)
}
