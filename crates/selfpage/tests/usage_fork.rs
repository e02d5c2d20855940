//! A sample over a fork, in a process of its own: a fork ends the samples of every domain.

use selfpage::{Sampling, Trap};

mod sampled;

use sampled::{domain, numbered, word};

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
