//! The mechanism of selfpage: frames, pages, regions and the fault path. `no_std`, no allocation: it may run while a thread
//! is stopped on a fault.
#![no_std]
#![deny(unsafe_code)]
#![deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod addr;
pub mod linux;
pub mod mmu;
pub mod pager;
pub mod policy;
