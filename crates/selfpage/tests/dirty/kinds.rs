//! What the kernel does with pages on its own, and what the program does other than writing.

use std::ops::Range;

use selfpage::Kind;
use selfpage::dirty::{Dirty, DirtyTracker};

use crate::child::forked;
use crate::memory::{HUGE, HugePages, Memory, PAGE};
use crate::swap::Swap;
use crate::traps::{apart, mappings_allowed, use_up_mappings};
use crate::{arm, fork, pages, tracker};

#[test]
fn discarded_pages_count_as_written_once() {
    let Some(tracker) = tracker() else { return };
    let (memory, mut found) = (Memory::anonymous(4 * HUGE / PAGE), Dirty::new());
    (0..1500).for_each(|page| memory.write(page, 1));
    arm(&tracker, &memory);
    memory.advise(3..4, libc::MADV_DONTNEED);
    memory.advise(1000..1900, libc::MADV_DONTNEED); // Whole tables of pages among them.
    let discarded: Vec<usize> = (3..4).chain(1000..1900).collect();
    tracker.scan(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), discarded);
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), discarded);
    memory.write(1100, 2);
    assert_eq!(memory.read(3), 0);
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [1100]);
}

/// What docs/dirty.md says of contents that go in other memory than private anonymous: whoever removes them writes to the pages, too.
#[test]
fn removed_pages_of_other_memory_count_where_they_are_written_before_or_after() {
    let Some(tracker) = tracker() else { return };
    let advise = |advice| move |memory: &Memory, pages: Range<usize>| memory.advise(pages, advice);
    let (memfd, file) = Memory::of_memfd(16);
    let cut_off = move |memory: &Memory, pages: Range<usize>| {
        assert_eq!(pages.end * PAGE, memory.range().len());
        file.set_len((pages.start * PAGE) as u64).unwrap();
        file.set_len((pages.end * PAGE) as u64).unwrap();
    };
    check_removal(&tracker, &memfd, 1, cut_off);
    check_removal(&tracker, &Memory::memfd(16), 1, advise(libc::MADV_REMOVE));
    check_removal(&tracker, &Memory::shared(16), 1, advise(libc::MADV_REMOVE));
    for (sharing, advice) in [(libc::MAP_PRIVATE, libc::MADV_DONTNEED), (libc::MAP_SHARED, libc::MADV_REMOVE)] {
        let aside = HugePages::set_aside(10);
        if let Some(memory) = Memory::of_huge_pages(&aside, 5 * HUGE / PAGE, sharing) {
            check_removal(&tracker, &memory, HUGE / PAGE, advise(advice));
        }
    }
}

/// Removes the last four units, of `grain` pages each, and writes to two of them.
fn check_removal(tracker: &DirtyTracker, memory: &Memory, grain: usize, remove: impl Fn(&Memory, Range<usize>)) {
    let size_pages = memory.range().len() / PAGE;
    let mut found = Dirty::new();
    let removed: Vec<usize> = (size_pages - 4 * grain..size_pages).step_by(grain).collect();
    (0..size_pages).step_by(grain).for_each(|page| memory.write(page, 1));
    arm(tracker, memory);
    memory.write(removed[1], 2);
    remove(memory, removed[0]..size_pages);
    memory.write(removed[2], 3);
    // This one is read, as `removed[0]` is not.
    assert_eq!(memory.read(removed[3]), 0, "{memory:?}");
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    let expected: Vec<usize> = (removed[1]..removed[3]).collect();
    // More than these: the kernel tells more than it did, which docs/dirty.md is to say.
    assert_eq!(pages(memory, &found), expected, "{memory:?}");
    assert_eq!([0, 1, 2].map(|unit| memory.read(removed[unit])), [0, 0, 3], "{memory:?}");
}

#[test]
fn a_mapping_that_was_moved_counts_as_written() {
    // By itself: what other threads map could come to lie where it was.
    forked(|| {
        let Some(tracker) = tracker() else { return };
        let (memory, place, mut found) = (Memory::anonymous(64), Memory::anonymous(64), Dirty::new());
        (0..64).for_each(|page| memory.write(page, 1));
        arm(&tracker, &memory);
        let (from, flags) = (memory.range(), libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
        // SAFETY: both are the test's own, and nobody holds a reference into either.
        let moved = unsafe { libc::mremap(from.start as *mut _, from.len(), from.len(), flags, place.page(0)) };
        assert_eq!(moved as usize, place.page(0));
        assert_eq!(place.read(40), 1);
        for _ in 0..2 {
            tracker.scan(place.range(), &mut found).unwrap();
            assert_eq!(found.pages(), 64, "it was armed elsewhere");
        }
        tracker.scan_and_rearm(place.range(), &mut found).unwrap();
        assert_eq!(found.pages(), 64);
        place.write(40, 2);
        tracker.scan_and_rearm(place.range(), &mut found).unwrap();
        assert_eq!(pages(&place, &found), [40]);
        assert!(tracker.scan(from, &mut found).unwrap_err().to_string().contains("not mapped"));
    });
}

/// Memory of three mappings that are armed but for the last, and of which mremap has moved the second to its place: the kernel makes one mapping
/// of the first two then, and watches neither any more. The pages of the first are protected still. Where they begin, a third of the memory each.
fn merged(tracker: &DirtyTracker) -> (Memory, [usize; 3]) {
    const PAGES: usize = 16;
    // What was a part of the same mapping before would be no part of it later.
    let ((memory, first), (_around, other)) = (apart(3 * PAGES), apart(PAGES));
    let len = PAGES * PAGE;
    let (second, third) = (first + len, first + 2 * len);
    (1..=PAGES).for_each(|page| memory.write(page, 1));
    // SAFETY: both are the test's own, and nobody holds a reference into either.
    let moved = unsafe {
        tracker.arm(first..second).unwrap();
        tracker.arm(other..other + len).unwrap();
        libc::mremap(other as *mut _, len, len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, second)
    };
    assert_eq!(moved as usize, second);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains(&format!("{first:x}-{third:x} ")), "they are not one mapping:\n{maps}");
    (memory, [first, second, third])
}

#[test]
fn mappings_that_mremap_has_merged_count_as_written() {
    // By itself: as above.
    forked(|| {
        let Some(tracker) = tracker() else { return };
        for scans in [DirtyTracker::scan, DirtyTracker::scan_and_rearm] {
            let ((memory, [first, second, _]), mut found) = (merged(&tracker), Dirty::new());
            memory.write(5, 2);
            scans(&tracker, first..second, &mut found).unwrap();
            assert!(found.contains(memory.page(5)), "{found:?}");
            memory.write(6, 2);
            tracker.scan_and_rearm(first..second, &mut found).unwrap();
            assert!(found.contains(memory.page(6)), "{found:?}");
            memory.write(7, 2);
            tracker.scan_and_rearm(first..second, &mut found).unwrap();
            assert_eq!(pages(&memory, &found), [7]);
        }
    });
}

/// The kernel watches the mappings before the one that it cannot split, and what is protected there may have been written to.
#[test]
fn a_range_that_can_be_watched_only_in_part_counts_as_written() {
    // By itself: as above.
    forked(|| {
        type Operation = fn(&DirtyTracker, Range<usize>) -> selfpage::Result<()>;
        let scan_and_rearm: Operation = |tracker, range| tracker.scan_and_rearm(range, &mut Dirty::new());
        // SAFETY: the memory is the test's.
        let arm: Operation = |tracker, range| unsafe { tracker.arm(range) };
        let (Some(tracker), Some(allowed)) = (tracker(), mappings_allowed()) else { return };
        let cases = [scan_and_rearm, arm, DirtyTracker::disarm].map(|operation| {
            let (memory, bounds) = merged(&tracker);
            // Else the kernel would make a part of it one with what is before.
            // SAFETY: the test's own mapping.
            assert_eq!(unsafe { libc::mprotect(bounds[2] as *mut _, 2 * PAGE, libc::PROT_READ) }, 0);
            (operation, memory, bounds)
        });
        let all = use_up_mappings(allowed);
        let seen = cases.each_ref().map(|(operation, memory, [first, _, third])| {
            memory.write(5, 2);
            let why = operation(&tracker, *first..third + PAGE).unwrap_err();
            let mut found = Dirty::new();
            tracker.scan(*first..*third, &mut found).unwrap();
            (why.kind(), found.contains(memory.page(5)))
        });
        // Whoever panics needs memory.
        drop(all);
        assert_eq!(seen, [(Kind::OutOfSpace, true); 3]);
    });
}

#[test]
fn a_forked_child_has_everything_dirty_until_it_arms() {
    let Some(tracker) = tracker() else { return };
    let (memory, mut found) = (Memory::anonymous(32), Dirty::new());
    (0..16).for_each(|page| memory.write(page, 1));
    arm(&tracker, &memory);
    memory.write(3, 2);
    let mut tracker = Some(tracker);
    let child = fork(|| {
        let tracker = tracker.take().unwrap();
        tracker.scan(memory.range(), &mut found).unwrap();
        assert_eq!(found.pages(), 32);
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(found.pages(), 32);
        memory.write(5, 2);
        memory.write(20, 2);
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [5, 20]);
        drop(tracker);
    });
    let tracker = tracker.unwrap();
    memory.write(7, 2);
    assert_eq!(child.wait(), 0, "what the child found");
    tracker.scan(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [3, 7], "the child's arming and its end are nothing to the parent");
    memory.write(8, 2);
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [3, 7, 8]);
}

#[test]
fn a_transparent_huge_page_is_split_by_its_first_write() {
    let (Some(tracker), Some(memory)) = (tracker(), Memory::huge(4 * HUGE / PAGE)) else { return };
    let mut found = Dirty::new();
    (0..4).for_each(|huge| memory.write(huge * 512, 1));
    arm(&tracker, &memory);
    tracker.scan(memory.range(), &mut found).unwrap();
    assert_eq!(found.pages(), 0);
    memory.write(600, 2);
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [600]);
    memory.advise(1024..1536, libc::MADV_DONTNEED);
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), (1024..1536).collect::<Vec<_>>());
    // A part of a huge page, armed by itself.
    // SAFETY: the memory is the test's.
    unsafe { tracker.arm(memory.page(1600)..memory.page(1700)).unwrap() };
    memory.write(1650, 2);
    tracker.scan(memory.page(1600)..memory.page(1700), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [1650]);
}

#[test]
fn a_page_of_hugetlb_is_written_as_a_whole() {
    let (Some(tracker), Some(memory)) = (tracker(), Memory::hugetlb(4 * HUGE / PAGE, libc::MAP_PRIVATE)) else {
        return;
    };
    let mut found = Dirty::new();
    memory.write(0, 1);
    memory.write(512, 1);
    arm(&tracker, &memory);
    memory.write(600, 2);
    memory.write(1100, 2);
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert!(found.ranges().eq(std::iter::once(memory.page(512)..memory.page(1536))), "{found:?}");
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert_eq!(found.pages(), 0);
    // SAFETY: the memory is the test's.
    let why = unsafe { tracker.arm(memory.page(0)..memory.page(700)) }.unwrap_err();
    assert!(why.to_string().contains("hugetlb"), "{why}");
}

#[test]
fn swapping_is_no_write_and_hides_none() {
    let Some(tracker) = tracker() else { return };
    let Some(swap) = Swap::on() else { return };
    let (memory, mut found) = (Memory::anonymous(64), Dirty::new());
    (0..32).for_each(|page| memory.write(page, 1));
    arm(&tracker, &memory);
    memory.write(5, 2);
    memory.advise(0..64, libc::MADV_PAGEOUT);
    let swapped = memory.swapped();
    tracker.scan(memory.range(), &mut found).unwrap();
    let while_out = pages(&memory, &found);
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert_eq!((memory.read(5), memory.read(6)), (2, 1));
    memory.write(7, 2);
    memory.advise(0..64, libc::MADV_PAGEOUT);
    tracker.scan(memory.range(), &mut found).unwrap();
    drop(swap);
    assert!(swapped > 0, "nothing was swapped out");
    assert_eq!((while_out, pages(&memory, &found)), (vec![5], vec![7]));
    tracker.scan(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [7], "brought back by swapoff");
}

/// To ask whether a mapping is watched must not bring in what shared memory has for it: those pages would count as written.
#[test]
fn a_scan_maps_nothing() {
    let Some(tracker) = tracker() else { return };
    for memory in [Memory::private_memfd(64), Memory::memfd(64), Memory::shared(64)] {
        let mut found = Dirty::new();
        // Another mapping of the same memory would do as well: the pages are there, and not mapped here.
        memory.advise(0..64, libc::MADV_POPULATE_READ);
        memory.advise(0..64, libc::MADV_DONTNEED);
        arm(&tracker, &memory);
        memory.write(20, 1);
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [20], "{memory:?}");
    }
}
