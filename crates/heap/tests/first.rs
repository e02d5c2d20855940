//! Threads that call the heap for the first time, all at once.

use std::alloc::{GlobalAlloc, Layout};
use std::process::Command;
use std::sync::Barrier;

use selfpage_heap::Allocator;

const THREADS: usize = 4;
const CHILD: &str = "SELFPAGE_TEST_FIRST";

/// A process has one first call: each round is a process of its own.
#[test]
fn whoever_is_first_has_objects_that_everybody_knows() {
    if std::env::var_os(CHILD).is_some() {
        return all_are_first();
    }
    for round in 0..200 {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output =
            child.args(["--exact", "whoever_is_first_has_objects_that_everybody_knows"]).env(CHILD, "").output();
        let output = output.unwrap();
        assert!(output.status.success(), "round {round}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

fn all_are_first() {
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let (short, long) = (Layout::new::<[u64; 8]>(), Layout::new::<[u64; 64]>());
                barrier.wait();
                // SAFETY: heap-block: ours, of these lengths.
                unsafe {
                    let block = Allocator.alloc(short);
                    assert!(!block.is_null());
                    block.write_bytes(7, short.size());
                    let grown = Allocator.realloc(block, short, long.size());
                    assert_eq!(grown.add(short.size() - 1).read(), 7);
                    Allocator.dealloc(grown, long);
                }
            });
        }
    });
}
