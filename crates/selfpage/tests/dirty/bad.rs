//! Ranges that cannot be watched: a clear error, and nothing changed.

use selfpage::Kind;
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

use crate::child::forked;
use crate::memory::{Memory, PAGE};
use crate::{arm, in_child, pages, tracker};

pub fn refused(tracker: &DirtyTracker, range: std::ops::Range<usize>, expected: &str) {
    let mut found = Dirty::new();
    // SAFETY: the memory is the test's, or nobody's.
    let refusals = [
        unsafe { tracker.arm(range.clone()) },
        tracker.scan_and_rearm(range.clone(), &mut found),
        tracker.disarm(range.clone()),
    ];
    for refusal in refusals {
        let why = refusal.unwrap_err();
        assert!(why.kind() == Kind::Invalid && why.to_string().contains(expected), "{why}");
    }
}

#[test]
fn an_empty_range_is_armed_and_clean_by_either_mechanism() {
    let (memory, mut found) = (Memory::anonymous(1), Dirty::new());
    for tracker in [tracker(), DirtyTracker::with(Mechanism::Traps).ok()].into_iter().flatten() {
        for at in [0, memory.range().start, usize::MAX - PAGE + 1] {
            // SAFETY: there is no memory in it.
            unsafe { tracker.arm(at..at) }.unwrap();
            tracker.scan(at..at, &mut found).unwrap();
            tracker.scan_and_rearm(at..at, &mut found).unwrap();
            assert_eq!(found.pages(), 0);
            tracker.disarm(at..at).unwrap();
        }
    }
}

#[test]
fn a_range_that_cannot_be_watched_is_refused_and_nothing_changes() {
    let Some(ours) = tracker() else { return };
    let (memory, mut found) = (Memory::anonymous(64), Dirty::new());
    let range = memory.range();
    arm(&ours, &memory);
    memory.write(9, 1);

    refused(&ours, range.start + 1..range.end, "cuts a page");
    refused(&ours, range.start..range.end - 100, "cuts a page");
    refused(&ours, range.end..range.start, "ends before it begins");
    refused(&ours, 0..PAGE, "not mapped");
    let theirs = DirtyTracker::new().unwrap();
    refused(&theirs, range.clone(), "another userfaultfd");
    let beside = Memory::anonymous(64);
    refused(&theirs, beside.range().start.min(range.start)..beside.range().end.max(range.end), "");

    ours.scan(range.clone(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [9]);
    ours.disarm(range.clone()).unwrap();
    // SAFETY: the memory is the test's.
    unsafe { theirs.arm(range.clone()).unwrap() };
    memory.write(10, 1);
    theirs.scan(range, &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [10]);
    // SAFETY: as above.
    unsafe { theirs.arm(0..0).unwrap() };
}

/// What one has found and armed again, the other would miss.
pub fn refuses_another(memory: &Memory, trackers: impl Fn() -> DirtyTracker) {
    let (ours, theirs, mut found) = (trackers(), trackers(), Dirty::new());
    arm(&ours, memory);
    memory.write(9, 1);
    refused(&theirs, memory.range(), "another tracker watches");
    // Reading them changes nothing, so it may.
    theirs.scan(memory.range(), &mut found).unwrap();
    assert!(found.contains(memory.page(9)));
    drop(theirs);
    ours.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert!(found.contains(memory.page(9)));
    ours.disarm(memory.range()).unwrap();

    let theirs = trackers();
    arm(&theirs, memory);
    memory.write(10, 1);
    refused(&ours, memory.range(), "another tracker watches");
    drop(theirs);
    arm(&ours, memory);
    memory.write(11, 1);
    ours.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert!(found.contains(memory.page(11)));
    ours.disarm(memory.range()).unwrap();
}

#[test]
fn a_range_that_another_tracker_has_armed_by_traps_is_refused() {
    refuses_another(&Memory::anonymous(64), || DirtyTracker::with(Mechanism::Traps).unwrap());
}

#[test]
fn a_range_that_was_unmapped_or_mapped_over_is_never_clean() {
    // By itself: what other threads map could come to lie in the hole.
    let ended = in_child(|| {
        let Some(tracker) = tracker() else { return };
        let (memory, mut found) = (Memory::anonymous(64), Dirty::new());
        arm(&tracker, &memory);
        let (from, len) = (memory.page(16), 8 * PAGE);
        // SAFETY: the test's own memory, to which nobody holds a reference.
        unsafe { libc::munmap(from as *mut _, len) };
        refused(&tracker, memory.range(), "not mapped");
        let why = tracker.scan(memory.range(), &mut found).unwrap_err();
        assert!(why.to_string().contains("not mapped"), "{why}");

        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the place is free.
        let over = unsafe { libc::mmap(from as *mut _, len, access, flags | libc::MAP_FIXED_NOREPLACE, -1, 0) };
        assert_eq!(over as usize, from);
        let new: Vec<usize> = (16..24).collect();
        for _ in 0..2 {
            tracker.scan(memory.range(), &mut found).unwrap();
            assert_eq!(pages(&memory, &found), new);
        }
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), new);
        memory.write(17, 1);
        memory.write(40, 1);
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [17, 40]);
    });
    assert_eq!(ended, 0, "what the child found is above");
}

#[test]
fn a_tracker_whose_descriptors_were_closed_says_so() {
    // By itself: other threads could open something by those numbers.
    forked(|| {
        let Some(tracker) = tracker() else { return };
        let memory = Memory::anonymous(8);
        arm(&tracker, &memory);
        for number in numbers(&tracker) {
            // SAFETY: what a program does that closes whatever is open.
            unsafe { libc::close(number) };
        }
        let mut found = Dirty::new();
        assert!(tracker.scan(memory.range(), &mut found).is_err());
        assert!(tracker.scan_and_rearm(memory.range(), &mut found).is_err());
    });
}

/// The numbers that a tracker shows when it is printed.
fn numbers(tracker: &DirtyTracker) -> Vec<i32> {
    let shown = format!("{tracker:?}");
    shown.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}
