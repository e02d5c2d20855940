//! Mappings that the program has sealed (mseal(2), Linux 6.10) where it may not write: the kernel lets a child have them, and does not take
//! that back.

use std::ops::Range;

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::Errno;
use selfpage_core::linux::memory::Advice;

use crate::error::Result;
use crate::maps;
use crate::region::Bound;

/// Keeps a part of a region from children, but for what is sealed like that.
pub(super) fn keep_rest_from_child(bound: &Bound, part: &Range<usize>) -> std::result::Result<(), Errno> {
    match bound.give_to_child(part, Advice::NotForChild) {
        // The kernel stops at the first one.
        Err(Errno::PERM) => {}
        result => return result,
    }
    if part.len() == PAGE_BYTES {
        return Ok(());
    }
    let pieces = mappings_within(part).unwrap_or_else(|_| {
        let middle = part.start + (part.len() / 2).next_multiple_of(PAGE_BYTES);
        vec![part.start..middle, middle..part.end]
    });
    // No seal is for a part of a mapping.
    if pieces.as_slice() == std::slice::from_ref(part) {
        return Ok(());
    }
    pieces.iter().try_for_each(|piece| keep_rest_from_child(bound, piece))
}

fn mappings_within(part: &Range<usize>) -> Result<Vec<Range<usize>>> {
    let within = maps::within(part)?.into_iter();
    Ok(within.map(|mapping| mapping.range.start.max(part.start)..mapping.range.end.min(part.end)).collect())
}
