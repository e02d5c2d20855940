//! The one room of the store with `unsafe`: anonymous memory, descriptors by number, and requests that the kernel or
//! another thread works on while the caller waits. Everything it offers is safe to call.
//!
//! Invariants that its SAFETY comments cite:
//! - `mapping-owned`: a [`mapping::Mapping`] owns its range from `new` to `drop`, nobody else unmaps or remaps it, and it is
//!   only ever looked at through atomics.
//! - `fd-number`: a number is only handed to system calls that report a closed or foreign descriptor as an error; no
//!   memory safety rests on what it means.
//! - `batch-borrowed`: a batch borrows its pages and vectors, and no executor returns before the last of its requests has
//!   completed.
//! - `cache-window`: a window onto a file is made, written through by one system call and unmapped by one function.
//! - `ring-own-thread`: a ring is entered and dropped by the thread that made it, or forgotten.
#![allow(unsafe_code)]

pub(super) mod anchor;
pub(super) mod descriptor;
pub(super) mod mapping;
pub(crate) mod page_cache;
pub(super) mod ring;
pub(super) mod transfer;
pub(super) mod workers;
