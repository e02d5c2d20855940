//! The tracker of written pages, over each kind of memory that the kernel has.

mod bad;
#[path = "../child/mod.rs"]
mod child;
#[path = "../../../../tests/filter.rs"]
mod filter;
mod holes;
mod kinds;
mod memory;
mod regions;
mod registered;
mod shadow;
#[path = "../../../../tests/skip.rs"]
mod skip;
#[path = "../../../../tests/swap.rs"]
mod swap;
mod traps;
mod without;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use memory::{Memory, PAGE};
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

/// Has the other threads end, also where the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The tracker, or none where the kernel lacks what it needs.
pub fn tracker() -> Option<DirtyTracker> {
    DirtyTracker::new().map_err(|why| skip::skip("dirty", &why.to_string())).ok()
}

fn pages(memory: &Memory, found: &Dirty) -> Vec<usize> {
    found.ranges().flat_map(|Range { start, end }| (start..end).step_by(PAGE)).map(|at| memory.index(at)).collect()
}

fn arm(tracker: &DirtyTracker, memory: &Memory) {
    // SAFETY: the memory is the test's.
    unsafe { tracker.arm(memory.range()) }.unwrap();
}

/// Runs `work` in a forked child, and says how that ended: 0 for well.
fn in_child(work: impl FnOnce()) -> i32 {
    fork(work).wait()
}

/// Begins `work` in a forked child.
fn fork(work: impl FnOnce()) -> child::Child {
    child::fork(|| {
        work();
        true
    })
}

#[test]
fn what_was_written_since_is_found_once() {
    let Some(tracker) = tracker() else { return };
    for memory in [Memory::anonymous(64), Memory::shared(64), Memory::file(64), Memory::private_memfd(64)] {
        let mut found = Dirty::new();
        (0..32).for_each(|page| memory.write(page, 1)); // The rest are holes.
        arm(&tracker, &memory);
        tracker.scan(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [], "nothing was written: {memory:?}");
        assert_eq!((memory.read(3), memory.read(40)), (1, 0));
        memory.write(5, 2);
        memory.write(6, 2);
        memory.write(50, 2);
        for _ in 0..2 {
            tracker.scan(memory.range(), &mut found).unwrap();
            assert_eq!(pages(&memory, &found), [5, 6, 50], "{memory:?}");
        }
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [5, 6, 50], "{memory:?}");
        memory.write_by_kernel(7);
        memory.write(50, 3);
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [7, 50], "{memory:?}");
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(found.pages(), 0, "{memory:?}");
        tracker.disarm(memory.range()).unwrap();
        tracker.scan(memory.range(), &mut found).unwrap();
        assert_eq!(found.pages(), 64, "what is not armed counts as written: {memory:?}");
        assert_eq!(found.ranges().collect::<Vec<_>>(), [memory.range()]);
    }
}

#[test]
fn what_is_dropped_watches_no_longer_where_the_first_thread_has_ended() {
    let by = Mechanism::WriteProtection;
    if let Err(why) = DirtyTracker::with(by) {
        return skip::skip("uffd", &why.to_string());
    }
    let ended = child::without_first_thread(move || {
        let open = || std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
        let (before, memory) = (open(), Memory::anonymous(1));
        for _ in 0..3 {
            arm(&DirtyTracker::with(by).unwrap(), &memory);
        }
        // Where the kernel has what one needs.
        drop(selfpage::Domain::with_frames(1 << 20).build());
        let left = open() - before;
        child::say(&format!("{left} descriptors are left"));
        left == 0
    });
    assert_eq!(ended, 0, "how the child ended");
}
