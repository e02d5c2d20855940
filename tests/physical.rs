//! Which physical pages memory has. Include it where tests need it, beside `skip`:
//! `#[path = "../../../tests/physical.rs"] mod physical;`.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::skip::skip;

const PAGE_BYTES: usize = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Bits of an entry of `/proc/self/pagemap`: which physical page it is.
const NUMBER: u64 = (1 << 55) - 1;

/// The physical page of each of `pages` pages from `start` on; 0 where there is none, and for all but root.
pub fn pages(start: usize, pages: usize) -> Vec<u64> {
    let mut bytes = vec![0; pages * 8];
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut bytes, (start / PAGE_BYTES * 8) as u64).unwrap();
    bytes.chunks_exact(8).map(|entry| u64::from_ne_bytes(entry.try_into().unwrap()) & NUMBER).collect()
}

/// How many of `pages` follow the one before them in memory, too.
pub fn neighbours(pages: &[u64]) -> usize {
    pages.windows(2).filter(|pair| pair[1] == pair[0] + 1).count()
}

/// Whether memory side by side is to be had now, and seen. Where it is not, the calling test is skipped for want of it.
///
/// # Panics
/// As [`skip`].
pub fn can_be_neighbours() -> bool {
    // One may be refused for a moment, by whatever else the machine is at.
    let found = (0..8).map(|_| of_a_huge_page()).max_by_key(|found| neighbours(found)).unwrap_or_default();
    if found[0] == 0 {
        skip("root", "only root is told which physical pages these are");
    } else if neighbours(&found) + 1 < found.len() {
        skip("thp", "no huge page is to be had");
    }
    found[0] != 0 && neighbours(&found) + 1 == found.len()
}

/// The physical pages of fresh memory that wants to be a huge page.
fn of_a_huge_page() -> Vec<u64> {
    let (len, anonymous) = (2 * HUGE_PAGE_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a mapping of this test's own.
    unsafe {
        let around = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, anonymous, -1, 0);
        assert_ne!(around, libc::MAP_FAILED);
        let start = (around as usize).next_multiple_of(HUGE_PAGE_BYTES);
        libc::madvise(start as *mut _, HUGE_PAGE_BYTES, libc::MADV_HUGEPAGE);
        (start as *mut u8).write_volatile(1);
        let found = pages(start, HUGE_PAGE_BYTES / PAGE_BYTES);
        libc::munmap(around, len);
        found
    }
}
