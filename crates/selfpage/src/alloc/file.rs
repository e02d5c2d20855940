//! Small files of the kernel's, read in the middle of an allocation.

use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Result;

/// A file to read. It is closed by the kernel's call: that of the C library, which std uses, is a place where the thread may be cancelled, and
/// what allocates is none.
#[derive(Debug)]
pub(super) struct File(ManuallyDrop<OwnedFd>);

impl File {
    pub(super) fn open(path: &CStr) -> Result<File> {
        rustix::fs::open(path, OFlags::CLOEXEC, Mode::empty()).map(|file| File(ManuallyDrop::new(file)))
    }

    /// Reads on into `bytes`. Returns how many it has read.
    pub(super) fn read(&self, bytes: &mut [u8]) -> Result<usize> {
        rustix::io::read(self.0.as_fd(), bytes)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: own-descriptor: taken out once, and closed here alone.
        unsafe { rustix::io::close(ManuallyDrop::take(&mut self.0).into_raw_fd()) };
    }
}
