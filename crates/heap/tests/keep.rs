//! A program that has the heap by one line, and the keeper by another. Alone in a process.

use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: selfpage_heap::Allocator = selfpage_heap::Allocator;

/// Has taken 512 MiB, and gives all of it back.
fn use_up() {
    let blocks: Vec<Vec<u8>> = (0..16).map(|_| vec![0; 32 << 20]).collect();
    std::hint::black_box(blocks);
}

/// Whether a thread of this process is called so.
fn runs(name: &str) -> bool {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    threads
        .flatten()
        .any(|thread| std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|said| said.trim() == name))
}

fn wait_for(what: &str, state: impl Fn() -> bool) {
    let begin = Instant::now();
    while !state() {
        assert!(begin.elapsed() < Duration::from_secs(300), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_a_program_has_freed_goes_back_once_the_keeper_runs() {
    use_up();
    assert!(!runs("selfpage-keeper"), "nobody asked for it");
    let kept_bytes = selfpage_heap::stats().large_retained_bytes;
    assert!(kept_bytes >= 256 << 20, "{kept_bytes} bytes are kept");
    selfpage_heap::keep();
    use_up();
    wait_for("there is no keeper", || runs("selfpage-keeper"));
    wait_for("the peak is not forgotten", || selfpage_heap::stats().large_retained_bytes < kept_bytes / 2);
}
