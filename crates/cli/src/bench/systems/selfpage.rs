//! selfpage itself: a region over the data file, over a store on the same disk, or over nothing.

use selfpage::store::FileStore;
use selfpage::{Domain, Region, Rights, Trap};

use super::super::case::Pattern;
use super::super::error::Error;
use super::super::raw::Memory;
use super::super::system::{Contents, Setup, System};

/// What backs the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backing {
    /// A file store: anonymous memory that is paged.
    Store,
    /// The data file.
    File,
    /// Frames as they come.
    Physical,
    /// Frames, cleared.
    Zero,
}

/// A region under test.
pub struct Selfpage {
    trap: Trap,
    backing: Backing,
    live: Option<(Region, Domain)>,
}

impl Selfpage {
    fn new(trap: Trap, backing: Backing) -> Box<dyn System> {
        Box::new(Selfpage { trap, backing, live: None })
    }

    /// Paged to a store, by upcalls.
    pub fn upcall() -> Box<dyn System> {
        Selfpage::new(Trap::Upcall, Backing::Store)
    }

    /// Paged to a store, by workers.
    pub fn worker() -> Box<dyn System> {
        Selfpage::new(Trap::Worker, Backing::Store)
    }

    /// The data file, by upcalls.
    pub fn file_upcall() -> Box<dyn System> {
        Selfpage::new(Trap::Upcall, Backing::File)
    }

    /// The data file, by workers.
    pub fn file_worker() -> Box<dyn System> {
        Selfpage::new(Trap::Worker, Backing::File)
    }

    /// No contents, by upcalls.
    pub fn upcall_physical() -> Box<dyn System> {
        Selfpage::new(Trap::Upcall, Backing::Physical)
    }

    /// Zeroed, by upcalls.
    pub fn upcall_zero() -> Box<dyn System> {
        Selfpage::new(Trap::Upcall, Backing::Zero)
    }

    /// Zeroed, by workers.
    pub fn worker_zero() -> Box<dyn System> {
        Selfpage::new(Trap::Worker, Backing::Zero)
    }
}

impl System for Selfpage {
    fn contents(&self) -> Contents {
        match self.backing {
            Backing::File => Contents::File,
            _ => Contents::Undefined,
        }
    }

    fn map(&mut self, setup: &Setup<'_>) -> Result<Memory, Error> {
        let failed = |error: selfpage::Error| Error::Failed(error.to_string());
        // Only what the case is about is chosen; everything else adapts itself.
        let policy = if setup.case.pattern == Pattern::CyclicMru { "mru" } else { "lru" };
        let domain = Domain::with_frames(setup.frames_bytes).policy(policy).build().map_err(failed)?;
        let builder = domain.region(setup.data_bytes).trap(self.trap);
        let region = match self.backing {
            Backing::File => builder.file(setup.data_path, 0, Rights::ReadWrite),
            Backing::Physical => builder.physical(),
            Backing::Zero => builder.zero(),
            Backing::Store => {
                let store = FileStore::unnamed_in(setup.directory, 2 * setup.data_bytes as u64)
                    .map_err(|error| Error::Failed(error.to_string()))?;
                builder.stored(store)
            }
        }
        .map_err(failed)?;
        let memory = Memory::of_region(&region);
        self.live = Some((region, domain));
        Ok(memory)
    }

    fn misses(&self) -> Option<u64> {
        let (_, domain) = self.live.as_ref()?;
        let counts = domain.stats().counts;
        Some(counts.fills_total - counts.fills_ahead_total)
    }

    fn counters(&self) -> Vec<(&'static str, f64)> {
        let Some((_, domain)) = &self.live else { return Vec::new() };
        let stats = domain.stats();
        vec![
            ("fills", stats.counts.fills_total as f64),
            ("fills_ahead", stats.counts.fills_ahead_total as f64),
            ("soft_faults", stats.counts.soft_faults_total as f64),
            ("saves", stats.counts.saves_total as f64),
            ("evictions", stats.counts.evictions_total as f64),
            ("frame_waits", stats.counts.frame_waits_total as f64),
            ("copied_back", stats.counts.copied_back_total as f64),
        ]
    }

    fn finish(&mut self) -> Result<(), Error> {
        let Some((region, domain)) = self.live.take() else { return Ok(()) };
        if self.backing == Backing::File {
            region.flush(0, region.len_bytes()).map_err(|error| Error::Failed(error.to_string()))?;
        }
        drop(region);
        drop(domain);
        Ok(())
    }
}
