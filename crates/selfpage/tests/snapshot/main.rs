//! Snapshots: what they have, that it is of one instant, and what happens where they cannot be taken.

mod alone;
mod beside;
mod clones;
mod consistent;
mod failed;
mod killed;
mod kinds;
mod restored;

#[path = "../child/mod.rs"]
mod child;
#[path = "../disk/mod.rs"]
mod disk;
#[path = "../../../../tests/filter.rs"]
mod filter;
#[path = "../../../../tests/over_memory.rs"]
mod over_memory;
#[path = "../alloc/random.rs"]
mod random;
#[allow(dead_code)]
#[path = "../failure/scenario.rs"]
mod scenario;
#[path = "../../../../tests/skip.rs"]
mod skip;

/// Bytes of a page, and words of eight.
const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

/// Words of a region that several threads use.
#[derive(Clone, Copy)]
struct Words {
    first: *const std::sync::atomic::AtomicU64,
    count: usize,
}

// SAFETY: region-view: the words are atomics, and the test keeps the region as long as its threads.
unsafe impl Send for Words {}
// SAFETY: region-view: as above.
unsafe impl Sync for Words {}

impl Words {
    fn of(region: &selfpage::Region) -> Words {
        Words { first: region.as_ptr().cast(), count: region.len_bytes() / 8 }
    }

    /// Word `word` of page `page`.
    fn at(&self, page: usize, word: usize) -> &std::sync::atomic::AtomicU64 {
        assert!(page * WORDS + word < self.count);
        // SAFETY: region-view: within the region.
        unsafe { &*self.first.add(page * WORDS + word) }
    }
}

/// A page of a snapshot, as words.
fn saved(snapshot: &selfpage::snapshot::Snapshot, region: usize, page: usize) -> Vec<u64> {
    let mut bytes = [0; PAGE];
    snapshot.read_page(region, page as u64, &mut bytes).unwrap();
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}
