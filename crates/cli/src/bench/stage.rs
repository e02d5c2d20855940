//! What the parent sets up around the jobs of a run: the data file, the disk's settings, the cgroup, the swap file.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

use super::cgroup::{Cgroup, Swapping};
use super::data;
use super::device::{self, Device, Readahead};
use super::error::Error;
use super::host;
use super::job::{self, Bench, Job, Place};
use super::progress::Progress;
use super::raw;
use super::result::{Confinement, Sample};
use super::scratch::Scratch;
use super::sizes::Sizes;
use super::swapfile::SwapFile;
use super::system::{Condition, Entry};

/// The stage of one run. All that it made is gone when it is dropped.
pub struct Stage<'a> {
    bench: &'a dyn Bench,
    sizes: Sizes,
    size_options: &'a [&'a str],
    // Dropped before the directory that it lies in.
    swap: Option<SwapFile>,
    data: Data,
    scratch: Scratch,
    said: BTreeSet<&'static str>,
}

/// The state of the data file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    Missing,
    Good,
}

impl<'a> Stage<'a> {
    /// A stage whose files go below `parent`.
    pub fn new(bench: &'a dyn Bench, sizes: Sizes, size_options: &'a [&'a str], parent: &Path) -> Result<Self, Error> {
        let scratch = Scratch::create(parent)?;
        Ok(Stage { bench, sizes, size_options, swap: None, data: Data::Missing, scratch, said: BTreeSet::new() })
    }

    /// Measures `case` with `system` once.
    pub fn play(
        &mut self,
        case: &str,
        system: &'static Entry,
        progress: &mut Progress,
    ) -> Result<(Sample, Confinement), Error> {
        if raw::interrupted() {
            return Err(Error::Interrupted);
        }
        if self.bench.place() == Place::Memory {
            host::supply(self.bench.memory_bytes(case))?;
            return Ok((self.ask(case, system, None)?, Confinement::NotNeeded));
        }
        self.ready_data()?;
        if system.condition == Condition::SwapFile && self.swap.is_none() {
            self.swap = Some(SwapFile::enable(self.scratch.directory(), self.sizes.swap_bytes())?);
        }
        let _readahead = match system.condition {
            Condition::Readahead { size_kib } => {
                let device = Device::of(self.scratch.directory())?;
                let note = self.scratch.note_readahead(&device.readahead()?, size_kib)?;
                // In the order in which they go.
                Some((Readahead::set(&device, size_kib)?, note))
            }
            Condition::Plain | Condition::SwapFile => None,
        };
        let swapping = match system.condition {
            Condition::SwapFile => Swapping::Allowed,
            Condition::Plain | Condition::Readahead { .. } => Swapping::Refused,
        };
        let cgroup = Cgroup::create(self.sizes.limit_bytes(), swapping);
        let cgroup = self.or_without(cgroup, progress)?;
        if let Some(cgroup) = &cgroup {
            self.scratch.note_cgroup(cgroup.directory())?;
        }
        self.empty_caches(progress)?;
        let result = self.ask(case, system, cgroup.as_ref().map(Cgroup::directory));
        if result.is_err() {
            // It may have written without telling which versions.
            self.data = Data::Missing;
        }
        let mut sample = result?;
        let peak = cgroup.as_ref().and_then(Cgroup::peak_bytes);
        sample.figures.extend(peak.map(|bytes| ("memory_max_bytes".to_string(), bytes as f64)));
        let confinement = if cgroup.is_some() { Confinement::Cgroup } else { Confinement::Missing };
        Ok((sample, confinement))
    }

    fn ask(&self, case: &str, system: &'static Entry, cgroup: Option<&Path>) -> Result<Sample, Error> {
        let job = Job { case, system, sizes: self.sizes, directory: self.scratch.directory() };
        job::ask(self.bench, &job, self.size_options, cgroup)
    }

    fn ready_data(&mut self) -> Result<(), Error> {
        if self.data == Data::Missing {
            data::create(self.scratch.directory(), self.sizes.file_bytes)?;
            self.data = Data::Good;
        }
        Ok(())
    }

    fn empty_caches(&mut self, progress: &mut Progress) -> Result<(), Error> {
        let path = data::path_in(self.scratch.directory());
        let forgotten = File::open(&path).and_then(|file| raw::forget(&file));
        forgotten.map_err(|error| Error::io("drop the cached pages of", &path, error))?;
        let dropped = device::drop_caches();
        self.or_without(dropped, progress).map(drop)
    }

    /// What may be missing: then it is said, once, and the case runs without; unless SELFPAGE_REQUIRE names it.
    fn or_without<T>(&mut self, result: Result<T, Error>, progress: &mut Progress) -> Result<Option<T>, Error> {
        match result {
            Ok(thing) => Ok(Some(thing)),
            Err(Error::Skip { name, reason }) if !super::error::required(name) => {
                if self.said.insert(name) {
                    progress.say(&format!("SKIP({name}: {reason}); cases run without"));
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
