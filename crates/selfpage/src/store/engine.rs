//! Reads and writes of many pages: neighbours in one request, separate requests at the same time.

use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::thread::gettid;
use selfpage_core::pager::PagerError;

use super::linux::ring::Ring;
pub(crate) use super::linux::transfer::LOCKED;
use super::linux::transfer::{Batch, Direction, Window};
use super::linux::workers::Workers;
use super::{ReadBlok, WriteBlok};

/// Pages in flight at a time, and how many of them a trap has room for on its stack.
const WINDOW_PAGES: usize = 256;
const TRAP_PAGES: usize = 32;
/// More pager threads than that read and write one request at a time.
const ENGINES: usize = 16;

/// What to try for requests at the same time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoChoice {
    /// io_uring, and threads where it is refused.
    Auto,
    /// Threads that call `preadv` and `pwritev`.
    Pool,
}

impl IoChoice {
    /// What the environment variable `SELFPAGE_IO` asks for: `auto`, or `pool`. Not set is `auto`.
    ///
    /// # Errors
    /// What else it says.
    pub fn from_env() -> Result<IoChoice, String> {
        match std::env::var_os("SELFPAGE_IO") {
            None => Ok(IoChoice::Auto),
            Some(value) if value == "auto" => Ok(IoChoice::Auto),
            Some(value) if value == "pool" => Ok(IoChoice::Pool),
            Some(value) => Err(format!("SELFPAGE_IO={}", value.display())),
        }
    }
}

/// The engines of one store: one for each thread that has moved more than one request, made by it and used by it alone,
/// since rings and workers belong to a descriptor table, and each pager thread may have its own.
pub(crate) struct IoEngines {
    choice: IoChoice,
    engines: [OwnedEngine; ENGINES],
}

#[derive(Default)]
struct OwnedEngine {
    /// The thread's number; 0 for none.
    owner: AtomicI32,
    engine: Mutex<Engine>,
}

#[derive(Default)]
enum Engine {
    /// Not made yet.
    #[default]
    None,
    Ring(Box<Ring>),
    Workers(Workers),
    /// Neither can be had.
    Serial,
}

impl IoEngines {
    /// As the environment says; what makes no sense there is what a store complains of.
    pub(crate) fn from_env() -> IoEngines {
        IoEngines::new(IoChoice::from_env().unwrap_or(IoChoice::Auto))
    }

    pub(super) fn new(choice: IoChoice) -> IoEngines {
        IoEngines { choice, engines: Default::default() }
    }

    /// Reads in a trap: on the caller's stack, one request after the other.
    pub(super) fn read_in_trap(file: RawFd, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        for part in bloks.chunks_mut(TRAP_PAGES) {
            let mut window = Window::<TRAP_PAGES>::to_read(part);
            let mut batch = window.batch();
            batch.run_serially(file);
            batch.result()?;
        }
        Ok(())
    }

    /// Reads on a pager thread.
    pub(super) fn read(&self, file: RawFd, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        for part in bloks.chunks_mut(WINDOW_PAGES) {
            let mut window = Window::<WINDOW_PAGES>::to_read(part);
            let mut batch = window.batch();
            self.run(file, &mut batch);
            batch.result()?;
        }
        Ok(())
    }

    /// Writes on a pager thread.
    pub(crate) fn write(&self, file: RawFd, bloks: &mut [WriteBlok<'_>]) {
        self.write_in(Direction::Write, file, bloks);
    }

    /// Writes on a pager thread what need not wait for the file's lock; the outcome of the rest is [`LOCKED`].
    pub(crate) fn write_unless_locked(&self, file: RawFd, bloks: &mut [WriteBlok<'_>]) {
        self.write_in(Direction::WriteUnlessLocked, file, bloks);
    }

    fn write_in(&self, direction: Direction, file: RawFd, bloks: &mut [WriteBlok<'_>]) {
        for part in bloks.chunks_mut(WINDOW_PAGES) {
            let mut outcomes = [Ok(()); WINDOW_PAGES];
            let mut window = Window::<WINDOW_PAGES>::to_write(direction, part);
            self.run(file, &mut window.batch());
            window.outcomes(|page, outcome| outcomes[page] = outcome);
            part.iter_mut().zip(outcomes).for_each(|(write, outcome)| write.outcome = outcome);
        }
    }

    fn run(&self, file: RawFd, batch: &mut Batch<'_>) {
        match self.mine().map(|mine| mine.engine.try_lock()) {
            Some(Ok(mut engine)) if batch.requests_len() > 1 => engine.run(self.choice, file, batch),
            _ => batch.run_serially(file),
        }
    }

    /// The calling thread's engine, if there is one left for it.
    fn mine(&self) -> Option<&OwnedEngine> {
        let me = gettid().as_raw_nonzero().get();
        let owned = |engine: &&OwnedEngine| engine.owner.load(Ordering::Acquire) == me;
        let take =
            |engine: &&OwnedEngine| engine.owner.compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        self.engines.iter().find(owned).or_else(|| self.engines.iter().find(take))
    }

    /// In a forked child the threads are gone, and the rings' descriptors are the parent's.
    pub(crate) fn after_fork_in_child(&self) {
        for owned in &self.engines {
            // A locked one was in use at the fork, against the rules, and stays out of use.
            let Ok(mut engine) = owned.engine.try_lock() else {
                continue;
            };
            std::mem::take(&mut *engine).forget();
            owned.owner.store(0, Ordering::Release);
        }
    }
}

impl Engine {
    fn run(&mut self, choice: IoChoice, file: RawFd, batch: &mut Batch<'_>) {
        let mut choice = choice;
        loop {
            match self {
                Engine::None => *self = Engine::new(choice),
                Engine::Ring(ring) => match ring.run(file, batch) {
                    Ok(()) => return,
                    Err(_) => {
                        // Closed behind our back, or forbidden since. The workers stay.
                        std::mem::take(self).forget();
                        choice = IoChoice::Pool;
                    }
                },
                Engine::Workers(workers) => return workers.run(file, batch),
                Engine::Serial => return batch.run_serially(file),
            }
        }
    }

    fn new(choice: IoChoice) -> Engine {
        let ring = match choice {
            IoChoice::Auto => Ring::new().ok().map(Box::new),
            IoChoice::Pool => None,
        };
        match ring {
            Some(ring) => Engine::Ring(ring),
            None => Workers::new().map_or(Engine::Serial, Engine::Workers),
        }
    }

    fn forget(self) {
        match self {
            Engine::Ring(ring) => (*ring).forget(),
            Engine::Workers(workers) => workers.forget(),
            Engine::None | Engine::Serial => {}
        }
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
