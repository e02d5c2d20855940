//! **Experimental.** Page tables of our own in a virtual machine of our own: what a program builds under the rules of
//! [`selfpage_core::capability`], a CPU translates by.
//!
//! - [`Memory`]: physical memory that the rules and a virtual machine share.
//! - [`Vm`]: one virtual machine with one CPU.
//! - [`Guest`]: runs a closure of this process in such a machine, at ring 3.
//! - [`Handler`]: answers its page faults, in the same machine, with what [`Private`] keeps.
//! - [`TableView`], [`protect`], [`clear_dirty_bits`]: how a closure looks at its own page tables, and has them changed.
//! - [`Steps`]: how many instructions of ring 3 that takes.
//! - [`Descriptors`]: what an x86-64 CPU needs beside page tables to run at ring 3.
//!
//! It needs Linux's KVM, and an x86-64 processor. Nothing of it is stable, and nothing of the library depends on it.
//!
//! What was seen of a KVM without hardware behind it: it keeps an entry of the root (256) to itself, through which ring 3 reaches
//! nothing; and it keeps using entries that the host changed after the machine had used them, until its memory is taken away and given
//! again. Entries that the guest itself changes it looks at again when the root is loaded.
//! qemu's emulated SVM with nested paging keeps no entry of the root, has pages of 1 GiB, and marks some entries as accessed on the
//! way to a fault.

#![cfg(target_arch = "x86_64")]

mod descriptors;
mod entry;
mod error;
mod guest;
mod handler;
mod limit;
mod memory;
mod private;
mod program;
mod statistics;
mod steps;
mod tables;
mod vm;

pub use descriptors::{Descriptors, RING0_CODE, RING3_CODE, RING3_DATA, TASK};
pub use entry::{Call, RING0_INSTRUCTIONS};
pub use error::{Error, Kind, Result};
pub use guest::{Guest, Machine, Parts, Side, Stopped, handler_call, host_call};
pub use handler::{Counts, Handler};
pub use kvm_bindings::{kvm_regs, kvm_sregs};
pub use memory::Memory;
pub use private::Private;
pub use statistics::Statistics;
pub use steps::{Stepped, Steps};
pub use tables::{TableView, answer, clear_dirty_bits, protect};
pub use vm::{Exit, Start, Vm, Writing};
