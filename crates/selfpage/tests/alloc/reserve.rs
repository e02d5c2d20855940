//! Frames that the keeper makes ready before a block asks for them.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use selfpage::alloc;

use crate::own_process;

const BLOCK_BYTES: usize = 8 << 20;
/// Of which a quarter is what may be made ready.
const BLOCKS: usize = 24;

/// Whether all of a block is in memory.
fn is_resident(block: NonNull<u8>) -> bool {
    let mut pages = [0u8; BLOCK_BYTES / 4096];
    // SAFETY: a block of ours, and a byte for each of its pages.
    assert_eq!(unsafe { libc::mincore(block.as_ptr().cast(), BLOCK_BYTES, pages.as_mut_ptr()) }, 0);
    pages.iter().all(|page| page & 1 == 1)
}

/// Allocates and touches blocks, as a program does that takes more and more, and gives them all back to the kernel. Whether one of them
/// was in memory before it was touched, with all its frames from the allocator.
fn one_was_ready() -> bool {
    let mut blocks = Vec::new();
    let mut ready = false;
    while blocks.len() < BLOCKS && !ready {
        let cold_bytes = alloc::stats().counts.cold_bytes;
        let block = alloc::allocate(BLOCK_BYTES, 1).unwrap();
        ready = is_resident(block);
        assert!(!ready || alloc::stats().counts.cold_bytes == cold_bytes, "it counts as taken from the kernel");
        // SAFETY: ours, and this long.
        unsafe { block.write_bytes(1, BLOCK_BYTES) };
        blocks.push(block);
        std::thread::sleep(Duration::from_millis(20));
    }
    // SAFETY: ours, and gone afterwards.
    blocks.into_iter().for_each(|block| unsafe { alloc::free(block) });
    alloc::trim(0);
    ready
}

/// How many threads the process has.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Also where nobody has called `fork::register`.
#[test]
fn a_forked_child_has_a_keeper_when_it_starts_one() {
    own_process::run("reserve::a_forked_child_has_a_keeper_when_it_starts_one", || {
        let before = threads();
        alloc::keeper::start().unwrap();
        assert_eq!(threads(), before + 1);
        // SAFETY: the child starts a thread, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let alone = threads();
            let starts = alloc::keeper::start().is_ok() && threads() == alone + 1;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!starts)) };
        }
        let mut status = 0;
        // SAFETY: our child, and a place for its status.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    });
}

#[test]
fn the_keeper_has_frames_ready_for_a_program_that_takes_more_and_more() {
    own_process::run("reserve::the_keeper_has_frames_ready_for_a_program_that_takes_more_and_more", || {
        // Where memory is short nothing is made ready: nobody is to say that it is.
        // SAFETY: the process has no other thread that looks at its environment.
        unsafe { std::env::set_var("MEMORY_PRESSURE_WATCH", "/dev/null") };
        assert!(!one_was_ready(), "without a keeper");
        alloc::keeper::start().unwrap();
        let begin = Instant::now();
        while !one_was_ready() {
            assert!(begin.elapsed() < Duration::from_secs(300), "no block was ready");
        }
    });
}
