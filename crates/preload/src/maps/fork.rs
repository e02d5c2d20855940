//! Mappings over a fork: none changes meanwhile, and a child has those that are for it.

use super::locking::Why;
use super::unmanaged::ASIDE;
use super::{MAPS, Table, serving, table};
use crate::sys::Quiet;

/// Keeps mappings from changing over a fork, and blocks signals: a handler that came meanwhile may map too, and would wait for its own
/// thread.
pub fn hold() {
    let Table { mut maps, _quiet } = table();
    maps.forking = Some(_quiet);
    std::mem::forget(maps);
}

/// Ends that, but for the signals, which are blocked until the result is dropped.
///
/// # Safety
/// *lock-word*: the caller, or the thread it is a copy of, called [`hold`].
#[must_use]
pub unsafe fn let_go() -> Option<Quiet> {
    // SAFETY: lock-word: passed on from our caller.
    unsafe { MAPS.held() }.forking.take()
}

/// In a forked child: takes away what the program said was not for it.
pub fn settle_in_child() {
    let Some(managed) = serving() else { return };
    let mut table = table();
    let maps = &mut *table.maps;
    // As the kernel: what the program locked is not locked in a child.
    maps.unlock_managed(managed, 0..usize::MAX, Why::Locked);
    // The calls that it was set aside for come to no end here, but for one that a handler forks in: what that one moves counts no longer.
    maps.forget(ASIDE..usize::MAX);
    while let Some(range) = maps.not_for_child.all().first().cloned() {
        if maps.unmap(managed, range.clone()).is_err() {
            // SAFETY: owned-range: the program said that it is not for a child. What cannot be closed is empty all the same.
            unsafe { managed.drop_contents(range.clone()) };
        }
        maps.not_for_child.remove(range);
    }
    let mut left = 0..usize::MAX;
    while let Some(range) = maps.empty_in_child.first_within(&left) {
        left.start = range.end;
        // SAFETY: owned-range: the program said that a child finds it empty.
        unsafe { managed.drop_contents(range.clone()) };
        maps.remove_guards(managed, &range);
        maps.lock_again(managed, range);
    }
}
