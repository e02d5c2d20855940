//! What each page must hold, so that wrong data is noticed at the access that reads it.
//!
//! Word 0 of a page carries its version: 0 as created, one more with each write of the bench. All other words are a function of
//! the page's number alone. Nothing compresses, and no two pages are alike.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use super::error::Error;
use super::raw::{Memory, WORDS};

/// A reversible scramble of 64 bits (splitmix64's finish).
#[inline(always)]
pub fn scramble(number: u64) -> u64 {
    let mut bits = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Draw `turn` of thread `thread` in the sequence that begins at `seed`. Sequences do not overlap: seeds are scrambled apart
/// before the turns are counted up from them.
#[inline(always)]
pub fn chance(seed: u64, thread: usize, turn: usize) -> u64 {
    scramble(scramble(seed ^ ((thread as u64) << 48)).wrapping_add(turn as u64))
}

/// The word `word` of page `page` as created.
#[inline(always)]
pub fn word(page: usize, word: usize) -> u64 {
    scramble((page * WORDS + word) as u64)
}

/// Word 0 of page `page` in version `version`.
#[inline(always)]
pub fn first_word(page: usize, version: u32) -> u64 {
    word(page, 0) ^ u64::from(version)
}

/// Writes page `page` in version `version` into `bytes`.
pub fn fill_page(bytes: &mut [u8], page: usize, version: u32) {
    for (index, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        let value = if index == 0 { first_word(page, version) } else { word(page, index) };
        chunk.copy_from_slice(&value.to_le_bytes());
    }
}

/// Writes all pages of `memory` in version 0.
pub fn fill_memory(memory: Memory) {
    for page in 0..memory.size_pages() {
        for index in 0..WORDS {
            memory.write(page, index, word(page, index));
        }
    }
}

/// A page held something else than it must.
#[derive(Debug)]
pub struct WrongData {
    page: usize,
    word: usize,
    found: u64,
    expected: u64,
}

impl From<WrongData> for Error {
    fn from(wrong: WrongData) -> Error {
        let WrongData { page, word, found, expected } = wrong;
        Error::Failed(format!("WRONG DATA: page {page} word {word} holds {found:#018x}, not {expected:#018x}"))
    }
}

/// The shadow: how often each page was written.
pub struct Versions(Vec<AtomicU32>);

impl Versions {
    /// All pages as created.
    pub fn zero(size_pages: usize) -> Versions {
        Versions((0..size_pages).map(|_| AtomicU32::new(0)).collect())
    }

    /// The versions that [`Versions::save`] left.
    pub fn load(path: &Path) -> Result<Versions, Error> {
        let bytes = std::fs::read(path).map_err(|error| Error::io("read", path, error))?;
        let number = |chunk: &[u8]| chunk.try_into().map(u32::from_le_bytes).unwrap_or_default();
        Ok(Versions(bytes.chunks_exact(4).map(|chunk| AtomicU32::new(number(chunk))).collect()))
    }

    /// Leaves the versions to the next case on the same file.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let bytes: Vec<u8> = self.0.iter().flat_map(|version| version.load(Ordering::Relaxed).to_le_bytes()).collect();
        std::fs::write(path, bytes).map_err(|error| Error::io("write", path, error))
    }

    /// The version of `page`. Only the thread that the page is given to may ask.
    #[inline(always)]
    pub fn get(&self, page: usize) -> u32 {
        self.0[page].load(Ordering::Relaxed)
    }

    /// Counts one write of `page` and returns its new version.
    #[inline(always)]
    pub fn bump(&self, page: usize) -> u32 {
        self.0[page].fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Holds a word against what it must be.
#[inline(always)]
pub fn check(page: usize, word: usize, found: u64, expected: u64) -> Result<(), WrongData> {
    if found == expected { Ok(()) } else { Err(WrongData { page, word, found, expected }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_words_agree() {
        let mut bytes = vec![0; 4096];
        fill_page(&mut bytes, 7, 3);
        let read = |index: usize| u64::from_le_bytes(bytes[index * 8..index * 8 + 8].try_into().unwrap());
        assert_eq!(read(0), first_word(7, 3));
        assert_eq!(read(0), first_word(7, 0) ^ 3);
        assert_eq!(read(511), word(7, 511));
        assert_ne!(read(511), word(8, 511));
    }

    #[test]
    fn sequences_do_not_overlap() {
        let draws = |seed, thread| (0..20_000).map(move |turn| chance(seed, thread, turn));
        let all: std::collections::BTreeSet<u64> =
            draws(1, 0).chain(draws(2, 0)).chain(draws(3, 0)).chain(draws(1, 1)).collect();
        assert_eq!(all.len(), 80_000);
    }

    #[test]
    fn versions_survive_a_save() {
        let path = std::env::temp_dir().join(format!("selfpage-versions-{}", std::process::id()));
        let versions = Versions::zero(3);
        versions.bump(1);
        assert_eq!(versions.bump(1), 2);
        versions.save(&path).unwrap();
        let loaded = Versions::load(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((loaded.get(0), loaded.get(1), loaded.get(2)), (0, 2, 0));
    }
}
