//! A tracker that passes over holes.

use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

use super::memory::{Memory, PAGE};
use super::{arm, pages, skip};

fn tracker() -> Option<DirtyTracker> {
    let tracker = DirtyTracker::with(Mechanism::WriteProtection);
    Some(tracker.map_err(|why| skip::skip("uffd", &why.to_string())).ok()?.passing_holes())
}

#[test]
fn only_pages_are_found_and_no_write_to_them_is_missed() {
    let Some(tracker) = tracker() else { return };
    let (memory, mut found) = (Memory::anonymous(64), Dirty::new());
    (0..32).for_each(|page| memory.write(page, 1));
    tracker.scan(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), (0..32).collect::<Vec<_>>(), "what was never armed");
    arm(&tracker, &memory);
    let mut check = |expected: &[usize], why: &str| {
        tracker.scan(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), expected, "a scan: {why}");
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), expected, "{why}");
        tracker.scan(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [], "armed again: {why}");
    };
    check(&[], "nothing was written");
    memory.write(5, 2);
    memory.write_by_kernel(6);
    memory.write(50, 2);
    check(&[5, 6, 50], "pages, and one that came to a hole");
    memory.advise(4..8, libc::MADV_DONTNEED);
    check(&[], "gone");
    assert_eq!(memory.read(7), 0);
    memory.write(4, 3);
    check(&[4, 7], "come again");
    memory.map_over(8..16);
    memory.write(9, 4);
    check(&[9], "mapped over");
    memory.write(9, 5);
    memory.write(15, 5);
    check(&[9, 15], "what was mapped over is armed");
}

#[test]
fn arming_takes_no_page_tables() {
    let Some(tracker) = tracker() else { return };
    let (memory, mut found) = (Memory::anonymous((4 << 30) / PAGE), Dirty::new());
    let before = page_tables_kib();
    arm(&tracker, &memory);
    memory.write(70_000, 1);
    for _ in 0..2 {
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    }
    assert_eq!(found.pages(), 0);
    let tables = page_tables_kib() - before;
    // Other tests run meanwhile. Armed as a whole it has 8 MiB.
    assert!(tables < 4 << 10, "{tables} KiB");
}

fn page_tables_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    line.split_ascii_whitespace().next().unwrap().parse().unwrap()
}
