//! The page allocator: blocks of whole pages, from frames that the process keeps.
//!
//! Freed frames stay in the process, under the addresses at which they were, so the next block of that size costs no system
//! call, no fault and no clearing. Blocks grow where they are, since each has room behind it, or by moving frames; bytes are copied only
//! of short ones (up to 4 MiB).
//!
//! Nothing here uses the program's `malloc`: it may stand underneath it.
//!
//! A child that is forked while another thread is in a call of these would wait for that thread for ever. So whoever takes bare blocks or
//! batches, and forks, calls [`fork::register`] before. [`GrowVec`] does by itself, as do domains and `selfpage-heap`.
//!
//! # Source
//! Douglas, "User Mode Memory Page Allocation" (2011), section 4.2. There, page tables are the process's own through Windows'
//! AWE; here frames stay mapped where they are, and move by whole page tables (mremap).
//!
//! # Context
//! Of functions that say nothing else: as for [`allocate`].
//!
//! # Examples
//! ```
//! use selfpage::alloc;
//! let block = alloc::allocate(1 << 20, 1).expect("memory");
//! // SAFETY: the block is ours until it is freed, and as long as was asked for.
//! unsafe {
//!     block.write_bytes(7, 1 << 20);
//!     let block = alloc::resize(block, 64 << 20).expect("memory");
//!     assert_eq!(block.add(1234).read(), 7);
//!     alloc::free(block);
//! }
//! ```
#![allow(unsafe_code)]

pub mod batch;
mod block;
mod cache;
pub(crate) mod cgroup;
mod class;
mod culprit;
mod file;
pub mod fork;
mod frames;
mod grow_vec;
pub mod keeper;
pub mod limit;
mod lock;
pub mod medium;
mod packed;
mod pages;
pub(crate) mod pressure;
mod reservation;
mod retention;
mod rounds;
mod run;
mod slot;
mod stats;
mod tails;
mod workers;

pub use block::{
    Severity, allocate, allocate_zeroed, block_around, culprit, decay, exchange, free, lacked_mappings,
    lacks_memory_alone, owns, relieve, resize, resize_in_place, set_retention, stats, trap_on_use_after_free, trim,
    usable_bytes,
};
pub use culprit::Culprit;
pub use grow_vec::{GrowVec, IntoIter, OutOfMemory};
pub use stats::{Counts, Stats};
