//! The systems that selfpage is compared with.

pub mod anonymous;
pub mod mmap;
pub mod requests;
pub mod selfpage;
