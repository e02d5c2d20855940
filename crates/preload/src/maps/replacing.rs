//! What is mapped over a part of a region: fresh managed memory, or something else of the program's.
//!
//! Other threads may use what is there meanwhile. They find what was there or what is there now, and nothing in between; and what they have
//! written since it is there stays.

use std::ops::Range;

use selfpage_core::linux::memory::Access;

use super::moving::Move;
use super::unmanaged::{Counted, map_elsewhere, page_bytes, rehearse, unmap_elsewhere};
use super::{ACCESS, Errno, Maps, Part, kernel, locking, table};
use crate::managed::{self, Managed};
use crate::promises::{self, Offer};
use crate::ranges::{Ranges, Standing};
use crate::space::PAGE;
use crate::sys::call;

impl Maps {
    /// MAP_FIXED over a region: fresh managed memory.
    pub(super) fn map_anew(
        &mut self,
        managed: &Managed,
        range: Range<usize>,
        prot: i32,
        flags: i32,
    ) -> Result<usize, Errno> {
        self.renew(managed, &range, prot, None)?;
        if flags & libc::MAP_LOCKED != 0 {
            let _ = self.lock_managed(managed, range.clone(), locking::Why::Locked);
        }
        Ok(range.start)
    }

    /// An error where a range is not all of one region, or may not be replaced.
    fn may_replace(&self, range: &Range<usize>) -> Result<(), Errno> {
        // A mapping across the edge of a region is not the domain's to give.
        if !managed::ranges().iter().any(|region| region.start <= range.start && range.end <= region.end) {
            return Err(libc::ENOMEM);
        }
        self.unless_sealed(range)?;
        self.has_room(self.parts(range.clone()).count())
    }

    /// A range is the program's, and nothing is said of it yet.
    fn begin(&mut self, managed: &Managed, range: &Range<usize>) {
        if managed::maps_range().contains(&range.start) {
            self.taken.add(range.clone());
            self.tell_reach(managed);
        }
        self.forget(range.clone());
    }

    /// Fresh managed memory over a part of a region. Where contents come, what could be read stays for them to replace, and what could not be
    /// written has the access that it had until the caller gives it the new one. An error is the kernel's, or says that the frames do not
    /// hold it: then what was there is there.
    pub(super) fn renew(
        &mut self,
        managed: &Managed,
        range: &Range<usize>,
        prot: i32,
        coming: Option<&Move>,
    ) -> Result<(), Errno> {
        self.may_replace(range)?;
        let opens = prot & ACCESS != 0;
        let offer = if opens { Some(Offer::of(range).ok_or(libc::ENOMEM)?) } else { None };
        // Before anything of the program's is lost: what the kernel refuses it refuses here.
        let mut lost_bytes = 0;
        let lost = [&self.foreign, &self.closed, &self.read_only];
        for set in &lost[..if opens { lost.len() } else { 1 }] {
            set.within(range.clone(), |part| lost_bytes += part.len());
        }
        if lost_bytes > 0 {
            // A hole between them is opened with them.
            let holes = self.parts(range.clone()).filter(|(part, _)| opens && *part == Part::Free);
            lost_bytes += holes.map(|(_, part)| part.len()).sum::<usize>();
            rehearse(lost_bytes, prot)?;
        }
        if opens {
            // Before somebody may read it who could not, or write what would be dropped with it.
            let drop_part = |part| drop_contents(managed, part);
            each_part(&self.closed, range, Standing::In, drop_part)?;
            self.each_fresh(range, coming, |part| each_part(&self.read_only, &part, Standing::In, drop_part))?;
        }
        while let Some(part) = self.foreign.first_within(range) {
            self.reclaim(managed, part.clone(), prot)?;
            // Nothing is left in it.
            self.closed.add(part);
        }
        let protect = |part| {
            // SAFETY: owned-range: the program replaces what it has there.
            kernel(unsafe { managed.protect_anew(part, prot) }).map(drop)
        };
        match coming {
            // Frames go where their page can be written alone: elsewhere contents are copied.
            Some(_) if opens => each_part(&self.read_only, range, Standing::Out, protect)?,
            _ => protect(range.clone())?,
        }
        self.remove_guards(managed, range);
        self.each_fresh(range, coming, |part| self.drop_left(managed, &part, prot))?;
        match offer {
            Some(offer) => offer.keep(),
            None => promises::end(range, || {}),
        }
        self.begin(managed, range);
        self.note_access(range.clone(), prot);
        Ok(())
    }

    /// Drops what [`Maps::renew`] leaves of a range: what could be written. Where nobody has access any more it is all left.
    fn drop_left(&self, managed: &Managed, range: &Range<usize>, prot: i32) -> Result<(), Errno> {
        if prot & ACCESS == libc::PROT_NONE {
            return drop_contents(managed, range.clone());
        }
        self.parts(range.clone()).filter(|(part, _)| *part == Part::Managed).try_for_each(|(_, part)| {
            each_part(&self.closed, &part, Standing::Out, |part| {
                each_part(&self.read_only, &part, Standing::Out, |part| drop_contents(managed, part))
            })
        })
    }

    /// Moves a mapping of that length over a part of a region, with nothing of what the program had there left.
    fn move_over(&mut self, managed: &Managed, range: &Range<usize>, elsewhere: usize) -> Result<(), Errno> {
        let Some((region, offset)) = managed.region_of(range.start) else { return Err(libc::EINVAL) };
        self.remove_guards(managed, range);
        let (start, len) = (range.start, range.len());
        // A pager thread makes the change, which does not have the program's files: it is handed the mapping.
        let change = move || {
            let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
            // SAFETY: raw-call, owned-range: the program replaces what it has there; what is the domain's of it is empty now.
            unsafe { call(libc::SYS_mremap, [elsewhere, len, len, flags, start, 0]) }
        };
        // SAFETY: region-contents: the program gives up what it has there.
        let moved = unsafe { region.while_empty(offset, len, change) };
        moved.map_err(|_| libc::EINVAL).and_then(kernel).map(drop)
    }

    /// A part of a region is to be the domain's again, with that access.
    pub(super) fn reclaim(&mut self, managed: &Managed, range: Range<usize>, prot: i32) -> Result<(), Errno> {
        let Some((region, offset)) = managed.region_of(range.start) else { return Ok(()) };
        let access = match prot & ACCESS {
            libc::PROT_NONE => Access::None,
            some if some & libc::PROT_WRITE == 0 => Access::Read,
            _ => Access::ReadWrite,
        };
        // SAFETY: owned-range: the program gives up what it mapped there.
        unsafe { region.restore(offset, range.len(), access) }.map_err(|_| libc::ENOMEM)?;
        self.foreign.remove(range.clone());
        self.forget(range);
        Ok(())
    }

    /// What the kernel has moved out of a region leaves holes, which are the domain's again. The kernel may have given one to somebody else by now:
    /// what is there is the program's, as other things that it mapped over a region, and stays.
    pub(super) fn close_holes(&mut self, managed: &Managed, mut left: Range<usize>) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        while let Some((_, hole)) = self.next(&mut left) {
            let args = [hole.start, hole.len(), libc::PROT_NONE as usize, flags as usize, usize::MAX, 0];
            // SAFETY: raw-call: it replaces nothing.
            let filled = kernel(unsafe { call(libc::SYS_mmap, args) });
            if filled.is_ok() && self.reclaim(managed, hole.clone(), libc::PROT_NONE).is_ok() {
                self.end(managed, hole);
            }
        }
    }
}

/// MAP_FIXED over a region: something else, which is foreign from then on.
///
/// # Safety
/// *raw-call*: `args` are those of an mmap(2) that the program asked for.
pub(super) unsafe fn map_over(managed: &Managed, range: Range<usize>, args: [usize; 6]) -> Result<usize, Errno> {
    let known_bytes = page_bytes(args);
    let page_bytes = known_bytes.unwrap_or(PAGE);
    if !range.start.is_multiple_of(page_bytes) {
        return Err(libc::EINVAL);
    }
    let end = range.end.checked_next_multiple_of(page_bytes).ok_or(libc::ENOMEM)?;
    let range = range.start..end;
    table().maps.may_replace(&range)?;
    // As for a mapping that goes anywhere: not under the lock.
    let elsewhere = map_elsewhere(args, known_bytes)?;
    let maps = &mut *table().maps;
    if let Err(why) = maps.may_replace(&range).and_then(|()| maps.move_over(managed, &range, elsewhere)) {
        unmap_elsewhere(elsewhere, range.len());
        return Err(why);
    }
    promises::end(&range, || {});
    maps.begin(managed, &range);
    maps.foreign.add(range.clone());
    maps.count(range.clone(), Counted::of(args[3] as i32, args[2] as i32));
    Ok(range.start)
}

/// Calls `visit` for each part of a range that stands so to a set, until one fails.
fn each_part(
    set: &Ranges,
    range: &Range<usize>,
    wanted: Standing,
    mut visit: impl FnMut(Range<usize>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let mut left = range.clone();
    while !left.is_empty() {
        let (end, standing) = set.stretch(&left);
        if standing == wanted {
            visit(left.start..end)?;
        }
        left.start = end;
    }
    Ok(())
}

/// Drops what is in a part of a region.
fn drop_contents(managed: &Managed, range: Range<usize>) -> Result<(), Errno> {
    let Some((region, offset)) = managed.region_of(range.start) else { return Ok(()) };
    // SAFETY: owned-range: the program replaces it.
    unsafe { region.drop_contents(offset, range.len()) }.map_err(|_| libc::EINVAL)
}
