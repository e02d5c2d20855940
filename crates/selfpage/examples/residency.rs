//! "Is this page in core?" costs a load: a program that may choose its order does first what needs no I/O.
//!
//! Run it with `cargo run --example residency -p selfpage`.

use std::sync::atomic::Ordering;

use selfpage::store::MemoryStore;
use selfpage::{Domain, PAGE_BYTES};

const WORDS: usize = PAGE_BYTES / 8;
const FRAMES: usize = 1024;
const PAGES: usize = 4 * FRAMES;

fn main() -> selfpage::Result<()> {
    let domain = Domain::with_frames(FRAMES * PAGE_BYTES).build()?;
    let store = MemoryStore::new((2 * PAGES * PAGE_BYTES) as u64)?;
    let mut region = domain.region(PAGES * PAGE_BYTES).stored(store)?;
    for (page, words) in region.as_mut_slice::<u64>().chunks_mut(WORDS).enumerate() {
        words[0] = page as u64;
    }

    let is_in_core = |page: &usize| region.residency()[*page].load(Ordering::Relaxed) == 1;
    let (here, elsewhere): (Vec<usize>, Vec<usize>) = (0..PAGES).partition(is_in_core);
    println!("{} of {PAGES} pages are in core, in {FRAMES} frames", here.len());
    assert!(!here.is_empty() && here.len() <= FRAMES);

    let words = region.as_slice::<u64>();
    let faults = || domain.stats().counts.faults_total;
    let sum = |pages: &[usize]| pages.iter().map(|page| words[page * WORDS]).sum::<u64>();
    let before = faults();
    let first = sum(&here);
    let between = faults();
    let second = sum(&elsewhere);
    println!("faults: {} for those, {} for the rest", between - before, faults() - between);
    assert_eq!(first + second, (PAGES * (PAGES - 1) / 2) as u64);
    assert!(between - before < faults() - between);
    Ok(())
}
