//! A program owns its frames and pages itself.
//!
//! A [`Domain`] holds a fixed number of frames. A [`Region`] is memory that may be larger than the frames. Its pager says where a page's
//! contents come from, and where they go. The domain's policy says which page makes room for another. The domain answers its own faults
//! with its own frames, on its own threads or on the faulting thread itself.
//!
//! # Examples
//! ```no_run
//! # fn main() -> selfpage::Result<()> {
//! use selfpage::{Domain, store::FileStore};
//! // 16 MiB of frames under 1 GiB of memory.
//! let domain = Domain::with_frames(16 << 20).policy("lru").build()?;
//! let store = FileStore::unnamed_in("/var/tmp", 2 << 30)?;
//! let mut region = domain.region(1 << 30).stored(store)?;
//! for (index, word) in region.as_mut_slice::<u64>().iter_mut().enumerate() {
//!     *word = index as u64;
//! }
//! println!("{:?}", domain.stats());
//! # Ok(()) }
//! ```
#![deny(unsafe_code)]

pub mod alloc;
mod arena;
#[doc(hidden)]
pub mod cancel;
#[cfg(test)]
#[path = "../tests/child/mod.rs"]
mod child;
mod config;
mod descriptors;
pub mod dirty;
pub mod doctor;
mod domain;
mod error;
mod evictor;
mod fork;
mod handler;
mod mapping;
mod maps;
#[cfg(test)]
#[path = "../../../tests/over_memory.rs"]
mod over_memory;
pub mod pager;
mod patience;
mod placement;
mod pool;
pub mod protection;
#[doc(hidden)]
pub mod pthread;
mod region;
mod residence;
#[cfg(test)]
#[path = "../../../tests/skip.rs"]
mod skip;
pub mod snapshot;
mod starved;
mod stats;
pub mod store;
#[doc(hidden)]
pub mod task;
pub mod trace;
pub mod trap;
mod turn;
mod undisturbed;
mod usage;

/// Values in a region are plain bytes: its traits `Pod` and `AnyBitPattern` are for [`Region::as_slice`] and [`Region::as_mut_slice`]. To
/// derive them, name `bytemuck = { version = "1", features = ["derive"] }` among your own dependencies.
pub use bytemuck;
pub use config::{Config, DescriptorTable, Locking};
pub use domain::Domain;
pub use error::{Error, Kind, Result};
pub use fork::attend as attend_forks;
pub use handler::{Answer, FaultHandler, FaultKind, MemoryFault, Protection};
pub use mapping::Guards;
pub use pool::FramePool;
pub use region::{Builder as RegionBuilder, Region};
pub use residence::Residence;
pub use selfpage_core::addr::{Frame, PAGE_BYTES, PageBytes, PageNo, VirtAddr};
pub use selfpage_core::contract::Contract;
pub use selfpage_core::fault::Failure;
pub use selfpage_core::mmu::{Refusal, Trap};
pub use selfpage_core::policy::{NAMES as POLICIES, Policy, Use};
pub use selfpage_core::region::Access;
/// For [`RegionBuilder::file`]. All other regions may be written.
pub use selfpage_core::region::Rights as FileAccess;
pub use selfpage_core::shortage::Shortage;
pub use selfpage_core::trace::Counts;
pub use stats::Stats;
pub use usage::{Estimate, Sample, Sampling, Usage};

/// The Rust in the guides compiles.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/policies.md")]
    struct Policies;
    #[doc = include_str!("../../../docs/pagers.md")]
    struct Pagers;
    #[doc = include_str!("../../../docs/snapshots.md")]
    struct Snapshots;
    #[doc = include_str!("../../../docs/stores.md")]
    struct Stores;
    #[doc = include_str!("../../../docs/monitoring.md")]
    struct Monitoring;
    #[doc = include_str!("../../../docs/protection.md")]
    struct Protection;
    #[doc = include_str!("../../../docs/handlers.md")]
    struct Handlers;
    #[doc = include_str!("../../../docs/dirty.md")]
    struct DirtyPages;
    #[doc = include_str!("../../../docs/allocator.md")]
    struct Allocator;
}

/// The end, where tables no longer make sense.
fn die(epitaph: &str) -> ! {
    selfpage_core::linux::die::die(epitaph)
}
