//! A pager that decides nothing: what the kernel takes for the faults of one, on the thread that takes them.

use std::fs::File;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use selfpage_core::linux::errno::Errno;

use super::super::data;
use super::super::error::Error;
use super::super::raw::watched::Watched;
use super::super::raw::{Mapping, Memory, PAGE_BYTES, trap};
use super::super::system::{Contents, Setup, System};

/// A userfaultfd, a handler of `SIGBUS`, and in it the calls that bring a page: a move; where there is a file, a read before it; and
/// where all frames are in use, a move of the page that came first. Nothing is shared between threads but the number of the next frame,
/// nothing is looked at, and what was written is lost.
pub struct Bare {
    contents: Contents,
}

impl Bare {
    /// Pages of the data file, only to be read; or frames that hold anything.
    pub fn with(contents: Contents) -> Box<dyn System> {
        Box::new(Bare { contents })
    }
}

struct State {
    memory: Watched,
    frames: Watched,
    /// The page that each frame holds.
    owners: Vec<AtomicUsize>,
    /// How many frames were taken so far.
    taken: AtomicUsize,
    file: Option<File>,
}

const NO_PAGE: usize = usize::MAX;

static STATE: OnceLock<State> = OnceLock::new();

impl State {
    fn bring(&self, page: usize) -> bool {
        // A frame comes round so late that whoever took it last has long done with it.
        let frame = self.taken.fetch_add(1, Ordering::Relaxed) % self.owners.len();
        let before = self.owners[frame].swap(NO_PAGE, Ordering::Acquire);
        if before != NO_PAGE && self.frames.move_in(frame, &self.memory, before).is_err() {
            return false;
        }
        if let Some(file) = &self.file
            && !self.frames.read(frame, file, (page * PAGE_BYTES) as u64)
        {
            return false;
        }
        loop {
            match self.memory.move_in(page, &self.frames, frame) {
                Ok(()) => self.owners[frame].store(page, Ordering::Release),
                // The disk's interrupt, on another CPU, lets go of the frame after it has told that it is read.
                Err(Errno::BUSY) => continue,
                // Another thread was first.
                Err(why) => return why == Errno::EXIST,
            }
            return true;
        }
    }
}

fn answer(addr: usize) -> bool {
    let Some(state) = STATE.get().filter(|state| state.memory.addresses().contains(&addr)) else { return false };
    state.bring((addr - state.memory.addresses().start) / PAGE_BYTES)
}

impl System for Bare {
    fn contents(&self) -> Contents {
        self.contents
    }

    fn map(&mut self, setup: &Setup<'_>) -> Result<Memory, Error> {
        let failed = |error| Error::Failed(format!("map {} bytes: {error}", setup.data_bytes));
        let frames = Mapping::anonymous(setup.frames_bytes).map_err(failed)?;
        frames.populate().map_err(failed)?;
        let state = State {
            memory: Watched::for_absence(Mapping::anonymous(setup.data_bytes).map_err(failed)?)?,
            frames: Watched::for_writes(frames)?,
            owners: (0..setup.frames_bytes / PAGE_BYTES).map(|_| AtomicUsize::new(NO_PAGE)).collect(),
            taken: AtomicUsize::new(0),
            file: (self.contents == Contents::File).then(|| data::open_direct(setup.data_path)).transpose()?,
        };
        trap::by_signal(libc::SIGBUS, answer).map_err(|error| Error::Failed(format!("handle SIGBUS: {error}")))?;
        Ok(STATE.get_or_init(|| state).memory.memory())
    }

    fn misses(&self) -> Option<u64> {
        STATE.get().map(|state| state.taken.load(Ordering::Relaxed) as u64)
    }

    fn filled_bytes(&self) -> Option<u64> {
        self.misses().map(|misses| misses * PAGE_BYTES as u64)
    }

    /// The process ends with the case.
    fn finish(&mut self) -> Result<(), Error> {
        Ok(())
    }
}
