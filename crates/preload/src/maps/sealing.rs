//! mseal(2) on managed mappings. The kernel holds the seal itself, against us too; what is kept here is where, so that a call that it
//! would refuse is refused before anything is dropped for it.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::{Errno, Maps, Part, answer, pages, serving, table};
use crate::managed::Managed;
use crate::space::PAGE;
use crate::sys::call;

/// mseal(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn mseal(address: usize, len: usize, flags: usize) -> isize {
    let args = [address, len, flags, 0, 0, 0];
    let seal = move || {
        // SAFETY: raw-call: passed on from our caller.
        unsafe { call(libc::SYS_mseal, args) }
    };
    let (Some(managed), Ok(range)) = (serving(), pages(address, len)) else { return seal() };
    if let Some(answer) = answer(&[&range], libc::SYS_mseal, args) {
        return answer;
    }
    let maps = &mut table().maps;
    // The program sees no mapping where nothing was mapped in a region; the kernel does.
    if maps.parts(range.clone()).any(|(part, _)| part == Part::Free) {
        return -libc::ENOMEM as isize;
    }
    if !maps.sealed.has_room(1) || !maps.may_seal(managed, &range) {
        return -libc::ENOMEM as isize;
    }
    let sealed = managed.maps.while_still(seal).unwrap_or(-libc::EACCES as isize);
    if sealed >= 0 {
        // All of it, whatever it is part by part: no call gets further than to here.
        maps.sealed.add(range);
    }
    sealed
}

impl Maps {
    /// Whether a range may be sealed as it is. The kernel drops no page again that is sealed and may not be written, for us neither: it stays
    /// in core, as if it were locked, and as many may.
    fn may_seal(&mut self, managed: &Managed, range: &Range<usize>) -> bool {
        let frames_bytes = managed.domain.stats().frames_bytes as usize;
        let more = self.staying_if_sealed(managed, range) - self.sealed_to_stay(managed, range);
        let bytes = self.sealed_to_stay(managed, &(0..usize::MAX)) + more;
        more == 0
            || bytes <= frames_bytes / 2 && self.locked.bytes() + self.kept.bytes() + bytes <= frames_bytes / 4 * 3
    }

    /// How many bytes of a range stay in core because they are sealed.
    pub(super) fn sealed_to_stay(&self, managed: &Managed, range: &Range<usize>) -> usize {
        let mut bytes = 0;
        self.sealed.within(range.clone(), |part| bytes += self.staying_if_sealed(managed, &part));
        bytes
    }

    /// How many bytes of a range would stay: all that can be read, and what is in core of the rest, for no more of it will come.
    fn staying_if_sealed(&self, managed: &Managed, range: &Range<usize>) -> usize {
        let mut bytes = 0;
        self.read_only.within(range.clone(), |part| bytes += part.len());
        self.closed.within(range.clone(), |part| {
            let Some((region, offset)) = managed.region_of(part.start) else { return };
            let pages = region.residency().iter().skip(offset / PAGE).take(part.len() / PAGE);
            bytes += PAGE * pages.filter(|page| page.load(Relaxed) == 1).count();
        });
        bytes
    }

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
