//! Files that stay open as long as the address space, whatever becomes of the tables of descriptors.

use super::descriptor::Descriptor;
use super::errno::Errno;
use super::memory::{self, Access, Advice, Place, Sharing};
use super::syscall::call;
use crate::addr::PAGE_BYTES;
use linux_raw_sys::{general as raw, io_uring};

/// Open files held by a mapping: by a page of an io_uring that has them registered and never runs, or by one of the file itself.
///
/// When the last descriptor of a userfaultfd is closed, the kernel forgets its ranges, and their absent pages read as zero. As a
/// process ends, its pager threads may be gone before a thread that is in the middle of a system call; a process that shares the
/// memory (vfork) may go on after all of them. Held so, the ranges stay as they are, and nobody reads zeros there.
#[derive(Debug)]
pub struct Held {
    mapping: usize,
}

impl Held {
    /// Holds these files of the calling thread's table. A forked child has its own memory, and does not hold them.
    ///
    /// # Errors
    /// What io_uring_setup(2) and io_uring_register(2) say: `EPERM` and `ENOSYS` where io_uring is refused.
    pub fn hold(files: &[Descriptor]) -> Result<Held, Errno> {
        // SAFETY: syscall-contract: numbers, for which zeros are right.
        let mut parameters: io_uring::io_uring_params = unsafe { core::mem::zeroed() };
        // Nothing is ever submitted.
        parameters.flags = io_uring::IORING_SETUP_R_DISABLED;
        let setup = [1, core::ptr::from_mut(&mut parameters) as usize, 0, 0, 0, 0];
        // SAFETY: syscall-contract: the structure is borrowed until the call returns.
        let ring = Descriptor::from_raw(unsafe { call(raw::__NR_io_uring_setup, setup) }? as i32);
        let held = Held::map(ring, files);
        let _ = ring.close();
        held
    }

    fn map(ring: Descriptor, files: &[Descriptor]) -> Result<Held, Errno> {
        let register = io_uring::io_uring_register_op::IORING_REGISTER_FILES as usize;
        // A `Descriptor` is the `int` that the call takes.
        let register = [ring.argument(), register, files.as_ptr() as usize, files.len(), 0, 0];
        // SAFETY: syscall-contract: the slice is borrowed until the call returns.
        unsafe { call(raw::__NR_io_uring_register, register) }?;
        Held::by_page_of(ring, Sharing::Shared, io_uring::IORING_OFF_SQES as usize)
    }

    /// Holds one file that can be mapped, by the page at its beginning, which nobody can touch.
    ///
    /// # Errors
    /// What mmap(2) says.
    pub fn by_mapping(file: Descriptor) -> Result<Held, Errno> {
        Held::by_page_of(file, Sharing::Private, 0)
    }

    fn by_page_of(file: Descriptor, sharing: Sharing, offset_bytes: usize) -> Result<Held, Errno> {
        // SAFETY: owned-range: nothing is replaced. file-mapping: nobody looks at what is there.
        let mapping =
            unsafe { memory::map_file(Place::Anywhere, PAGE_BYTES, Access::None, sharing, file, offset_bytes) }?;
        let held = Held { mapping };
        // SAFETY: owned-range: the mapping is this value's.
        match unsafe { memory::advise(mapping, PAGE_BYTES, Advice::NotForChild) } {
            Ok(()) => Ok(held),
            Err(why) => {
                held.release();
                Err(why)
            }
        }
    }

    /// Lets go of them. Not in a forked child, where the address may be another's: there the value is forgotten.
    pub fn release(self) {
        // SAFETY: owned-range: the mapping is this value's, which is gone with it.
        let _ = unsafe { memory::unmap(self.mapping, PAGE_BYTES) };
    }
}
