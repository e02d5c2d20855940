//! How faults reach the domain, and the threads that serve it.
//!
//! # Source
//! Nemesis §6.4: fault dispatch to the faulting domain, in its own time and on its own resources.
#![allow(unsafe_code)]

pub(crate) mod ask;
pub(crate) mod errand;
mod handler_place;
mod handler_stack;
pub(crate) mod handlers;
pub(crate) mod pager;
pub(crate) mod stack;
pub(crate) mod table;
pub(crate) mod takeover;
pub(crate) mod thread;
pub(crate) mod upcall;
pub(crate) mod worker;

// For `selfpage run` alone.
#[doc(hidden)]
pub use stack::run as on_own_stack;
pub use thread::{is_pager_thread, on_pager_thread};
// For `selfpage run` alone, which counts the program's threads without them and tells them from those that it starts.
#[doc(hidden)]
pub use thread::{pager_threads, starts_own_threads};
