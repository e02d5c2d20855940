//! A scan allocates nothing: a collector scans while it has threads stopped, one of which may hold the lock of malloc.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use io_uring::IoUring;
use selfpage::Domain;
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

mod child;
#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;
const PAGES: usize = 64;

thread_local! {
    /// What this thread has asked the allocator for, while it is counted.
    static ASKED: Cell<Option<u32>> = const { Cell::new(None) };
}

struct Counting;

fn count() {
    ASKED.set(ASKED.get().map(|asked| asked + 1));
}

// SAFETY: all is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as our caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: as our caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often `work` goes to the allocator.
fn asked(work: impl FnOnce()) -> u32 {
    ASKED.set(Some(0));
    work();
    ASKED.take().unwrap_or(u32::MAX)
}

fn mapped() -> usize {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping, never unmapped.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), PAGES * PAGE, access, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at as usize
}

#[test]
fn a_scan_with_room_allocates_nothing() {
    assert_eq!(asked(|| drop(std::hint::black_box(Box::new(1)))), 2, "it is counted");
    // From then on each range is looked for among the regions that are tracked.
    let domain = Domain::with_frames(16 * PAGE).build().unwrap();
    let mut region = domain.region(4 * PAGE).tracked().zero().unwrap();
    for mechanism in [Mechanism::WriteProtection, Mechanism::Traps] {
        let tracker = match DirtyTracker::with(mechanism) {
            Ok(tracker) => tracker,
            Err(why) => {
                skip::skip("dirty", &why.to_string());
                continue;
            }
        };
        let start = mapped();
        let range = start..start + PAGES * PAGE;
        // SAFETY: the memory is the test's.
        unsafe { tracker.arm(range.clone()).unwrap() };
        let mut found = Dirty::with_room(range.len());
        let write = || {
            for page in (0..PAGES).step_by(2) {
                // SAFETY: mapped, and nobody holds a reference to it.
                unsafe { ((start + page * PAGE) as *mut u8).write_volatile(1) };
            }
        };
        let mut scan = |pages: usize| {
            write();
            assert_eq!(asked(|| tracker.scan(range.clone(), &mut found).unwrap()), 0, "{mechanism:?}");
            assert_eq!(asked(|| tracker.scan_and_rearm(range.clone(), &mut found).unwrap()), 0, "{mechanism:?}");
            assert_eq!(found.pages(), pages as u64, "{mechanism:?}");
        };
        scan(PAGES / 2);
        if mechanism == Mechanism::Traps {
            // There the kernel refuses to register what is protected.
            continue;
        }
        let all = region.as_slice::<u8>().as_ptr_range();
        let tracked = all.start as usize..all.end as usize;
        // SAFETY: the memory is the test's.
        unsafe { tracker.arm(tracked.clone()).unwrap() };
        region.as_mut_slice::<u8>()[PAGE] = 1;
        let mut written = Dirty::with_room(tracked.len());
        assert_eq!(asked(|| tracker.scan(tracked.clone(), &mut written).unwrap()), 0);
        assert_eq!(asked(|| tracker.scan_and_rearm(tracked.clone(), &mut written).unwrap()), 0);
        assert!(written.contains(tracked.start + PAGE));
        // And where it looks for buffers that devices write to.
        let ring = match IoUring::new(8) {
            Ok(ring) => ring,
            Err(why) => {
                skip::skip("io_uring", &format!("{why}: write 0 into /proc/sys/kernel/io_uring_disabled"));
                continue;
            }
        };
        let buffer = libc::iovec { iov_base: (start + 3 * PAGE) as *mut _, iov_len: PAGE };
        // SAFETY: the memory outlives the ring's use of it.
        unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
        scan(PAGES / 2 + 1);
    }
}

/// The collector goes on without the tracker then.
#[test]
fn an_error_without_words_allocates_nothing() {
    let tracker = match DirtyTracker::with(Mechanism::WriteProtection) {
        Ok(tracker) => tracker,
        Err(why) => return skip::skip("uffd", &why.to_string()),
    };
    let wordless = tracker.wordless().unwrap();
    let start = mapped();
    let (range, gone) = (start..start + PAGES * PAGE, 0..PAGE);
    let mut found = Dirty::with_room(range.len());
    // Alone: it closes every descriptor.
    child::forked(|| {
        let fails = |range, found: &mut Dirty| {
            asked(|| assert!(!wordless.disarm(range))) + asked(|| assert!(!wordless.scan_and_rearm(range, found)))
        };
        assert_eq!(fails(&range, &mut found), 0, "a child's tracker has armed nothing");
        // SAFETY: the memory is the test's.
        unsafe { tracker.arm(range.clone()).unwrap() };
        assert_eq!(fails(&gone, &mut found), 0, "not mapped");
        // SAFETY: mapped, and nobody holds a reference to it.
        unsafe { ((start + PAGE) as *mut u8).write_volatile(1) };
        assert_eq!(asked(|| assert!(wordless.scan_and_rearm(&range, &mut found))), 0);
        assert_eq!(found.pages(), 1);
        // SAFETY: nothing here uses them any more but the tracker.
        unsafe { libc::close_range(3, u32::MAX, 0) };
        assert_eq!(fails(&range, &mut found), 0, "the descriptors are closed");
        assert_eq!(found.pages(), 0);
    });
}
