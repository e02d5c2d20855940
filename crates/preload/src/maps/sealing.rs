//! mseal(2) on managed mappings. The kernel holds the seal itself, against us too; what is kept here is where, so that a call that it
//! would refuse is refused before anything is dropped for it.

use std::ops::Range;

use super::{Errno, Maps, Part, pages, serving, table};
use crate::sys::call;

/// mseal(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn mseal(address: usize, len: usize, flags: usize) -> isize {
    let seal = move || {
        // SAFETY: raw-call: passed on from our caller.
        unsafe { call(libc::SYS_mseal, [address, len, flags, 0, 0, 0]) }
    };
    let (Some(managed), Ok(range)) = (serving(), pages(address, len)) else { return seal() };
    let maps = &mut table().maps;
    // The program sees no mapping where nothing was mapped in a region; the kernel does.
    if maps.parts(range.clone()).any(|(part, _)| part == Part::Free) {
        return -libc::ENOMEM as isize;
    }
    if !maps.sealed.has_room(1) {
        return -libc::ENOMEM as isize;
    }
    let sealed = managed.maps.while_still(seal);
    if sealed >= 0 {
        // All of it, whatever it is part by part: no call gets further than to here.
        maps.sealed.add(range);
    }
    sealed
}

impl Maps {
    /// `EPERM` where a call would change a mapping that is sealed.
    pub(super) fn unless_sealed(&self, range: &Range<usize>) -> Result<(), Errno> {
        if self.sealed.first_within(range).is_some() { Err(libc::EPERM) } else { Ok(()) }
    }

    /// The same for contents that would be dropped: who may write them may drop them.
    pub(super) fn unless_sealed_for_good(&self, range: &Range<usize>) -> Result<(), Errno> {
        let mut sealed = Ok(());
        self.sealed.within(range.clone(), |part| {
            if [&self.closed, &self.read_only].iter().any(|set| set.first_within(&part).is_some()) {
                sealed = Err(libc::EPERM);
            }
        });
        sealed
    }
}
