//! selfpage itself: a region over the data file, over a store on the same disk, or over nothing.

use selfpage::store::FileStore;
use selfpage::{Domain, FileAccess, Region, Trap};

use super::super::case::Pattern;
use super::super::error::Error;
use super::super::raw::Memory;
use super::super::system::{Contents, Setup, System};

/// What backs the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
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
    /// Nothing mapped yet.
    pub fn over(trap: Trap, backing: Backing) -> Box<dyn System> {
        Box::new(Selfpage { trap, backing, live: None })
    }

    /// Frames for so much memory of which nothing is ever evicted: a reserve on top of what is touched stays free.
    pub fn frames_without_eviction(touched_bytes: usize) -> usize {
        touched_bytes + touched_bytes / 8
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
        // Only what the case is about is chosen; everything else adapts itself.
        let policy = if setup.case.pattern == Pattern::CyclicMru { "mru" } else { "lru" };
        let frames_bytes = match self.backing {
            Backing::Physical | Backing::Zero => Selfpage::frames_without_eviction(setup.frames_bytes),
            Backing::Store | Backing::File => setup.frames_bytes,
        };
        let domain = Domain::with_frames(frames_bytes).policy(policy).build()?;
        let builder = domain.region(setup.data_bytes).trap(self.trap);
        let mut region = match self.backing {
            Backing::File => builder.file(setup.data_path, 0, FileAccess::ReadWrite),
            Backing::Physical => builder.physical(),
            Backing::Zero => builder.zero(),
            Backing::Store => {
                let store = FileStore::unnamed_in(setup.directory, 2 * setup.data_bytes as u64);
                builder.stored(store.map_err(selfpage::Error::from)?)
            }
        }?;
        if matches!(self.backing, Backing::Physical | Backing::Zero) {
            // The frames are the domain's already, and hold something: a zero pager has to clear them in the fault.
            region.as_mut_slice::<u64>().iter_mut().step_by(512).for_each(|word| *word = 1);
            let len_bytes = region.len_bytes();
            region.discard(0, len_bytes)?;
        }
        let memory = Memory::of_region(&region);
        self.live = Some((region, domain));
        Ok(memory)
    }

    fn put_out(&mut self) -> Result<(), Error> {
        let Some((region, _)) = &self.live else { return Ok(()) };
        // The first time what has changed goes to the store and stays on standby; the second time it goes.
        region.evict(0, region.len_bytes())?;
        region.flush(0, region.len_bytes())?;
        region.evict(0, region.len_bytes())?;
        Ok(())
    }

    fn misses(&self) -> Option<u64> {
        let (_, domain) = self.live.as_ref()?;
        let counts = domain.stats().counts;
        Some(counts.fills_total - counts.fills_ahead_total)
    }

    fn filled_bytes(&self) -> Option<u64> {
        self.live.as_ref().map(|(_, domain)| domain.stats().counts.bytes_filled)
    }

    fn evictions(&self) -> Option<u64> {
        self.live.as_ref().map(|(_, domain)| domain.stats().counts.evictions_total)
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
            region.flush(0, region.len_bytes())?;
        }
        drop(region);
        drop(domain);
        Ok(())
    }
}
