//! Frames under addresses of ours: given, moved, exchanged and dropped, whole page tables at a time where it can be.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::Errno;
use selfpage_core::linux::limit::{self, Resource};
use selfpage_core::linux::memory::{self, Access, Advice, HUGE_PAGE_BYTES, Place};

use super::file::File;

/// What one page table maps, or a huge page in its place. Ranges aligned alike to this move at the cost of a step each.
pub(super) const TABLE_BYTES: usize = HUGE_PAGE_BYTES;

/// How much of `bytes` is in whole page tables, from the first.
pub(super) fn whole_tables(bytes: usize) -> usize {
    bytes / TABLE_BYTES * TABLE_BYTES
}

/// What one entry two levels above maps: all of it moves in one step where source and target are multiples of it, and the source
/// is one mapping.
pub(super) const ENTRY_BYTES: usize = 1 << 30;

/// Blocks up to this length are cleared without a look at what has frames. The C library's are cleared then, too, where it has them from
/// earlier ones; longer ones it has fresh from the kernel each time.
const LONGEST_WRITTEN: usize = 32 << 20;

/// Moves contents, by frames wherever the kernel lets us; what was at `to` is gone. Whether nothing is left at `from`: it reads as zeros
/// then, else it holds what it held.
///
/// # Safety
/// *slot-held*: both ranges are slots' that the caller holds, open and apart.
pub(super) unsafe fn shift(from: usize, to: usize, len_bytes: usize) -> bool {
    // What is at `to` afterwards has come from `from`.
    // SAFETY: slot-held: nobody needs what is there.
    unsafe { empty(to, len_bytes) };
    // SAFETY: slot-held: passed on from our caller.
    let moved = may_map() && unsafe { moved(from, to, len_bytes, Lock::Comes) };
    if !moved {
        // SAFETY: slot-held: passed on from our caller.
        unsafe { copy_rest(from, to, len_bytes) };
    }
    moved
}

/// Swaps what two ranges hold, by frames wherever the kernel lets us. What was `between` is gone, and something else may be left there.
///
/// # Safety
/// *slot-held*: all three ranges are slots' that the caller holds, open and apart.
pub(super) unsafe fn swap(first: usize, second: usize, between: usize, len_bytes: usize) {
    let may_move = may_map();
    let mut is_empty = false;
    for (from, to) in [(first, between), (second, first), (between, second)] {
        // SAFETY: slot-held: passed on from our caller. What is at `to` is nobody's, or has come to where it belongs, or to the place
        // between.
        unsafe {
            if !is_empty {
                empty(to, len_bytes);
            }
            is_empty = may_move && moved(from, to, len_bytes, Lock::Comes);
            if !is_empty {
                copy_rest(from, to, len_bytes);
            }
        }
    }
}

/// What becomes of a lock in memory (mlock) where frames move away.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lock {
    /// It is the contents', and comes along.
    Comes,
    /// Nobody needs the contents: where they go to all stays as it was.
    Stays,
}

/// Has the kernel move frames, one mapping after the other. False: it did not, or not all, and has left some of `to` unmapped if it ran out
/// of memory itself.
///
/// It unmaps what is at `to` before it finds that it may not move what is at `from`; and until that is mapped again, another thread's new
/// mapping could come to lie there. So it is not asked where it would refuse: callers ask [`may_map`] first.
///
/// # Safety
/// *slot-held*: as for [`shift`].
unsafe fn moved(from: usize, to: usize, len_bytes: usize, lock: Lock) -> bool {
    if len_bytes > PAGE_BYTES && !is_one_mapping(from, len_bytes) {
        // Each half may be one.
        let step = if len_bytes > TABLE_BYTES { TABLE_BYTES } else { PAGE_BYTES };
        let half = (len_bytes / 2).next_multiple_of(step).min(len_bytes - PAGE_BYTES);
        // SAFETY: slot-held: parts of the ranges.
        return unsafe { moved(from, to, half, lock) && moved(from + half, to + half, len_bytes - half, lock) };
    }
    // SAFETY: slot-held: passed on from our caller.
    unsafe {
        match is_locked(from, PAGE_BYTES) {
            true => moved_locked(from, to, len_bytes, lock),
            false => memory::remap_contents(from, len_bytes, to).is_ok(),
        }
    }
}

/// As [`moved`], for one mapping that is locked. The kernel would take the lock from all of it, neighbours too, and count it for ever: so it is
/// ended before, for what moves, and begins anew. As frames come: none may come that nobody counts.
///
/// # Safety
/// *slot-held*: as for [`shift`].
#[cold]
unsafe fn moved_locked(from: usize, to: usize, len_bytes: usize, lock: Lock) -> bool {
    // With mlockall(2) everything is, and stays so.
    let other_too = is_locked(to, PAGE_BYTES);
    // It counts nothing anew, and is refused where the lock could not begin again.
    if (other_too || lock == Lock::Comes) && memory::lock_on_fault(from, len_bytes).is_err() {
        // SAFETY: slot-held: passed on from our caller.
        return unsafe { moved_with_lock(from, to, len_bytes) };
    }
    if memory::unlock(from, len_bytes).is_err() {
        return false;
    }
    // SAFETY: slot-held: passed on from our caller.
    let moved = unsafe { memory::remap_contents(from, len_bytes, to) }.is_ok();
    for (addr, locked) in [(from, other_too || !moved), (to, moved && (other_too || lock == Lock::Comes))] {
        if locked {
            // No more is locked than was; who may lock nothing any more goes on without.
            let _ = memory::lock_on_fault(addr, len_bytes);
        }
    }
    moved
}

/// As [`moved_locked`], where the process may lock nothing any more: the kernel takes the lock along, and counts it where it was, too. That is
/// better than contents that are locked no more.
///
/// # Safety
/// *slot-held*: as for [`shift`].
#[cold]
unsafe fn moved_with_lock(from: usize, to: usize, len_bytes: usize) -> bool {
    // A mapping of its own, or neighbours would lose theirs.
    // SAFETY: slot-held: passed on from our caller. The advice is about what is read ahead of files.
    unsafe {
        let moved = memory::advise(from, len_bytes, Advice::Scattered).is_ok()
            && memory::remap_contents(from, len_bytes, to).is_ok();
        for addr in [from, to] {
            let _ = memory::advise(addr, len_bytes, Advice::Usual);
        }
        moved
    }
}

/// Whether any of a range is locked in memory.
pub(super) fn is_locked(addr: usize, len_bytes: usize) -> bool {
    if ASKS_FOR_LIMITS.load(Ordering::Relaxed) {
        return memory::is_locked(addr, len_bytes);
    }
    // By a call for memory, which splits a huge page.
    // SAFETY: slot-held: contents stay as they are.
    unsafe { memory::advise(addr, len_bytes, Advice::Cold) == Err(Errno::INVAL) }
}

/// Ends the lock of what a block has lost, unless all of the process is locked, as the page at `nobodys` is then.
pub(super) fn end_lock(addr: usize, len_bytes: usize, nobodys: usize) {
    if is_locked(addr, len_bytes) && !is_locked(nobodys, PAGE_BYTES) {
        let _ = memory::unlock(addr, len_bytes);
    }
}

/// Whether the range lies in one mapping: Linux before 6.17 moves no more in one call.
pub(super) fn is_one_mapping(addr: usize, len_bytes: usize) -> bool {
    // What follows is mapped too, so it cannot grow; where it is several mappings the kernel says that first.
    memory::grow(addr, len_bytes, len_bytes + PAGE_BYTES) != Err(Errno::FAULT)
}

/// Whether limits are asked for, which is faster than to try what they allow.
static ASKS_FOR_LIMITS: AtomicBool = AtomicBool::new(true);

/// From now on nothing is asked of the kernel but memory, where `false`: a program may have forbidden itself all else.
pub(super) fn ask_for_limits(asks: bool) {
    ASKS_FOR_LIMITS.store(asks, Ordering::Relaxed);
}

/// Whether it is known that the process has no limits on what it maps. A filter of system calls may have nobody told.
pub(super) fn has_no_limits() -> bool {
    let unlimited = |resource| limit::of_this_process(resource) == Ok(None);
    ASKS_FOR_LIMITS.load(Ordering::Relaxed) && unlimited(Resource::Addresses) && unlimited(Resource::Data)
}

/// Whether the process may map anything: somebody may have set its limits below what it has, or others may have taken what a strict overcommit
/// lets there be. A move needs no room besides, since it unmaps its target before it looks at them.
fn may_map() -> bool {
    if OVERCOMMITS.load(Ordering::Relaxed) && has_no_limits() {
        return true;
    }
    // SAFETY: owned-range: a fresh mapping replaces nothing, and nobody knows of it.
    unsafe {
        memory::map_anonymous(Place::Anywhere, PAGE_BYTES, Access::ReadWrite)
            .is_ok_and(|found| memory::unmap(found, PAGE_BYTES).is_ok())
    }
}

/// Copies what a move left behind: what it took along reads as zeros where it was, and so does what there never was. Nobody has to say which
/// pages were moved, which `/proc` alone could.
///
/// # Safety
/// *slot-held*: as for [`shift`], and what is at `to` came from `from`, or reads as zeros.
#[cold]
unsafe fn copy_rest(from: usize, to: usize, len_bytes: usize) {
    // SAFETY: slot-held: passed on from our caller.
    unsafe {
        map_pages_again(from, len_bytes);
        map_pages_again(to, len_bytes);
    }
    for at in (0..len_bytes).step_by(PAGE_BYTES) {
        let (from, to) = (from + at, to + at);
        // SAFETY: slot-held: a page of each range, which nobody uses meanwhile.
        unsafe {
            if std::slice::from_raw_parts(from as *const u64, PAGE_BYTES / 8).iter().any(|word| *word != 0) {
                std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, PAGE_BYTES);
            }
        }
    }
}

/// Makes a range read as zeros that something is to come to.
///
/// # Safety
/// *slot-held*: as for [`drop_frames`].
unsafe fn empty(addr: usize, len_bytes: usize) {
    // SAFETY: slot-held: passed on from our caller. Locked memory cannot be dropped.
    unsafe {
        if !drop_frames(addr, len_bytes) {
            map_pages_again(addr, len_bytes);
            (addr as *mut u8).write_bytes(0, len_bytes);
        }
    }
}

/// As [`map_again`], for a range of which parts are mapped.
///
/// # Safety
/// *slot-held*: the range is a slot's that the caller holds, and open.
unsafe fn map_pages_again(addr: usize, len_bytes: usize) {
    // SAFETY: slot-held: it may be touched as it is; this tells whether all of it is there. Nobody needs what is in a page that is not.
    unsafe {
        if memory::protect(addr, len_bytes, Access::ReadWrite).is_err() {
            (addr..addr + len_bytes).step_by(PAGE_BYTES).for_each(|page| map_again(page, PAGE_BYTES));
        }
    }
}

/// Maps a range again that a move which failed has left unmapped, as Linux before 6.17 does.
///
/// # Safety
/// *slot-held*: the range is a slot's that the caller holds, and open; nobody needs what is there, if it is not all mapped.
unsafe fn map_again(addr: usize, len_bytes: usize) {
    // SAFETY: slot-held: it may be touched as it is; this tells whether it is there.
    if unsafe { memory::protect(addr, len_bytes, Access::ReadWrite) }.is_ok() {
        return;
    }
    // SAFETY: slot-held: passed on from our caller.
    let mapped = unsafe {
        memory::reserve(Place::Over(addr), len_bytes).and_then(|_| memory::protect(addr, len_bytes, Access::ReadWrite))
    };
    if mapped.is_err() {
        crate::die("the kernel unmapped a part of a block's addresses, and does not map it again");
    }
    // SAFETY: slot-held: as above.
    let _ = unsafe { memory::advise(addr, len_bytes, Advice::HugePages) };
}

/// Moves frames whose contents nobody needs. False: there are none at `to`.
///
/// # Safety
/// *slot-held*: as for [`shift`].
pub(super) unsafe fn lend(from: usize, to: usize, len_bytes: usize) -> bool {
    // SAFETY: slot-held: passed on from our caller.
    let lent = may_map() && unsafe { moved(from, to, len_bytes, Lock::Stays) };
    if !lent {
        // SAFETY: slot-held: as above; some may have been moved.
        unsafe {
            map_again(to, len_bytes);
            drop_frames(to, len_bytes);
        }
    }
    lent
}

/// Gives frames back to the kernel; the range reads as zeros afterwards. False: it does not.
///
/// # Safety
/// *slot-held*: the range is a slot's that the caller holds, and open.
pub(super) unsafe fn drop_frames(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: slot-held: nobody needs what is there.
    unsafe { memory::advise(addr, len_bytes, Advice::Drop) }.is_ok()
}

/// Makes a range of whole pages read as zeros. Of a long one what has hardly any frames is dropped: who uses little of a long block is
/// not to have all of it in memory when the next one is cleared.
///
/// # Safety
/// *slot-held*: the range is a slot's that the caller holds, and open.
pub(super) unsafe fn clear(addr: usize, len_bytes: usize) {
    let mut resident = [0; TABLE_BYTES / PAGE_BYTES];
    for start in (addr..addr + len_bytes).step_by(TABLE_BYTES) {
        let len = TABLE_BYTES.min(addr + len_bytes - start);
        let pages = resident.get_mut(..len / PAGE_BYTES).unwrap_or(&mut []);
        // What is in swap counts as absent, and goes from there as well.
        let sparse = len_bytes > LONGEST_WRITTEN
            && memory::residency(start, pages).is_ok()
            && 2 * pages.iter().filter(|page| **page & 1 == 1).count() < pages.len();
        // SAFETY: slot-held: nobody needs what is there.
        unsafe {
            if !(sparse && drop_frames(start, len)) {
                (start as *mut u8).write_bytes(0, len);
            }
        }
    }
}

/// Lets the kernel take frames back when it needs them. Until then the range reads as it did, so this is never true.
///
/// # Safety
/// *slot-held*: as for [`drop_frames`].
pub(super) unsafe fn free_frames(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: slot-held: nobody needs what is there.
    if unsafe { memory::advise(addr, len_bytes, Advice::Free) }.is_err() {
        // Locked memory, for one, is not taken back like that.
        // SAFETY: slot-held: as above.
        return unsafe { drop_frames(addr, len_bytes) };
    }
    false
}

/// Makes one mapping of several again, with nothing in it, closed, and with small pages.
///
/// # Safety
/// *slot-held*: as for [`drop_frames`].
pub(super) unsafe fn close(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: slot-held: nobody needs what is there, nor the mapping.
    unsafe { memory::reserve(Place::Over(addr), len_bytes) }.is_ok()
}

/// Takes away the right to touch a range. False: there are no mappings left for it.
///
/// # Safety
/// *slot-held*: as for [`drop_frames`].
pub(super) unsafe fn shut(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: slot-held: passed on from our caller.
    unsafe { memory::protect(addr, len_bytes, Access::None) }.is_ok()
}

/// Ends [`shut`]. False: it stays.
///
/// # Safety
/// *slot-held*: as for [`shut`].
pub(super) unsafe fn reopen(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: slot-held: passed on from our caller.
    unsafe { memory::protect(addr, len_bytes, Access::ReadWrite) }.is_ok()
}

/// Opens for a moment what has no frames, to be moved along with what comes before it. False: it may not be opened, or would
/// get frames at once.
///
/// # Safety
/// *slot-held*: as for [`drop_frames`], but closed.
pub(super) unsafe fn open_empty(addr: usize, len_bytes: usize) -> bool {
    if len_bytes == 0 {
        return true;
    }
    // Locked memory is filled when it is opened. The kernel refuses to take frames of it back lazily, which is how it is known.
    // SAFETY: slot-held: there are no frames.
    let unlocked = unsafe { memory::advise(addr, PAGE_BYTES, Advice::Free) }.is_ok();
    // SAFETY: slot-held: passed on from our caller.
    unlocked && unsafe { reopen(addr, len_bytes) }
}

/// Has the kernel give frames in one go, which takes a fraction of as many faults. Only a hint.
pub(super) fn populate(addr: usize, len_bytes: usize) {
    // SAFETY: slot-held: contents stay as they are.
    let _ = unsafe { memory::advise(addr, len_bytes, Advice::PopulateWrite) };
}

/// What the machine has, memory and swap, as far as somebody has asked.
static MACHINE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Whether the machine has so much at all, for who does not have the allocator's lock: it is asked. Not where nothing is to be kept: then the program
/// may have forbidden itself to. A mapping of more the kernel refuses, unless its owner will have it otherwise (`vm.overcommit_memory`
/// is 1); what was reserved before it is opened is not judged by that, and whoever touched it all would be ended in the place of an error.
pub(super) fn machine_has(len_bytes: usize) -> bool {
    len_bytes <= MACHINE_BYTES.load(Ordering::Relaxed) || !ASKS_FOR_LIMITS.load(Ordering::Relaxed) || {
        // SAFETY: plain-old-data, out-pointer: the structure outlives the call.
        let (told, machine) = unsafe {
            let mut machine: libc::sysinfo = std::mem::zeroed();
            (libc::sysinfo(&raw mut machine) == 0, machine)
        };
        let units = machine.totalram + machine.totalswap;
        // Where a filter of system calls has it not told, the kernel's word on each mapping has to do.
        let bytes = if told { units.saturating_mul(u64::from(machine.mem_unit)) as usize } else { usize::MAX };
        MACHINE_BYTES.store(bytes, Ordering::Relaxed);
        len_bytes <= bytes || setting(OVERCOMMIT).starts_with(b"1")
    }
}

/// How the kernel judges what a process asks for.
pub(super) const OVERCOMMIT: &CStr = c"/proc/sys/vm/overcommit_memory";

/// Whether that is known to be less than strict. Who moves frames does not ask: the program may have forbidden itself to.
static OVERCOMMITS: AtomicBool = AtomicBool::new(false);

/// Whether a process may have more than the machine has. Else the kernel counts all that may be written (`vm.overcommit_memory` is 2), or
/// that cannot be read.
pub(super) fn overcommits() -> bool {
    let is_known = OVERCOMMITS.load(Ordering::Relaxed);
    let overcommits = is_known || matches!(setting(OVERCOMMIT), [b'0' | b'1', ..]);
    OVERCOMMITS.store(overcommits, Ordering::Relaxed);
    overcommits
}

/// What a setting of the kernel begins with; zeros where it cannot be read.
pub(super) fn setting(path: &CStr) -> [u8; 32] {
    let mut text = [0; 32];
    let _ = File::open(path).and_then(|file| file.read(&mut text));
    text
}

/// The number that such a setting is.
pub(super) fn number(path: &CStr) -> Option<usize> {
    let text = setting(path);
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    str::from_utf8(&text[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child;

    const PAGES: usize = 700;

    fn mapped() -> usize {
        // SAFETY: owned-range: a fresh mapping replaces nothing.
        unsafe { memory::map_anonymous(Place::Anywhere, PAGES * PAGE_BYTES, Access::ReadWrite) }.unwrap()
    }

    fn page(start: usize, at: usize) -> *mut usize {
        (start + at * PAGE_BYTES) as *mut usize
    }

    #[test]
    fn a_move_that_stopped_half_way_is_ended_by_copying() {
        let (from, to) = (mapped(), mapped());
        // SAFETY: slot-held: two ranges of our own, as a move leaves them that stops after page 600 and has unmapped some of the rest.
        unsafe {
            for at in (0..PAGES).filter(|at| at % 7 != 0) {
                page(from, at).write(at + 1);
            }
            memory::remap_contents(from, 600 * PAGE_BYTES, to).unwrap();
            memory::unmap(to + 650 * PAGE_BYTES, 20 * PAGE_BYTES).unwrap();
            copy_rest(from, to, PAGES * PAGE_BYTES);
            for at in 0..PAGES {
                assert_eq!(page(to, at).read(), if at % 7 == 0 { 0 } else { at + 1 }, "page {at}");
            }
        }
    }

    #[test]
    fn a_range_of_several_mappings_moves_part_by_part() {
        let (from, to) = (mapped(), mapped());
        // SAFETY: slot-held: two ranges of our own, and what lies between two mappings of the first.
        unsafe {
            memory::advise(page(from, 300) as usize, 100 * PAGE_BYTES, Advice::NotInDump).unwrap();
            assert!(
                is_one_mapping(from, 300 * PAGE_BYTES) && is_one_mapping(page(from, 300) as usize, 100 * PAGE_BYTES)
            );
            assert!(!is_one_mapping(from, 301 * PAGE_BYTES));
            (0..PAGES).for_each(|at| page(from, at).write(at));
            page(to, 3).write(7);
            assert!(shift(from, to, PAGES * PAGE_BYTES), "some was copied");
            (0..PAGES).for_each(|at| assert_eq!((page(to, at).read(), page(from, at).read()), (at, 0)));
        }
    }

    fn locked_kib() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn a_lock_goes_with_contents_and_neighbours_keep_theirs() {
        const PART: usize = PAGES / 7;
        // Alone: it is all of the process's locks that are counted.
        child::forked(|| {
            let (range, other, between) = (mapped(), mapped(), mapped());
            let (at, kib) = (|part: usize| page(range, part * PART) as usize, |parts: usize| parts * PART * 4);
            let locked =
                |ranges: &[usize]| ranges.iter().map(|start| is_locked(*start, PAGE_BYTES)).collect::<Vec<_>>();
            let len_bytes = PART * PAGE_BYTES;
            memory::lock(range, 5 * len_bytes).unwrap();
            // SAFETY: slot-held: parts of three ranges of our own.
            unsafe {
                page(at(1), 3).write(7);
                assert!(shift(at(1), other, len_bytes));
                assert_eq!((page(other, 3).read(), locked_kib()), (7, kib(5)));
                assert_eq!(locked(&[at(0), at(1), at(2), other]), [true, false, true, true]);
                swap(at(2), at(5), between, len_bytes);
                assert_eq!(locked(&[at(1), at(2), at(3), at(5), between]), [false, false, true, true, false]);
                // What nobody needs takes no lock along, and none away.
                assert!(lend(at(3), at(6), len_bytes) && lend(at(4), at(0), len_bytes));
                assert_eq!(locked(&[at(0), at(3), at(4), at(6)]), [true, false, true, false]);
            }
            assert_eq!(locked_kib(), kib(4));
        });
    }

    #[test]
    fn a_lock_goes_with_contents_and_neighbours_keep_theirs_where_nothing_may_be_locked_any_more() {
        const PART: usize = PAGES / 7;
        // Alone: it loses its rights.
        child::forked(|| {
            let (range, other) = (mapped(), mapped());
            memory::lock(range, 3 * PART * PAGE_BYTES).unwrap();
            // SAFETY: test: a limit that outlives the call, and numbers.
            unsafe {
                let nothing = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const nothing), 0);
                assert!(libc::geteuid() != 0 || libc::setuid(65534) == 0);
            }
            let at = |part: usize| page(range, part * PART) as usize;
            assert!(memory::lock_on_fault(at(1), PAGE_BYTES).is_err());
            // SAFETY: slot-held: parts of two ranges of our own.
            unsafe {
                page(at(1), 3).write(7);
                assert!(shift(at(1), other, PART * PAGE_BYTES));
                assert_eq!(page(other, 3).read(), 7);
            }
            let locked = [at(0), at(1), at(2), other].map(|start| is_locked(start, PAGE_BYTES));
            assert_eq!(locked, [true, false, true, true]);
        });
    }

    #[test]
    fn what_the_kernel_moves_only_in_part_is_swapped_all_the_same() {
        // Alone: another thread's memory could come to lie in a hole.
        child::forked(swap_with_holes);
    }

    fn swap_with_holes() {
        // Nothing moves from where a range is not mapped, nor from behind that.
        for holes in [[300..400, 0..0], [0..0, 300..400], [100..200, 300..400]] {
            let (ranges, between) = ([mapped(), mapped()], mapped());
            let contents = |which: usize, at: usize| match holes[which].contains(&at) || at.is_multiple_of(2 + which) {
                true => 0,
                false => at << which,
            };
            // SAFETY: slot-held: three ranges of our own.
            unsafe {
                (0..PAGES).for_each(|at| page(between, at).write(7));
                for which in [0, 1] {
                    let written = (0..PAGES).filter(|at| contents(which, *at) != 0);
                    written.for_each(|at| page(ranges[which], at).write(contents(which, at)));
                    if !holes[which].is_empty() {
                        let hole = page(ranges[which], holes[which].start) as usize;
                        memory::unmap(hole, holes[which].len() * PAGE_BYTES).unwrap();
                    }
                }
                swap(ranges[0], ranges[1], between, PAGES * PAGE_BYTES);
                for at in 0..PAGES {
                    let found = ranges.map(|range| page(range, at).read());
                    assert_eq!(found, [contents(1, at), contents(0, at)], "page {at} with {holes:?} not mapped");
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_lent_leaves_memory_without_contents() {
        child::forked(|| {
            let (from, to) = (mapped(), mapped());
            // SAFETY: slot-held: two ranges of our own; the second move has nothing to move from.
            unsafe {
                page(to, 3).write(7);
                memory::unmap(from, PAGES * PAGE_BYTES).unwrap();
                assert!(!lend(from, to, PAGES * PAGE_BYTES));
                assert_eq!(page(to, 3).read(), 0);
                page(to, PAGES - 1).write(1);
            }
        });
    }
}
