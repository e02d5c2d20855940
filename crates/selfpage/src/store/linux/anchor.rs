//! A file that stays the same one whatever becomes of its descriptors.

use std::os::fd::RawFd;

use selfpage_core::linux::descriptor::Descriptor;
use selfpage_core::linux::held::Held;

use crate::fork::lineage::Process;

/// Holds a file for the process that made it. As long as it does the file is not gone, even where it has no name and the program has closed
/// its descriptor: then the file system would give its inode's number to the next file, which is perhaps the program's own.
pub struct Anchor {
    held: Option<Held>,
    /// A child does not get it, and may have something else there. A parent's locks would last as long as the child if it did.
    process: Option<Process>,
}

impl Anchor {
    /// Holds the file of this descriptor, where the file system can map it.
    pub fn new(file: RawFd) -> Anchor {
        Anchor { held: Held::by_mapping(Descriptor::from_raw(file)).ok(), process: Process::this().ok() }
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        if let Some(held) = self.held.take().filter(|_| self.process.is_some_and(Process::is_this)) {
            held.release();
        }
    }
}
