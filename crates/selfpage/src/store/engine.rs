//! Reads and writes of many pages: neighbours in one request, separate requests at the same time.

use std::cell::RefCell;
use std::mem::{ManuallyDrop, needs_drop};
use std::os::fd::RawFd;

use selfpage_core::domain::MOST_AHEAD;
use selfpage_core::pager::PagerError;

use super::linux::ring::Ring;
use super::linux::transfer::{Batch, Direction, Window};
pub(crate) use super::linux::transfer::{LOCKED, has_no_room};
use super::linux::workers::Workers;
use super::{ReadBlok, WriteBlok};

/// Pages in flight at a time: all of a chunk that is read ahead.
const WINDOW_PAGES: usize = MOST_AHEAD as usize;
/// The same for a fault: in a trap there is not more room on the stack, and on a pager thread a wider window would take longer to lay
/// out than a page to copy.
const FEW_PAGES: usize = 32;

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

/// Never dropped by the thread-local that holds it. One with a destructor is registered with the C library on a thread's first use of it:
/// that takes the loader's lock, whose holder may be waiting for this very thread, and memory from the program's `malloc`, which a
/// forked child may not touch before its pagers are there.
type Engines = ManuallyDrop<[Engine; 2]>;
const _: () = assert!(!needs_drop::<Engines>());

thread_local! {
    /// The calling thread's engines, by choice: made by it when it first moves more than one request, used by it alone, and gone with
    /// its work ([`with_engines`]), since rings and workers belong to a descriptor table, and pager threads have one of their own.
    static MINE: RefCell<Engines> = const { RefCell::new(NO_ENGINES) };
}

/// What a thread of the program's has: nobody would take engines back from it.
const NO_ENGINES: Engines = ManuallyDrop::new([Engine::Serial, Engine::Serial]);

/// Does the work of a pager thread, which may have engines meanwhile.
pub(crate) fn with_engines<T>(work: impl FnOnce() -> T) -> T {
    MINE.set(ManuallyDrop::new([Engine::None, Engine::None]));
    let done = work();
    drop(ManuallyDrop::into_inner(MINE.replace(NO_ENGINES)));
    done
}

#[derive(Default)]
enum Engine {
    /// Not made yet.
    #[default]
    None,
    Ring(Box<Ring>),
    Workers(Workers),
    /// None can be had, or this is no pager thread.
    Serial,
}

/// Reads in a trap: on the caller's stack, one request after the other.
pub(super) fn read_in_trap(file: RawFd, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
    read_by::<FEW_PAGES>(bloks, |batch| batch.run_serially(file))
}

/// Reads `PAGES` pages at a time, by whatever `run` moves a batch with. Never a part of its caller: a wide window is more than the whole
/// stack of a trap, which the caller may be on with a narrow one.
#[inline(never)]
fn read_by<const PAGES: usize>(bloks: &mut [ReadBlok<'_>], run: impl Fn(&mut Batch<'_>)) -> Result<(), PagerError> {
    for part in bloks.chunks_mut(PAGES) {
        let mut window = Window::<PAGES>::to_read(part);
        let mut batch = window.batch();
        run(&mut batch);
        batch.result()?;
    }
    Ok(())
}

impl IoChoice {
    /// Reads on a pager thread.
    pub(super) fn read(self, file: RawFd, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        let run = |batch: &mut Batch<'_>| self.run(file, batch);
        if bloks.len() <= FEW_PAGES { read_by::<FEW_PAGES>(bloks, run) } else { read_by::<WINDOW_PAGES>(bloks, run) }
    }

    /// Writes on a pager thread.
    pub(crate) fn write(self, file: RawFd, bloks: &mut [WriteBlok<'_>]) {
        self.write_in(Direction::Write, file, bloks);
    }

    /// Writes on a pager thread what need not wait for the file's lock; the outcome of the rest is [`LOCKED`].
    pub(crate) fn write_unless_locked(self, file: RawFd, bloks: &mut [WriteBlok<'_>]) {
        self.write_in(Direction::WriteUnlessLocked, file, bloks);
    }

    fn write_in(self, direction: Direction, file: RawFd, bloks: &mut [WriteBlok<'_>]) {
        for part in bloks.chunks_mut(WINDOW_PAGES) {
            let mut outcomes = [Ok(()); WINDOW_PAGES];
            let mut window = Window::<WINDOW_PAGES>::to_write(direction, part);
            self.run(file, &mut window.batch());
            window.outcomes(|page, outcome| outcomes[page] = outcome);
            part.iter_mut().zip(outcomes).for_each(|(write, outcome)| write.outcome = outcome);
        }
    }

    fn run(self, file: RawFd, batch: &mut Batch<'_>) {
        let done = batch.requests_len() > 1
            && MINE.with(|mine| match mine.try_borrow_mut() {
                Ok(mut mine) => {
                    mine[self as usize].run(self, file, batch);
                    true
                }
                Err(_) => false,
            });
        if !done {
            batch.run_serially(file);
        }
    }
}

/// In a forked child: its engines' threads are the parent's, and so are the rings' descriptors.
pub(crate) fn forget_engines() {
    ManuallyDrop::into_inner(MINE.replace(NO_ENGINES)).into_iter().for_each(Engine::forget);
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
