//! Bad input: no memory where there can be none, and one line before the end where a pointer is none of ours.

use std::os::unix::process::ExitStatusExt;
use std::ptr::NonNull;

use selfpage::alloc;
use selfpage::alloc::batch::{self, Blocks};

use crate::child;
use crate::filter::Call;
use crate::own_process;
use crate::skip::skip;

#[test]
fn lengths_and_alignments_that_cannot_be_give_none() {
    for len_bytes in [usize::MAX, usize::MAX - 4095, isize::MAX as usize, 1 << 46] {
        assert_eq!(alloc::allocate(len_bytes, 1), None, "{len_bytes}");
        assert_eq!(alloc::allocate_zeroed(len_bytes, 1), None, "{len_bytes}");
    }
    for align_bytes in [0, 3, 1 << 31, 1 << 63] {
        assert_eq!(alloc::allocate(1, align_bytes), None, "{align_bytes}");
    }
    let block = alloc::allocate(0, 1).unwrap();
    // SAFETY: ours, of a page at least.
    unsafe {
        block.write(3);
        assert_eq!(alloc::resize(block, usize::MAX), None);
        assert!(!alloc::resize_in_place(block, usize::MAX));
        assert_eq!(block.read(), 3);
        alloc::free(block);
    }
}

/// As the kernel has it for a mapping, where it judges by what the machine has.
#[test]
fn more_than_the_machine_has_is_none() {
    let setting = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap();
    if setting.trim() != "0" {
        return skip("overcommit", "the machine's owner will have it otherwise (vm.overcommit_memory)");
    }
    // What is live here counts in what others of this process may keep.
    own_process::run("input::more_than_the_machine_has_is_none", || {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap();
        let kib = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
        };
        let machine_bytes = (kib("MemTotal:") + kib("SwapTotal:")) << 10;
        for beyond in [1 << 20, 1 << 40] {
            assert_eq!(alloc::allocate(machine_bytes + beyond, 1), None);
            assert_eq!(alloc::allocate_zeroed(machine_bytes + beyond, 1), None);
        }
        let block = alloc::allocate(machine_bytes - (1 << 20), 1).unwrap();
        // SAFETY: ours, of a page at least.
        unsafe {
            block.write(3);
            assert_eq!(alloc::resize(block, machine_bytes + (1 << 20)), None);
            assert_eq!(block.read(), 3);
            alloc::free(block);
        }
    });
}

#[test]
fn no_memory_is_none_and_everything_goes_on() {
    own_process::run("input::no_memory_is_none_and_everything_goes_on", || {
        let block = alloc::allocate(8 << 20, 1).unwrap();
        // SAFETY: ours.
        unsafe { block.write_bytes(5, 8 << 20) };
        let limit = libc::rlimit { rlim_cur: 1, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit: there can be no new mappings.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) };
        assert_eq!(alloc::allocate(512 << 20, 1), None);
        // SAFETY: ours.
        assert_eq!(unsafe { alloc::resize(block, 512 << 20) }, None);
        let limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) };
        // SAFETY: ours.
        unsafe {
            let block = alloc::resize(block, 512 << 20).unwrap();
            assert_eq!(block.add((8 << 20) - 1).read(), 5);
            alloc::free(block);
        }
    });
}

/// A block moves as a program makes it longer that limits itself to less than it has.
fn moves_where_there_can_be_no_new_mappings(test: &str, resource: libc::__rlimit_resource_t) {
    own_process::run(test, || {
        let (kept, block) = (alloc::allocate(64 << 20, 1).unwrap(), alloc::allocate(3 << 20, 1).unwrap());
        // SAFETY: ours, and this long.
        unsafe {
            kept.write_bytes(1, 64 << 20);
            block.write_bytes(5, 3 << 20);
            alloc::free(kept);
        }
        let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit.
        unsafe { libc::setrlimit(resource, &raw const limit) };
        // SAFETY: ours, as long as was asked for; where it was is forgotten.
        unsafe {
            let moved = alloc::resize(block, 40 << 20).unwrap();
            assert!(moved != block);
            assert!(std::slice::from_raw_parts(moved.as_ptr(), 3 << 20).iter().all(|byte| *byte == 5));
            moved.add(3 << 20).write_bytes(6, 37 << 20);
            assert!(alloc::resize_in_place(moved, 10 << 20));
            alloc::free(moved);
        }
    });
}

#[test]
fn blocks_move_where_addresses_are_limited() {
    moves_where_there_can_be_no_new_mappings("input::blocks_move_where_addresses_are_limited", libc::RLIMIT_AS);
}

#[test]
fn blocks_move_where_data_is_limited() {
    moves_where_there_can_be_no_new_mappings("input::blocks_move_where_data_is_limited", libc::RLIMIT_DATA);
}

/// Resizes blocks of 8 MiB so that each has to move, and frees them.
fn grow_in_each_others_way(blocks: [(u8, NonNull<u8>); 2]) {
    for (byte, block) in blocks {
        // SAFETY: ours, as long as was asked for.
        unsafe {
            block.write_bytes(byte, 8 << 20);
            let moved = alloc::resize(block, 40 << 20).unwrap();
            assert!(std::slice::from_raw_parts(moved.as_ptr(), 8 << 20).iter().all(|at| *at == byte));
            alloc::free(moved);
        }
    }
}

/// As under a filter that comes later, or a service manager's.
#[test]
fn blocks_move_where_neither_limits_nor_memory_are_told() {
    own_process::run("input::blocks_move_where_neither_limits_nor_memory_are_told", || {
        for call in [libc::SYS_prlimit64, libc::SYS_sysinfo] {
            Call::any(call).fails(libc::EPERM).unwrap();
        }
        let blocks = [7, 8].map(|byte| (byte, alloc::allocate(8 << 20, 1).unwrap()));
        grow_in_each_others_way(blocks);
    });
}

/// What RLIMIT_DATA counts of this process.
pub fn data_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn a_block_grows_as_far_as_a_limit_lets_it() {
    own_process::run("input::a_block_grows_as_far_as_a_limit_lets_it", || {
        let block = alloc::allocate(256 << 20, 1).unwrap();
        let limit = libc::rlimit { rlim_cur: data_bytes() + (8 << 20), rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) };
        // SAFETY: ours.
        let grew = unsafe { [260, 300].map(|mib| alloc::resize_in_place(block, mib << 20)) };
        let limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, ..limit };
        // SAFETY: a valid limit.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) };
        assert_eq!(grew, [true, false], "an eighth more than the first is too much");
        // SAFETY: ours, and this long.
        unsafe { block.add((260 << 20) - 1).write(1) };
    });
}

/// What it needs beside its own memory is open for a freed block. All of it elsewhere would be too much.
fn grows_into_what_another_left(test: &str, grows: impl FnOnce(NonNull<u8>, usize) -> bool) {
    own_process::run(test, || {
        let [block, freed] = [(); 2].map(|()| alloc::allocate(300 << 20, 1).unwrap());
        let limit = libc::rlimit { rlim_cur: data_bytes() + (100 << 20), rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) };
        // SAFETY: ours, and forgotten.
        unsafe { alloc::free(freed) };
        assert!(grows(block, 420 << 20));
        // SAFETY: ours, and this long.
        unsafe { block.add((420 << 20) - 1).write(1) };
    });
}

#[test]
fn a_block_that_may_move_grows_into_what_another_left() {
    grows_into_what_another_left("input::a_block_that_may_move_grows_into_what_another_left", |block, len_bytes| {
        // SAFETY: ours, and where it was.
        unsafe { alloc::resize(block, len_bytes) == Some(block) }
    });
}

#[test]
fn a_block_that_may_not_move_grows_into_what_another_left() {
    grows_into_what_another_left(
        "input::a_block_that_may_not_move_grows_into_what_another_left",
        |block, len_bytes| {
            // SAFETY: ours.
            unsafe { alloc::resize_in_place(block, len_bytes) }
        },
    );
}

/// What a block is lent must not need more than a limit leaves: the kernel would have unmapped its addresses before it says so.
#[test]
fn a_block_is_lent_no_more_than_a_limit_leaves_room_for() {
    const TABLE: usize = 2 << 20;
    crate::own_process::run("input::a_block_is_lent_no_more_than_a_limit_leaves_room_for", || {
        let freed = [(); 2].map(|()| alloc::allocate(TABLE, 1).unwrap());
        for block in freed {
            // SAFETY: ours, this long; and forgotten.
            unsafe {
                block.write_bytes(1, TABLE);
                alloc::free(block);
            }
        }
        // For the end of the block, and not for all of its last table.
        let limit = libc::rlimit { rlim_cur: data_bytes() + TABLE as u64 / 2, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: a valid limit.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) };
        let block = alloc::allocate(TABLE + TABLE / 4, 1).unwrap();
        // SAFETY: ours, this long.
        unsafe { block.write_bytes(2, TABLE + TABLE / 4) };
    });
}

/// The mistake ends the process, after one line of ours: the line that it says before it aborts.
fn says(test: &str, words: &str, body: impl FnOnce()) {
    let Some(output) = own_process::output(test, body) else { return };
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{errors}");
    let lines: Vec<&str> = errors.lines().filter(|line| line.starts_with("selfpage: ")).collect();
    assert!(lines.len() == 1 && lines[0].contains("0x") && lines[0].contains(words), "{errors}");
}

#[test]
fn freeing_twice_is_named() {
    says("input::freeing_twice_is_named", "freed already", || {
        let block = alloc::allocate(1 << 20, 1).unwrap();
        // SAFETY: the second is the mistake.
        unsafe {
            alloc::free(block);
            alloc::free(block);
        }
    });
}

#[test]
fn freeing_the_middle_is_named() {
    says("input::freeing_the_middle_is_named", "inside of the block", || {
        let block = alloc::allocate(1 << 20, 1).unwrap();
        // SAFETY: within the block, which is the mistake.
        unsafe { alloc::free(block.add(4096)) };
    });
}

#[test]
fn freeing_what_is_not_ours_is_named() {
    says("input::freeing_what_is_not_ours_is_named", "no block of this allocator", || {
        let mut other = 0u8;
        // SAFETY: not ours, which is the mistake.
        unsafe { alloc::free(NonNull::from(&mut other)) };
    });
}

#[test]
fn resizing_an_item_as_a_block_is_named() {
    says("input::resizing_an_item_as_a_block_is_named", "of a batch's items", || {
        let mut items = vec![None; 10_000];
        assert_eq!(batch::allocate(&Blocks, 48, 16, &mut items), 10_000);
        // SAFETY: ours; that it is no block is the mistake.
        unsafe { alloc::resize(items[3].unwrap(), 1 << 20) };
    });
}

fn batch_of_items() -> Vec<Option<NonNull<u8>>> {
    let mut items = vec![None; 10_000];
    assert_eq!(batch::allocate(&Blocks, 48, 16, &mut items), 10_000);
    items
}

#[test]
fn freeing_what_lies_before_a_batchs_items_is_named() {
    says("input::freeing_what_lies_before_a_batchs_items_is_named", "of a batch's items", || {
        let first = batch_of_items()[0].unwrap();
        // SAFETY: within the run, but no item, which is the mistake.
        unsafe { alloc::free(first.sub(16)) };
    });
}

#[test]
fn freeing_what_lies_behind_a_batchs_items_is_named() {
    says("input::freeing_what_lies_behind_a_batchs_items_is_named", "of a batch's items", || {
        let last = batch_of_items()[9_999].unwrap();
        // SAFETY: as above.
        unsafe { alloc::free(last.add(48)) };
    });
}

#[test]
fn freeing_the_middle_of_an_item_is_named() {
    says("input::freeing_the_middle_of_an_item_is_named", "which is 48 bytes long", || {
        // SAFETY: as above.
        unsafe { alloc::free(batch_of_items()[5].unwrap().add(16)) };
    });
}

#[test]
fn only_an_item_that_is_live_has_a_length() {
    let items = batch_of_items();
    let at = |index: usize| items[index].unwrap();
    // SAFETY: within the run; ours.
    let none = unsafe {
        batch::free(&Blocks, &items[7..8]);
        [at(0).sub(16), at(5).add(16), at(7), at(9_999).add(48)]
    };
    assert_eq!(none.map(alloc::usable_bytes), [None; 4]);
    assert_eq!([6, 8, 9_999].map(|index| alloc::usable_bytes(at(index))), [Some(48); 3]);
    // SAFETY: ours.
    unsafe {
        batch::free(&Blocks, &items[..7]);
        batch::free(&Blocks, &items[8..]);
    }
}

#[test]
fn freeing_an_item_twice_is_named() {
    says("input::freeing_an_item_twice_is_named", "freed already", || {
        let mut items = vec![None; 10_000];
        assert_eq!(batch::allocate(&Blocks, 48, 16, &mut items), 10_000);
        // SAFETY: the second is the mistake.
        unsafe {
            batch::free(&Blocks, &items[7..9]);
            batch::free(&Blocks, &items[3..12]);
        }
    });
}

/// A move unmaps its target before the kernel counts what it maps there. So where all of that may be counted (`vm.overcommit_memory` is 2, or
/// cannot be read) a page is mapped for trial, and where there is none nothing is moved.
#[test]
fn a_block_is_copied_where_there_may_be_a_strict_overcommit_and_not_a_page_is_left() {
    own_process::run("input::a_block_is_copied_where_there_may_be_a_strict_overcommit_and_not_a_page_is_left", || {
        const MOVES: libc::c_int = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        let blocks = [7, 8].map(|byte| (byte, alloc::allocate(8 << 20, 1).unwrap()));
        child::forked(|| {
            Call::any(libc::SYS_open).fails(libc::EACCES).unwrap();
            Call::any(libc::SYS_openat).fails(libc::EACCES).unwrap();
            Call::with(libc::SYS_mmap, 1, 4096).fails(libc::ENOMEM).unwrap();
            // The child's only one.
            Call::with(libc::SYS_mremap, 3, MOVES as u32).ends_its_thread().unwrap();
            grow_in_each_others_way(blocks);
        });
    });
}
