//! The thin layer over Linux: system calls as functions, and [`mmu::LinuxMmu`] over them.
//!
//! Nothing here allocates, locks, panics, or touches errno or thread-local storage: a pager thread has neither, and a trap
//! may have stopped its thread anywhere.
#![allow(unsafe_code)]

pub mod clock;
pub mod descriptor;
pub mod die;
pub mod errno;
pub mod futex;
pub mod held;
pub mod key;
pub mod limit;
pub mod memory;
pub mod mmu;
pub mod pagemap;
pub mod probe;
pub mod signal;
mod syscall;
pub mod thread;
pub mod uffd;

pub use errno::Errno;
