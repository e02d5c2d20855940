//! The program's objects: the object heap over a region of the domain's.
//!
//! What is known of a page of objects lies beside the objects, and is paged with them. What is known of a thread lies in memory
//! that is not: it is small, and touched all the time.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use selfpage_heap::{Ground, RANGE_ALIGN};

use crate::heap;
use crate::limits::{BESIDE_BYTES, OBJECTS_BYTES};
use crate::space::{Room, Space};
use crate::{managed, maps, promises};

/// What is known of threads, one piece each.
static BESIDE: Space = Space::of_kernel(BESIDE_BYTES);

/// The stretches of [`RANGE_ALIGN`] that are open.
static OPEN: [AtomicBool; STRETCHES] = [const { AtomicBool::new(false) }; STRETCHES];
const STRETCHES: usize = OBJECTS_BYTES / RANGE_ALIGN;
/// Where the last part that objects use ends.
static END: AtomicUsize = AtomicUsize::new(0);

static GROUND: Ground = Ground { map, unmap, open, drop };

/// From now on objects can be allocated, from the domain's memory.
pub fn begin() -> Result<(), String> {
    let (start, end) = (start(), managed::objects_range().end / RANGE_ALIGN * RANGE_ALIGN);
    // SAFETY: heap-block: that much of the region is the heap's alone, and this is called once, before the program's first line.
    match unsafe { selfpage_heap::begin_over(&GROUND, start as *mut c_void, end - start) } {
        true => Ok(()),
        false => {
            Err("the heap cannot begin; unset MIMALLOC_RESERVE_OS_MEMORY and its like, whose memory is not managed"
                .into())
        }
    }
}

/// Where the heap's range begins.
fn start() -> usize {
    managed::objects_range().start.next_multiple_of(RANGE_ALIGN)
}

/// In a forked child, once it has its memory.
pub fn settle_in_child() {
    if managed::get().is_some() {
        // SAFETY: heap-block: a forked child's only thread is here, and so in no call of the heap's.
        unsafe { selfpage_heap::settle_in_child() };
    }
}

/// Bytes beside the objects, which nobody pages.
pub fn unmanaged_bytes() -> usize {
    BESIDE.used_bytes()
}

/// Keeps what is beside the objects from changing over a fork.
pub fn hold() {
    BESIDE.hold();
}

/// Ends that.
///
/// # Safety
/// *lock-word*: the caller, or the thread it is a copy of, called [`hold`].
pub unsafe fn let_go() {
    // SAFETY: lock-word: passed on from our caller.
    unsafe { BESIDE.let_go() };
}

extern "C" fn map(len: usize) -> *mut c_void {
    if heap::is_forking() {
        return std::ptr::null_mut();
    }
    BESIDE.take(len, 1, Room::None).unwrap_or(0) as *mut c_void
}

unsafe extern "C" fn unmap(at: *mut c_void, len: usize) {
    // SAFETY: owned-range: the heap gives back what it had from `map`.
    unsafe { BESIDE.give(at as usize..at as usize + len) };
}

/// Access is given to a whole stretch at once, for each change of it stops all paging. The pager learns from each part how far
/// objects reach: nothing is fetched ahead beyond.
unsafe extern "C" fn open(at: *mut c_void, len: usize) -> bool {
    let (at, end) = (at as usize - start(), at as usize - start() + len);
    let stretch = at / RANGE_ALIGN;
    let Some(is_open) = OPEN.get(stretch) else { return false };
    // What is known of a stretch of objects stands at its start; objects are promised one by one.
    if at.is_multiple_of(RANGE_ALIGN) && !promises::promise(&(start() + at..start() + end)) {
        return false;
    }
    if !is_open.load(Ordering::Acquire) {
        if heap::is_forking() {
            return false;
        }
        let from = start() + stretch * RANGE_ALIGN;
        if !maps::open_for_objects(from..from + RANGE_ALIGN) {
            return false;
        }
        is_open.store(true, Ordering::Release);
    }
    if let Some(managed) = managed::get() {
        let mut reach = END.fetch_max(end, Ordering::Relaxed).max(end);
        loop {
            managed.objects.set_reach(start() + reach - managed::objects_range().start);
            // Another thread may have gone further, and said so first.
            match END.load(Ordering::Relaxed) {
                now if now == reach => break,
                now => reach = now,
            }
        }
    }
    true
}

unsafe extern "C" fn drop(at: *mut c_void, len: usize) {
    if heap::is_forking() {
        // This thread holds what is needed for it; and it is only advice.
        return;
    }
    // SAFETY: owned-range: the heap says that it is garbage.
    unsafe { maps::drop_garbage(at as usize..at as usize + len) };
}
