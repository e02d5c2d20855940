//! Memory with a userfaultfd, a handler of `SIGBUS`, and the calls that answer: what the kernel takes for it, whoever pages.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

use selfpage_core::linux::errno::Errno;
use selfpage_core::linux::uffd::{Features, Modes, Reach, Reading, Uffd, Waiters, Writing};

use super::super::error::Error;
use super::{Mapping, Memory, PAGE_BYTES};

/// A mapping whose faults are `SIGBUS` on the thread that takes them. It is never unmapped before the process ends.
pub struct Watched {
    mapping: Mapping,
    uffd: Uffd,
}

impl Watched {
    /// Watches accesses to pages of `mapping` that are absent.
    pub fn for_absence(mapping: Mapping) -> Result<Watched, Error> {
        Watched::with(mapping, Features::SIGBUS.and(Features::MOVE), Modes::MISSING, "UFFDIO_MOVE")
    }

    /// Watches writes to pages of `mapping` that are protected.
    pub fn for_writes(mapping: Mapping) -> Result<Watched, Error> {
        Watched::with(mapping, Features::SIGBUS.and(Features::WP), Modes::WP, "write-protection")
    }

    /// `named`: the feature that is wanted most.
    fn with(mapping: Mapping, features: Features, modes: Modes, named: &str) -> Result<Watched, Error> {
        let missing = |why: Errno| {
            let remedy = "`selfpage doctor` says what this machine lacks";
            Error::skip("uffd", format!("no userfaultfd with {named}: {why}; {remedy}"))
        };
        let uffd = Uffd::open(Reach::UserFaults, Reading::Waits).map_err(missing)?;
        uffd.agree(features).map_err(missing)?;
        // SAFETY: own-mapping: nobody else knows it yet.
        unsafe { uffd.register(mapping.base as usize, mapping.len_bytes, modes) }
            .map_err(|why| Error::Failed(format!("watch {} bytes: {why}", mapping.len_bytes)))?;
        Ok(Watched { mapping, uffd })
    }

    /// Where it lies.
    pub fn addresses(&self) -> Range<usize> {
        self.mapping.addresses()
    }

    /// The memory.
    pub fn memory(&self) -> Memory {
        self.mapping.memory()
    }

    /// Lets pages be read only, or written too.
    pub fn set_writing(&self, pages: Range<usize>, writing: Writing) -> Result<(), Errno> {
        let (at, len_bytes) = (self.page_at(pages.start), pages.len() * PAGE_BYTES);
        assert!(pages.end <= self.mapping.len_bytes / PAGE_BYTES);
        // SAFETY: own-mapping: within it by the assertion, and writes that are not allowed are the handler's.
        unsafe { self.uffd.set_writing(at, len_bytes, writing) }
    }

    /// Moves a page of `from` here, where there is none.
    pub fn move_in(&self, page: usize, from: &Watched, page_there: usize) -> Result<(), Errno> {
        let (to, from) = (self.page_at(page), from.page_at(page_there));
        // SAFETY: own-mapping: pages of the bench's own mappings, reached by volatile accesses and by requests only.
        unsafe { self.uffd.move_pages(to, from, PAGE_BYTES, Waiters::Leave) }.map_err(|stopped| stopped.why)
    }

    /// Reads a page of a file, which was opened without the page cache, into a page that is there. Whether all of it came.
    pub fn read(&self, page: usize, file: &File, offset_bytes: u64) -> bool {
        // SAFETY: own-mapping: the kernel writes to a page of it.
        let read = unsafe {
            libc::pread(file.as_raw_fd(), self.page_at(page) as *mut _, PAGE_BYTES, offset_bytes as libc::off_t)
        };
        read == PAGE_BYTES as isize
    }

    fn page_at(&self, page: usize) -> usize {
        assert!(page < self.mapping.len_bytes / PAGE_BYTES);
        self.mapping.base as usize + page * PAGE_BYTES
    }
}
