//! The Boehm collector on selfpage's dirty bits.
//!
//! Run incrementally, the collector asks before each collection which pages of its heap were written since the last one. Its own
//! answer is `mprotect` and a signal for each first write. In its *manual* mode the program tells instead; here a
//! [`DirtyTracker`](selfpage::dirty::DirtyTracker) does, for a program that knows nothing of it: [`start`].
//!
//! The library is found at run time (`libgc.so.1`, 8.2), so that nothing here needs it to be built.
//! docs/collector.md says why no write is missed.
//!
//! # Source
//! Cichlid §4.5, with Figure 6 and Table 6: the Boehm collector on dirty bits that the program reads itself.

mod c;
#[cfg(test)]
#[path = "../../selfpage/tests/child/mod.rs"]
mod child;
pub mod gcbench;
mod heap;
mod library;
mod pauses;
#[cfg(test)]
#[path = "../../../tests/skip.rs"]
mod skip;
mod tracking;

use std::fmt;

pub use library::Library;
pub use pauses::Pauses;
pub use tracking::{Writes, start};

/// Why the collector does not run as asked.
#[derive(Debug)]
pub enum Error {
    /// The library, or a function of it, is not there.
    Missing(String),
    /// It came too late: the collector runs incrementally already, or this was done before.
    Started,
    /// The collector refuses to run incrementally.
    Refused,
    /// The calling thread is not the program's first, whose stack the collector looks through.
    Thread,
    /// Writes cannot be noted on this machine.
    Tracker(selfpage::Error),
    /// The benchmark found other objects than it made.
    Objects(String),
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Missing(what) => write!(out, "{what}; install the Boehm collector, 8.2 or later (Debian: libgc1)"),
            Error::Started => {
                write!(out, "the collector runs incrementally already; start selfpage's dirty bits before that, once")
            }
            Error::Refused => {
                write!(out, "the collector does not run incrementally; is GC_DISABLE_INCREMENTAL or GC_FIND_LEAK set?")
            }
            Error::Thread => {
                write!(
                    out,
                    "the collector knows the stack of the program's first thread, and this is another; call from `main`"
                )
            }
            Error::Tracker(error) => write!(out, "{error}"),
            Error::Objects(what) => write!(out, "objects were lost: {what}"),
        }
    }
}

impl std::error::Error for Error {}

/// Whether the calling thread is the program's first: the process has its number.
fn is_first_thread() -> bool {
    // SAFETY: no-pointers: two numbers.
    unsafe { libc::gettid() == libc::getpid() }
}
