//! Large blocks of Rust's global allocator grow by frames. Alone in a process, whose allocator counts.

use std::alloc::{GlobalAlloc, Layout};

use selfpage::alloc::stats;
use selfpage_heap::Allocator;

#[test]
fn large_blocks_grow_by_frames_at_any_alignment_up_to_a_page() {
    let layout = |size, align| Layout::from_size_align(size, align).unwrap();
    for align in [1, 64, 4096, 1 << 16, 2 << 20] {
        let before = stats().counts;
        // SAFETY: the block is ours, of the layouts that are given; nothing of it is read.
        unsafe {
            let small = Allocator.alloc(layout(16 << 20, align));
            let large = Allocator.realloc(small, layout(16 << 20, align), 48 << 20);
            assert_eq!(small, large, "{align}");
            let large = Allocator.realloc(large, layout(48 << 20, align), 20 << 20);
            assert_eq!(small, large, "{align}");
            let huge = Allocator.realloc(large, layout(20 << 20, align), 4 << 30);
            assert!(!huge.is_null() && huge.addr().is_multiple_of(align), "{align}");
            Allocator.dealloc(huge, layout(4 << 30, align));
        }
        let after = stats().counts;
        assert_eq!(after.in_place - before.in_place, 2, "{align}");
        // To where its place is a multiple of more than a page nobody can promise to move it.
        assert_eq!(after.moved - before.moved, u64::from(align <= 4096), "{align}");
    }
}
