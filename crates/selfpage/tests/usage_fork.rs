//! A sample over a fork, in a process of its own: a fork ends the samples of every domain.

use std::hint::black_box;

use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Sampling, Trap};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;

fn domain(frames: usize) -> Option<Domain> {
    match Domain::with_frames(frames * PAGE).build() {
        Ok(domain) => Some(domain),
        Err(why) => {
            skip::skip("uffd", &why.to_string());
            None
        }
    }
}

/// A region of `pages` pages, each with its own number in every word.
fn numbered(domain: &Domain, pages: usize, trap: Trap) -> Region {
    let store = MemoryStore::new((2 * pages * PAGE) as u64).unwrap();
    let mut region = domain.region(pages * PAGE).trap(trap).stored(store).unwrap();
    for (at, word) in region.as_mut_slice::<u64>().iter_mut().enumerate() {
        *word = (at * 8 / PAGE) as u64 + 1;
    }
    region
}

fn word(region: &Region, page: usize) -> u64 {
    black_box(region.as_slice::<u64>()[page * PAGE / 8])
}

#[test]
fn a_child_that_is_forked_during_a_sample_has_all_pages() {
    let Some(domain) = domain(512) else { return };
    let region = numbered(&domain, 64, Trap::Worker);
    let sample = region.sample(Sampling::Whole).unwrap();
    // SAFETY: the child reads memory and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let right = (0..64).all(|page| word(&region, page) == page as u64 + 1);
        // SAFETY: ends the process.
        unsafe { libc::_exit(if right { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: the status is a number of ours.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0, "the child found other contents");
    assert!((0..64).all(|page| word(&region, page) == page as u64 + 1));
    assert!(sample.usage().is_err(), "a fork ends a sample");
}
