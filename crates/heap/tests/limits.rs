//! A program that has the heap by one line, near the limit of a control group. Without a keeper, unless a test asks for it.

#[path = "../../../tests/limited_group.rs"]
mod limited_group;
#[path = "../../selfpage/tests/alloc/own_process.rs"]
mod own_process;
#[path = "../../../tests/skip.rs"]
mod skip;

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;

use limited_group::{Group, REASON};
use selfpage::alloc::{keeper, limit};

#[global_allocator]
static HEAP: selfpage_heap::Allocator = selfpage_heap::Allocator;

const MIB: usize = 1 << 20;

#[test]
fn what_is_kept_makes_room_for_objects_below_the_limit() {
    own_process::run("what_is_kept_makes_room_for_objects_below_the_limit", || {
        let Some(group) = Group::limited(256 * MIB) else { return skip::skip("cgroup", REASON) };
        group.join();
        let blocks: Vec<Vec<u8>> = (0..4).map(|_| vec![1; 50 * MIB]).collect();
        drop(std::hint::black_box(blocks));
        let kept_bytes = selfpage_heap::stats().large_retained_bytes;
        assert!(kept_bytes > 128 * MIB, "{kept_bytes} bytes are kept");
        let objects: Vec<Vec<u8>> = (0..100_000).map(|_| vec![1; 1000]).collect();
        let left_bytes = selfpage_heap::stats().large_retained_bytes;
        assert_eq!(objects.len(), 100_000);
        assert!(left_bytes > 64 * MIB, "{left_bytes} bytes are kept: more went than had to");
    });
}

#[test]
fn what_objects_have_freed_makes_room_for_blocks_below_the_limit() {
    own_process::run("what_objects_have_freed_makes_room_for_blocks_below_the_limit", || {
        let Some(group) = Group::limited(192 * MIB) else { return skip::skip("cgroup", REASON) };
        group.join();
        let first = vec![1u8; 5 * MIB];
        let objects: Vec<Vec<u8>> = (0..576).map(|_| vec![1; 250_000]).collect();
        drop(std::hint::black_box(objects));
        let blocks: Vec<Vec<u8>> = (0..28).map(|_| vec![1; 5 * MIB]).collect();
        assert_eq!(blocks.len() + first[0] as usize, 29);
    });
}

fn resident_mib() -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let anonymous = smaps.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    anonymous.trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
}

#[test]
fn what_objects_have_freed_stays_where_a_block_needs_little_more_below_the_limit() {
    own_process::run("what_objects_have_freed_stays_where_a_block_needs_little_more_below_the_limit", || {
        let Some(group) = Group::limited(256 * MIB) else { return skip::skip("cgroup", REASON) };
        group.join();
        let mut block: Vec<u8> = Vec::with_capacity(120 * MIB);
        // The limit is known from here on.
        drop(std::hint::black_box(vec![1u8; MIB]));
        let objects: Vec<Vec<u8>> = (0..160).map(|_| vec![1; 250_000]).collect();
        drop(std::hint::black_box(objects));
        // Nobody has touched the block.
        let freed_mib = resident_mib();
        block.reserve_exact(125 * MIB);
        block.shrink_to(110 * MIB);
        let left_mib = resident_mib();
        assert!(freed_mib >= 38 && left_mib >= 38, "{left_mib} MiB of {freed_mib} are left");
    });
}

#[test]
fn the_limit_is_looked_for_when_a_block_at_a_large_alignment_grows() {
    own_process::run("the_limit_is_looked_for_when_a_block_at_a_large_alignment_grows", || {
        let layout = Layout::from_size_align(2 * MIB, 1 << 16).unwrap();
        // SAFETY: the block is ours, of that layout; nothing of it is read.
        unsafe {
            let block = HEAP.alloc(layout);
            assert!(!limit::is_due());
            assert_eq!(HEAP.realloc(block, layout, 7 * MIB), block);
        }
        assert!(!limit::is_due(), "nobody has looked");
    });
}

#[test]
fn a_block_that_makes_a_keeper_due_does_not_wait_for_the_look_and_who_frees_it_does() {
    own_process::run("a_block_that_makes_a_keeper_due_does_not_wait_for_the_look_and_who_frees_it_does", || {
        let Some(group) = Group::limited(256 * MIB) else { return skip::skip("cgroup", REASON) };
        group.join();
        selfpage_heap::keep();
        // Nobody touches it.
        let block: Vec<u8> = Vec::with_capacity(300 * MIB);
        assert!(limit::is_due(), "it has waited");
        drop(std::hint::black_box(block));
        assert!(!limit::is_due(), "nobody has looked");
        // Below the limit by a sixteenth of it, and what objects open first.
        let kept_mib = selfpage_heap::stats().large_retained_bytes / MIB;
        assert!((128..=208).contains(&kept_mib), "{kept_mib} MiB are kept");
    });
}

unsafe extern "C" {
    fn selfpage_heap_look_around_soon();
}

/// Has this thread find its groups at the end of a text, `len_bytes` longer, that does not fit into what small objects leave. False: there can be no
/// mounts for it.
fn lengthen_groups(len_bytes: usize) -> bool {
    let groups = std::fs::read_to_string("/proc/thread-self/cgroup").unwrap();
    let file = std::env::temp_dir().join(format!("selfpage-groups-{}", std::process::id()));
    std::fs::write(&file, format!("99:name=none:/{}\n{groups}", "x".repeat(len_bytes))).unwrap();
    let (path, none) = (CString::new(file.as_os_str().as_bytes()).unwrap(), std::ptr::null());
    // SAFETY: test: texts that outlive the calls. Only this thread, and those that it starts, see the mounts.
    let is_longer = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()) == 0
            && libc::mount(path.as_ptr(), c"/proc/thread-self/cgroup".as_ptr(), none, libc::MS_BIND, none.cast()) == 0
    };
    std::fs::remove_file(file).unwrap();
    is_longer
}

/// Who frees may have a lock of the C library's that a new thread needs.
#[test]
fn a_free_that_looks_for_the_limit_starts_no_keeper_that_another_has_found_due() {
    own_process::run("a_free_that_looks_for_the_limit_starts_no_keeper_that_another_has_found_due", || {
        if !lengthen_groups(3000) {
            return skip::skip("mount", "no mounts of its own: be root, outside of a container");
        }
        selfpage_heap::keep();
        let block: Vec<u8> = Vec::with_capacity(300 * MIB);
        assert!(limit::is_due(), "it has waited");
        // As one on another thread does meanwhile.
        // SAFETY: no-pointers: nothing is passed.
        unsafe { selfpage_heap_look_around_soon() };
        drop(std::hint::black_box(block));
        let found = (limit::is_due(), keeper::pays());
        assert_eq!(found, (false, true), "it has looked, and no keeper has begun");
        // The next one that asks for memory may wait for a thread.
        drop(std::hint::black_box(vec![1u8; MIB / 2]));
        assert!(!keeper::pays(), "none has begun");
    });
}

#[test]
fn the_block_behind_one_that_did_not_wait_finds_the_limit_known() {
    own_process::run("the_block_behind_one_that_did_not_wait_finds_the_limit_known", || {
        let Some(group) = Group::limited(512 * MIB) else { return skip::skip("cgroup", REASON) };
        group.join();
        selfpage_heap::keep();
        let objects: Vec<Vec<u8>> = (0..800).map(|_| vec![1; 250_000]).collect();
        // It counts as if it had been touched.
        let block: Vec<u8> = Vec::with_capacity(300 * MIB);
        assert!(limit::is_due(), "it has waited");
        drop(std::hint::black_box(objects));
        let next: Vec<u8> = Vec::with_capacity(2 * MIB);
        assert!(!limit::is_due(), "nobody has looked");
        let left_mib = resident_mib();
        assert!(left_mib < 50, "{left_mib} MiB are left of what objects have freed");
        drop(std::hint::black_box((block, next)));
    });
}

#[test]
fn what_shrinks_stays_where_it_is_if_nothing_smaller_is_to_be_had() {
    own_process::run("what_shrinks_stays_where_it_is_if_nothing_smaller_is_to_be_had", || {
        let mut object: Vec<u8> = vec![7; 600_000];
        let mut block: Vec<u8> = vec![8; 2 * MIB];
        let mut others: Vec<Vec<u8>> = Vec::with_capacity(1 << 20);
        // Looked at when there is memory again to fail with.
        let mut errors: Vec<i32> = Vec::with_capacity(2);
        let limit = libc::rlimit { rlim_cur: 256 << 20, rlim_max: 256 << 20 };
        // SAFETY: test: the limit is borrowed until the call returns.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) }, 0);
        for bytes in [8 * MIB, MIB, 500_000, 70_000, 50_000, 5_000] {
            loop {
                let mut other = Vec::<u8>::new();
                if other.try_reserve_exact(bytes).is_err() {
                    break;
                }
                others.push(other);
            }
        }
        for (shrunk, byte) in [(&mut object, 7), (&mut block, 8)] {
            shrunk.truncate(70_000);
            // SAFETY: test: the C library's own location.
            let errno = || unsafe { &mut *libc::__errno_location() };
            *errno() = 0;
            shrunk.shrink_to_fit();
            errors.push(*errno());
            assert!(shrunk.len() == 70_000 && shrunk.iter().all(|at| *at == byte));
        }
        assert!(object.try_reserve_exact(4 * MIB).is_err(), "there is memory");
        others.clear();
        assert_eq!(errors, [0; 2], "nothing has failed");
    });
}
