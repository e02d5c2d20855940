//! Many items in one call: allocated, resized, freed.
//!
//! Small items of one size are carved from a run: one block with one header, so allocating them is writing down their addresses.
//! They may be freed in any order, by [`free`], one by one or as a whole; the run's memory is kept until its last item is freed.
//! That is for items of up to 32 KiB, aligned to as much at most, which are 64 KiB together or more; others come alone, from a [`Heap`], and so do
//! these where there is no memory for a run.
//!
//! # Source
//! Douglas, "malloc() extensions" (N1527), `batch_alloc1` (one length for all) and `batch_alloc5` (one for each: [`allocate_each`],
//! [`resize_each`]): as there, what could be done is counted, and what could not is left as it was. There every item is a block of its own; here those of a run share one.
//!
//! # Context
//! As for [`allocate`](super::allocate), and what the [`Heap`] says.
//!
//! # Examples
//! ```
//! use selfpage::alloc::batch::{self, Blocks};
//! let mut items = vec![None; 100_000];
//! assert_eq!(batch::allocate(&Blocks, 48, 16, &mut items), 100_000);
//! // SAFETY: the items are ours, and nobody uses them any more.
//! unsafe { batch::free(&Blocks, &items) };
//! ```

use std::ptr::NonNull;

use super::block::{self, PAGES};
use super::run::Run;

/// A place for an item. `None` is a null pointer. What an item holds at first is undefined: what earlier blocks have left there, or zero. A pointer
/// is not `Send`: a thread that is to get items gets their addresses, in a type of the program's that says so.
pub type Item = Option<NonNull<u8>>;

/// An item longer than this is allocated on its own.
const LONGEST_IN_RUN: usize = 32 << 10;
/// And so are items that would fill less than this together.
const SHORTEST_RUN: usize = 64 << 10;

/// Who serves items that come alone: an object heap over this allocator. It is asked about every item that is in no run.
///
/// # Safety
/// What [`Heap::allocate`] gives is memory as [`block::allocate`] gives it, of at least that length and alignment, that nobody else has,
/// until [`Heap::free`]. [`Heap::resize`] keeps the contents.
pub unsafe trait Heap {
    /// One item; `None`: no memory.
    fn allocate(&self, len_bytes: usize, align_bytes: usize) -> Item;

    /// Takes an item back.
    ///
    /// # Safety
    /// It came from this heap, and nobody uses it any more.
    unsafe fn free(&self, item: NonNull<u8>);

    /// Makes an item longer or shorter, here or elsewhere. `None`: no memory, and it is as it was.
    ///
    /// # Safety
    /// As for [`Heap::free`], where it moves.
    unsafe fn resize(&self, item: NonNull<u8>, len_bytes: usize) -> Item;
}

/// No heap: items that come alone are blocks of whole pages.
#[derive(Clone, Copy, Debug)]
pub struct Blocks;

// SAFETY: slot-held: blocks are what the trait asks for.
unsafe impl Heap for Blocks {
    fn allocate(&self, len_bytes: usize, align_bytes: usize) -> Item {
        block::allocate(len_bytes, align_bytes)
    }
    unsafe fn free(&self, item: NonNull<u8>) {
        // SAFETY: slot-held: passed on from our caller.
        unsafe { block::free(item) };
    }
    unsafe fn resize(&self, item: NonNull<u8>, len_bytes: usize) -> Item {
        // SAFETY: slot-held: passed on from our caller.
        unsafe { block::resize(item, len_bytes) }
    }
}

/// Allocates an item of `len_bytes` for each place of `items`, aligned to `align_bytes` (a power of two) and to 16. Returns how
/// many it could; places after those are `None`.
pub fn allocate(heap: &impl Heap, len_bytes: usize, align_bytes: usize, items: &mut [Item]) -> usize {
    if !align_bytes.is_power_of_two() {
        items.fill(None);
        return 0;
    }
    let total = len_bytes.saturating_mul(items.len());
    let carve =
        items.len() > 1 && len_bytes <= LONGEST_IN_RUN && align_bytes <= LONGEST_IN_RUN && total >= SHORTEST_RUN;
    if carve && Run::carve(len_bytes, align_bytes, items).is_some() {
        return items.len();
    }
    for at in 0..items.len() {
        items[at] = heap.allocate(len_bytes, align_bytes);
        if items[at].is_none() {
            items[at..].fill(None);
            return at;
        }
    }
    items.len()
}

/// Allocates an item of `lens_bytes[i]` for place `i`, as far as both go. Neighbours of one length are served as by [`allocate`].
/// Returns how many it could, from the first on; places after those are `None`.
pub fn allocate_each(heap: &impl Heap, lens_bytes: &[usize], align_bytes: usize, items: &mut [Item]) -> usize {
    items.fill(None);
    let mut done = 0;
    for alike in lens_bytes[..lens_bytes.len().min(items.len())].chunk_by(|one, next| one == next) {
        let Some(len_bytes) = alike.first() else { continue };
        let served = allocate(heap, *len_bytes, align_bytes, &mut items[done..done + alike.len()]);
        done += served;
        if served < alike.len() {
            break;
        }
    }
    done
}

/// Resizes each item to `len_bytes`, and notes where it is now. Returns how many it could, from the first on; those after are as they
/// were. A place that is `None` stays so, and counts. An item of a run stays aligned as it was asked for, also where it has to move out
/// of that; one that came alone, or did so before, as its heap keeps it.
///
/// # Safety
/// *slot-held*: the items are the caller's and came from a batch of this `heap` or from it.
pub unsafe fn resize(heap: &impl Heap, items: &mut [Item], len_bytes: usize) -> usize {
    // SAFETY: slot-held: passed on from our caller.
    unsafe { resize_in_order(heap, items.iter_mut().map(|place| (place, len_bytes))) }
}

/// As [`resize`], with the item at place `i` to `lens_bytes[i]`, as far as both go.
///
/// # Safety
/// *slot-held*: as for [`resize`].
pub unsafe fn resize_each(heap: &impl Heap, lens_bytes: &[usize], items: &mut [Item]) -> usize {
    // SAFETY: slot-held: passed on from our caller.
    unsafe { resize_in_order(heap, items.iter_mut().zip(lens_bytes.iter().copied())) }
}

/// Resizes items, each to its length, as far as it can. Returns how many it could.
///
/// # Safety
/// *slot-held*: as for [`resize`].
unsafe fn resize_in_order<'a>(heap: &impl Heap, places: impl Iterator<Item = (&'a mut Item, usize)>) -> usize {
    let mut done = 0;
    for (place, len_bytes) in places {
        if let Some(item) = *place {
            // SAFETY: slot-held: passed on from our caller.
            let Some(now) = (unsafe { resized(heap, item, len_bytes) }) else { return done };
            *place = Some(now);
        }
        done += 1;
    }
    done
}

/// Where an item is now that was made `len_bytes` long. `None`: no memory, and it is as it was.
///
/// # Safety
/// *slot-held*: as for [`resize`].
unsafe fn resized(heap: &impl Heap, item: NonNull<u8>, len_bytes: usize) -> Item {
    let run = PAGES.take().run(item.as_ptr() as usize).map(Run::at);
    match run {
        None => {
            // SAFETY: slot-held: passed on from our caller.
            unsafe { heap.resize(item, len_bytes) }
        }
        Some(run) if len_bytes <= run.item_bytes() => Some(item),
        Some(run) => heap.allocate(len_bytes, run.align_bytes()).inspect(|new| {
            // SAFETY: slot-held: both are the caller's, and at least this long; the old one is not used any more.
            unsafe { new.copy_from_nonoverlapping(item, run.item_bytes()) };
            run.free(&[Some(item)]);
        }),
    }
}

/// Frees all items, in any order. Places that are `None` are passed over. A pointer that is no item ends the process.
///
/// # Safety
/// *slot-held*: the items are the caller's, came from a batch of this `heap` or from it, and nobody uses them any more.
pub unsafe fn free(heap: &impl Heap, mut items: &[Item]) {
    while let [first, rest @ ..] = items {
        let Some(item) = *first else {
            items = rest;
            continue;
        };
        let run = PAGES.take().run(item.as_ptr() as usize).map(Run::at);
        let Some(run) = run else {
            // SAFETY: slot-held: passed on from our caller.
            unsafe { heap.free(item) };
            items = rest;
            continue;
        };
        let whole = run.is_whole(items);
        let share = if whole { run.count() } else { run.share(items).max(1) };
        if whole {
            run.free_whole();
        } else {
            run.free(&items[..share]);
        }
        items = &items[share..];
    }
}
