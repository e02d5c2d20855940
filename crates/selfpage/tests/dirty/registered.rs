//! Buffers that devices write to by their frames.

use std::fs::File;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, types};
use selfpage::Kind;
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

use crate::memory::{Memory, PAGE};
use crate::{arm, child, in_child, pages, skip, tracker};

/// A ring, or none where the kernel gives none.
fn ring() -> Option<IoUring> {
    let refused = |why| skip::skip("io_uring", &format!("{why}: write 0 into /proc/sys/kernel/io_uring_disabled"));
    IoUring::new(8).map_err(refused).ok()
}

fn register(ring: &IoUring, memory: &Memory, page: usize) {
    let buffer = libc::iovec { iov_base: memory.page(page) as *mut _, iov_len: PAGE };
    // SAFETY: test: no device writes to it.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
}

#[test]
fn everything_counts_as_written_where_buffers_cannot_be_looked_for() {
    let (Some(_), Some(_)) = (tracker(), ring()) else { return };
    let ended = in_child(|| {
        let (tracker, ring, memory) = (tracker().unwrap(), ring().unwrap(), Memory::anonymous(16));
        register(&ring, &memory, 3);
        arm(&tracker, &memory);
        let mut found = Dirty::new();
        let limit = |soft| {
            let limit = libc::rlimit { rlim_cur: soft, rlim_max: 64 };
            // SAFETY: of this child.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
        };
        limit(0); // No descriptor is free.
        let counts = [0; 2].map(|_| {
            tracker.scan(memory.range(), &mut found)?;
            let looked_at = found.pages();
            tracker.scan_and_rearm(memory.range(), &mut found)?;
            Ok::<_, selfpage::Error>((looked_at, found.pages()))
        });
        limit(64);
        counts.into_iter().for_each(|count| assert_eq!(count.unwrap(), (16, 16)));
        tracker.scan(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [3]);
    });
    assert_eq!(ended, 0, "how the child ended");
}

#[test]
fn a_buffer_is_found_where_the_first_thread_has_ended() {
    let (Some(_), Some(_)) = (tracker(), ring()) else { return };
    let ended = child::without_first_thread(|| {
        let (tracker, ring, memory) = (tracker().unwrap(), ring().unwrap(), Memory::anonymous(16));
        register(&ring, &memory, 3);
        arm(&tracker, &memory);
        let mut found = Dirty::new();
        tracker.scan(memory.range(), &mut found).is_ok() && pages(&memory, &found) == [3]
    });
    assert_eq!(ended, 0, "how the child ended");
}

#[test]
fn a_scan_that_fails_leaves_nothing_of_a_buffer_behind() {
    // It goes after the ring: what another thread maps there next is not held.
    let (memory, mut found) = (Memory::anonymous(16), Dirty::new());
    let Some(ring) = ring() else { return };
    let tracker = DirtyTracker::with(Mechanism::Traps).unwrap();
    register(&ring, &memory, 3);
    let refusals = [tracker.scan(memory.range(), &mut found), tracker.scan_and_rearm(memory.range(), &mut found)];
    for refusal in refusals {
        assert_eq!(refusal.unwrap_err().kind(), Kind::Invalid, "it is not armed");
        assert!((0..16).all(|page| !found.contains(memory.page(page))) && found.pages() == 0);
    }
}

#[test]
fn a_buffer_registered_before_arming_counts_as_written_until_it_is_not() {
    let Some(tracker) = tracker() else { return };
    // As above.
    let memory = Memory::anonymous(16);
    let Some(mut ring) = ring() else { return };
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
