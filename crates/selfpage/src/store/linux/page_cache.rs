//! Writing to a file without its lock: into a shared mapping of it. A thread that holds the lock may wait for us.

use std::ops::Range;
use std::os::fd::AsFd;

use rustix::fs::fstat;
use rustix::io::pread;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::PagerError;

/// Writes these parts of a page at `offset`, which is the page's. The file never grows by it.
///
/// # Context
/// PagerThread.
///
/// # Errors
/// [`PagerError::Full`]: the file system has no room. [`PagerError::Truncated`]: the file ends before it.
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
        mmap(std::ptr::null_mut(), PAGE_BYTES, rights, MapFlags::SHARED, &file, offset)
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
            (Ok(_), _) | (_, Some(libc::EFAULT)) => Err(why_not(&file, offset + part.end as u64)),
            (_, errno) => Err(PagerError::Io(errno.unwrap_or(libc::EIO))),
        }
    });
    // SAFETY: cache-window: mapped above.
    let _ = unsafe { munmap(window, PAGE_BYTES) };
    written
}

/// Why the page that has the byte before `end` cannot be had in the page cache to be written to.
fn why_not(file: impl AsFd, end: u64) -> PagerError {
    if fstat(&file).is_ok_and(|stat| (stat.st_size as u64) < end) {
        return PagerError::Truncated;
    }
    match pread(&file, &mut [0], end - 1) {
        Err(errno) => PagerError::Io(errno.raw_os_error()),
        Ok(_) => PagerError::Full,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn parts_are_written_and_a_file_that_ends_before_them_says_so() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE_BYTES as u64 + 100).unwrap();
        let write = |offset, part| write(&file, offset, &[7; PAGE_BYTES], std::iter::once(part));
        assert_eq!(write(0, 5..9), Ok(()));
        let mut bytes = [0; 10];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0, 0, 0, 0, 0, 7, 7, 7, 7, 0]);
        assert_eq!(write(PAGE_BYTES as u64, 0..100), Ok(()));
        assert_eq!(write(2 * PAGE_BYTES as u64, 0..100), Err(PagerError::Truncated));
        assert_eq!(file.metadata().unwrap().len(), PAGE_BYTES as u64 + 100);
    }
}
