//! Regions that the tests of samples read.
#![allow(dead_code)]

use std::hint::black_box;

use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Trap};

#[path = "../../../../tests/skip.rs"]
mod skip;

pub const PAGE: usize = 4096;

pub fn domain(frames: usize) -> Option<Domain> {
    match Domain::with_frames(frames * PAGE).build() {
        Ok(domain) => Some(domain),
        Err(why) => {
            skip::skip("uffd", &why.to_string());
            None
        }
    }
}

/// A region of `pages` pages, each with its own number in every word.
pub fn numbered(domain: &Domain, pages: usize, trap: Trap) -> Region {
    let store = MemoryStore::new((2 * pages * PAGE) as u64).unwrap();
    let mut region = domain.region(pages * PAGE).trap(trap).stored(store).unwrap();
    for (at, word) in region.as_mut_slice::<u64>().iter_mut().enumerate() {
        *word = (at * 8 / PAGE) as u64 + 1;
    }
    region
}

pub fn word(region: &Region, page: usize) -> u64 {
    black_box(region.as_slice::<u64>()[page * PAGE / 8])
}
