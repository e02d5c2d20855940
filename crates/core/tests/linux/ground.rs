//! What the tests of the machine stand on: a pool, regions, and the kernel's objects for them.

use selfpage_core::addr::{Frame, PAGE_BYTES, PageNo, VirtAddr};
use selfpage_core::linux::descriptor::Descriptor;
use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::mmu::{Descriptors, LinuxMmu};
use selfpage_core::linux::pagemap::Pagemap;
use selfpage_core::linux::uffd::{Features, Modes, Reach, Reading, Uffd};
use selfpage_core::linux::{Errno, clock};
use selfpage_core::mmu::Mmu;
use std::ptr::NonNull;

use crate::skip::skip;

/// A pool and two regions, one for each trap, and the machine over them.
pub struct Ground {
    pub pool: usize,
    pub worker: usize,
    pub upcall: usize,
    len: usize,
    pub descriptors: Descriptors,
    pub mmu: LinuxMmu,
}

pub fn open_uffd(features: Features) -> Result<Uffd, Errno> {
    let uffd =
        Uffd::open(Reach::EveryFault, Reading::Waits).or_else(|_| Uffd::open(Reach::UserFaults, Reading::Waits))?;
    uffd.agree(features.and(Features::MOVE))?;
    Ok(uffd)
}

/// A mapping of `len` bytes, a power of two, at a multiple of them, with a hole on both sides, so that it stays one mapping. No child has
/// it, as those of domains: pages that another test shares with one by forking do not move at once, and are copied.
pub fn reserve(len: usize) -> usize {
    unsafe {
        let around = memory::map_anonymous(Place::Anywhere, 3 * len, Access::None).unwrap();
        let inside = (around + 1).next_multiple_of(len);
        memory::map_anonymous(Place::Over(inside), len, Access::ReadWrite).unwrap();
        memory::advise(inside, len, Advice::NoHugePages).unwrap();
        memory::advise(inside, len, Advice::NotForChild).unwrap();
        inside
    }
}

impl Ground {
    /// Children have pool and worker region from now on.
    pub fn give_to_child(&self) {
        for start in [self.pool, self.worker] {
            unsafe { memory::advise(start, self.len, Advice::ForChild) }.unwrap();
        }
    }

    /// A pool and regions of `pages` pages. `None`: the test was skipped.
    pub fn of(pages: u32) -> Option<Ground> {
        let len = pages as usize * PAGE_BYTES;
        let made = (|| {
            let descriptors = Descriptors {
                pool: open_uffd(Features::WP)?,
                worker: open_uffd(Features::THREAD_ID.and(Features::POISON).and(Features::EXACT_ADDRESS))?,
                upcall: open_uffd(Features::SIGBUS)?,
                ..Descriptors::ABSENT
            };
            let descriptors = Descriptors {
                memory: Descriptor::open_memory()?,
                pagemap: Pagemap(Descriptor::open_pagemap()?),
                ..descriptors
            };
            let (pool, worker, upcall) = (reserve(len), reserve(len), reserve(len));
            unsafe {
                descriptors.pool.register(pool, len, Modes::WP)?;
                descriptors.worker.register(worker, len, Modes::MISSING.and(Modes::WP))?;
                descriptors.upcall.register(upcall, len, Modes::MISSING.and(Modes::WP))?;
                let slots = NonNull::new(pool as *mut _).unwrap();
                let mmu = LinuxMmu::new(slots, pages, descriptors, clock::monotonic_ns);
                Ok(Ground { pool, worker, upcall, len, descriptors, mmu })
            }
        })();
        made.map_err(|why: Errno| skip("uffd", &format!("userfaultfd with MOVE is refused: {why}"))).ok()
    }

    pub fn page(&self, index: usize) -> PageNo {
        VirtAddr(self.worker + index * PAGE_BYTES).page()
    }

    /// Fills frame `frame` with a byte.
    pub fn fill(&self, frame: u32, byte: u8) {
        self.mmu.populate(Frame(frame), 1).unwrap();
        unsafe { self.mmu.bytes(Frame(frame)).write_bytes(byte, 1) };
    }

    /// The byte that fills all of frame `frame`.
    pub fn filled_with(&self, frame: u32) -> u8 {
        let bytes = unsafe { &*self.mmu.bytes(Frame(frame)) };
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "frame {frame} is torn");
        bytes[0]
    }

    pub fn read(&self, index: usize) -> u8 {
        unsafe { ((self.worker + index * PAGE_BYTES + 77) as *const u8).read_volatile() }
    }

    pub fn populated(&self, addr: usize) -> bool {
        self.descriptors.pagemap.categories(addr).unwrap().populated()
    }
}

/// A page that an io_uring has registered as a buffer, which pins it.
pub struct Pinned {
    ring: libc::c_long,
}

impl Pinned {
    /// Pins the page at `addr`. `None`: the test was skipped.
    pub fn page(addr: usize) -> Option<Pinned> {
        let mut parameters = [0u8; 120];
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        if ring < 0 {
            skip("io_uring", &format!("{}", std::io::Error::last_os_error()));
            return None;
        }
        let buffer = libc::iovec { iov_base: addr as *mut _, iov_len: PAGE_BYTES };
        assert_eq!(unsafe { libc::syscall(libc::SYS_io_uring_register, ring, 0, &buffer, 1) }, 0);
        Some(Pinned { ring })
    }

    /// Takes the buffer back. The kernel lets go of the page a moment later.
    pub fn let_go(&self) {
        assert_eq!(unsafe { libc::syscall(libc::SYS_io_uring_register, self.ring, 1, 0, 0) }, 0);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        unsafe { libc::close(self.ring as i32) };
    }
}
