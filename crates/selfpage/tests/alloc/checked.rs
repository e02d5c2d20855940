//! The checked mode: whoever uses a block after it was freed is stopped there.

use std::collections::HashSet;
use std::os::unix::process::ExitStatusExt;
use std::ptr::NonNull;

use selfpage::alloc;

use crate::own_process;

fn written(len_bytes: usize) -> NonNull<u8> {
    let block = alloc::allocate(len_bytes, 1).unwrap();
    // SAFETY: ours, and this long.
    unsafe { block.write_bytes(7, len_bytes) };
    block
}

/// Frees a block and reads from its end.
fn use_after_free(len_bytes: usize) {
    let block = written(len_bytes);
    // SAFETY: the second is the mistake. Without the checked mode the addresses still hold what they held.
    unsafe {
        alloc::free(block);
        std::hint::black_box(block.add(len_bytes - 1).read_volatile());
    }
}

fn is_stopped(test: &str, body: impl FnOnce()) {
    let Some(output) = own_process::output(test, body) else { return };
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_large_block_cannot_be_used_after_it_was_freed() {
    is_stopped("checked::a_large_block_cannot_be_used_after_it_was_freed", || {
        alloc::trap_on_use_after_free();
        use_after_free(2 << 20);
    });
}

#[test]
fn nor_can_a_smaller_one() {
    is_stopped("checked::nor_can_a_smaller_one", || {
        alloc::trap_on_use_after_free();
        let _neighbours = [written(1 << 20), written(1 << 20)];
        use_after_free(1 << 20);
    });
}

#[test]
fn nor_after_a_request_that_nothing_can_serve() {
    is_stopped("checked::nor_after_a_request_that_nothing_can_serve", || {
        alloc::trap_on_use_after_free();
        let _neighbours = [written(1 << 20), written(1 << 20)];
        let block = written(1 << 20);
        // SAFETY: the last is the mistake.
        unsafe {
            alloc::free(block);
            assert!(alloc::allocate(3 << 40, 1).is_none() && alloc::allocate(1, 2 << 30).is_none());
            std::hint::black_box(block.read_volatile());
        }
    });
}

#[test]
fn nor_the_place_that_a_block_moved_from() {
    is_stopped("checked::nor_the_place_that_a_block_moved_from", || {
        let block = written(2 << 20);
        alloc::trap_on_use_after_free();
        // SAFETY: the last is the mistake: the block has moved.
        unsafe {
            let moved = alloc::resize(block, 100 << 20).unwrap();
            assert!(moved != block && moved.read() == 7);
            std::hint::black_box(block.read_volatile());
        }
    });
}

#[test]
fn otherwise_nobody_notices() {
    own_process::run("checked::otherwise_nobody_notices", || {
        use_after_free(2 << 20);
        use_after_free(1 << 20);
    });
}

#[test]
fn freeing_twice_is_named_as_ever() {
    let output = own_process::output("checked::freeing_twice_is_named_as_ever", || {
        alloc::trap_on_use_after_free();
        let block = written(2 << 20);
        // SAFETY: the second is the mistake.
        unsafe {
            alloc::free(block);
            alloc::free(block);
        }
    });
    let Some(output) = output else { return };
    assert_eq!(output.status.signal(), Some(libc::SIGABRT));
    assert!(String::from_utf8_lossy(&output.stderr).contains("freed already"));
}

#[test]
fn addresses_come_back_late_and_neither_they_nor_mappings_run_out() {
    own_process::run("checked::addresses_come_back_late_and_neither_they_nor_mappings_run_out", || {
        alloc::trap_on_use_after_free();
        // Of the last length there are about a thousand slots in all.
        for (len_bytes, count, stays) in [(4 << 10, 10_000, 6000), (2 << 20, 10_000, 0), (4 << 30, 1500, 0)] {
            let (mut seen, mut staying) = (HashSet::new(), Vec::new());
            for at in 0..count {
                let block = alloc::allocate(len_bytes, 1).unwrap();
                // Blocks between them stay: what is closed lies scattered.
                staying.extend((at < stays).then(|| alloc::allocate(len_bytes, 1).unwrap()));
                // SAFETY: ours.
                unsafe {
                    block.write(1);
                    alloc::free(block);
                }
                assert!(seen.insert(block) || at >= 900, "used again after {at}");
            }
            assert!(seen.len() < 8000, "{} addresses of {len_bytes} bytes", seen.len());
            let mappings = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
            assert!(mappings < 10_000, "{mappings} mappings");
            // SAFETY: ours.
            staying.into_iter().for_each(|block| unsafe { alloc::free(block) });
            assert_eq!((alloc::stats().live_bytes, alloc::stats().retained_bytes), (0, 0));
        }
        let zeroed = alloc::allocate_zeroed(64 << 10, 1).unwrap();
        // SAFETY: ours.
        assert_eq!(unsafe { zeroed.read() }, 0);
    });
}
