//! Writing to a file without its lock: into a shared mapping of it. A thread that holds the lock may wait for us.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::AsFd;

use arrayvec::ArrayVec;
use rustix::fs::fstat;
use rustix::io::pread;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::PagerError;

/// Pages in one window (IOV_MAX is 1024).
pub const MOST: usize = 512;

/// Whether the file system of this file, opened for reading and writing, lets it be written to so: FUSE with `direct_io`, 9p without a
/// cache that writes back, and files sealed against writing do not.
pub fn takes_mappings(file: impl AsFd) -> bool {
    match Window::over(file, 0, PAGE_BYTES) {
        Err(PagerError::Io(errno)) => says_nothing_of_the_file(errno),
        _ => true,
    }
}

/// Whether a mapping that failed so may succeed another time.
const fn says_nothing_of_the_file(errno: i32) -> bool {
    matches!(errno, libc::ENOMEM | libc::EAGAIN)
}

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
    let window = Window::over(&file, offset, PAGE_BYTES)?;
    parts.try_for_each(|part| match window.write(part.start, &[vector(&page[part.clone()])])? {
        written if written == part.len() => Ok(()),
        _ => Err(why_not(&file, offset + part.end as u64)),
    })
}

/// Writes neighbouring pages, at most [`MOST`], the first at `offset`.
///
/// # Context
/// PagerThread.
///
/// # Errors
/// As for [`write`], of the first page that could not be written, with its place among them: those before it were.
pub fn write_pages<'p>(
    file: impl AsFd,
    offset: u64,
    pages: impl Iterator<Item = &'p PageBytes>,
) -> Result<(), (usize, PagerError)> {
    let vectors: ArrayVec<libc::iovec, MOST> = pages.map(|page| vector(page)).collect();
    let window = Window::over(&file, offset, vectors.len() * PAGE_BYTES);
    let written = window.and_then(|window| window.write(0, &vectors)).map_err(|why| (0, why))?;
    let done = written / PAGE_BYTES;
    if done == vectors.len() {
        return Ok(());
    }
    Err((done, why_not(&file, offset + ((done + 1) * PAGE_BYTES) as u64)))
}

fn vector(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// Memory that is a part of a file.
struct Window {
    at: *mut c_void,
    len_bytes: usize,
}

impl Window {
    fn over(file: impl AsFd, offset: u64, len_bytes: usize) -> Result<Window, PagerError> {
        let failed = |errno: rustix::io::Errno| PagerError::Io(errno.raw_os_error());
        // SAFETY: cache-window: the kernel picks an unused range, which nobody else learns of and which `drop` unmaps.
        let at = unsafe {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), len_bytes, rights, MapFlags::SHARED, file, offset)
        }
        .map_err(failed)?;
        // Else the kernel reads ahead into its cache, page after page that nobody wants there.
        // SAFETY: cache-window: mapped above.
        let _ = unsafe { madvise(at, len_bytes, Advice::Random) };
        Ok(Window { at, len_bytes })
    }

    /// Writes `from` to the window from byte `start` on, and says how many bytes of it the file took.
    ///
    /// By a system call, to which a file that was cut, or has no room, is an error; to a store it is a signal. The process goes by the
    /// number of this thread: its own is that of the first thread, which may have ended.
    fn write(&self, start: usize, from: &[libc::iovec]) -> Result<usize, PagerError> {
        let to = libc::iovec {
            iov_base: self.at.wrapping_byte_add(start),
            iov_len: from.iter().map(|vector| vector.iov_len).sum(),
        };
        // SAFETY: cache-window: the kernel reads what `from` names and writes as much into the window, both alive.
        let written =
            unsafe { libc::process_vm_writev(libc::gettid(), from.as_ptr(), from.len() as libc::c_ulong, &to, 1, 0) };
        let why = std::io::Error::last_os_error().raw_os_error();
        match (usize::try_from(written), why) {
            (Ok(written), _) => Ok(written),
            (_, Some(libc::EFAULT)) => Ok(0),
            (_, errno) => Err(PagerError::Io(errno.unwrap_or(libc::EIO))),
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: cache-window: mapped by `over`, and looked at no more.
        let _ = unsafe { munmap(self.at, self.len_bytes) };
    }
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
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_file_without_shared_mappings_is_known() {
        assert!(takes_mappings(tempfile::tempfile().unwrap()));
        let without = std::fs::OpenOptions::new().read(true).write(true).open("/proc/self/comm").unwrap();
        assert!(!takes_mappings(without));
        let sealed = std::fs::File::from(memfd_create("sealed", MemfdFlags::ALLOW_SEALING).unwrap());
        sealed.set_len(PAGE_BYTES as u64).unwrap();
        assert!(takes_mappings(&sealed));
        fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
        assert!(!takes_mappings(&sealed));
    }

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

    #[test]
    fn pages_are_written_as_far_as_the_file_goes() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(5 * PAGE_BYTES as u64).unwrap();
        let pages = [1, 2, 3, 4, 5].map(|fill| [fill; PAGE_BYTES]);
        let write = |from, count| write_pages(&file, from * PAGE_BYTES as u64, pages.iter().take(count));
        assert_eq!(write(1, 3), Ok(()));
        assert_eq!(write(3, 5), Err((2, PagerError::Truncated)));
        assert_eq!(write(5, 1), Err((0, PagerError::Truncated)));
        let mut first_bytes = [9; 5];
        for (byte, page) in first_bytes.iter_mut().zip(0..) {
            file.read_exact_at(std::slice::from_mut(byte), page * PAGE_BYTES as u64).unwrap();
        }
        assert_eq!((first_bytes, file.metadata().unwrap().len()), ([0, 1, 2, 1, 2], 5 * PAGE_BYTES as u64));
    }
}
