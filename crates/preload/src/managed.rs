//! The domain of this process, and its two regions: one for the heap, one for mappings.

use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use selfpage::{Domain, Region};

use crate::sys;

/// Addresses for the heap.
pub const HEAP_BYTES: usize = 64 << 30;
/// Addresses for mappings.
pub const MAPS_BYTES: usize = 64 << 30;

/// What is set up once, and then stays until the process ends.
pub struct Managed {
    /// Who owns the frames.
    pub domain: Domain,
    /// Behind malloc.
    pub heap: Region,
    /// Behind mmap.
    pub maps: Region,
}

static MANAGED: AtomicPtr<Managed> = AtomicPtr::new(std::ptr::null_mut());
static HEAP_START: AtomicUsize = AtomicUsize::new(0);
static MAPS_START: AtomicUsize = AtomicUsize::new(0);

/// From now on memory is managed.
pub fn begin(managed: Managed) {
    HEAP_START.store(managed.heap.as_ptr() as usize, Ordering::Relaxed);
    MAPS_START.store(managed.maps.as_ptr() as usize, Ordering::Relaxed);
    MANAGED.store(Box::into_raw(Box::new(managed)), Ordering::Release);
}

/// The domain, once there is one.
pub fn get() -> Option<&'static Managed> {
    // SAFETY: set-up-once: the value was leaked before it was published, and is never changed.
    unsafe { MANAGED.load(Ordering::Acquire).as_ref() }
}

/// The heap's addresses; empty before there is a domain.
pub fn heap_range() -> Range<usize> {
    let start = HEAP_START.load(Ordering::Relaxed);
    start..if start == 0 { 0 } else { start + HEAP_BYTES }
}

/// The mappings' addresses; empty before there is a domain.
pub fn maps_range() -> Range<usize> {
    let start = MAPS_START.load(Ordering::Relaxed);
    start..if start == 0 { 0 } else { start + MAPS_BYTES }
}

/// Whether an address is in one of the regions.
pub fn holds(address: usize) -> bool {
    heap_range().contains(&address) || maps_range().contains(&address)
}

impl Managed {
    /// The region that an address is in, and its offset there.
    pub fn region_of(&self, address: usize) -> Option<(&Region, usize)> {
        if heap_range().contains(&address) {
            Some((&self.heap, address - heap_range().start))
        } else if maps_range().contains(&address) {
            Some((&self.maps, address - maps_range().start))
        } else {
            None
        }
    }

    /// Changes the access of a range of a region, while nothing moves.
    ///
    /// # Safety
    /// *owned-range*: the range is free or the program's, and asked for.
    pub unsafe fn protect(&self, range: Range<usize>, prot: i32) -> isize {
        self.maps.while_still(move || {
            // SAFETY: owned-range: passed on from our caller.
            unsafe { sys::protect(range.start, range.len(), prot) }
        })
    }

    /// Makes a range of a region empty and out of reach again.
    ///
    /// # Safety
    /// *owned-range*: nobody uses the range any more.
    pub unsafe fn close(&self, range: Range<usize>) {
        let Some((region, offset)) = self.region_of(range.start) else { return };
        // SAFETY: owned-range: passed on from our caller.
        let _ = unsafe {
            region.while_empty(offset, range.len(), move || sys::protect(range.start, range.len(), libc::PROT_NONE))
        };
    }

    /// Drops the contents of a range of a region.
    ///
    /// # Safety
    /// *owned-range*: what is in the range is garbage.
    pub unsafe fn drop_contents(&self, range: Range<usize>) {
        let Some((region, offset)) = self.region_of(range.start) else { return };
        // SAFETY: owned-range: passed on from our caller.
        let _ = unsafe { region.drop_contents(offset, range.len()) };
    }
}
