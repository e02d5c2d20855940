//! How much is kept, and that it is given back.

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use selfpage::alloc::{self, Severity};

use crate::{own_process, resident_bytes};

fn kept() -> usize {
    let stats = alloc::stats();
    stats.retained_bytes - stats.live_bytes
}

/// Allocates, touches and frees `len_bytes`.
fn use_up(len_bytes: usize) {
    let block = alloc::allocate(len_bytes, 1).unwrap();
    // SAFETY: ours, this long, and gone afterwards.
    unsafe {
        block.write_bytes(1, len_bytes);
        alloc::free(block);
    }
}

#[test]
fn a_quarter_more_than_was_live_is_kept_at_most() {
    own_process::run("bounds::a_quarter_more_than_was_live_is_kept_at_most", || {
        let before = resident_bytes();
        for len_mib in [64, 3, 40, 17, 64, 5, 33] {
            use_up(len_mib << 20);
            let resident = resident_bytes() - before;
            assert!(resident <= (64 << 20) / 4 * 5 + (4 << 20), "{} MiB after {len_mib}", resident >> 20);
        }
        // Small blocks can take over nothing of what is kept for large ones, which has to go.
        let len_bytes = (1 << 20) - 4096;
        let small: Vec<_> = (0..64).map(|_| alloc::allocate(len_bytes, 1).unwrap()).collect();
        // SAFETY: ours, and this long.
        small.iter().for_each(|block| unsafe { block.write_bytes(1, len_bytes) });
        let resident = resident_bytes() - before;
        assert!(resident <= (64 << 20) / 4 * 5 + (4 << 20), "{} MiB with small blocks", resident >> 20);
        // SAFETY: ours, and gone afterwards.
        small.into_iter().for_each(|block| unsafe { alloc::free(block) });
        assert!(resident_bytes() - before >= 60 << 20, "nothing is kept");
        alloc::trim(0);
        assert!(resident_bytes() - before < 8 << 20, "trim left {}", resident_bytes() - before);
        alloc::set_retention(Some(0));
        use_up(64 << 20);
        assert!(resident_bytes() - before < 8 << 20, "kept, though nothing may be");
    });
}

#[test]
fn long_blocks_of_zeros_take_what_is_used_of_them() {
    own_process::run("bounds::long_blocks_of_zeros_take_what_is_used_of_them", || {
        const MIB: usize = 1 << 20;
        let len_bytes = 400 * MIB + 4096;
        let before = resident_bytes();
        for round in 0..3 {
            let block = alloc::allocate_zeroed(len_bytes, 1).unwrap();
            let resident = resident_bytes() - before;
            assert!(resident < 32 * MIB, "{} MiB when little was used of the one before", resident / MIB);
            for at in [0, 70 * MIB, 301 * MIB, len_bytes - 4096] {
                // SAFETY: within the block.
                unsafe {
                    assert_eq!(block.add(at).read(), 0, "round {round}, byte {at}");
                    block.add(at).write_bytes(1, 4096);
                }
            }
            // SAFETY: ours, and gone afterwards.
            unsafe { alloc::free(block) };
        }
        use_up(len_bytes);
        let block = alloc::allocate_zeroed(len_bytes, 1).unwrap();
        // SAFETY: ours, and this long.
        let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), len_bytes) };
        assert!(bytes.iter().all(|byte| *byte == 0), "dirty, where all of the one before was used");
    });
}

#[test]
fn pressure_takes_half_and_then_all() {
    own_process::run("bounds::pressure_takes_half_and_then_all", || {
        let before = resident_bytes();
        use_up(64 << 20);
        assert_eq!(kept(), 64 << 20);
        assert!(alloc::relieve(Severity::Some) >= 32 << 20);
        assert!(kept() <= 32 << 20);
        // What was lazily given back may hold anything, and zeros were asked for.
        let zeroed = alloc::allocate_zeroed(64 << 20, 1).unwrap();
        // SAFETY: ours, and this long.
        let bytes = unsafe { std::slice::from_raw_parts(zeroed.as_ptr(), 64 << 20) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        // SAFETY: ours.
        unsafe { alloc::free(zeroed) };
        alloc::relieve(Severity::Full);
        assert_eq!(kept(), 0);
        assert!(resident_bytes() - before < 8 << 20);
    });
}

#[test]
fn what_was_left_to_the_kernel_is_cleared_for_who_asks_for_zeros() {
    own_process::run("bounds::what_was_left_to_the_kernel_is_cleared_for_who_asks_for_zeros", || {
        let drops: [fn() -> usize; 3] = [
            || alloc::relieve(Severity::Full),
            || alloc::trim(0),
            || {
                (0..200).for_each(|_| alloc::decay());
                0
            },
        ];
        for drop_rest in drops {
            use_up(64 << 20);
            alloc::relieve(Severity::Some);
            drop_rest();
            assert_eq!(kept(), 0);
            let zeroed = alloc::allocate_zeroed(64 << 20, 1).unwrap();
            // SAFETY: ours, and this long.
            let bytes = unsafe { std::slice::from_raw_parts(zeroed.as_ptr(), 64 << 20) };
            assert_eq!(bytes.iter().position(|byte| *byte != 0), None);
            // SAFETY: ours.
            unsafe { alloc::free(zeroed) };
        }
    });
}

#[test]
fn severe_pressure_takes_what_was_left_to_the_kernel_too() {
    own_process::run("bounds::severe_pressure_takes_what_was_left_to_the_kernel_too", || {
        let before = resident_bytes();
        use_up(64 << 20);
        // Behind a block, too.
        let block = alloc::allocate(48 << 20, 1).unwrap();
        // SAFETY: ours, and this long.
        unsafe {
            block.write_bytes(1, 48 << 20);
            assert!(alloc::resize_in_place(block, 47 << 20));
        }
        while kept() > 0 {
            alloc::relieve(Severity::Some);
        }
        alloc::relieve(Severity::Full);
        let resident = resident_bytes() - before;
        assert!(resident <= 55 << 20, "{} MiB beside 47", resident >> 20);
        // SAFETY: ours.
        unsafe { alloc::free(block) };
    });
}

#[test]
fn a_block_whose_frames_move_is_live_once() {
    own_process::run("bounds::a_block_whose_frames_move_is_live_once", || {
        let block = alloc::allocate(64 << 20, 1).unwrap();
        // SAFETY: ours; where it was is forgotten.
        let moved = unsafe { [256, 257].map(|mib| alloc::resize(block, mib << 20).unwrap()) };
        assert_ne!(moved[0], moved[1]);
        let stats = alloc::stats();
        assert_eq!((stats.live_bytes >> 20, stats.peak_bytes >> 20), (257, 257));
    });
}

#[test]
fn what_a_block_grows_by_counts_as_taken_from_the_kernel() {
    own_process::run("bounds::what_a_block_grows_by_counts_as_taken_from_the_kernel", || {
        let taken = || alloc::stats().counts.cold_bytes as usize >> 20;
        let mut block = alloc::allocate(64 << 20, 1).unwrap();
        for len_bytes in (64 << 20..=256 << 20).step_by(64 << 10) {
            // SAFETY: ours; where it was is forgotten.
            block = unsafe { alloc::resize(block, len_bytes) }.unwrap();
        }
        // What moves may count the rest of its last table again.
        assert!((256..264).contains(&taken()), "{} MiB", taken());
        // And nothing that is there.
        let before = taken();
        // SAFETY: ours; nobody uses what is cut off.
        let resized = unsafe { [100, 200].map(|mib| alloc::resize_in_place(block, mib << 20)) };
        assert_eq!(resized, [true; 2]);
        assert_eq!(taken(), before);
    });
}

#[test]
fn the_peak_is_forgotten_when_it_is_long_ago() {
    own_process::run("bounds::the_peak_is_forgotten_when_it_is_long_ago", || {
        use_up(64 << 20);
        (0..200).for_each(|_| alloc::decay());
        assert_eq!(kept(), 0);
        assert_eq!(alloc::stats().most_live_bytes, 64 << 20);
    });
}

/// A pipe that tells the keeper that memory is short, and has once, with its place.
fn short_of_memory(name: &str) -> (PathBuf, File) {
    let path = std::env::temp_dir().join(format!("selfpage-{name}-{}", std::process::id()));
    let place = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a string that ends in zero.
    assert_eq!(unsafe { libc::mkfifo(place.as_ptr(), 0o600) }, 0);
    // SAFETY: the process has no other thread that looks at its environment.
    unsafe { std::env::set_var("MEMORY_PRESSURE_WATCH", &path) };
    let mut pipe = File::options().read(true).write(true).open(&path).unwrap();
    pipe.write_all(b"x").unwrap();
    (path, pipe)
}

#[test]
fn the_keeper_gives_back_when_told_that_memory_is_short() {
    own_process::run("bounds::the_keeper_gives_back_when_told_that_memory_is_short", || {
        let (path, mut pipe) = short_of_memory("keeper");
        use_up(512 << 20);
        assert!(alloc::keeper::pays());
        static TOLD: AtomicBool = AtomicBool::new(false);
        alloc::keeper::on_pressure(|| TOLD.store(true, Ordering::Release));
        alloc::keeper::start().unwrap();
        assert!(!alloc::keeper::pays());
        let begin = Instant::now();
        while kept() == 512 << 20 || !TOLD.load(Ordering::Acquire) {
            assert!(begin.elapsed() < Duration::from_secs(120), "nothing was given back");
            std::thread::sleep(Duration::from_millis(10));
        }
        // Half, at once: what is forgotten each second is less.
        assert!(kept() <= 256 << 20, "{} MiB are kept", kept() >> 20);
        // A second report soon after is served as severe.
        TOLD.store(false, Ordering::Release);
        pipe.write_all(b"x").unwrap();
        while !TOLD.load(Ordering::Acquire) {
            assert!(begin.elapsed() < Duration::from_secs(240), "the second report was not heard");
            std::thread::sleep(Duration::from_millis(10));
        }
        if begin.elapsed() < Duration::from_secs(5) {
            assert_eq!(kept(), 0);
        }
        std::fs::remove_file(path).unwrap();
    });
}

/// As a daemon does: what has the numbers afterwards that the keeper's had is the program's.
#[test]
fn the_keeper_leaves_the_programs_descriptors_alone() {
    own_process::run("bounds::the_keeper_leaves_the_programs_descriptors_alone", || {
        let (path, pipe) = short_of_memory("numbers");
        static TOLD: AtomicBool = AtomicBool::new(false);
        alloc::keeper::on_pressure(|| TOLD.store(true, Ordering::Release));
        alloc::keeper::start().unwrap();
        while !TOLD.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::fs::remove_file(path).unwrap();
        std::mem::forget(pipe);
        // SAFETY: nothing here uses any of them any more.
        assert_eq!(unsafe { libc::close_range(3, u32::MAX, 0) }, 0);
        let pairs: Vec<_> = (0..10).map(|_| std::os::unix::net::UnixStream::pair().unwrap()).collect();
        for (one, other) in &pairs {
            let (mut one, mut other) = (one, other);
            one.write_all(b"1").unwrap();
            other.write_all(b"2").unwrap();
        }
        // It looks again within a second.
        std::thread::sleep(Duration::from_secs(3));
        for (mut one, mut other) in pairs {
            let mut read = [0; 2];
            let (mine, its) = read.split_at_mut(1);
            one.set_nonblocking(true).unwrap();
            other.set_nonblocking(true).unwrap();
            one.read_exact(mine).unwrap();
            other.read_exact(its).unwrap();
            assert_eq!(&read, b"21");
        }
    });
}

/// Blocks that are shorter than what their slots have of frames, each with its number at both ends.
fn blocks_with_tails(long_bytes: usize, short_bytes: usize, count: usize) -> Vec<std::ptr::NonNull<u8>> {
    let blocks: Vec<_> = (0..count).map(|_| alloc::allocate(long_bytes, 1).unwrap()).collect();
    for (at, block) in blocks.iter().enumerate() {
        // SAFETY: ours, and this long.
        unsafe {
            block.write_bytes(1, long_bytes);
            assert!(alloc::resize_in_place(*block, short_bytes));
            block.cast::<usize>().write(at);
            block.add(short_bytes - 8).cast::<usize>().write(!at);
        }
    }
    blocks
}

#[test]
fn frames_behind_blocks_are_bounded_too() {
    own_process::run("bounds::frames_behind_blocks_are_bounded_too", || {
        for (long_bytes, short_bytes, count) in [(192 << 10, 68 << 10, 500), (5 << 20, 3 << 20, 20)] {
            let before = resident_bytes();
            let blocks = blocks_with_tails(long_bytes, short_bytes, count);
            let live = alloc::stats().live_bytes;
            assert_eq!(live, short_bytes * count);
            assert!(kept() > live / 2, "nothing lies behind the blocks");
            (0..200).for_each(|_| alloc::decay());
            assert!(alloc::stats().retained_bytes <= live / 4 * 5);
            let resident = resident_bytes() - before;
            assert!(resident <= live / 4 * 5 + (4 << 20), "{} MiB for {} MiB", resident >> 20, live >> 20);
            assert!(alloc::trim(0) > 0);
            assert_eq!(kept(), 0);
            for (at, block) in blocks.into_iter().enumerate() {
                // SAFETY: ours, and gone afterwards.
                unsafe {
                    let end = block.add(short_bytes - 8).cast::<usize>();
                    assert_eq!((block.cast::<usize>().read(), end.read()), (at, !at));
                    // Back to the old length, where it is: what comes back is zeros.
                    assert!(alloc::resize_in_place(block, long_bytes));
                    assert_eq!(block.add(long_bytes - 1).read(), 0);
                    alloc::free(block);
                }
            }
            alloc::trim(0);
        }
    });
}
