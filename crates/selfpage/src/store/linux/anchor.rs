//! A file that stays the same one whatever becomes of its descriptors.

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use selfpage_core::addr::PAGE_BYTES;

/// A page of the file, which nobody can touch. As long as it is mapped the file is not gone, even where it has no name and the program has
/// closed its descriptor: then the file system would give its inode's number to the next file, which is perhaps the program's own.
pub struct Anchor {
    page: *mut c_void,
    /// A child does not get it, and may have something else there.
    process: u32,
}

// SAFETY: mapping-owned: the page is never looked at.
unsafe impl Send for Anchor {}
// SAFETY: mapping-owned: as above.
unsafe impl Sync for Anchor {}

impl Anchor {
    /// Holds the file that the descriptor is of.
    pub fn new(file: BorrowedFd<'_>) -> io::Result<Anchor> {
        // SAFETY: mapping-owned: the kernel picks an unused range.
        let page = unsafe { mmap(null_mut(), PAGE_BYTES, ProtFlags::empty(), MapFlags::PRIVATE, file, 0) }?;
        let anchor = Anchor { page, process: std::process::id() };
        // A parent's locks would last as long as the child.
        // SAFETY: mapping-owned: just mapped.
        unsafe { madvise(page, PAGE_BYTES, Advice::LinuxDontFork) }?;
        Ok(anchor)
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: mapping-owned: it is not used again.
            let _ = unsafe { munmap(self.page, PAGE_BYTES) };
        }
    }
}
