//! The heap as Rust's global allocator, of a program that is this test.

use std::alloc::{GlobalAlloc, Layout, alloc, alloc_zeroed, dealloc, realloc};
use std::sync::mpsc;

use selfpage::alloc::batch;
use selfpage_heap::Allocator;

#[global_allocator]
static HEAP: Allocator = Allocator;

const LARGE_BYTES: usize = 1 << 20;

/// A block that knows what it holds.
struct Block {
    at: *mut u8,
    layout: Layout,
    fill: u8,
}

// SAFETY: it owns its memory.
unsafe impl Send for Block {}

impl Block {
    fn new(size: usize, align: usize, fill: u8) -> Block {
        let layout = Layout::from_size_align(size, align).unwrap();
        // SAFETY: the size is not zero; all of the block is written.
        let at = unsafe { alloc(layout) };
        assert!(!at.is_null() && at.addr().is_multiple_of(align), "{layout:?} {at:p}");
        // SAFETY: as long as that.
        unsafe { at.write_bytes(fill, size) };
        Block { at, layout, fill }
    }

    fn holds(&self, bytes: usize) -> bool {
        // SAFETY: the block is this long at least, and was written.
        unsafe { std::slice::from_raw_parts(self.at, bytes) }.iter().all(|byte| *byte == self.fill)
    }

    fn resize(&mut self, size: usize) {
        // SAFETY: the block is ours, of that layout; the size is not zero.
        let at = unsafe { realloc(self.at, self.layout, size) };
        assert!(!at.is_null() && at.addr().is_multiple_of(self.layout.align()), "{:?} to {size}: {at:p}", self.layout);
        let kept = self.layout.size().min(size);
        self.at = at;
        self.layout = Layout::from_size_align(size, self.layout.align()).unwrap();
        assert!(self.holds(kept), "{:?}", self.layout);
        // SAFETY: as long as that.
        unsafe { at.write_bytes(self.fill, size) };
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        assert!(self.holds(self.layout.size()), "{:?}", self.layout);
        // SAFETY: the block is ours, of that layout.
        unsafe { dealloc(self.at, self.layout) };
    }
}

const SIZES: [usize; 12] =
    [1, 8, 17, 100, 1024, 5000, 70_000, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 3 << 20, 9 << 20];

#[test]
fn every_size_at_every_alignment_and_from_each_to_each() {
    for align in (0..=23).step_by(3).map(|log| 1 << log) {
        for (number, size) in SIZES.into_iter().enumerate() {
            let mut block = Block::new(size, align, number as u8 + 1);
            for other in SIZES {
                block.resize(other);
            }
        }
    }
}

#[test]
fn zeroed_is_zero_where_others_were_before() {
    for align in [1, 16, 64, 4096, 1 << 16, 2 << 20] {
        for size in SIZES {
            drop(Block::new(size, align, 0xa5));
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: the size is not zero; what is read was allocated.
            unsafe {
                let at = alloc_zeroed(layout);
                assert!(!at.is_null() && at.addr().is_multiple_of(align), "{layout:?}");
                assert!(std::slice::from_raw_parts(at, size).iter().all(|byte| *byte == 0), "{layout:?}");
                at.write_bytes(1, size);
                dealloc(at, layout);
            }
        }
    }
}

#[test]
fn what_cannot_be_is_null_and_all_goes_on() {
    let most = Layout::from_size_align(isize::MAX as usize - 4095, 4096).unwrap();
    // SAFETY: the sizes are not zero, and nothing is done with what is null.
    unsafe {
        // An optimizer may take memory for granted that nobody looks at.
        assert!(std::hint::black_box(alloc(most)).is_null());
        assert!(HEAP.alloc_zeroed(most).is_null());
        let mut block = Block::new(100, 64, 3);
        assert!(realloc(block.at, block.layout, isize::MAX as usize - 4095).is_null());
        block.resize(5 << 20);
        assert!(realloc(block.at, block.layout, isize::MAX as usize - 4095).is_null());
    }
}

#[test]
fn blocks_end_on_other_threads_than_they_began_on() {
    let (give, take) = mpsc::sync_channel::<Block>(64);
    let taker = std::thread::spawn(move || {
        for (number, mut block) in take.into_iter().enumerate() {
            if number % 3 == 0 {
                block.resize(SIZES[number % 8]);
            }
        }
    });
    let givers: Vec<_> = (1..4u8)
        .map(|fill| {
            let give = give.clone();
            std::thread::spawn(move || {
                for number in 0..4000 {
                    let size = SIZES[number % 7] + number % 50;
                    give.send(Block::new(size, 1 << (number % 13), fill)).unwrap();
                }
            })
        })
        .collect();
    drop(give);
    for giver in givers {
        giver.join().unwrap();
    }
    taker.join().unwrap();
}

#[test]
fn collections() {
    let mut numbers: Vec<u64> = (0..2_000_000).collect();
    numbers.shrink_to(10);
    numbers.truncate(1000);
    numbers.shrink_to_fit();
    assert_eq!(numbers.iter().sum::<u64>(), 499_500);
    let words: std::collections::BTreeMap<String, Vec<usize>> =
        (0..20_000).map(|number| (format!("{number}"), vec![number; number % 20])).collect();
    assert!(words.iter().all(|(word, list)| list.iter().all(|number| number.to_string() == *word)));
}

/// Items too few for a run are objects: a page each would be two hundred pages.
#[test]
fn small_items_of_a_batch_are_objects() {
    for (len, count) in [(48, 200), (1, 7), (5000, 3), (300, 1)] {
        let mut items = vec![None; count];
        assert_eq!(batch::allocate(&HEAP, len, 64, &mut items), count);
        assert!(items.iter().flatten().all(|item| !selfpage::alloc::owns(item.addr().get())), "{len}");
        for (number, item) in items.iter().flatten().enumerate() {
            assert!(item.addr().get().is_multiple_of(64));
            // SAFETY: as long as that.
            unsafe { item.write_bytes(number as u8, len) };
        }
        // SAFETY: the items are ours.
        unsafe {
            assert_eq!(batch::resize(&HEAP, &mut items, len * 3), count);
            for (number, item) in items.iter().flatten().enumerate() {
                assert!((0..len).all(|at| item.add(at).read() == number as u8), "{len} {number}");
            }
            batch::free(&HEAP, &items);
        }
    }
    let mut many = vec![None; 10_000];
    assert_eq!(batch::allocate(&HEAP, 48, 16, &mut many), 10_000);
    assert!(many.iter().flatten().all(|item| selfpage::alloc::owns(item.addr().get())));
    // SAFETY: the items are ours; one that outgrows its run becomes an object.
    unsafe {
        assert_eq!(batch::resize(&HEAP, &mut many[..1], 100), 1);
        assert!(!selfpage::alloc::owns(many[0].unwrap().addr().get()));
        batch::free(&HEAP, &many);
    }
}
