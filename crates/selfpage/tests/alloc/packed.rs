//! Many small blocks: once much is live they lie side by side in huge pages.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use selfpage::alloc;

use crate::child::forked;
use crate::own_process;
use crate::random::{Random, seed};
use crate::resident_bytes;
use crate::skip::skip;

const PAGE_BYTES: usize = 4096;

/// A block with its address and a mark in each of its pages.
struct Block {
    start: NonNull<u8>,
    pages: usize,
    mark: u64,
}

impl Block {
    fn new(pages: usize, mark: u64) -> Block {
        let start = alloc::allocate(pages * PAGE_BYTES, 1).expect("memory");
        let block = Block { start, pages, mark };
        block.write();
        block
    }

    fn addr(&self) -> usize {
        self.start.as_ptr() as usize
    }

    fn page(&self, page: usize) -> NonNull<u64> {
        assert!(page < self.pages);
        // SAFETY: within the block.
        unsafe { self.start.add(page * PAGE_BYTES) }.cast()
    }

    fn write(&self) {
        // SAFETY: within the block.
        (0..self.pages).for_each(|page| unsafe { self.page(page).write(self.mark + page as u64) });
    }

    fn check(&self, pages: usize) {
        for page in 0..pages {
            // SAFETY: within the block, and written before.
            let found = unsafe { self.page(page).read() };
            assert_eq!(found, self.mark + page as u64, "page {page} of the {} pages at {:?}", self.pages, self.start);
        }
    }

    fn resize(&mut self, pages: usize) {
        // SAFETY: ours, and the old address is forgotten.
        self.start = unsafe { alloc::resize(self.start, pages * PAGE_BYTES) }.expect("memory");
        let both = self.pages.min(pages);
        self.pages = pages;
        self.check(both);
        self.write();
    }

    fn free(self) {
        self.check(self.pages);
        // SAFETY: ours, and gone.
        unsafe { alloc::free(self.start) };
    }
}

fn blocks(count: usize, pages: usize) -> Vec<Block> {
    (0..count).map(|number| Block::new(pages, (number as u64) << 32)).collect()
}

/// How many of these blocks, all equally long, begin where another ends.
fn neighbours(blocks: &[Block]) -> usize {
    let mut starts: Vec<usize> = blocks.iter().map(Block::addr).collect();
    starts.sort_unstable();
    starts.windows(2).filter(|two| two[1] - two[0] == blocks[0].pages * PAGE_BYTES).count()
}

fn no_huge_pages() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let without = setting.contains("[never]") || !setting.contains('[');
    if without {
        skip("thp", "no transparent huge pages: write madvise into /sys/kernel/mm/transparent_hugepage/enabled");
    }
    without
}

#[test]
fn blocks_lie_apart_and_keep_what_they_hold() {
    let seed = seed();
    println!("seed {seed}");
    own_process::run("packed::blocks_lie_apart_and_keep_what_they_hold", || {
        let mut random = Random(seed);
        let mut blocks: Vec<Block> = Vec::new();
        for call in 0..20_000 {
            let most = [4, 16, 64, 256][random.below(4)];
            let (pages, mark) = (1 + random.below(most), random.next() >> 1);
            let chosen = random.below(blocks.len().max(1));
            match random.below(8) {
                0..=3 if blocks.len() < 2500 => blocks.push(Block::new(pages, mark)),
                4..=5 if !blocks.is_empty() => blocks.swap_remove(chosen).free(),
                6 if !blocks.is_empty() => blocks[chosen].resize(pages),
                7 if call % 64 == 0 => drop(alloc::trim(random.below(16 << 20))),
                _ => {}
            }
        }
        let mut ends = BTreeMap::new();
        for block in &blocks {
            block.check(block.pages);
            let (addr, len_bytes) = (block.addr(), block.pages * PAGE_BYTES);
            ends.insert(addr, addr + len_bytes);
            for at in [0, 1, len_bytes / 2, len_bytes - 1] {
                // SAFETY: within the block.
                let within = unsafe { block.start.add(at) };
                assert_eq!(alloc::block_around(within.as_ptr() as usize), Some((block.start, len_bytes)));
            }
        }
        assert!(ends.values().zip(ends.keys().skip(1)).all(|(end, next)| end <= next), "blocks overlap");
        blocks.into_iter().for_each(Block::free);
        assert_eq!(alloc::stats().live_bytes, 0);
        alloc::trim(0);
        let stats = alloc::stats();
        assert_eq!(stats.retained_bytes, 0, "{stats:?}");
    });
}

#[test]
fn few_blocks_have_room_and_many_lie_side_by_side() {
    own_process::run("packed::few_blocks_have_room_and_many_lie_side_by_side", || {
        for pages in [1, 4, 5, 16, 28, 64, 192, 256] {
            let bytes = pages * PAGE_BYTES;
            let few = blocks((4 << 20) / bytes / 2, pages);
            // Of more than 64 KiB, each has room behind it. Shorter ones got their pages together with those after them.
            let right = if pages <= 16 { neighbours(&few) >= few.len() / 2 } else { neighbours(&few) == 0 };
            assert!(right, "{pages} pages: {} of {}", neighbours(&few), few.len());
            few.into_iter().for_each(Block::free);
            alloc::trim(0);
            let many = blocks((48 << 20) / bytes, pages);
            assert!(neighbours(&many) >= many.len() / 2, "{pages} pages: {} of {}", neighbours(&many), many.len());
            many.into_iter().for_each(Block::free);
            // Forgotten, so that little is live and was.
            (0..200).for_each(|_| alloc::decay());
            assert_eq!(alloc::stats().retained_bytes, 0);
        }
    });
}

#[test]
fn memory_goes_a_quarter_beyond_the_blocks_at_most() {
    own_process::run("packed::memory_goes_a_quarter_beyond_the_blocks_at_most", || {
        let before = resident_bytes();
        let lens = [16, 17, 48, 69, 112, 170, 256, 4, 9];
        let (mut live_bytes, mut kept) = (0, Vec::new());
        for number in 0..1200 {
            let pages = lens[if number < 40 { 0 } else { number % lens.len() }];
            kept.push(Block::new(pages, number as u64));
            live_bytes += pages * PAGE_BYTES;
            // The records, page by page, for each rank.
            let most = live_bytes / 4 * 5 + (256 << 10);
            let resident = resident_bytes() - before;
            assert!(resident <= most, "{} KiB for blocks of {} KiB", resident >> 10, live_bytes >> 10);
            // What was taken ahead was within the bound, and stays.
            assert_eq!(alloc::stats().counts.dropped_bytes, 0, "with blocks of {} KiB", live_bytes >> 10);
        }
    });
}

#[test]
fn huge_pages_save_faults() {
    if no_huge_pages() {
        return;
    }
    own_process::run("packed::huge_pages_save_faults", || {
        let faults = || {
            // SAFETY: zeros are a value of it, and the call fills it in.
            unsafe {
                let mut usage: libc::rusage = std::mem::zeroed();
                libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
                usage.ru_minflt as usize
            }
        };
        let before = faults();
        // Beyond the length that gets its pages in one call.
        let kept = blocks(128, 128);
        let took = faults() - before;
        assert!(took < kept.len() * 128 / 2, "{took} faults for {} pages", kept.len() * 128);
    });
}

#[test]
fn a_block_that_grows_out_of_its_slot_moves_once() {
    own_process::run("packed::a_block_that_grows_out_of_its_slot_moves_once", || {
        let filler = blocks(512, 16);
        for pages in [1, 3, 16, 20, 100, 256] {
            // No roomy slot with frames.
            alloc::trim(0);
            let mut grown = blocks(3, pages);
            for block in &mut grown {
                block.resize(2 * pages);
                let moved_to = block.addr();
                block.resize(8 * pages);
                assert_eq!(block.addr(), moved_to, "{pages} pages had no room to grow");
                block.resize(1);
                block.resize(20_000);
            }
            grown.into_iter().for_each(Block::free);
        }
        filler.into_iter().for_each(Block::free);
        assert_eq!(alloc::stats().live_bytes, 0);
    });
}

#[test]
fn alignments_are_as_asked_for() {
    own_process::run("packed::alignments_are_as_asked_for", || {
        let filler = blocks(512, 20);
        for round in 0..2 {
            for pages in [1, 3, 5, 16, 20, 24, 100, 256] {
                for shift in 0..24 {
                    let block = alloc::allocate(pages * PAGE_BYTES, 1 << shift).expect("memory");
                    assert!((block.as_ptr() as usize).is_multiple_of(1 << shift), "{pages} pages, {shift}, {round}");
                    // SAFETY: ours; the second round finds what the first leaves.
                    unsafe { alloc::free(block) };
                }
            }
            // Free packed slots with frames, among those that are live.
            blocks(256, 5).into_iter().step_by(2).for_each(Block::free);
        }
        filler.into_iter().for_each(Block::free);
    });
}

#[test]
fn what_is_given_back_stays_away() {
    if no_huge_pages() {
        return;
    }
    own_process::run("packed::what_is_given_back_stays_away", || {
        let filler = blocks(64, 256);
        let before = resident_bytes();
        let (mut kept, mut freed) = (Vec::new(), Vec::new());
        for (number, block) in blocks(1024, 12).into_iter().enumerate() {
            if number % 8 == 0 { kept.push(block) } else { freed.push(block) }
        }
        // A block that is not touched, in a huge page that has no frames yet.
        let untouched = alloc::allocate(100 * PAGE_BYTES, 1).expect("memory");
        freed.into_iter().for_each(Block::free);
        alloc::trim(0);
        let left = resident_bytes() - before;
        let live = kept.iter().map(|block| block.pages * PAGE_BYTES).sum::<usize>();
        assert!(left < live + (2 << 20), "{} KiB are left with blocks of {} KiB", left >> 10, live >> 10);
        // SAFETY: ours.
        unsafe { untouched.write(1) };
        let again = resident_bytes() - before;
        assert!(again < left + (1 << 20), "a touch brought back {} KiB", (again - left) >> 10);
        kept.iter().for_each(|block| block.check(block.pages));
        // What was given back is taken again, page by page, and all are apart.
        let more = blocks(900, 12);
        kept.into_iter().chain(more).chain(filler).for_each(Block::free);
    });
}

#[test]
fn a_fork_has_its_own() {
    own_process::run("packed::a_fork_has_its_own", || {
        alloc::fork::register();
        let mut mine = blocks(2000, 7);
        forked(|| {
            let mine = std::mem::take(&mut mine).into_iter().enumerate().filter(|(number, block)| {
                block.check(block.pages);
                // SAFETY: the child's own copies, not used any more.
                number % 3 != 0
                    || unsafe {
                        alloc::free(block.start);
                        false
                    }
            });
            let mut left: Vec<Block> = mine.map(|(_, block)| block).collect();
            left.iter_mut().for_each(|block| {
                block.mark = 5;
                block.write();
            });
            left.extend((0..1000).map(|number| Block::new(7, number)));
            left.into_iter().for_each(Block::free);
            alloc::trim(0);
        });
        mine.into_iter().for_each(Block::free);
        assert_eq!(alloc::stats().live_bytes, 0);
    });
}

#[test]
fn as_much_may_be_kept_as_there_are_addresses() {
    own_process::run("packed::as_much_may_be_kept_as_there_are_addresses", || {
        alloc::set_retention(Some(usize::MAX));
        for _ in 0..2 {
            let all = blocks(2000, 9);
            all.into_iter().for_each(Block::free);
            alloc::trim(0);
        }
        // What was trimmed has nine pages of ten: all of it is less than was opened.
        let all = blocks(2000, 9);
        let more = blocks(500, 9);
        let mut starts: Vec<usize> = more.iter().map(Block::addr).collect();
        starts.sort_unstable();
        let side_by_side = starts.windows(2).filter(|two| two[1] - two[0] == 10 * PAGE_BYTES).count();
        assert!(side_by_side >= more.len() / 2, "{side_by_side} of {}", more.len());
        all.into_iter().chain(more).for_each(Block::free);
    });
}
