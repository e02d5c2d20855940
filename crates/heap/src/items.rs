//! Items of batches that come alone, from the heap.

use std::ptr::NonNull;

use selfpage::alloc::batch::{Heap, Item};

use crate::{Allocator, free, reallocate};

// SAFETY: heap-block: blocks have the length and alignment asked for, and are nobody else's until they are freed.
unsafe impl Heap for Allocator {
    fn allocate(&self, len_bytes: usize, align_bytes: usize) -> Item {
        NonNull::new(Allocator::place(align_bytes, len_bytes))
    }

    unsafe fn free(&self, item: NonNull<u8>) {
        // SAFETY: heap-block: passed on from our caller.
        unsafe { free(item.as_ptr().cast()) };
    }

    unsafe fn resize(&self, item: NonNull<u8>, len_bytes: usize) -> Item {
        // SAFETY: heap-block: passed on from our caller.
        NonNull::new(unsafe { reallocate(item.as_ptr().cast(), len_bytes) }.cast())
    }
}

#[cfg(test)]
mod tests {
    use selfpage::alloc::{self, batch};

    use super::*;

    #[test]
    fn items_that_come_alone_are_objects() {
        let lens = [24, 24, 300, 40_000, 3 << 20, 1];
        let mut items = vec![None; lens.len()];
        assert_eq!(batch::allocate_each(&Allocator, &lens, 64, &mut items), lens.len());
        for (item, len_bytes) in items.iter().zip(lens) {
            let item = item.unwrap();
            assert_eq!(item.as_ptr() as usize % 64, 0);
            assert_eq!(alloc::usable_bytes(item).is_some(), len_bytes >= 1 << 20, "{len_bytes}");
            // SAFETY: ours, and this long.
            unsafe { item.write_bytes(7, len_bytes) };
        }
        // SAFETY: ours.
        unsafe {
            assert_eq!(batch::resize(&Allocator, &mut items, 50_000), lens.len());
            assert!(items.iter().all(|item| item.unwrap().read() == 7));
            batch::free(&Allocator, &items);
        }
    }

    #[test]
    fn an_item_that_grows_out_of_its_run_becomes_an_object() {
        let mut items = vec![None; 5000];
        assert_eq!(batch::allocate(&Allocator, 24, 64, &mut items), 5000);
        // SAFETY: ours.
        unsafe {
            items[9].unwrap().write_bytes(9, 24);
            assert_eq!(batch::resize(&Allocator, &mut items[9..10], 1000), 1);
            let grown = items[9].unwrap();
            assert_eq!((grown.read(), grown.as_ptr() as usize % 64), (9, 0));
            assert_eq!(alloc::usable_bytes(grown), None);
            batch::free(&Allocator, &items);
        }
    }
}
