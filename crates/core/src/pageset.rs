//! A set of pages of one region: a bit a page.

use crate::frame::Table;
use crate::sync::{AtomicU64, Ordering};

/// A set of pages, by their numbers in the region. Zeroed memory is the empty set.
pub struct PageSet(Table<AtomicU64>);

impl PageSet {
    /// The empty set over a zeroed table of a word for 64 pages.
    pub const fn new(words: Table<AtomicU64>) -> PageSet {
        PageSet(words)
    }

    /// A set that holds nothing.
    pub const fn none() -> PageSet {
        PageSet(Table::empty())
    }

    /// How many words there are for `pages` pages.
    pub const fn words(pages: usize) -> usize {
        pages.div_ceil(64)
    }

    /// Adds a page.
    pub fn insert(&self, index: u64) {
        if let Some(word) = self.0.get((index / 64) as usize) {
            word.fetch_or(1 << (index % 64), Ordering::AcqRel);
        }
    }

    /// Takes a page out.
    pub fn remove(&self, index: u64) {
        if let Some(word) = self.0.get((index / 64) as usize) {
            word.fetch_and(!(1 << (index % 64)), Ordering::AcqRel);
        }
    }

    /// Whether a page is in it.
    pub fn contains(&self, index: u64) -> bool {
        let word = self.0.get((index / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (index % 64) & 1 != 0)
    }

    /// The first page of it from `from` on.
    pub fn next(&self, from: u64) -> Option<u64> {
        let mut mask = u64::MAX << (from % 64);
        let mut at = from / 64;
        loop {
            let word = self.0.get(at as usize)?.load(Ordering::Acquire) & mask;
            if word != 0 {
                return Some(at * 64 + u64::from(word.trailing_zeros()));
            }
            mask = u64::MAX;
            at += 1;
        }
    }

    /// How many pages it has.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// Adds the first `pages` pages.
    pub fn fill(&self, pages: u64) {
        for (word, first) in self.0.iter().zip((0u64..).step_by(64)) {
            let left = pages.saturating_sub(first).min(64);
            let bits = if left == 64 { u64::MAX } else { (1 << left) - 1 };
            word.store(bits, Ordering::Release);
        }
    }

    /// Takes every page out.
    pub fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Release));
    }

    /// Moves every page of `from` here. One that is added meanwhile may stay there.
    pub fn take_all(&self, from: &PageSet) {
        for (to, from) in self.0.iter().zip(from.0.iter()) {
            // A set is as long as its region, most of it is empty, and writers wait for this: only a word with pages is exchanged. What was
            // added before the call, in the order that threads know of, this look sees.
            if from.load(Ordering::Relaxed) != 0 {
                to.fetch_or(from.swap(0, Ordering::AcqRel), Ordering::AcqRel);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    extern crate std;
    use std::prelude::v1::*;

    fn set(pages: usize) -> PageSet {
        PageSet::new(crate::frame::table(PageSet::words(pages)))
    }

    fn all(set: &PageSet) -> Vec<u64> {
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(page) = set.next(from) {
            found.push(page);
            from = page + 1;
        }
        found
    }

    #[test]
    fn it_holds_what_was_put_into_it() {
        let set = set(200);
        for page in [0, 63, 64, 130, 199] {
            set.insert(page);
        }
        set.remove(63);
        assert_eq!((all(&set), set.count()), (vec![0, 64, 130, 199], 4));
        assert!(set.contains(130) && !set.contains(63) && !set.contains(5000));
        set.fill(130);
        assert_eq!(all(&set), (0..130).collect::<Vec<_>>());
        let other = self::set(200);
        other.insert(150);
        other.take_all(&set);
        assert_eq!((other.count(), set.count()), (131, 0));
        other.clear();
        assert_eq!(other.next(0), None);
        assert_eq!(PageSet::none().next(0), None);
    }
}
