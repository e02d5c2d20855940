//! The mechanism of selfpage: frames, pages, regions and the fault path. `no_std`, no allocation: it may run while a thread
//! is stopped on a fault.
#![no_std]
#![deny(unsafe_code)]
// The models need a part of core only.
#![cfg_attr(loom, allow(dead_code))]
#![deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg_attr(test, allow(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod addr;
#[cfg(not(loom))]
pub mod capability;
pub mod contract;
pub mod cut;
#[cfg(not(loom))]
pub mod domain;
#[cfg(not(loom))]
mod failure;
#[cfg(not(loom))]
pub mod fault;
pub mod frame;
#[cfg(not(loom))]
pub mod linux;
pub mod mmu;
pub mod page;
pub mod pager;
pub mod pageset;
#[cfg(not(loom))]
pub mod physical;
#[cfg(not(loom))]
pub mod policy;
pub mod region;
pub mod ring;
pub mod shortage;
#[cfg(not(loom))]
pub mod stack;
pub mod stream;
pub mod sync;
#[cfg(not(loom))]
pub mod tables;
pub mod trace;
pub mod tracer;
