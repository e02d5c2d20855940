//! Reading and writing a file without its lock: by a shared mapping of it. A thread that holds the lock may wait for us.

use std::ffi::c_void;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use arrayvec::ArrayVec;
use rustix::fs::{AtFlags, StatVfsMountFlags, StatxAttributes, StatxFlags, fstat, fstatfs, fstatvfs, statx};
use rustix::io::{Errno, pread};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::PagerError;

/// Pages in one window (IOV_MAX is 1024).
pub const MOST: usize = 512;
/// A file system that has as much for anybody has room for a page and what describes it.
const ROOM_BYTES: u64 = 1 << 20;
/// What a window is mapped for that is written to.
pub const WRITING: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Which reads of a file wait for its lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadLock {
    /// None but those past the page cache, and these can be told not to wait.
    Direct,
    /// The same, and these wait whatever they are told.
    DirectAlways,
    /// All that are not told otherwise.
    All,
}

impl ReadLock {
    /// As the sources of Linux 6.18 have it. What is not known there may take it.
    pub fn of(file: impl AsFd) -> ReadLock {
        let kind = fstatfs(&file).map_or(0, |about| about.f_type);
        let dax = || {
            let about = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::empty());
            about.is_ok_and(|about| about.stx_attributes.contains(StatxAttributes::DAX))
        };
        match kind {
            libc::BTRFS_SUPER_MAGIC => ReadLock::DirectAlways,
            libc::TMPFS_MAGIC => ReadLock::Direct,
            // Memory on its bus it does not cache, and there the lock is taken.
            libc::EXT4_SUPER_MAGIC if !dax() => ReadLock::Direct,
            _ => ReadLock::All,
        }
    }
}

/// Whether the file system of this file, opened for what the mapping is to be for, lets it be mapped so: FUSE with `direct_io`, 9p without a
/// cache, files of huge pages, and, to write, files sealed against that do not.
pub fn takes_mappings(file: impl AsFd, rights: ProtFlags) -> bool {
    // A huge page is mapped whole, also where less is asked for, and no part of it is unmapped.
    if fstatfs(&file).is_ok_and(|about| about.f_type == libc::HUGETLBFS_MAGIC) {
        return false;
    }
    match Window::over(file, 0, PAGE_BYTES, rights) {
        Err(PagerError::Io(errno)) => says_nothing_of_the_file(errno),
        _ => true,
    }
}

/// Whether a mapping that failed so may succeed another time.
const fn says_nothing_of_the_file(errno: i32) -> bool {
    matches!(errno, libc::ENOMEM | libc::EAGAIN)
}

/// Whether a [`read`] that failed so may be no failure of the file's: this process may not map it, or not read so, and a filter answers with
/// any number.
pub const fn is_refusal(error: PagerError) -> bool {
    !matches!(error, PagerError::Io(libc::EIO))
}

/// Whether the file's file system is memory: all of it is the page cache.
pub fn is_memory(file: impl AsFd) -> bool {
    fstatfs(&file).is_ok_and(|about| about.f_type == libc::TMPFS_MAGIC)
}

/// Whether the page cache has what is written to this file, also where it is opened to go past that (`O_DIRECT`): a tmpfs takes the flag all
/// the same, as ext4 does for a file whose data it journals, or that is encrypted.
pub fn is_always_cached(file: impl AsFd) -> bool {
    let none = || {
        let about = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
        about.is_ok_and(|about| about.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && about.stx_dio_offset_align == 0)
    };
    is_memory(&file) || none()
}

/// What the disk said of pages that the page cache had for it and it did not take, since this descriptor was last told; 0: nothing. Waits for
/// the page at `offset` alone, and for no lock.
///
/// # Context
/// PagerThread.
pub fn write_error(file: impl AsFd, offset: u64) -> i32 {
    let number = file.as_fd().as_raw_fd();
    let asked = |flags| {
        // SAFETY: syscall-contract: numbers alone.
        match unsafe { libc::sync_file_range(number, offset as i64, PAGE_BYTES as i64, flags) } {
            0 => 0,
            _ => std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        }
    };
    match asked(libc::SYNC_FILE_RANGE_WAIT_BEFORE) {
        // A filter answers with any number. The kernel itself refuses nobody who asks for nothing.
        errno if errno == asked(0) => 0,
        errno => errno,
    }
}

/// Reads what the file has from `offset` on, which is a page's, into neighbouring pages, and says how many bytes that are.
///
/// # Context
/// PagerThread.
///
/// # Errors
/// A page that the file has could not be had.
pub fn read(file: impl AsFd, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<usize, PagerError> {
    let len_bytes = into.iter().map(|slice| slice.len()).sum();
    let read = Window::over(&file, offset, len_bytes, ProtFlags::READ)?.read(into)?;
    // Only now: the mapping is zero behind the end, also where that has come nearer meanwhile.
    let len = fstat(&file).map_err(failed)?.st_size as u64;
    let there = len.saturating_sub(offset).min(len_bytes as u64) as usize;
    if read < there { Err(PagerError::Io(libc::EIO)) } else { Ok(there) }
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
    let window = Window::over(&file, offset, PAGE_BYTES, WRITING)?;
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
    let window = Window::over(&file, offset, vectors.len() * PAGE_BYTES, WRITING);
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
///
/// It is used by system calls, to which a file that was cut, or has no room, is an error; to a load or store it is a signal. The process goes
/// by the number of the calling thread: its own is that of the first thread, which may have ended.
struct Window {
    at: *mut c_void,
    len_bytes: usize,
}

impl Window {
    fn over(file: impl AsFd, offset: u64, len_bytes: usize, rights: ProtFlags) -> Result<Window, PagerError> {
        // SAFETY: cache-window: the kernel picks an unused range, which nobody else learns of and which `drop` unmaps.
        let at =
            unsafe { mmap(std::ptr::null_mut(), len_bytes, rights, MapFlags::SHARED, file, offset) }.map_err(failed)?;
        // Neighbours that are read should come from the disk together. Else the kernel's cache gets page after page that nobody wants there.
        let advice = match rights == ProtFlags::READ && len_bytes > PAGE_BYTES {
            true => Advice::Sequential,
            false => Advice::Random,
        };
        // SAFETY: cache-window: mapped above.
        let _ = unsafe { madvise(at, len_bytes, advice) };
        Ok(Window { at, len_bytes })
    }

    /// Reads the window from its beginning on, and says how many bytes could be had.
    fn read(&self, into: &mut [IoSliceMut<'_>]) -> Result<usize, PagerError> {
        let from = libc::iovec { iov_base: self.at, iov_len: into.iter().map(|slice| slice.len()).sum() };
        // SAFETY: cache-window: the kernel reads as much from the window as `into` takes, both alive; IoSliceMut has the layout of iovec.
        let read = unsafe {
            libc::process_vm_readv(libc::gettid(), into.as_ptr().cast(), into.len() as libc::c_ulong, &from, 1, 0)
        };
        moved(read)
    }

    /// Writes `from` to the window from byte `start` on, and says how many bytes of it the file took.
    fn write(&self, start: usize, from: &[libc::iovec]) -> Result<usize, PagerError> {
        let to = libc::iovec {
            iov_base: self.at.wrapping_byte_add(start),
            iov_len: from.iter().map(|vector| vector.iov_len).sum(),
        };
        // SAFETY: cache-window: the kernel reads what `from` names and writes as much into the window, both alive.
        let written =
            unsafe { libc::process_vm_writev(libc::gettid(), from.as_ptr(), from.len() as libc::c_ulong, &to, 1, 0) };
        moved(written)
    }
}

const fn failed(errno: Errno) -> PagerError {
    PagerError::Io(errno.raw_os_error())
}

/// How many bytes a call has moved that returned this just now.
fn moved(returned: isize) -> Result<usize, PagerError> {
    let why = std::io::Error::last_os_error().raw_os_error();
    match (usize::try_from(returned), why) {
        (Ok(len_bytes), _) => Ok(len_bytes),
        (_, Some(libc::EFAULT)) => Ok(0),
        (_, errno) => Err(PagerError::Io(errno.unwrap_or(libc::EIO))),
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
    let mut byte = [0];
    let read = match ReadLock::of(&file) {
        ReadLock::All => {
            let offset = (end - 1) / PAGE_BYTES as u64 * PAGE_BYTES as u64;
            read(&file, offset, &mut [IoSliceMut::new(&mut byte)])
        }
        // By a mapping a tmpfs would need room for what is read.
        ReadLock::Direct | ReadLock::DirectAlways => pread(&file, &mut byte, end - 1).map_err(failed),
    };
    read.err().unwrap_or_else(|| refusal(file))
}

/// Why a file system takes nothing more, as far as it says: of a file's lock a call that tells more would wait for.
fn refusal(file: impl AsFd) -> PagerError {
    match fstatvfs(file) {
        Ok(about) if about.f_flag.contains(StatVfsMountFlags::RDONLY) => PagerError::Io(libc::EROFS),
        // Of a quota, an error of the disk, one of the file system that ends all writes, and of a lack of memory there is no telling which it is.
        Ok(about) if about.f_bavail.saturating_mul(about.f_frsize) >= ROOM_BYTES => PagerError::Io(libc::EIO),
        _ => PagerError::Full,
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_file_without_shared_mappings_is_known() {
        assert!(takes_mappings(tempfile::tempfile().unwrap(), WRITING));
        let without = std::fs::OpenOptions::new().read(true).write(true).open("/proc/self/comm").unwrap();
        assert!(!takes_mappings(without, WRITING));
        let sealed = std::fs::File::from(memfd_create("sealed", MemfdFlags::ALLOW_SEALING).unwrap());
        sealed.set_len(PAGE_BYTES as u64).unwrap();
        assert!(takes_mappings(&sealed, WRITING));
        fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
        assert!(!takes_mappings(&sealed, WRITING));
    }

    #[test]
    fn pages_are_read_as_far_as_the_file_goes() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 2 * PAGE_BYTES + 100], 0).unwrap();
        let mut pages = [[9; PAGE_BYTES]; 4];
        let mut read = |first: u64| {
            let mut into = pages.each_mut().map(|page| IoSliceMut::new(page));
            read(&file, first * PAGE_BYTES as u64, &mut into)
        };
        assert_eq!([read(3), read(2), read(0)], [Ok(0), Ok(100), Ok(2 * PAGE_BYTES + 100)]);
        assert!(pages.as_flattened()[..2 * PAGE_BYTES + 100].iter().all(|byte| *byte == 7));
        assert_eq!(pages[3], [9; PAGE_BYTES]);
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
