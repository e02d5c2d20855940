//! The frame pool: the physical memory of a domain, as populated anonymous pages in slots.
//!
//! # Source
//! Nemesis §6.2 (the frames allocator), Cichlid §3.1. Frames are claimed lazily, in batches.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::uffd::{Modes, Uffd};

use crate::error::{Error, Result};

/// Whether the kernel may swap the frames out behind the domain's back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residence {
    /// There is no swap for this process (none on the machine, or `memory.swap.max` is 0): never.
    NoSwap,
    /// It may. `selfpage doctor` says what to do.
    MaySwap,
}

/// The slots of a domain's frames.
#[derive(Debug)]
pub struct FramePool {
    start: usize,
    frames: u32,
    residence: Residence,
}

impl FramePool {
    /// Reserves slots for `frames` frames. None has memory yet.
    ///
    /// # Errors
    /// No address space.
    pub(crate) fn reserve(frames: u32) -> Result<FramePool> {
        let mut pool = FramePool { start: 0, frames, residence: Residence::MaySwap };
        pool.start = pool.map(Place::Anywhere)?;
        if !has_swap() {
            pool.residence = Residence::NoSwap;
        }
        Ok(pool)
    }

    fn map(&self, place: Place) -> Result<usize> {
        let object = || format!("a pool of {} frames", self.frames);
        // SAFETY: owned-range: a fresh mapping, or (in a forked child) the place that DONTFORK left empty.
        let start = unsafe { memory::map_anonymous(place, self.len_bytes(), Access::ReadWrite) }
            .map_err(|errno| Error::system("map", object(), errno))?;
        for advice in [Advice::NoHugePages, Advice::NotForChild] {
            // SAFETY: owned-range: just mapped.
            unsafe { memory::advise(start, self.len_bytes(), advice) }
                .map_err(|errno| Error::system("set up", object(), errno))?;
        }
        Ok(start)
    }

    /// In a forked child, which did not get the pool: empty slots in the same place.
    pub(crate) fn map_in_child(&self) -> Result<()> {
        self.map(Place::Free(self.start)).map(drop)
    }

    /// Registers the slots with `uffd`, for write protection only: pages move back into them, and populating them does not
    /// wait for a pager.
    pub(crate) fn register(&self, uffd: Uffd) -> Result<()> {
        // SAFETY: owned-range: the slots are ours alone.
        unsafe { uffd.register(self.start, self.len_bytes(), Modes::WP) }
            .map_err(|errno| Error::system("register", format!("a pool of {} frames", self.frames), errno))
    }

    /// The first slot.
    pub(crate) fn first_slot(&self) -> NonNull<PageBytes> {
        NonNull::new(self.start as *mut PageBytes).expect("mappings are not at zero")
    }

    /// How many frames there can be.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Whether the frames may be swapped out.
    pub fn residence(&self) -> Residence {
        self.residence
    }

    const fn len_bytes(&self) -> usize {
        self.frames as usize * PAGE_BYTES
    }
}

impl Drop for FramePool {
    fn drop(&mut self) {
        // SAFETY: owned-range: no frame is in use any more.
        let _ = unsafe { memory::unmap(self.start, self.len_bytes()) };
    }
}

/// Whether the kernel has swap that this process's memory could go to.
fn has_swap() -> bool {
    let swap_on = std::fs::read_to_string("/proc/swaps").map_or(true, |swaps| swaps.lines().count() > 1);
    let refused = std::fs::read_to_string("/proc/self/cgroup").ok().is_some_and(|groups| {
        groups.lines().filter_map(|line| line.strip_prefix("0::")).any(|group| {
            let limit = format!("/sys/fs/cgroup{}/memory.swap.max", group.trim_end_matches('/'));
            std::fs::read_to_string(limit).is_ok_and(|limit| limit.trim() == "0")
        })
    });
    swap_on && !refused
}
