//! A sample over a fork, in a process of its own: a fork ends the samples of every domain.

use selfpage::{Sampling, Trap};

mod child;
mod sampled;

use sampled::{domain, numbered, word};

#[test]
fn a_child_that_is_forked_during_a_sample_has_all_pages() {
    let Some(domain) = domain(512) else { return };
    let region = numbered(&domain, 64, Trap::Worker);
    let sample = region.sample(Sampling::Whole).unwrap();
    let right = || (0..64).all(|page| word(&region, page) == page as u64 + 1);
    assert_eq!(child::in_child(right), 0, "the child found other contents");
    assert!(right());
    assert!(sample.usage().is_err(), "a fork ends a sample");
}
