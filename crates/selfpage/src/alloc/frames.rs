//! Frames under addresses of ours: given, moved, exchanged and dropped, whole page tables at a time where it can be.

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::memory::{self, Access, Advice, Place};

/// What one page table maps. Ranges aligned alike to this move at the cost of a step each.
pub(super) const TABLE_BYTES: usize = 2 << 20;
/// What one entry two levels above maps: all of it moves in one step where source and target are multiples of it, and the source
/// is one mapping.
pub(super) const ENTRY_BYTES: usize = 1 << 30;

/// Moves contents, by frames wherever the kernel lets us; what was at `to` is gone, and `from` is left absent, or holds what
/// it held.
///
/// # Safety
/// *slot-held*: both ranges are slots' that the caller holds, open and apart.
pub(super) unsafe fn shift(from: usize, to: usize, len_bytes: usize) {
    // SAFETY: slot-held: passed on from our caller.
    if unsafe { memory::remap_contents(from, len_bytes, to) }.is_ok() {
        return;
    }
    if len_bytes > TABLE_BYTES {
        // Several mappings cannot be moved in one call. Each half may be within one.
        let half = (len_bytes / 2).next_multiple_of(TABLE_BYTES).min(len_bytes - PAGE_BYTES);
        // SAFETY: slot-held: parts of the ranges.
        unsafe {
            shift(from, to, half);
            shift(from + half, to + half, len_bytes - half);
        }
        return;
    }
    // SAFETY: slot-held: both may be touched, and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len_bytes) };
}

/// Moves frames whose contents nobody needs. False: they stay.
///
/// # Safety
/// *slot-held*: as for [`shift`].
pub(super) unsafe fn lend(from: usize, to: usize, len_bytes: usize) -> bool {
    // SAFETY: slot-held: passed on from our caller.
    unsafe { memory::remap_contents(from, len_bytes, to) }.is_ok()
}

/// Gives frames back to the kernel; the range reads as zeros afterwards. False: it does not.
///
/// # Safety
/// *slot-held*: the range is a slot's that the caller holds, and open.
pub(super) unsafe fn drop_frames(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: slot-held: nobody needs what is there.
    unsafe { memory::advise(addr, len_bytes, Advice::Drop) }.is_ok()
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

/// Makes one mapping of several again, with nothing in it, closed.
///
/// # Safety
/// *slot-held*: as for [`drop_frames`].
pub(super) unsafe fn close(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: slot-held: nobody needs what is there, nor the mapping.
    let closed = unsafe { memory::map_anonymous(Place::Over(addr), len_bytes, Access::None) }.is_ok();
    // SAFETY: slot-held: as above.
    closed && unsafe { memory::advise(addr, len_bytes, Advice::HugePages) }.is_ok()
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
