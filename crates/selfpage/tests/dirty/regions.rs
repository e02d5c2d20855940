//! Regions whose pages come and go while they are watched.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};
use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{Answer, Domain, FileAccess, Kind, MemoryFault, Protection, Region, Trap};

use crate::bad::{refused, refuses_another};
use crate::memory::{Memory, PAGE};
use crate::shadow::{Beyond, compare, share};
use crate::{arm, fork, in_child, pages, skip};

const FRAMES: usize = 128;
const TRAPS: [Trap; 2] = [Trap::Worker, Trap::Upcall];

/// A domain, and a tracked region of so many pages.
fn region(trap: Trap, size_pages: usize) -> Option<(Domain, Region)> {
    let domain = match Domain::with_frames(FRAMES * PAGE).build() {
        Ok(domain) => domain,
        Err(why) => {
            skip::skip("uffd", &why.to_string());
            return None;
        }
    };
    let store = MemoryStore::new(2 * (size_pages * PAGE) as u64).unwrap();
    let region = domain.region(size_pages * PAGE).trap(trap).tracked().stored(store).unwrap();
    Some((domain, region))
}

/// Arms at a moment when the domain brings nothing in and moves nothing out.
fn arm_at_rest(tracker: &DirtyTracker, memory: &Memory) {
    let mut found = Dirty::new();
    for _ in 0..1000 {
        arm(tracker, memory);
        std::thread::sleep(std::time::Duration::from_millis(1));
        tracker.scan(memory.range(), &mut found).unwrap();
        if found.pages() == 0 {
            return;
        }
    }
    panic!("nothing was written, whether it is in core or not: {found:?}");
}

/// A page has one bit that tells of its next write.
#[test]
fn who_needs_that_bit_too_is_refused_and_the_tracker_goes_on() {
    for trap in TRAPS {
        let Some((domain, region)) = region(trap, 16) else { return };
        let (tracker, memory, mut found) = (DirtyTracker::new().unwrap(), Memory::of(&region), Dirty::new());
        (0..16).for_each(|page| memory.write(page, 1));
        arm_at_rest(&tracker, &memory);
        memory.write(3, 2);
        let (dir, store) = (tempfile::tempdir().unwrap(), || MemoryStore::new(1 << 20).unwrap());
        let handler = |_: &MemoryFault<'_>| Answer::Refuse;
        let refusals = [
            region.protect(0, PAGE, Protection::Read).unwrap_err(),
            region.cow_clone(store()).unwrap_err(),
            Snapshots::of(&[&region], dir.path().join("s")).unwrap_err(),
            domain.region(PAGE).trap(trap).tracked().handler(handler).stored(store()).unwrap_err(),
        ];
        for why in refusals {
            assert!(
                why.kind() == Kind::Invalid
                    && why.to_string().contains("leave `tracked` out, and note writes by a handler"),
                "{why}"
            );
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        memory.write(7, 2);
        tracker.scan(memory.range(), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [3, 7]);
    }
}

#[test]
fn arming_a_region_that_is_not_tracked_names_what_makes_it_so() {
    let Some((domain, _tracked)) = region(Trap::Worker, 1) else { return };
    let plain = domain.region(4 * PAGE).zero().unwrap();
    refused(
        &DirtyTracker::with(Mechanism::WriteProtection).unwrap(),
        Memory::of(&plain).range(),
        "`RegionBuilder::tracked`",
    );
}

#[test]
fn a_page_is_found_wherever_it_went_since() {
    for trap in TRAPS {
        let Some((_domain, region)) = region(trap, 4 * FRAMES) else { return };
        let (tracker, memory, mut found) = (DirtyTracker::new().unwrap(), Memory::of(&region), Dirty::new());
        tracker.scan(memory.range(), &mut found).unwrap();
        assert_eq!(found.pages(), 4 * FRAMES as u64, "never armed");
        (0..4 * FRAMES).for_each(|page| memory.write(page, page as u64));
        region.evict(0, region.len_bytes()).unwrap();
        assert_eq!([1, 200, 90, 400].map(|page| memory.read(page)), [1, 200, 90, 400]);
        arm_at_rest(&tracker, &memory);
        memory.write(1, 100);
        memory.write(200, 200);
        region.evict(PAGE, PAGE).unwrap();
        region.evict(200 * PAGE, PAGE).unwrap();
        memory.write(300, 300); // In core now, and new there.
        let check = |found: &Dirty| {
            let pages = pages(&memory, found);
            assert!([1, 200, 300].iter().all(|page| pages.contains(page)), "{trap:?}: {pages:?}");
            // The domain may bring in or move out a few others on its own.
            assert!(pages.len() < 100, "{trap:?}: {pages:?}");
        };
        for _ in 0..2 {
            tracker.scan(memory.range(), &mut found).unwrap();
            check(&found);
        }
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        check(&found);
        // A page that comes or goes during a scan is found by the next one too.
        let quiet = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
            found.pages() == 0
        });
        assert!(quiet, "{trap:?}: {found:?}");
        // Holes were armed too, and pages come to them.
        assert_eq!((memory.read(1), memory.read(50)), (100, 50));
        memory.write(90, 5);
        tracker.scan(memory.page(90)..memory.page(91), &mut found).unwrap();
        assert_eq!(pages(&memory, &found), [90], "{trap:?}");
        tracker.disarm(memory.range()).unwrap();
        tracker.scan(memory.range(), &mut found).unwrap();
        assert_eq!(found.pages(), 4 * FRAMES as u64);
    }
}

#[test]
fn no_write_is_missed_while_pages_come_and_go() {
    for trap in TRAPS {
        let Some((_domain, region)) = region(trap, 4 * FRAMES) else { return };
        compare(&DirtyTracker::new().unwrap(), &Memory::of(&region), 1, Beyond::Moved);
    }
}

/// What a pager never saves is moved out, looked at and put back, over and over, while it is written to and scanned.
#[test]
fn a_write_that_ended_before_the_scan_is_found_by_it_though_its_page_is_put_back() {
    const PAGES: usize = 64;
    for trap in TRAPS {
        let Some((domain, _)) = region(trap, FRAMES) else { return };
        let region = domain.region(PAGES * PAGE).trap(trap).tracked().zero().unwrap();
        let (memory, tracker, done) = (Memory::of(&region), DirtyTracker::new().unwrap(), AtomicBool::new(false));
        (0..PAGES).for_each(|page| memory.write(page, 1));
        arm(&tracker, &memory);
        std::thread::scope(|scope| {
            let evicts = || {
                while !done.load(Ordering::Relaxed) {
                    // None of them can go.
                    let _ = region.evict(0, PAGES * PAGE);
                }
            };
            scope.spawn(evicts);
            let mut found = Dirty::new();
            let missed = (0..8000_u64).find(|turn| {
                let page = (turn % PAGES as u64) as usize;
                memory.write(page, *turn);
                // An error is a find: the other thread ends all the same.
                tracker.scan_and_rearm(memory.range(), &mut found).is_err() || !pages(&memory, &found).contains(&page)
            });
            done.store(true, Ordering::Relaxed);
            assert_eq!(missed, None, "{trap:?}");
        });
    }
}

/// Pages that have left since they were armed are their tracker's still.
#[test]
fn a_region_is_one_trackers_until_all_that_it_armed_is_disarmed() {
    for trap in TRAPS {
        let Some((_domain, region)) = region(trap, 8) else { return };
        let (memory, [first, second]) = (Memory::of(&region), [(); 2].map(|()| DirtyTracker::new().unwrap()));
        (0..8).for_each(|page| memory.write(page, 1));
        arm(&first, &memory);
        memory.write(6, 2);
        region.evict(4 * PAGE, 4 * PAGE).unwrap();
        first.disarm(memory.page(0)..memory.page(4)).unwrap();
        refused(&second, memory.page(4)..memory.range().end, "another tracker watches");
        let mut found = Dirty::new();
        first.scan_and_rearm(memory.page(4)..memory.range().end, &mut found).unwrap();
        assert!(pages(&memory, &found).contains(&6), "{trap:?}: {found:?}");
        first.disarm(memory.page(4)..memory.range().end).unwrap();
        arm(&second, &memory);
    }
}

#[test]
fn nothing_else_is_found_where_pages_stay() {
    for trap in TRAPS {
        let Some((_domain, region)) = region(trap, FRAMES / 2) else { return };
        let memory = Memory::of(&region);
        (0..FRAMES / 2).for_each(|page| memory.write(page, 1));
        let tracker = DirtyTracker::new().unwrap();
        arm_at_rest(&tracker, &memory); // A page is with its writer a moment before the domain has done with it.
        compare(&tracker, &memory, 1, Beyond::Nothing);
        share(&tracker, &memory);
    }
}

#[test]
fn discarded_pages_of_a_region_count_as_written() {
    let Some((_domain, mut region)) = region(Trap::Worker, 2 * FRAMES) else { return };
    let (tracker, memory, mut found) = (DirtyTracker::new().unwrap(), Memory::of(&region), Dirty::new());
    (0..2 * FRAMES).for_each(|page| memory.write(page, 1));
    region.evict(0, region.len_bytes()).unwrap();
    assert_eq!(memory.read(7), 1);
    arm_at_rest(&tracker, &memory);
    region.discard(7 * PAGE, PAGE).unwrap();
    region.discard(9 * PAGE, PAGE).unwrap();
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert!(found.contains(memory.page(7)) && found.contains(memory.page(9)), "{found:?}");
}

#[test]
fn a_forked_child_has_the_region_dirty_until_it_arms() {
    let Some((_domain, region)) = region(Trap::Worker, 2 * FRAMES) else { return };
    let (tracker, memory, mut found) = (DirtyTracker::new().unwrap(), Memory::of(&region), Dirty::new());
    (0..2 * FRAMES).for_each(|page| memory.write(page, 1));
    (0..16).for_each(|page| assert_eq!(memory.read(page), 1));
    arm(&tracker, &memory);
    memory.write(3, 2);
    let child = fork(|| {
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert_eq!(found.pages(), 2 * FRAMES as u64);
        memory.write(5, 2);
        tracker.scan(memory.range(), &mut found).unwrap();
        assert!(found.contains(memory.page(5)));
    });
    memory.write(7, 2);
    assert_eq!(child.wait(), 0, "what the child found");
    tracker.scan(memory.range(), &mut found).unwrap();
    assert!(found.contains(memory.page(3)) && found.contains(memory.page(7)));
}

/// Has another thread arm the memory, whose tracker the child does not know of.
fn a_child_tracks_it_anew(memory: &Memory, tracker: fn() -> DirtyTracker) {
    let (tell, told) = channel();
    let (end, ends) = channel::<()>();
    let range = memory.range();
    let other = std::thread::spawn(move || {
        let tracker = tracker();
        // SAFETY: the memory is the test's.
        unsafe { tracker.arm(range.clone()) }.unwrap();
        tell.send(()).unwrap();
        let _ = ends.recv();
        tracker.disarm(range).unwrap();
    });
    told.recv().unwrap();
    let ended = in_child(|| {
        let (tracker, mut found) = (tracker(), Dirty::new());
        arm(&tracker, memory);
        memory.write(3, 1);
        tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
        assert!(found.contains(memory.page(3)), "{found:?}");
        tracker.disarm(memory.range()).unwrap();
    });
    assert_eq!(ended, 0, "what the child found");
    let why = tracker().scan_and_rearm(memory.range(), &mut Dirty::new()).unwrap_err();
    assert!(why.to_string().contains("another tracker watches"), "{why}");
    drop(end);
    other.join().unwrap();
}

#[test]
fn a_forked_child_tracks_what_another_thread_had_armed() {
    let by_traps = || DirtyTracker::with(Mechanism::Traps).unwrap();
    a_child_tracks_it_anew(&Memory::anonymous(FRAMES), by_traps);
    for trap in TRAPS {
        let Some((_domain, region)) = region(trap, FRAMES) else { return };
        a_child_tracks_it_anew(&Memory::of(&region), || DirtyTracker::new().unwrap());
    }
}

#[test]
fn what_cannot_be_tracked_is_refused() {
    let Some((domain, region)) = region(Trap::Worker, FRAMES) else { return };
    let refused = domain.region(0).tracked().file("/proc/self/exe", 0, FileAccess::Read).map(drop).unwrap_err();
    assert!(refused.to_string().contains("only be read") || refused.kind() == Kind::Invalid, "{refused}");
    let plain = domain.region(FRAMES * PAGE).zero().unwrap();
    let tracker = DirtyTracker::new().unwrap();
    // SAFETY: the memory is the test's.
    let why = unsafe { tracker.arm(Memory::of(&plain).range()) }.unwrap_err();
    assert!(why.kind() == Kind::Invalid && why.to_string().contains("region of a domain"), "{why}");
    let range = Memory::of(&region).range();
    let beside = Memory::anonymous(4);
    let (start, end) = (range.start.min(beside.range().start), range.end.max(beside.range().end));
    // SAFETY: as above.
    assert_eq!(unsafe { tracker.arm(start..end) }.unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_region_has_one_tracker_at_a_time() {
    for trap in TRAPS {
        let Some((_domain, region)) = region(trap, FRAMES) else { return };
        refuses_another(&Memory::of(&region), || DirtyTracker::new().unwrap());
        let (tracker, memory, mut found) = (DirtyTracker::new().unwrap(), Memory::of(&region), Dirty::new());
        let halves = [memory.page(0)..memory.page(FRAMES / 2), memory.page(FRAMES / 2)..memory.range().end];
        // SAFETY: the memory is the test's.
        halves.iter().cloned().for_each(|half| unsafe { tracker.arm(half) }.unwrap());
        tracker.disarm(halves[0].clone()).unwrap();
        let other = DirtyTracker::new().unwrap();
        let why = other.scan_and_rearm(halves[0].clone(), &mut found).unwrap_err();
        assert!(why.to_string().contains("another tracker watches"), "{why}");
        tracker.disarm(halves[1].clone()).unwrap();
        other.scan_and_rearm(halves[0].clone(), &mut found).unwrap();
        drop(tracker);
        assert!(other.scan_and_rearm(halves[1].clone(), &mut found).is_ok());
        drop(other);
        DirtyTracker::new().unwrap().scan(memory.range(), &mut found).unwrap();
        assert_eq!(found.pages(), FRAMES as u64, "nobody watches it any more");
    }
}

#[test]
fn a_scan_that_ends_half_way_forgets_no_write() {
    for trap in TRAPS {
        // By itself, as others fork, which goes badly while something else lies over a part of a region.
        let ended = in_child(|| {
            let Some((_domain, region)) = region(trap, FRAMES / 2) else { return };
            let (tracker, memory, mut found) = (DirtyTracker::new().unwrap(), Memory::of(&region), Dirty::new());
            (0..FRAMES / 2).for_each(|page| memory.write(page, 1));
            arm_at_rest(&tracker, &memory);
            memory.write(3, 2);
            memory.map_over(32..33);
            let why = tracker.scan_and_rearm(memory.range(), &mut found).unwrap_err();
            assert!(why.kind() == Kind::Invalid && why.to_string().contains("mapped something else"), "{why}");
            tracker.scan(memory.page(0)..memory.page(32), &mut found).unwrap();
            assert!(found.contains(memory.page(3)), "{trap:?}: {found:?}");
        });
        assert_eq!(ended, 0, "how the child ended");
    }
}

#[test]
fn a_region_that_could_not_be_armed_is_nobodys() {
    for trap in TRAPS {
        // By itself, as above.
        let ended = in_child(|| {
            let Some((_domain, region)) = region(trap, FRAMES / 2) else { return };
            let (tracker, memory) = (DirtyTracker::new().unwrap(), Memory::of(&region));
            memory.map_over(32..33);
            let (front, rest) = (memory.page(0)..memory.page(16), memory.page(16)..memory.range().end);
            // SAFETY: the memory is the test's.
            let arm = |tracker: &DirtyTracker, range: &std::ops::Range<usize>| unsafe { tracker.arm(range.clone()) };
            assert_eq!(arm(&tracker, &rest).unwrap_err().kind(), Kind::Invalid, "{trap:?}");
            let other = DirtyTracker::new().unwrap();
            arm(&other, &front).unwrap();
            // What it has armed before keeps the region.
            assert_eq!(other.scan_and_rearm(rest, &mut Dirty::new()).unwrap_err().kind(), Kind::Invalid, "{trap:?}");
            let why = arm(&tracker, &front).unwrap_err();
            assert!(why.to_string().contains("another tracker watches"), "{trap:?}: {why}");
        });
        assert_eq!(ended, 0, "how the child ended");
    }
}
