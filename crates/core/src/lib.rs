//! The mechanism of selfpage.
#![no_std]
