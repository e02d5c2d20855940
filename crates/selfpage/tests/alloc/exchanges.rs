//! Exchange of blocks so long that all of their slots change places.

use std::ptr::NonNull;
use std::time::Instant;

use selfpage::alloc;

use crate::input::data_bytes;
use crate::own_process;
use crate::skip::skip;

const MIB: usize = 1 << 20;

/// Small pages only: a page touched here and there is not to take 2 MiB.
fn small_pages() {
    // SAFETY: a call without pointers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }, 0);
}

/// A block with `mark` in a page of each page table, and in its last byte.
fn marked(len_bytes: usize, mark: u8) -> NonNull<u8> {
    let block = alloc::allocate(len_bytes, 1).unwrap();
    // SAFETY: within the block.
    places(len_bytes).for_each(|at| unsafe { block.add(at).write(mark) });
    block
}

fn places(len_bytes: usize) -> impl Iterator<Item = usize> {
    (0..len_bytes).step_by(2 * MIB).chain([len_bytes - 1])
}

fn holds(block: NonNull<u8>, len_bytes: usize, mark: u8) -> bool {
    // SAFETY: within the block.
    places(len_bytes).all(|at| unsafe { block.add(at).read() } == mark)
}

/// Exchanges blocks of the program's that are marked 1 and 2, three times.
fn change_places(a: NonNull<u8>, b: NonNull<u8>, len_bytes: usize) {
    for _ in 0..3 {
        // SAFETY: both are ours.
        assert!(unsafe { alloc::exchange(a, b) });
    }
    assert!(holds(a, len_bytes, 2) && holds(b, len_bytes, 1));
}

/// Whether a line of /proc/self/maps or smaps is the one of the mapping that an address is in.
fn is_mapping_of(line: &str, addr: usize) -> bool {
    let number = |hex| usize::from_str_radix(hex, 16).ok();
    let range = line.split(' ').next().and_then(|range| range.split_once('-'));
    range.is_some_and(|(start, end)| number(start) <= Some(addr) && Some(addr) < number(end))
}

/// What /proc/self/maps says that may be done with the mapping of an address.
fn access(addr: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().find(|line| is_mapping_of(line, addr)).unwrap().split(' ').nth(1).unwrap().to_owned()
}

/// What the kernel notes of the mapping of an address, in two letters each.
fn flags(addr: usize) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let of_mapping = maps.lines().skip_while(|line| !is_mapping_of(line, addr));
    let flags = of_mapping.skip(1).find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    flags.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn it_costs_the_same_however_long_the_blocks_are() {
    if std::fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2") {
        return skip(
            "overcommit",
            "it goes table by table under a strict overcommit: sysctl -w vm.overcommit_memory=0",
        );
    }
    own_process::run("exchanges::it_costs_the_same_however_long_the_blocks_are", || {
        small_pages();
        let fastest = |len_bytes| {
            let (a, b) = (marked(len_bytes, 1), marked(len_bytes, 2));
            let times = (0..41).map(|_| {
                let begin = Instant::now();
                // SAFETY: both are ours.
                assert!(unsafe { alloc::exchange(a, b) });
                begin.elapsed()
            });
            let fastest = times.min().unwrap();
            assert!(holds(a, len_bytes, 2) && holds(b, len_bytes, 1));
            fastest
        };
        // Table by table the second takes three times as long and more.
        let (some, many) = (fastest(256 * MIB), fastest(1000 * MIB));
        assert!(many < 2 * some, "256 MiB: {some:?}, 1000 MiB: {many:?}");
    });
}

#[test]
fn both_blocks_are_whole_afterwards() {
    own_process::run("exchanges::both_blocks_are_whole_afterwards", || {
        small_pages();
        // What lies far behind stays open for the next time, but where a huge page would reach behind the block.
        check_blocks_of(200 * MIB + 4096, "---p");
        check_blocks_of(400 * MIB, "rw-p");
    });
}

fn check_blocks_of(len: usize, access_behind: &str) {
    // The one was longer before: a page of its slot behind the block has frames, and holds something.
    let a = marked(len + MIB, 3);
    let b = marked(len, 2);
    // SAFETY: ours, as are all below; the old addresses are forgotten.
    unsafe {
        assert!(alloc::resize_in_place(a, len));
        places(len).for_each(|at| a.add(at).write(1));
        change_places(a, b, len);
        for block in [a, b] {
            assert_eq!(access(block.as_ptr() as usize + len - 1), "rw-p");
            assert_eq!(access(block.as_ptr() as usize + 700 * MIB), access_behind);
        }
        // What is behind the block went along, and so what is known of it.
        alloc::free(b);
        let zeroed = alloc::allocate_zeroed(len + MIB, 1).unwrap();
        assert!(zeroed == b && holds(zeroed, len + MIB, 0));
        let a = alloc::resize(a, 1500 * MIB).unwrap();
        assert!(holds(a, len, 2));
        a.add(1500 * MIB - 1).write(1);
        alloc::free(a);
        alloc::free(zeroed);
    }
}

#[test]
fn blocks_of_many_lengths_do_not_fall_to_pieces() {
    own_process::run("exchanges::blocks_of_many_lengths_do_not_fall_to_pieces", || {
        const MOST: usize = 64 * MIB;
        let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let (mut a, mut b) = (marked(MOST, 1), marked(MOST, 1));
        let before = mappings();
        for turn in 0..400usize {
            let len = 9 * MIB + turn * 7919 % (50 * 256) * 4096;
            // SAFETY: ours; the old addresses are forgotten.
            unsafe {
                (a, b) = (alloc::resize(a, len).unwrap(), alloc::resize(b, len).unwrap());
                places(len).for_each(|at| a.add(at).write(2));
                places(len).for_each(|at| b.add(at).write(3));
                assert!(alloc::exchange(a, b));
            }
            assert!(holds(a, len, 3) && holds(b, len, 2));
        }
        // Each table of two blocks, of what they gave away when they became shorter, and of what is closed behind.
        let most = before + 12 * MOST / (2 * MIB);
        assert!(mappings() < most, "{} mappings, {before} at first", mappings());
        // SAFETY: ours.
        unsafe {
            alloc::free(a);
            alloc::free(b);
        }
    });
}

#[test]
fn what_was_advised_for_a_block_stays_with_it() {
    own_process::run("exchanges::what_was_advised_for_a_block_stays_with_it", || {
        for len in [8 * MIB, 130 * MIB] {
            let (a, b) = (marked(len, 1), marked(len, 2));
            // SAFETY: a and b are ours; whole pages of a.
            unsafe {
                assert_eq!(libc::madvise(a.as_ptr().cast(), len, libc::MADV_DONTFORK), 0);
                assert!(alloc::exchange(a, b));
            }
            let between = marked(len, 3);
            let addr = |block: NonNull<u8>| block.as_ptr() as usize;
            assert_eq!(addr(between) - addr(b), addr(b) - addr(a), "the place that they changed places by");
            let advised = [a, b, between].map(|block| flags(addr(block)).contains(&"dc".to_owned()));
            assert_eq!(advised, [false, true, false], "{} MiB", len / MIB);
            // Where the kernel has huge pages at all.
            let huge = [a, b, between].map(|block| flags(addr(block)).contains(&"hg".to_owned()));
            assert_eq!(huge, [huge[0]; 3], "{} MiB", len / MIB);
        }
    });
}

#[test]
fn it_goes_on_where_no_more_may_be_opened() {
    own_process::run("exchanges::it_goes_on_where_no_more_may_be_opened", || {
        small_pages();
        let len = 150 * MIB;
        let (a, b) = (marked(len, 1), marked(len, 2));
        // Room for the blocks and one more, and not for a slot of a gibibyte.
        let limit = libc::rlimit { rlim_cur: 700 << 20, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) };
        change_places(a, b, len);
    });
}

/// Where what is kept of a freed block is in the way.
#[test]
fn it_goes_on_where_only_a_freed_block_leaves_memory() {
    own_process::run("exchanges::it_goes_on_where_only_a_freed_block_leaves_memory", || {
        small_pages();
        let len = 150 * MIB;
        let (a, b) = (marked(len, 1), marked(len, 2));
        let freed = marked(2 * len, 3);
        let limit = libc::rlimit { rlim_cur: data_bytes() + (100 << 20), rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit; freed is ours, and forgotten.
        unsafe {
            libc::setrlimit(libc::RLIMIT_DATA, &raw const limit);
            alloc::free(freed);
        }
        change_places(a, b, len);
    });
}

/// The place to change places by is any free slot: of another length, one with frames, or one that is kept closed.
#[test]
fn it_goes_on_where_slots_of_that_length_are_used_up() {
    own_process::run("exchanges::it_goes_on_where_slots_of_that_length_are_used_up", || {
        small_pages();
        let limit = libc::rlimit { rlim_cur: 160 << 30, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
        let len = 40 * MIB;
        let (a, b) = (marked(len, 1), marked(len, 2));
        let others: Vec<_> = std::iter::from_fn(|| alloc::allocate(len, 1)).collect();
        // SAFETY: ours; the others are forgotten.
        let swapped = unsafe {
            let alone = alloc::exchange(a, b);
            others.iter().for_each(|other| alloc::free(*other));
            let again = [(); 2].map(|()| alloc::exchange(a, b));
            (others.len() > 9, alone, again)
        };
        assert_eq!(swapped, (true, false, [true; 2]));
        assert!(holds(a, len, 1) && holds(b, len, 2));
        let others: Vec<_> = std::iter::from_fn(|| alloc::allocate(len, 1)).collect();
        // SAFETY: as above. The last one's slot is no longer than need be.
        let swapped = unsafe {
            alloc::free(others[others.len() - 1]);
            alloc::exchange(a, b)
        };
        assert!(swapped && holds(a, len, 2) && holds(b, len, 1));
    });
}

#[test]
fn it_goes_on_where_all_free_slots_are_kept_closed() {
    if std::fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2") {
        return skip("overcommit", "blocks of 4 GiB count in full: sysctl -w vm.overcommit_memory=0");
    }
    own_process::run("exchanges::it_goes_on_where_all_free_slots_are_kept_closed", || {
        small_pages();
        alloc::set_retention(Some(0));
        alloc::trap_on_use_after_free();
        let len = 4096 * MIB;
        let [a, b] = [(); 2].map(|()| alloc::allocate(len, 1).unwrap());
        for freed in 0..1100 {
            // SAFETY: ours, and forgotten.
            unsafe {
                assert!(alloc::exchange(a, b), "{freed} blocks were freed");
                alloc::free(alloc::allocate(len, 1).unwrap());
            }
        }
    });
}

#[test]
fn locked_memory_does_not_grow() {
    own_process::run("exchanges::locked_memory_does_not_grow", || {
        small_pages();
        let len = 130 * MIB;
        let (a, b) = (marked(len, 1), marked(len, 2));
        // SAFETY: a call without pointers.
        if unsafe { libc::mlockall(libc::MCL_CURRENT) } != 0 {
            skip("mlock", "all memory may not be locked; run as root, or raise RLIMIT_MEMLOCK");
            return;
        }
        let most = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
        };
        let before = most();
        // SAFETY: both are ours.
        assert!(unsafe { alloc::exchange(a, b) });
        assert!(holds(a, len, 2) && holds(b, len, 1));
        // The slot between them may be filled as far as the blocks go.
        assert!(most() < before + 300, "{before} MiB, then {} MiB", most());
    });
}
