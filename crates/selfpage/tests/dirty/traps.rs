//! The fallback where the kernel notes nothing: `mprotect` and `SIGSEGV`.

use std::sync::atomic::{AtomicBool, Ordering};

use selfpage::Kind;
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

use crate::memory::{Memory, PAGE};
use crate::{Stop, arm, in_child, pages, skip};

/// As many mappings as the kernel may be made to allow here: each takes a few hundred bytes of the kernel's.
const MOST_MAPPINGS: usize = 1 << 20;

/// Mappings that a process may have, or none where they are too many to be made.
pub fn mappings_allowed() -> Option<usize> {
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if allowed > MOST_MAPPINGS {
        skip::skip("mappings", &format!("{allowed} are allowed: sysctl -w vm.max_map_count={MOST_MAPPINGS}"));
        return None;
    }
    Some(allowed)
}

/// Has the process have as many mappings as it may, which is `allowed`, until what it returns is dropped: a mapping can be split no more.
pub fn use_up_mappings(allowed: usize) -> Memory {
    let pages = allowed + 16;
    let memory = Memory::anonymous(pages);
    // SAFETY: a part of a fresh mapping.
    let split = |page: usize| unsafe { libc::mprotect(memory.page(page) as *mut _, PAGE, libc::PROT_READ) } == 0;
    assert!((1..pages).step_by(2).any(|page| !split(page)), "more mappings than allowed");
    memory
}

/// Memory that the kernel makes one mapping with no other.
pub fn apart(pages: usize) -> (Memory, usize) {
    let memory = Memory::anonymous(pages + 2);
    for page in [0, pages + 1] {
        // SAFETY: the test's own mapping.
        assert_eq!(unsafe { libc::mprotect(memory.page(page) as *mut _, PAGE, libc::PROT_NONE) }, 0);
    }
    let start = memory.page(1);
    (memory, start)
}

#[test]
fn ranges_that_are_one_mapping_are_written_and_disarmed_where_it_cannot_be_split() {
    let Some(allowed) = mappings_allowed() else { return };
    for written in [true, false] {
        let ended = in_child(|| {
            let (memory, start) = apart(24);
            let tracker = DirtyTracker::with(Mechanism::Traps).unwrap();
            let part = |index: usize| start + index * 8 * PAGE..start + (index + 1) * 8 * PAGE;
            let mut found = Dirty::with_room(8 * PAGE);
            // SAFETY: the memory is the test's.
            (0..3).for_each(|index| unsafe { tracker.arm(part(index)).unwrap() });
            let _all = use_up_mappings(allowed);
            if written {
                memory.write(12, 1);
                tracker.scan(part(1), &mut found).unwrap();
                assert_eq!(found.pages(), 8, "what was opened counts as written");
            }
            tracker.disarm(part(1)).unwrap();
            (1..25).for_each(|page| memory.write(page, 2));
            for beside in [part(0), part(2)] {
                tracker.scan(beside.clone(), &mut found).unwrap();
                assert_eq!(found.ranges().collect::<Vec<_>>(), [beside], "what was opened counts as written");
            }
        });
        assert_eq!(ended, 0, "how the child ended");
    }
}

/// A thread of its parent's is in the middle of arming at any moment, and the child has nobody who would end that.
#[test]
fn a_child_forked_while_others_arm_finds_each_write() {
    const PAGES: usize = 512;
    let tracker = DirtyTracker::with(Mechanism::Traps).unwrap();
    let [memory, other] = [(); 2].map(|()| Memory::anonymous(PAGES));
    arm(&tracker, &memory);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            let mut found = Dirty::with_room(PAGES * PAGE);
            while !stop.load(Ordering::Relaxed) {
                tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
            }
        });
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                arm(&tracker, &other);
                tracker.disarm(other.range()).unwrap();
            }
        });
        for round in 0..100 {
            (0..PAGES).for_each(|page| memory.write(page, round));
            let ended = in_child(|| {
                let mut found = Dirty::with_room(PAGES * PAGE);
                (0..PAGES).for_each(|page| memory.write(page, round + 1));
                tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
                assert_eq!(found.pages(), PAGES as u64, "a page was open, and not noted");
                arm(&tracker, &other);
                other.write(3, 1);
                tracker.scan(other.range(), &mut found).unwrap();
                assert_eq!(pages(&other, &found), [3]);
            });
            assert_eq!(ended, 0, "how the child ended");
        }
    });
}

#[test]
fn a_range_that_is_one_mapping_with_others_stays_armed_where_it_cannot_be_split() {
    let Some(allowed) = mappings_allowed() else { return };
    let ended = in_child(|| {
        let (_memory, start) = apart(24);
        let tracker = DirtyTracker::with(Mechanism::Traps).unwrap();
        let range = start..start + 8 * PAGE;
        let mut found = Dirty::with_room(range.len());
        // SAFETY: the test's own memory, which may only be read from now on.
        assert_eq!(unsafe { libc::mprotect(range.end as *mut _, 16 * PAGE, libc::PROT_READ) }, 0);
        // SAFETY: as above.
        unsafe { tracker.arm(range.clone()).unwrap() };
        let _all = use_up_mappings(allowed);
        let why = tracker.disarm(range.clone()).unwrap_err();
        assert_eq!(why.kind(), Kind::OutOfSpace, "{why}");
        tracker.scan(range, &mut found).unwrap();
        assert_eq!(found.pages(), 8, "it is armed, and all of it counts as written");
    });
    assert_eq!(ended, 0, "how the child ended");
}

#[test]
fn arming_that_ends_half_way_leaves_every_write_through() {
    let Some(allowed) = mappings_allowed() else { return };
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
        let _all = use_up_mappings(allowed);
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

#[test]
fn ranges_that_are_disarmed_make_room_for_others() {
    // By itself: other tests arm ranges too.
    let ended = in_child(|| {
        const MOST: usize = 64;
        let tracker = DirtyTracker::with(Mechanism::Traps).unwrap();
        // What another test has armed and given back may have been there, and is armed still. All are there before one is looked at.
        let mut tried = [(); 16].map(|()| Memory::anonymous(4 * MOST)).into_iter();
        // SAFETY: the memory is the test's.
        let is_free = |memory: &Memory| unsafe { tracker.arm(memory.range()) }.is_ok();
        let (memory, mut found) = (tried.find(is_free).unwrap(), Dirty::new());
        tracker.disarm(memory.range()).unwrap();
        let range = |index: usize| memory.page(index)..memory.page(index) + PAGE;
        // SAFETY: the memory is the test's.
        let armed = |index: usize| unsafe { tracker.arm(range(index)) };
        // What other tests have armed at the fork stays so here.
        let count = (0..MOST).take_while(|index| armed(2 * index).is_ok()).count();
        assert!(count > MOST / 2);
        (0..count).for_each(|index| tracker.disarm(range(2 * index)).unwrap());
        for round in 1..4 {
            let all = || (0..count).map(|index| round + 2 * index);
            all().for_each(|index| armed(index).unwrap());
            let why = armed(4 * MOST - 1).unwrap_err();
            assert!(why.kind() == Kind::OutOfSpace && why.to_string().contains("disarm one"), "{why}");
            for index in all() {
                memory.write(index, 1);
                tracker.scan_and_rearm(range(index), &mut found).unwrap();
                assert_eq!(pages(&memory, &found), [index]);
                tracker.disarm(range(index)).unwrap();
            }
        }
    });
    assert_eq!(ended, 0, "how the child ended");
}

#[test]
fn memory_with_other_rights_is_refused_and_keeps_them() {
    /// The rights of the three mappings from `start` on.
    fn rights(start: usize) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let from_here = maps.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-"))).take(3);
        from_here.map(|line| line.split(' ').nth(1).unwrap().to_owned()).collect()
    }
    for (access, letters) in [(libc::PROT_NONE, "---p"), (libc::PROT_READ, "r--p"), (7, "rwxp")] {
        let (_memory, start) = apart(8);
        let page = |index: usize| start + index * PAGE;
        // SAFETY: the test's own mapping.
        assert_eq!(unsafe { libc::mprotect(page(3) as *mut _, PAGE, access) }, 0);
        let before = rights(start);
        assert_eq!(before[1], letters);
        let tracker = DirtyTracker::with(Mechanism::Traps).unwrap();
        // SAFETY: the memory is the test's.
        let why = unsafe { tracker.arm(start..page(8)) }.unwrap_err();
        assert!(why.kind() == Kind::Invalid && why.to_string().contains("read and written and not executed"), "{why}");
        assert_eq!(rights(start), before);
        // What is beside it can be armed, overlaps are refused, and it may be armed again as it was.
        let part = page(4)..page(8);
        // SAFETY: as above.
        unsafe {
            tracker.arm(part.clone()).unwrap();
            let why = tracker.arm(page(5)..page(6)).unwrap_err();
            assert!(why.kind() == Kind::Invalid && why.to_string().contains("overlaps another"), "{why}");
            tracker.arm(part.clone()).unwrap();
        }
        tracker.disarm(part).unwrap();
    }
}

/// It would be writable afterwards, and not read-only any more.
#[test]
fn memory_whose_rights_cannot_be_looked_at_is_refused() {
    let ended = in_child(|| {
        let (_memory, start) = apart(1);
        let tracker = DirtyTracker::with(Mechanism::Traps).unwrap();
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the test's own mapping, and a value of ours.
        unsafe {
            assert_eq!(libc::mprotect(start as *mut _, PAGE, libc::PROT_READ), 0);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &none), 0);
        }
        // SAFETY: the memory is the test's.
        let why = unsafe { tracker.arm(start..start + PAGE) }.unwrap_err();
        let said = why.to_string();
        assert_eq!(why.kind(), Kind::OutOfSpace, "{said}");
        assert!(["/proc/thread-self/maps", "ulimit -n"].iter().all(|word| said.contains(word)), "{said}");
    });
    assert_eq!(ended, 0, "how the child ended");
}

#[test]
fn a_jump_into_an_armed_page_ends_the_program() {
    let ended = in_child(|| {
        let memory = Memory::anonymous(1);
        memory.write(0, 0xc3); // A return.
        arm(&DirtyTracker::with(Mechanism::Traps).unwrap(), &memory);
        // SAFETY: if it went on for ever; what lies there would return at once, if it might be executed.
        unsafe {
            libc::alarm(60);
            std::mem::transmute::<usize, extern "C" fn()>(memory.page(0))();
        }
    });
    assert_eq!(libc::WTERMSIG(ended), libc::SIGSEGV, "how the child ended");
}
