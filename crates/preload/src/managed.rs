//! The domain of this process, and its three regions: for objects, for large blocks, and for mappings.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use selfpage::{Domain, Region};

use crate::limits::{LARGE_BYTES, MAPS_BYTES, OBJECTS_BYTES};
use crate::space::PAGE;
use crate::{promises, sys};

/// Why contents have not moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unmoved {
    /// They are in no region.
    Unmanaged,
    /// A page of them cannot be had, or there is no frame for one that has to be copied.
    Short,
}

/// What is set up once, and then stays until the process ends.
pub struct Managed {
    /// Who owns the frames.
    pub domain: Domain,
    /// Behind malloc.
    pub objects: Region,
    /// Behind malloc too, for what gets pages of its own.
    pub large: Region,
    /// Behind mmap.
    pub maps: Region,
}

/// What this process has, in memory that the kernel empties in every child. One that clone(2) made, past the handlers of forks, has neither
/// memory of the domain's nor pager threads, which a call would wait for.
static HERE: AtomicPtr<AtomicPtr<Managed>> = AtomicPtr::new(std::ptr::null_mut());
/// The same over a fork, which the child has too: null in a process that came about past a fork.
static OVER_FORK: AtomicPtr<Managed> = AtomicPtr::new(std::ptr::null_mut());
static OBJECTS_START: AtomicUsize = AtomicUsize::new(0);
static LARGE_START: AtomicUsize = AtomicUsize::new(0);
static MAPS_START: AtomicUsize = AtomicUsize::new(0);

/// Whether a part of a region has, or had, a protection key of the program's. Where there are no keys the kernel takes not even none.
static KEYED: AtomicBool = AtomicBool::new(false);

/// The program has given a part of a region a protection key.
pub fn has_key() {
    KEYED.store(true, Ordering::SeqCst);
}

/// From now on memory is managed.
///
/// # Errors
/// The kernel has no room for a page more.
pub fn begin(managed: Managed) -> Result<(), String> {
    let here = emptied_in_children().ok_or("no room for a page that children find empty: raise ulimit -v and -d")?;
    let here = here.cast::<AtomicPtr<Managed>>();
    OBJECTS_START.store(managed.objects.as_ptr() as usize, Ordering::Relaxed);
    LARGE_START.store(managed.large.as_ptr() as usize, Ordering::Relaxed);
    MAPS_START.store(managed.maps.as_ptr() as usize, Ordering::Relaxed);
    // SAFETY: set-up-once: the page was just mapped, is aligned, and stays.
    unsafe { (*here).store(Box::into_raw(Box::new(managed)), Ordering::Release) };
    HERE.store(here, Ordering::Release);
    Ok(())
}

/// A page of zeros; `None`: the kernel has no room for it.
fn emptied_in_children() -> Option<*mut u8> {
    let page = sys::reserve(PAGE)?;
    // SAFETY: owned-range: just reserved.
    let opened = unsafe { sys::protect(page, PAGE, libc::PROT_READ | libc::PROT_WRITE) };
    // SAFETY: raw-call: our own mapping.
    let emptied = unsafe { sys::call(libc::SYS_madvise, [page, PAGE, libc::MADV_WIPEONFORK as usize, 0, 0, 0]) };
    (opened == 0 && emptied == 0).then_some(page as *mut u8)
}

fn here() -> Option<&'static AtomicPtr<Managed>> {
    // SAFETY: set-up-once: the page was mapped before it was published, and stays.
    unsafe { HERE.load(Ordering::Acquire).as_ref() }
}

/// Before a fork, one at a time: the child is to have what this process has.
pub fn hold() {
    let managed = here().map_or(std::ptr::null_mut(), |here| here.load(Ordering::Acquire));
    OVER_FORK.store(managed, Ordering::Relaxed);
}

/// In a forked child: it has that.
pub fn settle_in_child() {
    if let Some(here) = here() {
        here.store(OVER_FORK.load(Ordering::Relaxed), Ordering::Release);
    }
}

/// The domain, once there is one, where this process has it.
pub fn get() -> Option<&'static Managed> {
    // SAFETY: set-up-once: the value was leaked before it was published, and is never changed.
    unsafe { here()?.load(Ordering::Acquire).as_ref() }
}

fn range(start: &AtomicUsize, len: usize) -> Range<usize> {
    let start = start.load(Ordering::Relaxed);
    start..if start == 0 { 0 } else { start + len }
}

/// The addresses of objects; empty before there is a domain.
pub fn objects_range() -> Range<usize> {
    range(&OBJECTS_START, OBJECTS_BYTES)
}

/// The addresses of large blocks; empty before there is a domain.
pub fn large_range() -> Range<usize> {
    range(&LARGE_START, LARGE_BYTES)
}

/// The mappings' addresses; empty before there is a domain.
pub fn maps_range() -> Range<usize> {
    range(&MAPS_START, MAPS_BYTES)
}

/// All of them.
pub fn ranges() -> [Range<usize>; 3] {
    [objects_range(), large_range(), maps_range()]
}

/// Whether an address is in one of the regions.
pub fn holds(address: usize) -> bool {
    ranges().iter().any(|range| range.contains(&address))
}

/// Whether a part of a range is in one of the regions.
pub fn holds_any(range: &Range<usize>) -> bool {
    !range.is_empty() && ranges().iter().any(|region| region.start < range.end && range.start < region.end)
}

impl Managed {
    /// The region that an address is in, and its offset there.
    pub fn region_of(&self, address: usize) -> Option<(&Region, usize)> {
        let regions = [&self.objects, &self.large, &self.maps];
        regions
            .into_iter()
            .zip(ranges())
            .find_map(|(region, range)| range.contains(&address).then(|| (region, address - range.start)))
    }

    /// Changes the access of a range of a region, while nothing moves.
    ///
    /// # Safety
    /// *owned-range*: the range is free or the program's, and asked for.
    pub unsafe fn protect(&self, range: Range<usize>, prot: i32) -> isize {
        let changed = self.maps.while_still(move || {
            // SAFETY: owned-range: passed on from our caller.
            unsafe { sys::protect(range.start, range.len(), prot) }
        });
        changed.unwrap_or(-libc::EACCES as isize)
    }

    /// The same for what is no longer the mapping that it was: a protection key that the program gave it goes.
    ///
    /// # Safety
    /// *owned-range*: as for [`Managed::protect`].
    pub unsafe fn protect_anew(&self, range: Range<usize>, prot: i32) -> isize {
        if !KEYED.load(Ordering::SeqCst) {
            // SAFETY: owned-range: passed on from our caller.
            return unsafe { self.protect(range, prot) };
        }
        let changed = self.maps.while_still(move || {
            // SAFETY: owned-range: passed on from our caller.
            unsafe { sys::call(libc::SYS_pkey_mprotect, [range.start, range.len(), prot as usize, 0, 0, 0]) }
        });
        changed.unwrap_or(-libc::EACCES as isize)
    }

    /// Gives access to a range of a region that nobody had. An error too where there is no store, and the frames do not hold it.
    ///
    /// # Safety
    /// *owned-range*: the range is free, and asked for.
    pub unsafe fn open(&self, range: Range<usize>, prot: i32) -> isize {
        let Some(offer) = promises::Offer::of(&range) else { return -libc::ENOMEM as isize };
        // SAFETY: owned-range: passed on from our caller.
        let opened = unsafe { self.protect(range, prot) };
        if opened >= 0 {
            offer.keep();
        }
        opened
    }

    /// Puts a range of a region out of reach again, and makes it empty. An error is the kernel's, which may have no room for
    /// one more mapping: then it holds what it held, though parts that had other access may be out of reach.
    ///
    /// # Safety
    /// *owned-range*: nobody uses the range any more.
    pub unsafe fn close(&self, range: Range<usize>) -> isize {
        // SAFETY: owned-range: passed on from our caller.
        unsafe {
            let closed = self.protect_anew(range.clone(), libc::PROT_NONE);
            if closed >= 0 {
                self.end(range);
            }
            closed
        }
    }

    /// Drops the contents of a range of a region, which is not used again as it is.
    ///
    /// # Safety
    /// *owned-range*: what is in the range is garbage.
    pub unsafe fn end(&self, range: Range<usize>) {
        // SAFETY: owned-range: passed on from our caller.
        promises::end(&range, || unsafe { self.drop_contents(range.clone()) });
    }

    /// Moves what is in a range of a region to another place of the same length in a region. After an error it is where it was.
    ///
    /// # Safety
    /// *owned-range*: both are the program's, and do not meet. Nobody needs what is at the new one.
    pub unsafe fn move_contents(&self, old: Range<usize>, new: usize) -> Result<(), Unmoved> {
        let (Some((from, offset)), Some((to, to_offset))) = (self.region_of(old.start), self.region_of(new)) else {
            return Err(Unmoved::Unmanaged);
        };
        // SAFETY: owned-range: passed on from our caller.
        unsafe { from.move_contents(offset, old.len(), to, to_offset) }.map_err(|_| Unmoved::Short)
    }

    /// Copies what is in a range of a region to memory of the kernel's that is zero: no page that nobody has touched. Each page is kept in core
    /// meanwhile: one that cannot be had is an error, and no signal to a thread that may hold our locks.
    ///
    /// # Safety
    /// *owned-range*: both are ours alone, and open: the one to reading, the other to writing.
    pub unsafe fn copy_out(&self, from: Range<usize>, to: usize) -> Result<(), Unmoved> {
        let Some((region, offset)) = self.region_of(from.start) else { return Err(Unmoved::Unmanaged) };
        let (mut left, end) = (offset, offset + from.len());
        while let Some(held) = region.first_held(left, end - left).map_err(|_| Unmoved::Short)? {
            for start in held.clone().step_by(MOST_COPIED * PAGE) {
                let len = (MOST_COPIED * PAGE).min(held.end - start);
                region.pin(start, len).map_err(|_| Unmoved::Short)?;
                // SAFETY: owned-range: passed on from our caller.
                unsafe { sys::copy_bytes(from.start + (start - offset), to + (start - offset), len) };
                let _ = region.unpin(start, len);
            }
            left = held.end;
        }
        Ok(())
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

/// Pages that are kept in core at a time to be copied.
const MOST_COPIED: usize = 16;
