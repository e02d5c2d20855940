//! mremap(2) on managed mappings.

use std::ops::Range;

use super::{Errno, Maps, Part, READ_WRITE, as_kernel, kernel, pages, serving, table};
use crate::managed::{self, Managed};
use crate::sys::call;

/// mremap(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn mremap(args: [usize; 6]) -> isize {
    let [address, len, new_len, flags, new_address, _] = args;
    let (Some(managed), Ok(old), Ok(new)) = (serving(), pages(address, len), pages(0, new_len)) else {
        // SAFETY: raw-call: passed on from our caller.
        return unsafe { call(libc::SYS_mremap, args) };
    };
    let wish = Wish { old, new_len: new.end, flags: flags as i32, new_address };
    // SAFETY: raw-call: passed on from our caller.
    as_kernel(unsafe { table().maps.remap(managed, wish, args) })
}

struct Wish {
    old: Range<usize>,
    new_len: usize,
    flags: i32,
    new_address: usize,
}

impl Maps {
    /// # Safety
    /// *raw-call*: `args` are those of an mremap(2) that the program asked for.
    unsafe fn remap(&mut self, managed: &Managed, wish: Wish, args: [usize; 6]) -> Result<usize, Errno> {
        let Wish { old, new_len, flags, new_address } = wish;
        let first = self.parts(old.start..old.end.max(old.start + 1)).next();
        let fixed = flags & libc::MREMAP_FIXED != 0;
        match first {
            Some((Part::Managed, range)) if range == old => {}
            Some((Part::Managed, _)) => return Err(libc::EFAULT),
            Some((Part::Free, _)) => return Err(libc::EFAULT),
            _ => {
                // The kernel's own. Its new place is not to be in a region.
                if fixed && self.touches_regions(&(new_address..new_address.saturating_add(new_len))) {
                    return Err(libc::EINVAL);
                }
                // SAFETY: raw-call: passed on from our caller.
                let start = kernel(unsafe { call(libc::SYS_mremap, args) })?;
                let counted = self.unmanaged.covers(&old);
                if flags & libc::MREMAP_DONTUNMAP == 0 {
                    self.forget(old);
                }
                if counted {
                    self.count_unmanaged(start..start + new_len);
                }
                return Ok(start);
            }
        }
        if new_len == 0 || flags & !(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) != 0 {
            return Err(libc::EINVAL);
        }
        let moves = flags & libc::MREMAP_MAYMOVE != 0;
        let stays = flags & libc::MREMAP_DONTUNMAP != 0;
        if (fixed || stays) && !moves || stays && new_len != old.len() {
            return Err(libc::EINVAL);
        }
        if fixed {
            let new = pages(new_address, new_len)?;
            if new.start < old.end && old.start < new.end {
                return Err(libc::EINVAL);
            }
            self.make_room(managed, new.clone())?;
            return self.move_contents(managed, old, new, stays);
        }
        if !stays && new_len <= old.len() {
            self.unmap(managed, old.start + new_len..old.end)?;
            return Ok(old.start);
        }
        if !stays && self.grow(managed, &old, new_len) {
            return Ok(old.start);
        }
        if !moves {
            return Err(libc::ENOMEM);
        }
        let new = self.map_anywhere(managed, new_len, READ_WRITE).ok_or(libc::ENOMEM)?;
        self.move_contents(managed, old, new, stays)
    }

    /// Makes a mapping larger where it stands, if what follows is free.
    fn grow(&mut self, managed: &Managed, old: &Range<usize>, new_len: usize) -> bool {
        let more = old.end..old.start + new_len;
        if !managed::maps_range().contains(&old.start)
            || more.end > managed::maps_range().end
            || self.taken.gap(more.clone(), more.len(), 1).is_none()
        {
            return false;
        }
        let prot = self.access(old);
        // SAFETY: owned-range: nobody had it.
        if prot != libc::PROT_NONE && unsafe { managed.protect(more.clone(), prot) } < 0 {
            return false;
        }
        self.taken.add(more.clone());
        self.tell_reach(managed);
        self.note_access(more, prot);
        true
    }

    /// An empty mapping at a place that the program names.
    fn make_room(&mut self, managed: &Managed, new: Range<usize>) -> Result<(), Errno> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let args = [new.start, new.len(), READ_WRITE as usize, flags as usize, usize::MAX, 0];
        if self.touches_regions(&new) {
            // SAFETY: raw-call: the program replaces what it has there.
            return unsafe { self.map_over(managed, new, READ_WRITE, true, args) }.map(drop);
        }
        // SAFETY: raw-call: as above.
        kernel(unsafe { call(libc::SYS_mmap, args) })?;
        self.forget(new.clone());
        self.count_unmanaged(new);
        Ok(())
    }

    /// Moves what is in `old` to `new`, which is empty and open.
    fn move_contents(
        &mut self,
        managed: &Managed,
        old: Range<usize>,
        new: Range<usize>,
        stays: bool,
    ) -> Result<usize, Errno> {
        let prot = self.access(&old);
        if prot & libc::PROT_READ == 0 {
            // SAFETY: owned-range: the program's own, which is about to go.
            kernel(unsafe { managed.protect(old.clone(), libc::PROT_READ) })?;
        }
        // SAFETY: owned-range: both are the program's, do not meet, and are open; faults on them are answered by pager
        // threads, which do not take our lock.
        unsafe {
            std::ptr::copy_nonoverlapping(old.start as *const u8, new.start as *mut u8, old.len().min(new.len()));
        }
        if stays {
            // SAFETY: owned-range: the program asked for an empty mapping to stay.
            unsafe { managed.drop_contents(old.clone()) };
            // SAFETY: owned-range: as it was before.
            kernel(unsafe { managed.protect(old.clone(), prot) })?;
        } else {
            self.unmap(managed, old)?;
        }
        if prot != READ_WRITE {
            self.protect(managed, new.clone(), prot, super::Key::Unchanged)?;
        }
        Ok(new.start)
    }
}
