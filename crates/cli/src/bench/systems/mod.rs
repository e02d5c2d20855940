//! The systems that selfpage is compared with.

pub mod anonymous;
pub mod bare;
pub mod mmap;
pub mod populate;
pub mod protect;
pub mod requests;
pub mod rules;
pub mod selfpage;
