//! Physical memory of a virtual machine: words that the rules of capabilities work on, and a CPU too.

use std::ptr::{NonNull, null_mut};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use selfpage_core::frame::Table;
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::sync::AtomicU64;

use crate::error::{Error, Kind, Result};

const PAGE_BYTES: u64 = 4096;

/// A mapping of the process that is physical memory of a virtual machine from an address on. All zero at first.
pub struct Memory {
    physical: PhysMemory,
    host: NonNull<u8>,
}

impl Memory {
    /// `len_bytes` of memory, whose first byte has the physical address `first`.
    ///
    /// # Errors
    /// [`Kind::Invalid`]: these are no whole pages. [`Kind::OutOfSpace`].
    pub fn new(first: PhysAddr, len_bytes: usize) -> Result<Memory> {
        const OPERATION: &str = "map memory for a virtual machine";
        if len_bytes == 0 || !(len_bytes as u64).is_multiple_of(PAGE_BYTES) || !first.0.is_multiple_of(PAGE_BYTES) {
            let cause = format!("{len_bytes} bytes at {:#x} are no whole pages of {PAGE_BYTES} bytes", first.0);
            return Err(Error::new(Kind::Invalid, OPERATION, cause));
        }
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: guest-memory: a new mapping where the kernel finds room replaces nothing.
        let host = unsafe { mmap_anonymous(null_mut(), len_bytes, access, flags) };
        let host = host.map_err(|errno| Error::system(OPERATION, errno))?;
        let host = NonNull::new(host.cast()).ok_or_else(|| Error::new(Kind::Refused, OPERATION, "it lies at 0"))?;
        // SAFETY: guest-memory: so many zeroed words, which stay until `physical` is dropped with us.
        let words = unsafe { Table::<AtomicU64>::new(host.cast(), len_bytes / 8) };
        Ok(Memory { physical: PhysMemory::new(first, words), host })
    }

    /// The memory, as the rules see it.
    pub const fn physical(&self) -> &PhysMemory {
        &self.physical
    }

    /// The same once more, to be kept where the memory's owner is not.
    ///
    /// # Safety
    /// *guest-memory*: it is not used once this is dropped.
    pub(crate) unsafe fn view(&self) -> PhysMemory {
        let len = (self.physical.len_bytes() / 8) as usize;
        // SAFETY: guest-memory: all its words, and atomics only, as the caller promises.
        PhysMemory::new(self.physical.first(), unsafe { Table::new(self.host.cast(), len) })
    }

    /// Where the process has it.
    pub const fn host(&self) -> NonNull<u8> {
        self.host
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: guest-memory: ours, and who borrowed it is gone.
        let _ = unsafe { munmap(self.host.as_ptr().cast(), self.physical.len_bytes() as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_whole_pages() {
        for (first, len_bytes) in [(0, 0), (0, 4095), (8, 4096)] {
            assert_eq!(Memory::new(PhysAddr(first), len_bytes).err().map(|error| error.kind()), Some(Kind::Invalid));
        }
        let memory = Memory::new(PhysAddr(4096), 8192).unwrap();
        memory.physical().store(PhysAddr(12280), 7);
        assert_eq!((memory.physical().load(PhysAddr(12280)), memory.physical().load(PhysAddr(8192))), (7, 0));
    }

    #[test]
    fn too_much_memory_is_an_error() {
        assert_eq!(Memory::new(PhysAddr(0), 1 << 60).err().map(|error| error.kind()), Some(Kind::OutOfSpace));
    }
}
