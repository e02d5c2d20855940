//! Memory of each kind, a page at a time.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr;

pub const PAGE: usize = 4096;

/// A mapping of whole pages.
pub struct Memory {
    kind: &'static str,
    start: usize,
    len: usize,
}

impl Memory {
    pub fn anonymous(pages: usize) -> Memory {
        Memory::map("anonymous", pages * PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None).unwrap()
    }

    /// Of a memfd.
    pub fn shared(pages: usize) -> Memory {
        Memory::map("shared", pages * PAGE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, None).unwrap()
    }

    /// Of a file on disk.
    pub fn file(pages: usize) -> Memory {
        let file = tempfile::tempfile_in(std::env::temp_dir()).unwrap();
        file.set_len((pages * PAGE) as u64).unwrap();
        Memory::map("file", pages * PAGE, libc::MAP_SHARED, Some(&file)).unwrap()
    }

    pub fn map(kind: &'static str, len: usize, flags: i32, file: Option<&File>) -> std::io::Result<Memory> {
        let (access, file) = (libc::PROT_READ | libc::PROT_WRITE, file.map_or(-1, AsRawFd::as_raw_fd));
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, file, 0) };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Memory { kind, start: at as usize, len })
    }

    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    pub fn page(&self, page: usize) -> usize {
        assert!(page * PAGE < self.len);
        self.start + page * PAGE
    }

    pub fn index(&self, addr: usize) -> usize {
        (addr - self.start) / PAGE
    }

    pub fn read(&self, page: usize) -> u64 {
        // SAFETY: mapped, and every byte of it is a number.
        unsafe { ptr::read_volatile(self.page(page) as *const u64) }
    }

    pub fn write(&self, page: usize, value: u64) {
        // SAFETY: mapped, and nobody holds a reference to it.
        unsafe { ptr::write_volatile(self.page(page) as *mut u64, value) }
    }

    /// Writes by a system call.
    pub fn write_by_kernel(&self, page: usize) {
        // SAFETY: mapped, and nobody else holds a reference to it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.page(page) as *mut u8, PAGE) };
        File::open("/dev/urandom").unwrap().read_exact(bytes).unwrap();
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} memory of {} pages", self.kind, self.len / PAGE)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`.
        unsafe { libc::munmap(self.start as *mut _, self.len) };
    }
}
