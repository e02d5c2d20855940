//! Threads with few objects take little memory. Alone in a process.

use std::sync::Barrier;

#[global_allocator]
static HEAP: selfpage_heap::Allocator = selfpage_heap::Allocator;

const THREADS: usize = 64;

fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Each has a part of the heap of its own, which begins with small pages.
#[test]
fn a_thread_with_few_objects_takes_no_huge_page() {
    let before = resident_bytes();
    let (up, end) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (up, end) = (&up, &end);
            scope.spawn(move || {
                let objects: Vec<Vec<u8>> = (0..20).map(|object| vec![number as u8; 16 << (object % 8)]).collect();
                up.wait();
                end.wait();
                drop(objects);
            });
        }
        up.wait();
        let taken = resident_bytes().saturating_sub(before);
        end.wait();
        assert!(taken < THREADS << 19, "{taken} bytes for {THREADS} threads");
    });
}
