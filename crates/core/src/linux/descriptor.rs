//! File descriptors as plain numbers.

use super::errno::Errno;
use super::syscall::call;
use core::ffi::CStr;
use linux_raw_sys::general as raw;

/// A file descriptor of the calling thread's table, not owned: a pager thread and the program may have different tables, so
/// no value can stand for the right to close it everywhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Descriptor(i32);

impl Descriptor {
    /// Stands for "none"; every call on it fails with `EBADF`.
    pub const ABSENT: Descriptor = Descriptor(-1);

    /// The descriptor with this number.
    pub const fn from_raw(number: i32) -> Descriptor {
        Descriptor(number)
    }

    /// Its number.
    pub const fn raw(self) -> i32 {
        self.0
    }

    /// Opens `path` with these `O_*` flags; close-on-exec.
    ///
    /// # Errors
    /// What open(2) says.
    pub fn open(path: &CStr, flags: u32) -> Result<Descriptor, Errno> {
        let flags = (flags | raw::O_CLOEXEC) as usize;
        // SAFETY: syscall-contract: the path ends with NUL and lives until the call returns.
        let number =
            unsafe { call(raw::__NR_openat, [raw::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0, 0, 0]) }?;
        Ok(Descriptor(number as i32))
    }

    /// Opens this process's pagemap, as the calling thread's: that of `/proc/self` is empty where the first thread has ended.
    ///
    /// # Errors
    /// What open(2) says.
    pub fn open_pagemap() -> Result<Descriptor, Errno> {
        Descriptor::open(c"/proc/thread-self/pagemap", raw::O_RDONLY)
    }

    /// Opens this process's memory for reading, in the same way.
    ///
    /// # Errors
    /// What open(2) says.
    pub fn open_memory() -> Result<Descriptor, Errno> {
        Descriptor::open(c"/proc/thread-self/mem", raw::O_RDONLY)
    }

    /// Closes the descriptor in the calling thread's table.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn close(self) -> Result<(), Errno> {
        // SAFETY: syscall-contract: the call takes no pointer.
        unsafe { call(raw::__NR_close, [self.argument(), 0, 0, 0, 0, 0]) }.map(drop)
    }

    /// Reads `len_bytes` at `offset_bytes` into memory at `into`; returns how many came.
    ///
    /// # Errors
    /// What pread(2) says.
    ///
    /// # Safety
    /// owned-range: `[into, into+len_bytes)` is the caller's to write, and nobody holds a reference to it.
    pub unsafe fn read_at(self, into: usize, len_bytes: usize, offset_bytes: usize) -> Result<usize, Errno> {
        // SAFETY: owned-range: passed on from our caller.
        unsafe { call(raw::__NR_pread64, [self.argument(), into, len_bytes, offset_bytes, 0, 0]) }
    }

    /// Issues an ioctl whose argument is a structure that the kernel reads and writes.
    ///
    /// # Safety
    /// syscall-contract: `T` is the structure that `request` takes, and what it names is the caller's to change.
    pub(super) unsafe fn control<T>(self, request: u32, argument: &mut T) -> Result<usize, Errno> {
        let pointer = core::ptr::from_mut(argument) as usize;
        // SAFETY: syscall-contract: the structure is borrowed until the call returns; its type is the caller's word.
        unsafe { call(raw::__NR_ioctl, [self.argument(), request as usize, pointer, 0, 0, 0]) }
    }

    /// Issues an ioctl whose argument is a number.
    ///
    /// # Safety
    /// syscall-contract: `request` takes a number, not a pointer.
    pub(super) unsafe fn control_number(self, request: u32, number: usize) -> Result<usize, Errno> {
        // SAFETY: syscall-contract: passed on from our caller.
        unsafe { call(raw::__NR_ioctl, [self.argument(), request as usize, number, 0, 0, 0]) }
    }

    /// As the kernel takes it: an `int` widened.
    pub(super) const fn argument(self) -> usize {
        self.0 as isize as usize
    }
}

/// The number of an ioctl that reads and writes a `T`, as `_IOWR(kind, number, T)` makes it.
pub(super) const fn read_write<T>(kind: u32, number: u32) -> u32 {
    3 << 30 | (size_of::<T>() as u32) << 16 | kind << 8 | number
}
