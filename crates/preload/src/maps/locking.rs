//! What stays in core: mlock(2) and its family, and memory that the kernel itself will touch when no fault can be served.

use std::ops::Range;

use super::{Errno, Maps, Part, READ_WRITE, as_kernel, kernel, pages, serving, table};
use crate::managed::{self, Managed};
use crate::promises;
use crate::ranges::{Ranges, SPARE, Standing};
use crate::space::PAGE;
use crate::sys::call;

/// Why pages stay in core. Each reason has pins of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Why {
    /// The program said so.
    Locked,
    /// The kernel will touch them. The program did not ask for it, and can take nothing back.
    Kept,
}

impl Why {
    pub(super) const ALL: [Why; 2] = [Why::Locked, Why::Kept];
}

impl Maps {
    pub(super) fn staying(&mut self, why: Why) -> &mut Ranges {
        match why {
            Why::Locked => &mut self.locked,
            Why::Kept => &mut self.kept,
        }
    }

    /// Locks managed pages that are not locked yet for this reason.
    pub(super) fn lock_managed(&mut self, managed: &Managed, range: Range<usize>, why: Why) -> Result<(), Errno> {
        let mut already = 0;
        self.staying(why).within(range.clone(), |part| already += part.len());
        if !self.may_stay(managed, range.len() - already, why) || !promises::promise(&range) {
            return Err(libc::ENOMEM);
        }
        let mut at = range.start;
        while at < range.end {
            let (end, standing) = self.staying(why).stretch(&(at..range.end));
            if standing == Standing::Out
                && let Some((region, offset)) = managed.region_of(at)
            {
                region.pin(offset, end - at).map_err(|_| libc::ENOMEM)?;
                self.staying(why).add(at..end);
            }
            at = end;
        }
        Ok(())
    }

    /// Whether so many bytes more may stay: for either reason half of the frames, for both, and with what is sealed, three quarters.
    pub(super) fn may_stay(&mut self, managed: &Managed, more_bytes: usize, why: Why) -> bool {
        let frames_bytes = managed.domain.stats().frames_bytes as usize;
        let sealed_bytes = self.sealed_to_stay(managed, &(0..usize::MAX));
        self.staying(why).bytes() + more_bytes <= frames_bytes / 2
            && self.locked.bytes() + self.kept.bytes() + sealed_bytes + more_bytes <= frames_bytes / 4 * 3
    }

    pub(super) fn unlock_managed(&mut self, managed: &Managed, range: Range<usize>, why: Why) {
        while let Some(part) = self.staying(why).first_within(&range) {
            unpin(managed, &part);
            self.staying(why).remove(part);
        }
    }

    /// After its contents were dropped, and with them the pins. Where some stayed they have theirs still, and must not get a second one.
    pub(super) fn lock_again(&mut self, managed: &Managed, range: Range<usize>) {
        // All of them first: which of its reasons a pin is for, a page does not know.
        for why in Why::ALL {
            self.staying(why).within(range.clone(), |part| unpin(managed, &part));
        }
        for why in Why::ALL {
            let mut left = range.clone();
            while let Some(part) = self.staying(why).first_within(&left) {
                self.staying(why).remove(part.clone());
                let _ = self.lock_managed(managed, part.clone(), why);
                left.start = part.end;
            }
        }
    }

    /// Keeps what is managed of a range.
    pub(super) fn keep(&mut self, managed: &Managed, mut left: Range<usize>) {
        if self.kept.covers(&left) {
            return;
        }
        while let Some((part, range)) = self.next(&mut left) {
            // Room is left for calls that fail where there is none, which would be all that map: of this one the program hears nothing.
            if part == Part::Managed && self.kept.has_room(SPARE) {
                let _ = self.lock_managed(managed, range, Why::Kept);
            }
        }
    }

    pub(super) fn locked_within(&self, range: &Range<usize>) -> bool {
        self.locked.first_within(range).is_some()
    }

    /// mlock(2) on each part, of which what is not managed is there.
    pub(super) fn lock(&mut self, managed: &Managed, mut left: Range<usize>) -> Result<usize, Errno> {
        while let Some((part, range)) = self.next(&mut left) {
            match part {
                Part::Free => return Err(libc::ENOMEM),
                Part::Managed => self.lock_mapped(managed, range)?,
                Part::Foreign | Part::Outside => {
                    // SAFETY: raw-call: the program asked for it.
                    kernel(unsafe { call(libc::SYS_mlock, [range.start, range.len(), 0, 0, 0, 0]) })?;
                }
            }
        }
        Ok(0)
    }

    fn lock_mapped(&mut self, managed: &Managed, range: Range<usize>) -> Result<(), Errno> {
        let fits = self.locked.has_room(1);
        if fits { self.lock_managed(managed, range, Why::Locked) } else { Err(libc::ENOMEM) }
    }
}

/// mlock2(2) on each part. As the kernel: what nobody has access to cannot be brought in, which is an error but for MLOCK_ONFAULT, and the
/// rest is locked all the same.
fn lock_parts(managed: &Managed, mut left: Range<usize>, flags: usize) -> Result<usize, Errno> {
    let mut result = Ok(0);
    loop {
        let mut held = table();
        match held.maps.next(&mut left) {
            None => return result,
            Some((Part::Free, _)) => return Err(libc::ENOMEM),
            Some((Part::Managed, range)) => {
                let (end, closed) = held.maps.closed.stretch(&range);
                left.start = end;
                if closed == Standing::In && flags == 0 {
                    result = Err(libc::ENOMEM);
                } else {
                    held.maps.lock_mapped(managed, range.start..end)?;
                }
            }
            Some((part @ (Part::Foreign | Part::Outside), range)) => {
                // The kernel brings pages in by faults, which a thread of the program's may have to answer: not under our lock, for which that
                // may be waiting.
                drop(held);
                // SAFETY: raw-call: the program asked for it.
                let locked = kernel(unsafe { call(libc::SYS_mlock2, [range.start, range.len(), flags, 0, 0, 0]) });
                if part == Part::Foreign {
                    unlock_reclaimed(range);
                }
                locked?;
            }
        }
    }
}

/// munlock(2) of each part.
fn unlock_parts(managed: &Managed, mut left: Range<usize>) -> Result<usize, Errno> {
    loop {
        let mut held = table();
        match held.maps.next(&mut left) {
            None => return Ok(0),
            Some((Part::Free, _)) => return Err(libc::ENOMEM),
            Some((Part::Managed, range)) => {
                if !held.maps.locked.may_lose(&range) {
                    return Err(libc::ENOMEM);
                }
                held.maps.unlock_managed(managed, range, Why::Locked);
            }
            Some((Part::Foreign | Part::Outside, range)) => {
                // A filter may have a handler of the program's called, or somebody asked: not under our lock. The domain's memory, which may be
                // there by now, is never locked in the kernel.
                drop(held);
                // SAFETY: raw-call: the program asked for it.
                kernel(unsafe { call(libc::SYS_munlock, [range.start, range.len(), 0, 0, 0, 0]) })?;
            }
        }
    }
}

/// Who unmapped a range in the moment before the kernel locked it has left the domain's memory there, which is not to be locked: frames do not
/// move into it.
fn unlock_reclaimed(range: Range<usize>) {
    let table = table();
    for (_, part) in table.maps.parts(range).filter(|(part, _)| *part != Part::Foreign) {
        // SAFETY: raw-call: the domain's memory is never locked in the kernel.
        unsafe { call(libc::SYS_munlock, [part.start, part.len(), 0, 0, 0, 0]) };
    }
}

/// Takes one pin of each page back, where there is one.
fn unpin(managed: &Managed, part: &Range<usize>) {
    if let Some((region, offset)) = managed.region_of(part.start) {
        let _ = region.unpin(offset, part.len());
    }
}

/// The pages that a range of bytes touches.
fn touched(address: usize, len: usize) -> Result<Range<usize>, Errno> {
    let start = address & !(PAGE - 1);
    pages(start, len.checked_add(address - start).ok_or(libc::ENOMEM)?)
}

/// mlock(2), mlock2(2) with `flags`. With MLOCK_ONFAULT too pages come in at once, and those that nobody has access to are no error.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn mlock(address: usize, len: usize, flags: usize) -> isize {
    match (serving(), touched(address, len)) {
        (Some(managed), Ok(range)) if flags & !(libc::MLOCK_ONFAULT as usize) == 0 => {
            as_kernel(lock_parts(managed, range, flags))
        }
        // SAFETY: raw-call: passed on from our caller.
        _ => unsafe { call(libc::SYS_mlock2, [address, len, flags, 0, 0, 0]) },
    }
}

/// munlock(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn munlock(address: usize, len: usize) -> isize {
    match (serving(), touched(address, len)) {
        (Some(managed), Ok(range)) => as_kernel(unlock_parts(managed, range)),
        // SAFETY: raw-call: passed on from our caller.
        _ => unsafe { call(libc::SYS_munlock, [address, len, 0, 0, 0, 0]) },
    }
}

/// mlockall(2): to lock everything would be to do without the domain, and is more than its frames hold. The kernel is not
/// asked: it would lock the regions, and no page could go any more.
pub fn mlockall(flags: i32) -> isize {
    let bad = !(1..8).contains(&flags) || flags == libc::MCL_ONFAULT;
    if serving().is_some() && !bad {
        return -libc::ENOMEM as isize;
    }
    // SAFETY: raw-call: the program asked for it.
    unsafe { call(libc::SYS_mlockall, [flags as usize, 0, 0, 0, 0, 0]) }
}

/// munlockall(2).
pub fn munlockall() -> isize {
    // SAFETY: raw-call: the program asked for it.
    let result = unsafe { call(libc::SYS_munlockall, [0; 6]) };
    if let Some(managed) = serving() {
        table().maps.unlock_managed(managed, 0..usize::MAX, Why::Locked);
    }
    result
}

/// mincore(2): whether a page is in core, from the domain.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn mincore(address: usize, len: usize, vector: *mut u8) -> isize {
    // First: whether there is a place for the answer, the kernel knows. Of managed memory it answers what is replaced here.
    // SAFETY: raw-call: passed on from our caller.
    let asked = unsafe { call(libc::SYS_mincore, [address, len, vector as usize, 0, 0, 0]) };
    let (0, Some(managed), Ok(range)) = (asked, serving(), pages(address, len)) else { return asked };
    let mut left = range.clone();
    loop {
        // Not under the lock: the program's vector may be absent, and is written here.
        let Some((part, piece)) = table().maps.next(&mut left) else { return 0 };
        let at = (piece.start - range.start) / PAGE;
        match (part, managed.region_of(piece.start)) {
            (Part::Managed, Some((region, offset))) => {
                let first = offset / PAGE;
                for (index, resident) in region.residency()[first..first + piece.len() / PAGE].iter().enumerate() {
                    // SAFETY: raw-call: the program's vector has a byte for each page.
                    unsafe { vector.add(at + index).write(resident.load(std::sync::atomic::Ordering::Relaxed)) };
                }
            }
            (Part::Free, _) => return -libc::ENOMEM as isize,
            _ => {}
        }
    }
}

/// Keeps again in core what stays there of a range, after its contents, or some of them, went away and came back.
pub fn renew_locks(range: Range<usize>) {
    if let Some(managed) = serving() {
        table().maps.lock_again(managed, range);
    }
}

/// Keeps the pages under `[address, address+len)` in core, if they are managed, until their memory is given up: the kernel
/// will touch them at a moment when it does not wait for a pager.
pub fn keep(address: usize, len: usize) {
    let (Some(managed), Ok(range)) = (serving(), touched(address, len)) else { return };
    if !managed::holds(range.start) {
        return;
    }
    table().maps.keep(managed, range);
}

/// Makes a call, which does not sleep, with the pages under `[address, address+len)` in core, if they are managed.
pub fn while_in_core(address: usize, len: usize, call: impl FnOnce() -> isize) -> isize {
    let (Some(managed), Ok(range)) = (serving(), touched(address, len)) else { return call() };
    if !managed::holds(range.start) {
        return call();
    }
    // Over the call, so that no fork gives a child a pin that nobody takes back there.
    let table = table();
    let is_open = table.maps.part(&range) == (Part::Managed, range.end) && table.maps.access(&range) == Ok(READ_WRITE);
    let pinned =
        managed.region_of(range.start).filter(|(region, offset)| is_open && region.pin(*offset, range.len()).is_ok());
    let result = call();
    if pinned.is_some() {
        unpin(managed, &range);
    }
    result
}
