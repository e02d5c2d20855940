//! Anonymous memory that nothing pages: plain, unregistered, and only as large in fact as what was touched.

use std::ffi::c_void;
use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};

/// Who sees what is written after a fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// Parent and child each have their own copy.
    Private,
    /// Parent and children have one memory.
    Family,
    /// A child finds zeros.
    Own,
}

/// A range of anonymous memory, all zero at first.
pub struct Mapping {
    base: NonNull<AtomicU64>,
    len_bytes: usize,
    sharing: Sharing,
}

// SAFETY: mapping-owned: the range is reached through atomics only.
unsafe impl Send for Mapping {}
// SAFETY: mapping-owned: the range is reached through atomics only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `pages` pages; none of them takes memory before it is touched.
    pub fn new(pages: usize, sharing: Sharing) -> io::Result<Mapping> {
        let len_bytes = pages.checked_mul(PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = match sharing {
            Sharing::Private | Sharing::Own => MapFlags::PRIVATE,
            Sharing::Family => MapFlags::SHARED,
        };
        // SAFETY: mapping-owned: the kernel picks an unused range.
        let base = unsafe {
            mmap_anonymous(null_mut(), len_bytes, ProtFlags::READ | ProtFlags::WRITE, flags | MapFlags::NORESERVE)
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping { base, len_bytes, sharing };
        // No program's own memory, and a core dump would have shared memory written out whole, and given pages for that.
        // SAFETY: mapping-owned: just mapped; nothing changes but what a dump has.
        let _ = unsafe { madvise(base.as_ptr().cast(), len_bytes, Advice::LinuxDontDump) };
        if sharing == Sharing::Own {
            // SAFETY: mapping-owned: just mapped; what a child finds there are words, too.
            unsafe { madvise(base.as_ptr().cast(), len_bytes, Advice::LinuxWipeOnFork) }?;
        }
        Ok(mapping)
    }

    /// The memory, in words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapping-owned: mapped, aligned to a page, zero is a valid word, and never seen but as atomics.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len_bytes / 8) }
    }

    /// The words of one page.
    ///
    /// # Panics
    /// Where the mapping ends before the page.
    pub fn page(&self, page: usize) -> &[AtomicU64; PAGE_BYTES / 8] {
        match self.words()[page * (PAGE_BYTES / 8)..].first_chunk() {
            Some(words) => words,
            None => panic!("page {page} lies outside the mapping"),
        }
    }

    /// Copies a page out.
    pub fn read(&self, page: usize, to: &mut PageBytes) {
        for (word, bytes) in self.page(page).iter().zip(to.as_chunks_mut::<8>().0) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
    }

    /// Copies a page in.
    pub fn write(&self, page: usize, from: &PageBytes) {
        for (word, bytes) in self.page(page).iter().zip(from.as_chunks::<8>().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
    }

    /// Gives the memory under these pages back; they read as zero afterwards.
    ///
    /// # Errors
    /// The kernel refuses. Some of them may be as they were.
    ///
    /// # Panics
    /// Where the mapping ends before the last page.
    pub fn discard(&self, first_page: usize, pages: usize) -> io::Result<()> {
        let start_bytes = first_page * PAGE_BYTES;
        assert!(start_bytes + pages * PAGE_BYTES <= self.len_bytes, "pages lie outside the mapping");
        let advice = match self.sharing {
            Sharing::Private | Sharing::Own => Advice::LinuxDontNeed,
            Sharing::Family => Advice::LinuxRemove,
        };
        // SAFETY: mapping-owned: the range lies inside; turning to zero is a store like any other to those who see atomics.
        unsafe { madvise(self.base.as_ptr().byte_add(start_bytes).cast::<c_void>(), pages * PAGE_BYTES, advice) }?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapping-owned: the last look at it is over.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel says of the mapping that has this address.
    fn flags(addr: usize) -> String {
        let is_there = |line: &str| {
            let ends = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let number = |digits| usize::from_str_radix(digits, 16).unwrap_or(0);
            ends.is_some_and(|(start, end)| (number(start)..number(end)).contains(&addr))
        };
        let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut about = all.lines().skip_while(|line| !is_there(line));
        about.find(|line| line.starts_with("VmFlags:")).unwrap().to_owned()
    }

    #[test]
    fn no_core_dump_has_it() {
        for sharing in [Sharing::Private, Sharing::Family, Sharing::Own] {
            let mapping = Mapping::new(3, sharing).unwrap();
            let flags = flags(mapping.base.as_ptr().addr());
            assert!(flags.split(' ').any(|flag| flag == "dd"), "{sharing:?}: {flags}");
        }
    }
}
