//! Batches: items apart from each other, freed in any order, and their memory back at the end.

use std::cell::Cell;
use std::collections::HashSet;
use std::ptr::NonNull;

use selfpage::alloc;
use selfpage::alloc::batch::{self, Blocks, Heap, Item};

use crate::own_process;
use crate::random::{Random, seed};

fn write_numbers(items: &[Item]) {
    for (number, item) in items.iter().flatten().enumerate() {
        // SAFETY: ours, of 8 bytes at least.
        unsafe { item.cast::<u64>().write(number as u64) };
    }
}

fn number(item: Item) -> u64 {
    // SAFETY: ours, and written before.
    unsafe { item.unwrap().cast::<u64>().read() }
}

#[test]
fn items_are_apart_and_may_be_freed_in_any_order() {
    own_process::run("batches::items_are_apart_and_may_be_freed_in_any_order", || {
        let mut random = Random(seed());
        for (len_bytes, align_bytes, count) in [(48, 16, 40_000), (1, 1, 100_000), (100, 64, 5000), (5000, 8, 100)] {
            let mut items = vec![None; count];
            assert_eq!(batch::allocate(&Blocks, len_bytes, align_bytes, &mut items), count);
            assert!(items.iter().flatten().all(|item| (item.as_ptr() as usize).is_multiple_of(align_bytes.max(16))));
            let usable = alloc::usable_bytes(items[0].unwrap()).unwrap();
            assert!(usable >= len_bytes);
            write_numbers(&items);
            assert!((0..count).all(|at| number(items[at]) == at as u64));
            // Shuffled, half by single frees.
            for at in (1..count).rev() {
                items.swap(at, random.below(at + 1));
            }
            let (one_by_one, rest) = items.split_at(count / 2);
            for item in one_by_one.iter().flatten() {
                // SAFETY: ours.
                unsafe { alloc::free(*item) };
            }
            // SAFETY: ours.
            unsafe { batch::free(&Blocks, rest) };
            assert_eq!(alloc::stats().live_bytes, 0);
        }
    });
}

#[test]
fn a_whole_run_is_freed_at_once_and_items_of_many_lengths_too() {
    own_process::run("batches::a_whole_run_is_freed_at_once_and_items_of_many_lengths_too", || {
        let lens: Vec<usize> = (0..30_000).map(|at| if at < 20_000 { 32 } else { 1 + at % 3 * 4000 }).collect();
        let mut items = vec![None; lens.len()];
        // Single items are blocks of a page and more here.
        assert_eq!(batch::allocate_each(&Blocks, &lens[..21_000], 8, &mut items), 21_000);
        write_numbers(&items[..21_000]);
        // SAFETY: ours.
        assert_eq!(unsafe { batch::resize(&Blocks, &mut items[19_990..20_010], 9000) }, 20);
        assert!((0..21_000).all(|at| number(items[at]) == at as u64));
        let distinct: HashSet<_> = items.iter().flatten().collect();
        assert_eq!(distinct.len(), 21_000);
        // SAFETY: ours.
        unsafe { batch::free(&Blocks, &items) };
        assert_eq!(alloc::stats().live_bytes, 0);
    });
}

/// Blocks, and what they were asked to be aligned to last.
struct Aligned(Cell<usize>);

// SAFETY: blocks are what the trait asks for.
unsafe impl Heap for Aligned {
    fn allocate(&self, len_bytes: usize, align_bytes: usize) -> Item {
        self.0.set(align_bytes);
        Blocks.allocate(len_bytes, align_bytes)
    }
    unsafe fn free(&self, item: NonNull<u8>) {
        // SAFETY: passed on from our caller.
        unsafe { Blocks.free(item) };
    }
    unsafe fn resize(&self, item: NonNull<u8>, len_bytes: usize) -> Item {
        // SAFETY: passed on from our caller.
        unsafe { Blocks.resize(item, len_bytes) }
    }
}

#[test]
fn an_item_that_grows_out_of_its_run_stays_aligned() {
    own_process::run("batches::an_item_that_grows_out_of_its_run_stays_aligned", || {
        for (align_bytes, least) in [(1, 16), (64, 64), (8192, 8192)] {
            let heap = Aligned(Cell::new(0));
            let mut items = vec![None; 2000];
            assert_eq!(batch::allocate(&heap, 40, align_bytes, &mut items), 2000);
            assert_eq!(heap.0.get(), 0, "no run");
            // SAFETY: ours.
            assert_eq!(unsafe { batch::resize(&heap, &mut items[7..8], 40_000) }, 1);
            assert_eq!(heap.0.get(), least);
            // SAFETY: ours.
            unsafe { batch::free(&heap, &items) };
        }
    });
}

#[test]
fn only_small_items_that_are_much_together_share_a_run() {
    own_process::run("batches::only_small_items_that_are_much_together_share_a_run", || {
        const KIB: usize = 1 << 10;
        for (len_bytes, align_bytes, count, alone) in [
            (KIB, 1, 64, false),
            (KIB - 1, 1, 64, true),
            (32 * KIB, 32 * KIB, 2, false),
            (32 * KIB + 1, 1, 9, true),
            (KIB, 64 * KIB, 99, true),
        ] {
            let heap = Aligned(Cell::new(0));
            let mut items = vec![None; count];
            assert_eq!(batch::allocate(&heap, len_bytes, align_bytes, &mut items), count);
            assert_eq!(heap.0.get() != 0, alone, "{count} of {len_bytes} at {align_bytes}");
            // SAFETY: ours.
            unsafe { batch::free(&heap, &items) };
        }
    });
}

#[test]
fn each_item_is_resized_to_its_own_length() {
    own_process::run("batches::each_item_is_resized_to_its_own_length", || {
        let heap = Aligned(Cell::new(0));
        // Of a run, alone, and none at all.
        let mut items = vec![None; 3003];
        assert_eq!(batch::allocate(&heap, 40, 64, &mut items[..3000]), 3000);
        assert_eq!(batch::allocate(&heap, 100_000, 1, &mut items[3000..3002]), 2);
        write_numbers(&items);
        let before = items.clone();
        let mut lens: Vec<usize> = (0..3003).map(|at| if at % 1000 == 7 { 40_000 + at } else { 8 + at % 32 }).collect();
        lens[3001] = 5 << 20;
        // SAFETY: ours.
        assert_eq!(unsafe { batch::resize_each(&heap, &lens, &mut items) }, 3003);
        for (at, item) in items[..3002].iter().enumerate() {
            assert_eq!(number(*item), at as u64);
            assert!(alloc::usable_bytes(item.unwrap()).unwrap() >= lens[at], "{at}");
            assert!(at % 1000 == 7 || at >= 3000 || *item == before[at], "{at} moved");
        }
        assert_eq!(items[3002], None);
        // As far as both go, and as far as there is memory.
        // SAFETY: ours.
        unsafe {
            assert_eq!(batch::resize_each(&heap, &[50, 60], &mut items), 2);
            assert_eq!(batch::resize_each(&heap, &[50; 9], &mut items[..3]), 3);
            let kept = items.clone();
            assert_eq!(batch::resize_each(&heap, &[70, usize::MAX, 80_000], &mut items), 1);
            assert!(items[1..] == kept[1..]);
            batch::free(&heap, &items);
        }
        assert_eq!(alloc::stats().live_bytes, 0);
    });
}

#[test]
fn what_cannot_be_had_is_counted() {
    let mut items = vec![None; 3];
    assert_eq!(batch::allocate(&Blocks, usize::MAX, 1, &mut items), 0);
    assert_eq!(batch::allocate(&Blocks, 8, 3, &mut items), 0);
    assert_eq!(batch::allocate_each(&Blocks, &[8, usize::MAX, 8], 8, &mut items), 1);
    assert!(items[0].is_some() && items[1].is_none() && items[2].is_none());
    // SAFETY: ours.
    unsafe { batch::free(&Blocks, &items) };
}
