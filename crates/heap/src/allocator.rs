//! The heap as Rust sees it: the global allocator.

use std::alloc::{GlobalAlloc, Layout};

use crate::{allocate, allocate_aligned, allocate_zeroed, free, large, reallocate};

/// Rust's global allocator.
///
/// Also the heap under [batches](selfpage::alloc::batch): items that are too few or too large for a run of their own then come from
/// here, and not as pages.
///
/// # Examples
/// ```
/// #[global_allocator]
/// static HEAP: selfpage_heap::Allocator = selfpage_heap::Allocator;
///
/// let mut items = [None; 100];
/// assert_eq!(selfpage::alloc::batch::allocate(&HEAP, 48, 16, &mut items), 100);
/// // SAFETY: the items are ours, and nobody uses them any more.
/// unsafe { selfpage::alloc::batch::free(&HEAP, &items) };
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocator;

/// What every object is aligned to: none is shorter.
const ALIGN: usize = 16;
/// What larger blocks are aligned to, wherever they move.
const PAGE: usize = 4096;
/// From here on a request is a block of the page allocator: as `heap.c` has it.
const LARGE_BYTES: usize = 1 << 20;

impl Allocator {
    /// A block at a multiple of `align`, a power of two. Null: there is no room.
    #[inline]
    pub(crate) fn place(align: usize, size: usize) -> *mut u8 {
        if align <= ALIGN { allocate(size).cast() } else { allocate_aligned(align, size).cast() }
    }
}

// SAFETY: heap-block: blocks have the size and alignment asked for, and are freed once.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::place(layout.align(), layout.size())
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.align() <= ALIGN {
            return allocate_zeroed(1, layout.size()).cast();
        }
        if layout.size() >= LARGE_BYTES {
            // It knows what is zero already. Where it has no addresses, the objects' range may have room.
            let block = large::selfpage_large_allocate(layout.size(), layout.align(), true);
            if !block.is_null() {
                return block.cast();
            }
        }
        let block = Self::place(layout.align(), layout.size());
        if !block.is_null() {
            // SAFETY: heap-block: just allocated, of that size.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _layout: Layout) {
        // SAFETY: heap-block: passed on from our caller.
        unsafe { free(block.cast()) }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if layout.align() <= ALIGN {
            // SAFETY: heap-block: passed on from our caller.
            return unsafe { reallocate(block.cast(), size).cast() };
        }
        let is_large = layout.size().min(size) >= LARGE_BYTES && selfpage::alloc::owns(block.addr());
        if is_large {
            let before = layout.size();
            // SAFETY: heap-block: passed on from our caller, and large as was just found.
            let resized = unsafe {
                match layout.align() {
                    ..=PAGE => large::selfpage_large_reallocate(block.cast(), before, size).cast(),
                    _ if large::resize_in_place(block, before, size) => block,
                    _ => std::ptr::null_mut(),
                }
            };
            if !resized.is_null() {
                return resized;
            }
        }
        // SAFETY: heap-block: the caller's size fits the layout; the new block has at least as many bytes as are copied.
        unsafe {
            let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if new.is_null() {
                return if size <= layout.size() { block } else { new };
            }
            new.copy_from_nonoverlapping(block, layout.size().min(size));
            self.dealloc(block, layout);
            new
        }
    }
}
