//! What is compared: the systems of a bench, and what each must be able to do.

use std::path::Path;

use super::case::Case;
use super::error::Error;
use super::preload::Preload;
use super::raw::Memory;

/// What a system is given to set itself up.
pub struct Setup<'a> {
    /// The case that will run, for systems that can choose a policy.
    pub case: Case,
    /// The data file, at least `data_bytes` long.
    pub data_path: &'a Path,
    /// A directory on the same disk for files of the system's own; removed after the run.
    pub directory: &'a Path,
    /// How much memory the loops will touch.
    pub data_bytes: usize,
    /// How much of it may be resident. The cgroup allows this and a slack ([`Sizes::limit_bytes`]).
    pub frames_bytes: usize,
}

/// What the memory of a system holds once it is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// The data file: writes go back to it, and `finish` makes them durable.
    File,
    /// Anything: the bench writes all of it, once, before it measures.
    Undefined,
}

/// A system under test that shows its data as memory. It lives in a process of its own, for one case, once.
pub trait System {
    /// What [`System::map`] maps.
    fn contents(&self) -> Contents;

    /// Maps `setup.data_bytes` of memory. It stays mapped until `finish`.
    fn map(&mut self, setup: &Setup<'_>) -> Result<Memory, Error>;

    /// Puts the contents out of memory and in their store, as empty caches do for a file. Asked of those whose contents the
    /// bench has written ([`Contents::Undefined`]).
    fn put_out(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Accesses so far that had to wait for the store; `None` where the kernel counts them (major faults).
    fn misses(&self) -> Option<u64> {
        None
    }

    /// Bytes so far that came from the store or the file, ahead of their use or not; `None` where each miss brings a page.
    fn filled_bytes(&self) -> Option<u64> {
        None
    }

    /// Pages so far that made room for others; `None` where nobody counts them for this process alone.
    fn evictions(&self) -> Option<u64> {
        None
    }

    /// More to report, under these names.
    fn counters(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Makes writes durable where contents are the data file, and unmaps.
    fn finish(&mut self) -> Result<(), Error>;
}

/// What a system stands for in a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// selfpage.
    Ours,
    /// A memory map by the kernel.
    Mmap,
    /// Anonymous memory over Linux swap.
    Swap,
    /// The disk itself.
    Raw,
    /// Writes noticed by mprotect and signals.
    Mprotect,
    /// The kernel's part of ours: the calls of a fault, and nobody who decides anything.
    Bare,
    /// The C library's `malloc`.
    Glibc,
    /// Another `malloc`.
    Malloc,
    /// The library that our heap keeps, alone.
    Kept,
    /// The kernel's own way: its first-touch fault, its map of pages that exist; a collector that knows of no writes.
    Kernel,
}

/// What must be set on the machine while a system runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Nothing.
    Plain,
    /// The readahead of the disk.
    Readahead { size_kib: u32 },
    /// A swap file; such systems run last.
    SwapFile,
}

/// One system of a bench, as all benches know it. How it is driven only its own bench knows ([`Systems`]).
pub struct Entry {
    /// As in `system` of the results.
    pub name: &'static str,
    /// What it stands for.
    pub group: Group,
    /// What it needs.
    pub condition: Condition,
    /// What is preloaded into the process that measures it.
    pub preload: Option<Preload>,
}

impl Entry {
    /// A system that needs nothing.
    pub const fn plain(name: &'static str, group: Group) -> Entry {
        Entry { name, group, condition: Condition::Plain, preload: None }
    }
}

/// The systems of a bench, in the order in which they run, each with the way in which the bench drives it.
pub struct Systems<W: 'static>(pub &'static [(Entry, W)]);

impl<W: Copy> Systems<W> {
    /// Without their ways.
    pub fn entries(&self) -> Vec<&'static Entry> {
        self.0.iter().map(|(entry, _)| entry).collect()
    }

    /// How `system` is driven.
    ///
    /// # Panics
    /// If it is another bench's.
    pub fn way(&self, system: &Entry) -> W {
        let found = self.0.iter().find(|(entry, _)| entry.name == system.name);
        found.map(|(_, way)| *way).expect("a bench is asked about its own systems")
    }
}
