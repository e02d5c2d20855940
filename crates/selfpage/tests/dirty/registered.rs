//! Buffers that devices write to by their frames.

use std::fs::File;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, types};
use selfpage::dirty::Dirty;

use crate::memory::{Memory, PAGE};
use crate::{arm, pages, skip, tracker};

#[test]
fn a_buffer_registered_before_arming_counts_as_written_until_it_is_not() {
    let Some(tracker) = tracker() else { return };
    let mut ring = match IoUring::new(8) {
        Ok(ring) => ring,
        Err(why) => return skip::skip("io_uring", &format!("{why}: write 0 into /proc/sys/kernel/io_uring_disabled")),
    };
    let memory = Memory::anonymous(16);
    (0..16).for_each(|page| memory.write(page, 1));
    let buffer = libc::iovec { iov_base: (memory.page(3) + 100) as *mut _, iov_len: PAGE };
    let outside = libc::iovec { iov_base: memory.page(15) as *mut _, iov_len: PAGE };
    // SAFETY: test: the memory outlives the ring's use of it.
    unsafe { ring.submitter().register_buffers(&[buffer, outside]) }.unwrap();
    let range = memory.page(0)..memory.page(15);
    // SAFETY: test: the memory is the test's.
    unsafe { tracker.arm(range.clone()) }.unwrap();

    let random = File::open("/dev/urandom").unwrap();
    let read = opcode::ReadFixed::new(types::Fd(random.as_raw_fd()), buffer.iov_base.cast(), 8, 0).build();
    // SAFETY: test: the buffer is registered, and lives.
    unsafe { ring.submission().push(&read) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), 8);

    let mut found = Dirty::new();
    for _ in 0..2 {
        tracker.scan(range.clone(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [3, 4]);
        tracker.scan_and_rearm(range.clone(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [3, 4]);
    }
    memory.write(9, 2);
    tracker.scan_and_rearm(range.clone(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [3, 4, 9]);
    assert_eq!((found.pages(), found.contains(memory.page(4)), found.contains(memory.page(5))), (3, true, false));
    ring.submitter().unregister_buffers().unwrap();
    tracker.scan_and_rearm(range, &mut found).unwrap();
    assert_eq!(found.pages(), 0);
    // Registered after arming: the kernel itself writes to the page, as far as its notes go.
    arm(&tracker, &memory);
    // SAFETY: test: as above.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    ring.submitter().unregister_buffers().unwrap();
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [3, 4]);
}
