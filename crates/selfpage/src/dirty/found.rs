//! What a scan found.

use std::ops::Range;

use selfpage_core::addr::PAGE_BYTES;

/// The pages that a scan found: as ranges in order, and as a bit for each page to ask for.
///
/// To be used again: once it has held as much, a scan into it allocates nothing. It takes a bit for each page of the largest
/// range scanned (32 KiB for 1 GiB), and 16 bytes for each range found.
#[derive(Debug, Default)]
pub struct Dirty {
    ranges: Vec<Range<usize>>,
    /// Where the range scanned begins.
    start: usize,
    /// A bit for each page from `start` on. Those behind the range scanned are zero.
    bits: Vec<u64>,
    pages: u64,
}

impl Dirty {
    /// Nothing found yet.
    pub fn new() -> Dirty {
        Dirty::default()
    }

    /// Nothing found yet, and room for all that a scan of `len_bytes` can find: such a scan allocates nothing.
    pub fn with_room(len_bytes: usize) -> Dirty {
        let pages = len_bytes.div_ceil(PAGE_BYTES);
        let ranges = Vec::with_capacity(pages.div_ceil(2));
        Dirty { ranges, bits: vec![0; pages.div_ceil(64)], ..Dirty::default() }
    }

    /// The ranges of pages that were found, in order; no two touch.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.ranges.iter().cloned()
    }

    /// Whether the page at `addr` was found.
    #[inline]
    pub fn contains(&self, addr: usize) -> bool {
        let page = addr.wrapping_sub(self.start) / PAGE_BYTES;
        self.bits.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 != 0)
    }

    /// How many pages were found.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Empties it for a scan of `range`.
    pub(super) fn begin(&mut self, range: &Range<usize>) {
        let mut ranges = std::mem::take(&mut self.ranges);
        for old in ranges.drain(..) {
            self.each_word(&old, |word, _| *word = 0);
        }
        self.ranges = ranges;
        self.pages = 0;
        self.start = range.start;
        let words = (range.len() / PAGE_BYTES).div_ceil(64);
        if self.bits.len() < words {
            self.bits.resize(words, 0);
        }
    }

    /// Empties it of whatever a scan added or marked before it failed.
    pub(super) fn clear(&mut self) {
        self.ranges.clear();
        self.bits.fill(0);
        self.pages = 0;
    }

    /// Adds pages, which come after all that were added and lie within the range scanned.
    pub(super) fn add(&mut self, found: Range<usize>) {
        if found.is_empty() {
            return;
        }
        self.each_word(&found, |word, bits| *word |= bits);
        self.pages += (found.len() / PAGE_BYTES) as u64;
        match self.ranges.last_mut() {
            Some(last) if last.end == found.start => last.end = found.end,
            _ => self.ranges.push(found),
        }
    }

    /// Adds pages within the range scanned, in any order; to be followed by [`Dirty::end`].
    pub(super) fn mark(&mut self, found: Range<usize>) {
        self.each_word(&found, |word, bits| *word |= bits);
    }

    /// Adds 64 pages, a bit each, to be followed by [`Dirty::end`].
    pub(super) fn mark_word(&mut self, index: usize, found: u64) {
        if let Some(word) = self.bits.get_mut(index) {
            *word |= found;
        }
    }

    /// Makes ranges of all that was marked or added in a scan of `range`.
    pub(super) fn end(&mut self, range: &Range<usize>) {
        self.ranges.clear();
        self.pages = 0;
        let page_at = |page: usize| range.start + page * PAGE_BYTES;
        let size_pages = range.len() / PAGE_BYTES;
        let mut page = 0;
        while page < size_pages {
            let Some(word) = self.bits.get(page / 64) else { return };
            let rest = word >> (page % 64);
            if rest == 0 {
                page = (page / 64 + 1) * 64;
                continue;
            }
            let first = page + rest.trailing_zeros() as usize;
            // Up to the end of the word; `add` joins what goes on in the next one.
            let count = (rest >> rest.trailing_zeros()).trailing_ones() as usize;
            page = first + count;
            self.add(page_at(first)..page_at(page));
        }
    }

    /// Calls `each` with the words that have the range's bits, and which bits those are.
    fn each_word(&mut self, range: &Range<usize>, mut each: impl FnMut(&mut u64, u64)) {
        let (mut page, end) = ((range.start - self.start) / PAGE_BYTES, (range.end - self.start) / PAGE_BYTES);
        while page < end {
            let count = (64 - page % 64).min(end - page);
            if let Some(word) = self.bits.get_mut(page / 64) {
                each(word, (u64::MAX >> (64 - count)) << (page % 64));
            }
            page += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: usize = 0x7000_0000;

    fn page(index: usize) -> usize {
        START + index * PAGE_BYTES
    }

    #[test]
    fn what_was_added_is_found_and_nothing_else() {
        let mut found = Dirty::new();
        for round in 0..3 {
            found.begin(&(START..page(300 - round)));
            found.add(page(0)..page(1));
            found.add(page(1)..page(2));
            found.add(page(62 + round)..page(130));
            found.add(page(297)..page(298));
            let expected = |index: usize| index < 2 || (62 + round..130).contains(&index) || index == 297;
            for index in 0..400 {
                assert_eq!(found.contains(page(index) + index), expected(index), "page {index} in round {round}");
            }
            assert!(!found.contains(START - 1) && !found.contains(0) && !found.contains(usize::MAX));
            assert_eq!(found.pages(), (0..300).filter(|index| expected(*index)).count() as u64);
            assert_eq!(
                found.ranges().collect::<Vec<_>>(),
                [page(0)..page(2), page(62 + round)..page(130), page(297)..page(298)]
            );
        }
        found.begin(&(page(1)..page(2)));
        assert!((0..400).all(|index| !found.contains(page(index))) && found.pages() == 0);
    }
}
