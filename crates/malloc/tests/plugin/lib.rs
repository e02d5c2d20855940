//! A plugin that has the heap by its line, for a host that has another one.

use std::alloc::{Layout, alloc_zeroed, dealloc, realloc};

#[global_allocator]
static HEAP: selfpage_heap::Allocator = selfpage_heap::Allocator;

const MIB: usize = 1 << 20;

/// Allocates, resizes and frees objects and larger blocks. Returns how many bytes held what they should.
#[unsafe(no_mangle)]
pub extern "C" fn selfpage_test_work() -> usize {
    let mut bytes = 0;
    for size in [10, 100_000, 3 * MIB] {
        let mut block: Vec<u8> = vec![7; size];
        block.resize(2 * size, 7);
        block.reserve_exact(20 * size);
        bytes += block.iter().filter(|byte| **byte == 7).count();
        block.truncate(size / 2);
        block.shrink_to_fit();
        bytes += block.iter().filter(|byte| **byte == 7).count();
    }
    bytes + aligned(64) + aligned(8192)
}

/// Takes so much that the keeper is started.
#[unsafe(no_mangle)]
pub extern "C" fn selfpage_test_keep() {
    selfpage_heap::keep();
    let blocks: Vec<Vec<u8>> = (0..8).map(|_| vec![7; 40 * MIB]).collect();
    std::hint::black_box(&blocks);
}

/// Larger blocks at a multiple of `align`: the heap's half in Rust allocates them, and its half in C frees them.
fn aligned(align: usize) -> usize {
    let [short, long] = [2 * MIB, 5 * MIB].map(|size| Layout::from_size_align(size, align).unwrap());
    // SAFETY: blocks of these layouts, which are ours until they are freed; zeros are bytes.
    unsafe {
        let block = realloc(alloc_zeroed(short), short, long.size());
        let zeros = std::slice::from_raw_parts(block, short.size()).iter().filter(|byte| **byte == 0).count();
        dealloc(block, long);
        zeros
    }
}
