//! Writing to a file without its lock: into a shared mapping of it. A thread that holds the lock may wait for us.

use std::ops::Range;
use std::os::fd::AsFd;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::PagerError;

/// Writes these parts of a page at `offset`, which is the page's. The file never grows by it.
///
/// # Context
/// PagerThread.
///
/// # Errors
/// [`PagerError::Full`]: the file system has no room, or the file ends before it.
pub fn write(
    file: impl AsFd,
    offset: u64,
    page: &PageBytes,
    mut parts: impl Iterator<Item = Range<usize>>,
) -> Result<(), PagerError> {
    let failed = |errno: rustix::io::Errno| PagerError::Io(errno.raw_os_error());
    // SAFETY: cache-window: the kernel picks an unused range, which nobody else learns of and which is unmapped below.
    let window = unsafe {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        mmap(std::ptr::null_mut(), PAGE_BYTES, rights, MapFlags::SHARED, file, offset)
    }
    .map_err(failed)?;
    // Else the kernel reads ahead into its cache, page after page that nobody wants there.
    // SAFETY: cache-window: mapped above.
    let _ = unsafe { madvise(window, PAGE_BYTES, Advice::Random) };
    let written = parts.try_for_each(|part| {
        let bytes = &page[part.clone()];
        let from = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let to = libc::iovec { iov_base: window.wrapping_byte_add(part.start), iov_len: bytes.len() };
        // By a system call, to which a file that was cut, or has no room, is an error; to a store it is a signal. The process goes by
        // the number of this thread: its own is that of the first thread, which may have ended.
        // SAFETY: cache-window: the kernel reads `bytes` and writes as many into the window, both alive.
        let written = unsafe { libc::process_vm_writev(libc::gettid(), &from, 1, &to, 1, 0) };
        let why = std::io::Error::last_os_error().raw_os_error();
        match (usize::try_from(written), why) {
            (Ok(written), _) if written == bytes.len() => Ok(()),
            (Ok(_), _) | (_, Some(libc::EFAULT)) => Err(PagerError::Full),
            (_, errno) => Err(PagerError::Io(errno.unwrap_or(libc::EIO))),
        }
    });
    // SAFETY: cache-window: mapped above.
    let _ = unsafe { munmap(window, PAGE_BYTES) };
    written
}
