//! A program owns its frames and pages itself.
#![deny(unsafe_code)]

pub mod doctor;
pub mod store;
