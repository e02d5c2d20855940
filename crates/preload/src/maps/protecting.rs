//! mprotect(2) and pkey_mprotect(2).

use std::ops::Range;

use super::{ACCESS, Errno, Maps, NOWHERE, Part, answer, as_kernel, kernel, pages, serving, table};
use crate::managed::{self, Managed};
use crate::promises::Offer;
use crate::sys::call;

impl Maps {
    pub(super) fn protect(
        &mut self,
        managed: &Managed,
        mut left: Range<usize>,
        prot: i32,
        key: Key,
    ) -> Result<usize, Errno> {
        self.may_protect(&left, prot)?;
        while let Some((part, range)) = self.next(&mut left) {
            self.protect_part(managed, part, range, prot, key)?;
        }
        Ok(0)
    }

    fn may_protect(&self, range: &Range<usize>, prot: i32) -> Result<(), Errno> {
        self.unless_sealed(range)?;
        let parts = self.parts(range.clone()).count();
        self.has_room(parts)?;
        self.may_note_unmanaged_access(range, prot, parts)
    }

    fn protect_part(
        &mut self,
        managed: &Managed,
        part: Part,
        range: Range<usize>,
        prot: i32,
        key: Key,
    ) -> Result<(), Errno> {
        let (there, change) = (range.clone(), key.change(prot));
        match part {
            // An error in either case: bad arguments come before a hole.
            Part::Free => kernel(change(NOWHERE)).map(drop),
            Part::Managed => {
                let opened = if prot & ACCESS != 0 { range.clone() } else { range.start..range.start };
                let offer = Offer::of(&opened).ok_or(libc::ENOMEM)?;
                let changed = managed.maps.while_still(move || change(there)).map_err(|_| libc::EACCES)?;
                // Without room for one more mapping a part may have it.
                if key.is_set() && (changed >= 0 || changed == -libc::ENOMEM as isize) {
                    managed::has_key();
                }
                if let Err(why) = kernel(changed) {
                    if why == libc::ENOMEM && !self.close_again(managed, &opened) {
                        offer.keep();
                    }
                    return Err(why);
                }
                offer.keep();
                self.note_access(range, prot);
                Ok(())
            }
            Part::Outside => {
                kernel(change(there))?;
                self.note_unmanaged_access(&range, prot);
                Ok(())
            }
            // Under our lock signals are blocked, and a handler of the program's has been asked: a filter would kill this thread.
            Part::Foreign => {
                kernel(managed.maps.while_still(move || change(there)).map_err(|_| libc::EACCES)?)?;
                self.note_unmanaged_access(&range, prot);
                Ok(())
            }
        }
    }

    /// Where the kernel had no room for one more mapping, a part of what was closed may be open. Whether none is any more.
    fn close_again(&self, managed: &Managed, range: &Range<usize>) -> bool {
        let mut closed = true;
        // SAFETY: owned-range: the program's, which has no access to it.
        self.closed.within(range.clone(), |part| closed &= unsafe { managed.protect(part, libc::PROT_NONE) } >= 0);
        closed
    }
}

/// mprotect(2), or pkey_mprotect(2), of each part.
fn protect_parts(managed: &Managed, mut left: Range<usize>, prot: i32, key: Key) -> Result<usize, Errno> {
    let mut held = table();
    held.maps.may_protect(&left, prot)?;
    while let Some((part, range)) = held.maps.next(&mut left) {
        if part != Part::Outside {
            held.maps.protect_part(managed, part, range, prot, key)?;
            continue;
        }
        // A filter may have a handler of the program's called, or somebody asked: not with signals blocked, nor under our lock, for which that
        // may be waiting.
        drop(held);
        let changed = kernel(key.change(prot)(range.clone()));
        held = table();
        changed?;
        held.maps.note_unmanaged_access(&range, prot);
    }
    Ok(0)
}

/// Which protection key a change sets.
#[derive(Clone, Copy)]
pub(super) enum Key {
    Unchanged,
    Set(usize),
}

impl Key {
    /// With -1 the call is mprotect(2).
    fn is_set(self) -> bool {
        matches!(self, Key::Set(key) if key as i32 != -1)
    }

    fn change(self, prot: i32) -> impl Fn(Range<usize>) -> isize + Send {
        move |range| {
            let (start, len, prot) = (range.start, range.len(), prot as usize);
            // SAFETY: raw-call: the program asked for it.
            unsafe {
                match self {
                    Key::Unchanged => call(libc::SYS_mprotect, [start, len, prot, 0, 0, 0]),
                    Key::Set(key) => call(libc::SYS_pkey_mprotect, [start, len, prot, key, 0, 0]),
                }
            }
        }
    }
}

/// mprotect(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn mprotect(address: usize, len: usize, prot: i32) -> isize {
    let args = [address, len, prot as usize, 0, 0, 0];
    match (serving(), pages(address, len)) {
        (Some(managed), Ok(range)) => answer(&[&range], libc::SYS_mprotect, args)
            .unwrap_or_else(|| as_kernel(protect_parts(managed, range, prot, Key::Unchanged))),
        // SAFETY: raw-call: passed on from our caller.
        _ => unsafe { call(libc::SYS_mprotect, args) },
    }
}

/// pkey_mprotect(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn pkey_mprotect(address: usize, len: usize, prot: i32, key: usize) -> isize {
    let args = [address, len, prot as usize, key, 0, 0];
    match (serving(), pages(address, len)) {
        (Some(managed), Ok(range)) => answer(&[&range], libc::SYS_pkey_mprotect, args)
            .unwrap_or_else(|| as_kernel(protect_parts(managed, range, prot, Key::Set(key)))),
        // SAFETY: raw-call: passed on from our caller.
        _ => unsafe { call(libc::SYS_pkey_mprotect, args) },
    }
}
