//! Which pages are as they were filled or saved.

use std::sync::Arc;

use selfpage_core::addr::PageBytes;
use selfpage_core::frame::Table;
use selfpage_core::sync::{AtomicU64, Ordering};

use super::PageHash;

/// The hash of a page of which nobody knows what a fill would bring, or that was never filled: an entry of a zeroed table.
const NO_HASH: u64 = 0;

/// The hash of each page as it was filled or saved last.
///
/// # Context
/// Trap.
pub(crate) struct Noted {
    hash: Arc<PageHash>,
    hashes: Table<AtomicU64>,
}

impl Noted {
    /// Over a zeroed table of one entry a page.
    pub(crate) fn new(hash: Arc<PageHash>, hashes: Table<AtomicU64>) -> Noted {
        Noted { hash, hashes }
    }

    /// A page was filled or saved, and a fill would bring these bytes.
    pub(super) fn note(&self, index: u64, bytes: &PageBytes) {
        self.note_hash(index, self.hash_of(bytes));
    }

    /// Nobody knows what a fill would bring.
    pub(super) fn forget(&self, index: u64) {
        self.note_hash(index, NO_HASH);
    }

    /// Whether a page is as it was noted.
    pub(super) fn is_as_noted(&self, index: u64, bytes: &PageBytes) -> bool {
        self.hashes.get(index as usize).is_some_and(|hash| hash.load(Ordering::Relaxed) == self.hash_of(bytes))
    }

    /// Whether other bytes were noted than those that this stands for. Of a page that nobody knows of, none were.
    pub(super) fn has_others(&self, index: u64, hash: u64) -> bool {
        let noted = self.noted_hash(index);
        noted != NO_HASH && noted != hash
    }

    /// What stands for these bytes, also where another pager of the domain has the page later.
    pub(super) fn hash_of(&self, bytes: &PageBytes) -> u64 {
        self.hash.of(bytes)
    }

    /// What stands for the bytes that were noted.
    pub(super) fn noted_hash(&self, index: u64) -> u64 {
        self.hashes.get(index as usize).map_or(NO_HASH, |hash| hash.load(Ordering::Relaxed))
    }

    /// [`Noted::note`], of bytes that this stands for.
    pub(super) fn note_hash(&self, index: u64, hash: u64) {
        if let Some(entry) = self.hashes.get(index as usize) {
            entry.store(hash, Ordering::Relaxed);
        }
    }
}
