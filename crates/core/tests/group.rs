//! The frames that one huge page has room for, on the kernel that runs the test.
#![allow(clippy::undocumented_unsafe_blocks, reason = "a test: the mappings are its own")]

use selfpage_core::addr::{Frame, PAGE_BYTES, PageNo, VirtAddr};
use selfpage_core::frame::GROUP;
use selfpage_core::linux::descriptor::Descriptor;
use selfpage_core::linux::memory::{self, Access, Advice, HUGE_PAGE_BYTES, Place};
use selfpage_core::linux::mmu::{Descriptors, LinuxMmu};
use selfpage_core::linux::pagemap::{Categories, Pagemap};
use selfpage_core::linux::uffd::{Features, Modes, Reach, Reading, Uffd};
use selfpage_core::linux::{Errno, clock};
use selfpage_core::mmu::{Mmu, Trap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

/// Bits of an entry of `/proc/self/pagemap`: which physical page it is.
const PHYSICAL: u64 = (1 << 55) - 1;

/// Says loudly that a test did not run, and fails where SELFPAGE_REQUIRE wants it to.
fn skip(name: &str, reason: &str) {
    println!("SKIP({name}: {reason})");
    let required = std::env::var("SELFPAGE_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|one| one == name), "{name} is required: {reason}");
}

/// Anonymous memory for a group, where a huge page would fit.
fn reserve() -> usize {
    unsafe {
        let around = memory::map_anonymous(Place::Anywhere, 3 * HUGE_PAGE_BYTES, Access::None).unwrap();
        let start = (around + 1).next_multiple_of(HUGE_PAGE_BYTES);
        memory::map_anonymous(Place::Over(start), HUGE_PAGE_BYTES, Access::ReadWrite).unwrap();
        memory::advise(start, HUGE_PAGE_BYTES, Advice::NoHugePages).unwrap();
        start
    }
}

/// A pool of one group, a region as large, and the machine over them.
struct Ground {
    pool: usize,
    region: usize,
    pagemap: Pagemap,
    mmu: LinuxMmu,
}

impl Ground {
    fn new() -> Option<Ground> {
        let open = |features: Features| {
            let uffd = Uffd::open(Reach::EveryFault, Reading::Waits);
            let uffd = uffd.or_else(|_| Uffd::open(Reach::UserFaults, Reading::Waits))?;
            uffd.agree(features.and(Features::MOVE)).map(|_| uffd)
        };
        let made = (|| {
            let pagemap = Pagemap(Descriptor::open_pagemap()?);
            let (slots, upcall) = (open(Features::WP)?, open(Features::SIGBUS)?);
            let descriptors = Descriptors { pool: slots, upcall, pagemap, ..Descriptors::ABSENT };
            let (pool, region) = (reserve(), reserve());
            unsafe {
                slots.register(pool, HUGE_PAGE_BYTES, Modes::WP)?;
                upcall.register(region, HUGE_PAGE_BYTES, Modes::MISSING)?;
                let first = NonNull::new(pool as *mut _).unwrap();
                let mmu = LinuxMmu::new(first, GROUP, descriptors, clock::monotonic_ns);
                Ok(Ground { pool, region, pagemap, mmu })
            }
        })();
        made.map_err(|why: Errno| skip("uffd", &format!("userfaultfd with MOVE is refused: {why}"))).ok()
    }

    fn page(&self, index: u32) -> PageNo {
        VirtAddr(self.region + index as usize * PAGE_BYTES).page()
    }

    /// The physical page of each slot. `None`: only root is told.
    fn physical(&self) -> Option<Vec<u64>> {
        let mut bytes = vec![0; GROUP as usize * 8];
        let entry = (self.pool / PAGE_BYTES * 8) as u64;
        File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut bytes, entry).unwrap();
        let entries = bytes.chunks_exact(8).map(|entry| u64::from_ne_bytes(entry.try_into().unwrap()) & PHYSICAL);
        let pages: Vec<u64> = entries.collect();
        pages.iter().all(|page| *page != 0).then_some(pages)
    }
}

#[test]
fn a_group_is_512_clean_pages_of_its_own_side_by_side() {
    let Some(ground) = Ground::new() else { return };
    ground.mmu.populate(Frame(0), GROUP).unwrap();
    for frame in 0..GROUP {
        let known = ground.pagemap.categories(ground.pool + frame as usize * PAGE_BYTES).unwrap();
        assert!(known.contains(Categories::PRESENT), "frame {frame} has no memory");
        assert!(!known.contains(Categories::ZERO), "frame {frame} is the page of zeros, which is everybody's");
        assert!(
            unsafe { &*ground.mmu.bytes(Frame(frame)) }.iter().all(|byte| *byte == 0),
            "frame {frame} is not clean"
        );
    }
    let how = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if how.is_empty() || how.contains("[never]") {
        return skip("thp", "there are no huge pages");
    }
    let Some(physical) = ground.physical() else { return skip("root", "only root is told which pages these are") };
    let neighbours = physical.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
    // The last took the place of another for a moment, and is a new one. Where memory is in pieces there is no huge page to be had.
    assert!(neighbours >= GROUP as usize - 3, "{neighbours} of {GROUP} lie side by side");
}

#[test]
fn a_page_moves_while_a_device_is_at_its_neighbours() {
    let Some(ground) = Ground::new() else { return };
    ground.mmu.populate(Frame(0), GROUP).unwrap();
    let mut parameters = [0u8; 120];
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    if ring < 0 {
        return skip("io_uring", &format!("{}", std::io::Error::last_os_error()));
    }
    let buffer = libc::iovec { iov_base: (ground.pool + PAGE_BYTES) as *mut _, iov_len: PAGE_BYTES };
    assert_eq!(unsafe { libc::syscall(libc::SYS_io_uring_register, ring, 0, &buffer, 1) }, 0);
    ground.mmu.map(Trap::Upcall, ground.page(0), Frame(0), 1).unwrap();
    ground.mmu.map(Trap::Upcall, ground.page(2), Frame(2), GROUP - 2).unwrap();
    unsafe { libc::close(ring as i32) };
}
