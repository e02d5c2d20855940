//! Frames that the keeper makes ready before a block asks for them.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use selfpage::alloc;

use crate::child::in_child;
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
        thread::sleep(Duration::from_millis(20));
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

/// Forks, and expects the child to find `right`. A child that hangs is ended.
fn fork_finds(right: impl FnOnce() -> bool) {
    let ended = in_child(|| {
        // SAFETY: a call without pointers.
        unsafe { libc::alarm(60) };
        right()
    });
    assert_eq!(ended, 0);
}

/// Also where nobody has called `fork::register`.
#[test]
fn a_forked_child_has_a_keeper_when_it_starts_one() {
    own_process::run("reserve::a_forked_child_has_a_keeper_when_it_starts_one", || {
        let before = threads();
        alloc::keeper::start().unwrap();
        assert_eq!(threads(), before + 1);
        fork_finds(|| {
            let alone = threads();
            alloc::keeper::start().is_ok() && threads() == alone + 1
        });
    });
}

extern "C" fn prepare() {
    alloc::fork::prepare();
}
extern "C" fn parent() {
    alloc::fork::parent();
}
extern "C" fn child_with_a_keeper() {
    alloc::fork::child();
    alloc::keeper::start().unwrap();
}

#[test]
fn a_keeper_that_a_handler_of_a_fork_starts_in_the_child_is_its_only_one() {
    own_process::run("reserve::a_keeper_that_a_handler_of_a_fork_starts_in_the_child_is_its_only_one", || {
        // SAFETY: functions without arguments.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child_with_a_keeper)) };
        alloc::keeper::start().unwrap();
        fork_finds(|| threads() == 2 && alloc::keeper::start().is_ok() && threads() == 2);
    });
}

/// Whether somebody has the program's own lock, under which it takes blocks.
static OWN: AtomicBool = AtomicBool::new(false);

fn take_own() {
    while OWN.swap(true, Ordering::Acquire) {
        thread::yield_now();
    }
}
fn let_go_of_own() {
    OWN.store(false, Ordering::Release);
}
extern "C" fn prepare_after_own() {
    take_own();
    alloc::fork::prepare();
}
extern "C" fn parent_before_own() {
    alloc::fork::parent();
    let_go_of_own();
}
extern "C" fn child_before_own() {
    alloc::fork::child();
    let_go_of_own();
}

/// As POSIX has it for a program's locks: else who has its own waits for the allocator's, and the fork for its own.
#[test]
fn who_attends_to_forks_himself_takes_his_locks_before_the_allocators() {
    own_process::run("reserve::who_attends_to_forks_himself_takes_his_locks_before_the_allocators", || {
        // A fork that waits for ever ends the process.
        // SAFETY: a call without pointers.
        unsafe { libc::alarm(120) };
        // SAFETY: functions without arguments.
        unsafe { libc::pthread_atfork(Some(prepare_after_own), Some(parent_before_own), Some(child_before_own)) };
        alloc::keeper::start().unwrap();
        let ends = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ends.load(Ordering::Relaxed) {
                        take_own();
                        let block = alloc::allocate(1 << 20, 1).unwrap();
                        // SAFETY: ours, and gone afterwards.
                        unsafe { alloc::free(block) };
                        let_go_of_own();
                        thread::yield_now();
                    }
                });
            }
            (0..200).for_each(|_| fork_finds(|| alloc::allocate(1 << 20, 1).is_some()));
            ends.store(true, Ordering::Relaxed);
        });
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
