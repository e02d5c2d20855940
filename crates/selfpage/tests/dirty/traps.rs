//! The fallback where the kernel notes nothing: `mprotect` and `SIGSEGV`.

use std::ptr;

use selfpage::Kind;
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

use crate::memory::{Memory, PAGE};
use crate::{in_child, pages};

/// Has the process have as many mappings as it may: a mapping can be split no more.
fn use_up_mappings() {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let len = (1 << 18) * PAGE;
    // SAFETY: a fresh mapping, of which parts are protected.
    unsafe {
        let start = libc::mmap(ptr::null_mut(), len, access, flags | libc::MAP_NORESERVE, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        let split = |page: usize| libc::mprotect(start.byte_add(page * PAGE), PAGE, libc::PROT_READ) == 0;
        assert!((1..1 << 18).step_by(2).any(|page| !split(page)), "as many mappings as it likes");
    }
}

#[test]
fn arming_that_ends_half_way_leaves_every_write_through() {
    let ended = in_child(|| {
        // Two mappings side by side, the first shared, so that they stay two.
        let memory = Memory::anonymous(32);
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: over the test's own mapping.
        let over = unsafe { libc::mmap(memory.page(0) as *mut _, 16 * PAGE, access, flags | libc::MAP_FIXED, -1, 0) };
        assert_eq!(over as usize, memory.page(0));
        let tracker = DirtyTracker::with(Mechanism::Traps).unwrap();
        let range = memory.page(0)..memory.page(24);
        let mut found = Dirty::with_room(range.len());
        // Once, for what it allocates.
        // SAFETY: the memory is the test's.
        unsafe { tracker.arm(range.clone()).unwrap() };
        tracker.disarm(range.clone()).unwrap();
        use_up_mappings();
        // The first mapping is protected as a whole, and the second cannot be split.
        // SAFETY: as above.
        let why = unsafe { tracker.arm(range.clone()) }.unwrap_err();
        assert_eq!(why.kind(), Kind::OutOfSpace, "{why}");
        (0..32).for_each(|page| memory.write(page, 1));
        tracker.scan(range, &mut found).unwrap();
        assert_eq!(pages(&memory, &found), (0..24).collect::<Vec<_>>(), "all of it counts as written");
    });
    assert_eq!(ended, 0, "how the child ended");
}
