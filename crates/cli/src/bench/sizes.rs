//! How much of everything.

use std::time::Duration;

use super::case::Pattern;
use super::raw::PAGE_BYTES;

const MIB: u64 = 1 << 20;

/// Sizes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The data file.
    pub file_bytes: u64,
    /// What a case touches of it.
    pub data_bytes: u64,
    /// What may be resident.
    pub frames_bytes: u64,
    /// Random accesses of a thread.
    pub accesses: usize,
    /// Random accesses end here even if there are more to come: some settings read megabytes for a page.
    pub limit: Duration,
    /// Passes that are measured, in cyclic cases.
    pub passes: usize,
    /// The depth of the first tree in the least case of `gcbench`.
    pub least_tree_depth: u32,
}

impl Sizes {
    /// The sizes that results are stated for.
    pub const FULL: Sizes = Sizes {
        file_bytes: 2048 * MIB,
        data_bytes: 2048 * MIB,
        frames_bytes: 512 * MIB,
        accesses: 200_000,
        limit: Duration::from_secs(20),
        passes: 3,
        least_tree_depth: 16,
    };

    /// Sizes for a first look.
    pub const QUICK: Sizes = Sizes {
        file_bytes: 256 * MIB,
        data_bytes: 256 * MIB,
        frames_bytes: 64 * MIB,
        accesses: 20_000,
        limit: Duration::from_millis(1500),
        passes: 2,
        least_tree_depth: 12,
    };

    /// The same frames, and the data that `pattern` touches. Cyclic: 4/3 of the frames, in whole 2 MiB.
    pub fn for_pattern(self, pattern: Pattern) -> Sizes {
        let cyclic_bytes = self.frames_bytes * 4 / 3 / (2 * MIB) * (2 * MIB);
        Sizes { data_bytes: if pattern.is_cyclic() { cyclic_bytes } else { self.data_bytes }, ..self }
    }

    /// More than twice the data: a swap space that is half full gives up the copies of pages that it brought in, and clean pages would be
    /// written again.
    pub fn swap_bytes(self) -> u64 {
        self.data_bytes * 2 + 64 * MIB
    }

    /// The memory limit of every system: the frames and a slack for everything else, ours and the kernel's: 16 MiB, and
    /// 24 bytes a page of the file (page tables, tables of pages, the kernel's record of evicted pages).
    pub fn limit_bytes(self) -> u64 {
        self.frames_bytes + 16 * MIB + self.file_bytes / PAGE_BYTES as u64 * 24
    }
}
