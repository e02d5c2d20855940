//! Snapshots: one instant of regions, in a file.
//!
//! The program writes on while a snapshot is taken, and no process is forked. docs/snapshots.md has the file's format, what
//! holds after a crash, and how the instant is made.

mod file;
#[cfg(test)]
mod file_tests;
mod format;
mod place;
mod take;
mod writing;

pub use file::Snapshot;
pub(crate) use file::{Index, Placed};
pub use format::SavedRegion;
pub(crate) use place::files;
pub(crate) use take::MOST_RUNS;
pub use take::{Snapshots, Taken};
