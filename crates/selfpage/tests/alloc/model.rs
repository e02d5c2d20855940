//! Random calls against a model: every block holds what was written to it, whatever happened to the others.

use std::ptr::NonNull;

use selfpage::alloc::{self, Severity};

use crate::random::Random;

/// Words are written this far apart, and at the end.
const STEP: usize = 1000;

/// A block, and the seed of what it holds.
struct Block {
    start: NonNull<u8>,
    len_bytes: usize,
    seed: u64,
}

impl Block {
    fn word(&self, at: usize) -> u64 {
        (self.seed ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn places(&self) -> impl Iterator<Item = usize> + use<> {
        let last = self.len_bytes - 8;
        (0..last.saturating_sub(7)).step_by(STEP).chain([last])
    }

    fn fill(&self) {
        for at in self.places() {
            // SAFETY: within the block.
            unsafe { self.start.add(at).cast::<u64>().write_unaligned(self.word(at)) };
        }
    }

    /// Checks what lies in the first `len_bytes`; the word at the end may be cut.
    fn check(&self, len_bytes: usize) {
        for at in self.places().filter(|at| at + 8 <= len_bytes) {
            // SAFETY: within the block.
            let found = unsafe { self.start.add(at).cast::<u64>().read_unaligned() };
            assert_eq!(found, self.word(at), "byte {at} of the block of {} at {:?}", self.len_bytes, self.start);
        }
    }
}

fn length(random: &mut Random) -> usize {
    let most = [64 << 10, 1 << 20, 8 << 20, 64 << 20][random.below(4)];
    8 + random.below(most)
}

/// Swaps what the last of some blocks and the first of others hold, where they are of one length.
fn exchange((some, others): (&mut [Block], &mut [Block])) {
    let (a, b) = (some.last_mut().expect("a block"), &mut others[0]);
    // SAFETY: both are ours; made as long as the other.
    let resized = unsafe { alloc::resize(b.start, a.len_bytes) }.expect("memory");
    (b.start, b.len_bytes) = (resized, a.len_bytes);
    b.fill();
    // SAFETY: both are ours.
    assert!(unsafe { alloc::exchange(a.start, b.start) });
    std::mem::swap(&mut a.seed, &mut b.seed);
    a.check(a.len_bytes);
    b.check(b.len_bytes);
}

fn calls(seed: u64, count: usize) {
    let mut random = Random(seed);
    let mut blocks: Vec<Block> = Vec::new();
    for call in 0..count {
        let chosen = random.below(blocks.len().max(1));
        match random.below(12) {
            0..=2 if blocks.len() < 24 => {
                let (len_bytes, align) = (length(&mut random), 1 << random.below(23));
                let zeroed = random.below(2) == 0;
                let make = if zeroed { alloc::allocate_zeroed } else { alloc::allocate };
                let start = make(len_bytes, align).expect("memory");
                assert!((start.as_ptr() as usize).is_multiple_of(align));
                assert!(alloc::usable_bytes(start).expect("a block") >= len_bytes);
                if zeroed {
                    // SAFETY: within the block.
                    let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), len_bytes) };
                    assert!(bytes.iter().all(|byte| *byte == 0), "seed {seed}, call {call}: dirty");
                }
                let block = Block { start, len_bytes, seed: random.next() };
                block.fill();
                blocks.push(block);
            }
            3..=4 if !blocks.is_empty() => {
                let block = blocks.swap_remove(chosen);
                block.check(block.len_bytes);
                // SAFETY: ours, and forgotten.
                unsafe { alloc::free(block.start) };
            }
            5..=6 if !blocks.is_empty() => {
                let block = &mut blocks[chosen];
                let len_bytes = length(&mut random);
                // SAFETY: ours; the old address is forgotten.
                block.start = unsafe { alloc::resize(block.start, len_bytes) }.expect("memory");
                block.check(len_bytes.min(block.len_bytes));
                block.len_bytes = len_bytes;
                block.seed = random.next();
                block.fill();
            }
            7 => drop(alloc::trim(random.below(64 << 20))),
            8 if chosen + 1 < blocks.len() => exchange(blocks.split_at_mut(chosen + 1)),
            9 => drop(alloc::relieve(if random.below(4) == 0 { Severity::Full } else { Severity::Some })),
            10 => (0..random.below(8)).for_each(|_| alloc::decay()),
            11 => blocks.iter().for_each(|block| block.check(block.len_bytes)),
            _ => {}
        }
        let stats = alloc::stats();
        assert!(stats.retained_bytes >= stats.live_bytes, "{stats:?}");
    }
    for block in blocks {
        block.check(block.len_bytes);
        // SAFETY: ours.
        unsafe { alloc::free(block.start) };
    }
}

#[test]
fn every_block_keeps_what_was_written_to_it() {
    let seed = crate::random::seed();
    println!("seed {seed}");
    crate::own_process::run("model::every_block_keeps_what_was_written_to_it", || calls(seed, 1500));
}
