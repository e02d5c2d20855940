//! The frame pool: the physical memory of a domain, as populated anonymous pages in slots.
//!
//! # Source
//! Nemesis §6.2 (the frames allocator), Cichlid §3.1. Frames are claimed lazily, in batches.
#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::linux::Errno;
use selfpage_core::linux::memory::{self, Access, Advice, HUGE_PAGE_BYTES, Place};
use selfpage_core::linux::uffd::{Modes, Uffd};

use crate::config::Locking;
use crate::error::{Error, Result};
use crate::placement;
use crate::residence::{Residence, Swapping};

/// The slots of a domain's frames.
#[derive(Debug)]
pub struct FramePool {
    start: usize,
    frames: u32,
    locked: AtomicBool,
}

impl FramePool {
    /// Reserves slots for `frames` frames. None has memory yet.
    ///
    /// # Errors
    /// No address space.
    pub(crate) fn reserve(frames: u32) -> Result<FramePool> {
        let len_bytes = frames as usize * PAGE_BYTES;
        let wider = len_bytes + HUGE_PAGE_BYTES;
        let reserved = placement::reserve_anywhere(wider, &name(frames))?;
        let start = reserved.next_multiple_of(HUGE_PAGE_BYTES);
        let (front, behind) = (start - reserved, start + len_bytes);
        for (addr, len_bytes) in [(reserved, front), (behind, HUGE_PAGE_BYTES - front)] {
            if len_bytes > 0 {
                // What the kernel does not take back costs nothing but addresses.
                // SAFETY: owned-range: parts of the fresh mapping.
                let _ = unsafe { memory::unmap(addr, len_bytes) };
            }
        }
        // Not before the addresses are ours: when it is dropped they are unmapped.
        let pool = FramePool { start, frames, locked: AtomicBool::new(false) };
        pool.map(Place::Over(start))?;
        Ok(pool)
    }

    fn failure(&self, action: &'static str, errno: Errno) -> Error {
        Error::system(action, name(self.frames), errno)
    }

    fn map(&self, place: Place) -> Result<()> {
        // SAFETY: owned-range: a fresh mapping, or (in a forked child) the place that DONTFORK left empty.
        let start = unsafe { memory::map_anonymous(place, self.len_bytes(), Access::ReadWrite) }
            .map_err(|errno| self.failure("map", errno))?;
        // SAFETY: owned-range: just mapped.
        unsafe { memory::keep_hands_off(start, self.len_bytes()) }.map_err(|errno| self.failure("set up", errno))
    }

    /// In a forked child, which did not get the pool: empty slots in the same place.
    pub(crate) fn map_in_child(&self) -> Result<()> {
        self.map(Place::Free(self.start))
    }

    /// Decides whether the domain's frames are locked, and locks the slots if so: their frames as they come. The regions are
    /// to follow, since a page moves only between two mappings that are both locked or both not. A forked child inherits no
    /// lock, and perhaps has other rights: it decides anew.
    ///
    /// A limit on locking counts addresses. The first region that it does not cover ends the lock.
    pub(crate) fn lock(&self, locking: Locking) {
        let permitted = locking == Locking::WherePermitted;
        if permitted && memory::lock_on_fault(self.start, self.len_bytes()).is_ok() {
            self.locked.store(true, Ordering::Relaxed);
        } else {
            self.unlock();
        }
    }

    /// Ends the lock, before those of all regions. The program may have all new mappings locked (mlockall(2)).
    pub(crate) fn unlock(&self) {
        self.locked.store(false, Ordering::Relaxed);
        let _ = memory::unlock(self.start, self.len_bytes());
    }

    /// Locks another mapping as its pages come, or not at all: as the pool is. It loses what else it was told of locking.
    pub(crate) fn lock_alike(&self, part: &Range<usize>) -> std::result::Result<(), Errno> {
        let change = if self.is_locked() { memory::lock_on_fault } else { memory::unlock };
        change(part.start, part.len())
    }

    /// Whether pool and regions are locked.
    pub(crate) fn is_locked(&self) -> bool {
        self.locked.load(Ordering::Relaxed)
    }

    /// Registers the slots with `uffd`, for write protection only: pages move back into them, and populating them does not
    /// wait for a pager.
    pub(crate) fn register(&self, uffd: Uffd) -> Result<()> {
        // SAFETY: owned-range: the slots are ours alone.
        unsafe { uffd.register(self.start, self.len_bytes(), Modes::WP) }
            .map_err(|errno| self.failure("register", errno))
    }

    /// The first slot.
    pub(crate) fn first_slot(&self) -> NonNull<PageBytes> {
        NonNull::new(self.start as *mut PageBytes).expect("mappings are not at zero")
    }

    /// How many frames there can be.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Whether the frames may be swapped out, as things are now. Where they are not locked, the kernel's files are read.
    pub fn residence(&self) -> Residence {
        if self.is_locked() {
            return Residence::Locked;
        }
        match Swapping::of_this_process() {
            Swapping::Never(_) => Residence::NoSwap,
            Swapping::May { .. } => Residence::MaySwap,
        }
    }

    /// Gives the memory of all slots back, locked or not. The addresses stay.
    ///
    /// # Safety
    /// pool-owned: nobody uses a frame any more.
    pub(crate) unsafe fn empty(&self) {
        // SAFETY: pool-owned: passed on from our caller.
        let _ = unsafe { memory::advise(self.start, self.len_bytes(), Advice::Drop) };
    }

    /// Where its slots are.
    pub(crate) fn addresses(&self) -> Range<usize> {
        self.start..self.start + self.len_bytes()
    }

    const fn len_bytes(&self) -> usize {
        self.frames as usize * PAGE_BYTES
    }
}

fn name(frames: u32) -> String {
    format!("a pool of {frames} frames")
}

impl Drop for FramePool {
    fn drop(&mut self) {
        // SAFETY: owned-range: no frame is in use any more.
        let _ = unsafe { memory::unmap(self.start, self.len_bytes()) };
    }
}
