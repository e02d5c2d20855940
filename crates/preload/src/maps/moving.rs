//! mremap(2) on managed mappings.

use std::ops::Range;

use super::advice::{MADV_GUARD_INSTALL, MADV_WIPEONFORK};
use super::locking::Why;
use super::protecting::Key;
use super::unmanaged::{Counted, map_elsewhere, unmap_elsewhere};
use super::{
    Errno, HIGHEST, Maps, Part, READ_WRITE, Table, answer, as_kernel, kernel, pages, serving, split, table, unmap_parts,
};
use crate::managed::{self, Managed};
use crate::promises;
use crate::ranges::{Ranges, Standing};
use crate::space::PAGE;
use crate::sys::{self, call};

/// mremap(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn mremap(args: [usize; 6]) -> isize {
    let [address, len, new_len, flags, new_address, _] = args;
    let flags = flags as i32;
    let named = if flags & libc::MREMAP_FIXED != 0 { pages(new_address, new_len) } else { Ok(0..0) };
    let (Some(managed), Ok(whole), Ok(new), Ok(named)) = (serving(), pages(address, len), pages(0, new_len), named)
    else {
        // SAFETY: raw-call: passed on from our caller.
        return unsafe { call(libc::SYS_mremap, args) };
    };
    if named.start < whole.end && whole.start < named.end {
        return -libc::EINVAL as isize;
    }
    if let Some(answer) = answer(&[&whole, &named], libc::SYS_mremap, args) {
        return answer;
    }
    let mut held = table();
    let first = held.maps.parts(whole.start..whole.end.max(whole.start + 1)).next();
    let (part, part_end) = first.map_or((Part::Free, whole.start), |(part, range)| (part, range.end));
    let (old, cut) = match part {
        // The kernel cuts it off.
        Part::Outside if part_end >= whole.end => (whole.clone(), whole.end..whole.end),
        _ => split(&whole, new.end),
    };
    let wish = Wish { old, cut: cut.clone(), new_len: new.end, flags, named };
    let moved = match part {
        Part::Foreign | Part::Outside if part_end >= wish.old.end => {
            // SAFETY: raw-call: passed on from our caller.
            unsafe { remap_by_kernel(held, managed, part, wish, args) }
        }
        _ => {
            let moved = held.maps.remap(managed, wish, part, part_end);
            drop(held);
            moved
        }
    };
    let Ok(start) = moved else { return as_kernel(moved) };
    if cut.is_empty() {
        return start as isize;
    }
    match unmap_parts(managed, cut) {
        // It stays where it is, as long as it was.
        Err(why) if start == whole.start => -why as isize,
        // What the kernel has no room to close is left as it is.
        _ => start as isize,
    }
}

/// The same for a mapping that is not managed.
///
/// # Safety
/// *raw-call*: `args` are those of an mremap(2) that the program asked for, of which the wish is what is not cut off.
unsafe fn remap_by_kernel(
    mut held: Table,
    managed: &Managed,
    part: Part,
    wish: Wish,
    mut args: [usize; 6],
) -> Result<usize, Errno> {
    let Wish { old, cut, new_len, flags, named } = wish;
    let stays = flags & libc::MREMAP_DONTUNMAP != 0;
    // Its new place is not to be in a region, and what stays keeps its length: the kernel is not to find it cut off.
    if managed::holds_any(&named) || stays && !cut.is_empty() {
        return Err(libc::EINVAL);
    }
    held.maps.unless_sealed(&cut)?;
    held.maps.may_lose(&cut)?;
    // Before Linux 6.17 both lengths of what stays are to be the same as they are given, whole pages or not.
    args[1] = if cut.is_empty() { args[1] } else { old.len() };
    held.maps.has_room(1)?;
    let counted = held.maps.counted(&old);
    let shrinks = !stays && flags & libc::MREMAP_FIXED == 0 && new_len <= old.len();
    let leaving = match () {
        () if stays => old.end..old.end,
        () if shrinks => split(&old, new_len).1,
        () => old.clone(),
    };
    let aside = held.maps.set_aside(&leaving);
    // The kernel may wait for a thread of the program's that answers faults, or is told of the move: where the mapping is locked, what it grows by
    // comes in at once. Not under our lock, for which that may be waiting.
    drop(held);
    // SAFETY: raw-call: passed on from our caller.
    let moved = kernel(unsafe { call(libc::SYS_mremap, args) });
    let maps = &mut *table().maps;
    let start = match moved {
        Ok(start) => start,
        Err(why) => {
            maps.carry_counts(&aside, leaving.start);
            return Err(why);
        }
    };
    if shrinks {
        maps.forget(aside);
        return Ok(start);
    }
    if !stays && part == Part::Foreign && start != old.start {
        maps.close_holes(managed, old);
    }
    // What was there before has been replaced.
    maps.forget(start..start + new_len);
    let come = split(&aside, new_len).0;
    maps.carry_counts(&come, start);
    maps.forget(aside);
    maps.count(start + come.len()..start + new_len, counted);
    Ok(start)
}

struct Wish {
    old: Range<usize>,
    /// What was behind it, and goes last: after an error it is there. It may be anything.
    cut: Range<usize>,
    new_len: usize,
    flags: i32,
    /// The new place, if that was named.
    named: Range<usize>,
}

/// Where a mapping goes.
pub(super) struct Move {
    old: Range<usize>,
    new: Range<usize>,
    afterwards: Afterwards,
}

/// What becomes of the old place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Afterwards {
    Gone,
    Empty,
}

/// The access that a mapping has at its new place as its contents come, which need none. Others find no more there than it is to have, and no
/// code before it is there: what can be written and executed could not come back.
fn access_on_the_way(prot: i32) -> i32 {
    if prot & libc::PROT_WRITE != 0 { READ_WRITE } else { prot }
}

/// One of the sets of what was said.
type SetOf = fn(&Maps) -> &Ranges;

impl Move {
    /// What moves: a mapping may become smaller on the way.
    fn moved(&self) -> Range<usize> {
        self.old.start..self.old.end.min(self.old.start + self.new.len())
    }

    /// The new place of a part. What is said of the whole is said of a new end too.
    fn place_of(&self, part: &Range<usize>) -> Range<usize> {
        if *part == self.moved() {
            return self.new.clone();
        }
        let start = self.new.start + (part.start - self.old.start);
        start..start + part.len()
    }
}

impl Maps {
    /// mremap(2) of a range that begins with such a part. What is cut off is there still.
    fn remap(&mut self, managed: &Managed, wish: Wish, part: Part, part_end: usize) -> Result<usize, Errno> {
        let Wish { old, cut, new_len, flags, named } = wish;
        let fixed = flags & libc::MREMAP_FIXED != 0;
        let moves = flags & libc::MREMAP_MAYMOVE != 0;
        let stays = flags & libc::MREMAP_DONTUNMAP != 0;
        // No mapping is longer than all addresses.
        if new_len == 0
            || new_len > HIGHEST
            || flags & !(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) != 0
        {
            return Err(libc::EINVAL);
        }
        if (fixed || stays) && !moves || stays && (new_len != old.len() || !cut.is_empty()) {
            return Err(libc::EINVAL);
        }
        if part == Part::Free {
            return Err(libc::EFAULT);
        }
        self.unless_sealed(&(old.start..cut.end))?;
        if !fixed && !stays && new_len <= old.len() {
            return Ok(old.start);
        }
        if old.is_empty() {
            return Err(libc::EINVAL);
        }
        if part_end < old.end {
            return Err(libc::EFAULT);
        }
        self.may_lose(&cut)?;
        // For a while all that was said of parts is said twice.
        self.has_room_for_copies(&old)?;
        let prot = self.access(&old)?;
        if self.locked.covers(&old) && !self.may_stay(managed, new_len.saturating_sub(old.len()), Why::Locked) {
            return Err(libc::EAGAIN);
        }
        if !fixed && !stays && self.grow(managed, &old, new_len, prot) {
            return Ok(old.start);
        }
        if !moves {
            return Err(libc::ENOMEM);
        }
        let access = access_on_the_way(prot);
        let afterwards = if stays { Afterwards::Empty } else { Afterwards::Gone };
        if !fixed {
            let new = self.map_anywhere(managed, new_len, access).map_err(|_| libc::ENOMEM)?;
            return self.move_in(managed, &Move { old, new, afterwards }, Some(access), prot);
        }
        let wish = Move { old, new: named, afterwards };
        if managed::holds_any(&wish.new) {
            self.renew(managed, &wish.new, access, Some(&wish))?;
            return self.move_in(managed, &wish, None, prot);
        }
        self.move_out(managed, &wish, prot)
    }

    /// As [`Maps::move_contents`], with nothing at the new place after an error.
    fn move_in(&mut self, managed: &Managed, wish: &Move, access: Option<i32>, prot: i32) -> Result<usize, Errno> {
        let moved = self.move_contents(managed, wish, access, prot);
        if moved.is_err() {
            // As the kernel, which has unmapped what was at a place that the program named by then.
            let _ = self.unmap(managed, wish.new.clone());
        }
        moved
    }

    /// Makes a mapping larger where it stands, if what follows is free.
    fn grow(&mut self, managed: &Managed, old: &Range<usize>, new_len: usize, prot: i32) -> bool {
        let more = old.end..old.start.saturating_add(new_len);
        if !managed::maps_range().contains(&old.start)
            || more.end > managed::maps_range().end
            || self.taken.gap(more.clone(), more.len(), 1).is_none()
        {
            return false;
        }
        // SAFETY: owned-range: nobody had it.
        if prot != libc::PROT_NONE && unsafe { managed.open(more.clone(), prot) } < 0 {
            return false;
        }
        self.taken.add(more.clone());
        self.tell_reach(managed);
        self.note_access(more.clone(), prot);
        self.spread(managed, old, more);
        true
    }

    /// What was said of all of a mapping, but for access, holds for what it grows by.
    fn spread(&mut self, managed: &Managed, old: &Range<usize>, more: Range<usize>) {
        for set in [&mut self.not_for_child, &mut self.empty_in_child] {
            if set.covers(old) {
                set.add(more.clone());
            }
        }
        if self.locked.covers(old) {
            // As the kernel, which makes room for it later if there is none now.
            let _ = self.lock_managed(managed, more, Why::Locked);
        }
    }

    /// Calls `visit` for each part of a new place that no contents come to, until one fails.
    pub(super) fn each_fresh(
        &self,
        new: &Range<usize>,
        coming: Option<&Move>,
        mut visit: impl FnMut(Range<usize>) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut end = new.start;
        if let Some(wish) = coming {
            self.each_with_contents(wish.moved(), |part| {
                let there = new.start + (part.start - wish.old.start);
                visit(end..there)?;
                end = there + part.len();
                Ok(())
            })?;
        }
        visit(end..new.end)
    }

    /// Moves what is in `old` to `new`, with all that was said of it. `access` is what all of `new` has; `None`: parts of it are still as they
    /// were before. After an error it is all in `old`.
    fn move_contents(
        &mut self,
        managed: &Managed,
        wish: &Move,
        access: Option<i32>,
        prot: i32,
    ) -> Result<usize, Errno> {
        let old = wish.old.clone();
        if prot == libc::PROT_NONE {
            self.promise(wish)?;
        }
        self.guard(managed, wish)?;
        let mut moved_to = old.start;
        let moved = (self.move_filled(managed, wish, prot, &mut moved_to))
            .and_then(|()| self.agree(managed, wish, access, prot))
            .and_then(|()| self.move_wishes(managed, wish))
            .and_then(|()| self.give_up(managed, wish));
        if moved.is_err() {
            self.bring_back(managed, wish, old.start..moved_to, prot);
        }
        moved.map(|()| wish.new.start)
    }

    /// Has frames for what moves, if it may have contents, where they go.
    fn promise(&self, wish: &Move) -> Result<(), Errno> {
        self.each_with_contents(wish.moved(), |part| {
            let there = wish.new.start + (part.start - wish.old.start);
            if promises::promise(&(there..there + part.len())) { Ok(()) } else { Err(libc::ENOMEM) }
        })
    }

    /// Has guards in `new` where `old` has them: what they guard cannot be read.
    fn guard(&mut self, managed: &Managed, wish: &Move) -> Result<(), Errno> {
        let mut left = wish.moved();
        while let Some(guard) = self.guarded.first_within(&left) {
            left.start = guard.end;
            let there = wish.new.start + (guard.start - wish.old.start);
            self.advise(managed, there..there + guard.len(), MADV_GUARD_INSTALL)?;
        }
        Ok(())
    }

    /// Moves a mapping out of all regions. Its contents leave by their frames, so that what others write meanwhile is in what moves or in what
    /// stays, for a place that the program does not know of. There they are copied.
    fn move_out(&mut self, managed: &Managed, wish: &Move, prot: i32) -> Result<usize, Errno> {
        let aside = self.open_aside(managed, wish)?;
        let away = Move { old: wish.old.clone(), new: aside.clone(), afterwards: wish.afterwards };
        let mut moved_to = wish.old.start;
        let moved = (self.move_filled(managed, &away, prot, &mut moved_to))
            .and_then(|()| self.copy_out(managed, &away, wish, prot));
        if moved.is_err() {
            self.bring_back(managed, &away, wish.old.start..moved_to, prot);
        }
        // SAFETY: owned-range: ours, and what is left there is garbage. What cannot be closed is empty all the same for who comes next.
        unsafe {
            if managed.close(aside.clone()) < 0 {
                managed.end(aside);
            }
        }
        moved.map(|()| wish.new.start)
    }

    /// A place in the region of mappings for what moves, which nobody hears of.
    fn open_aside(&self, managed: &Managed, wish: &Move) -> Result<Range<usize>, Errno> {
        let moved = wish.moved();
        let start = self.taken.gap(managed::maps_range(), moved.len(), PAGE).ok_or(libc::ENOMEM)?;
        let aside = start..start + moved.len();
        // The old place may be full again before it is done with.
        let promised = self.promise(&Move { old: wish.old.clone(), new: aside.clone(), afterwards: wish.afterwards });
        // SAFETY: owned-range: nobody has it.
        let opened = promised.and_then(|()| kernel(unsafe { managed.protect(aside.clone(), READ_WRITE) }));
        if opened.is_err() {
            promises::end(&aside, || {});
        }
        opened.map(|_| aside)
    }

    /// Copies what has moved away to memory of the kernel's, which then replaces what is at the new place, in one step; and ends the old place.
    fn copy_out(&mut self, managed: &Managed, away: &Move, wish: &Move, prot: i32) -> Result<(), Errno> {
        let start = map_beside(&wish.new)?;
        let beside = Move { new: start..start + wish.new.len(), old: wish.old.clone(), afterwards: wish.afterwards };
        let copied = (self.guard(managed, &beside))
            .and_then(|()| {
                self.each_with_contents(wish.moved(), |part| {
                    let offset = part.start - wish.old.start;
                    let from = away.new.start + offset;
                    // SAFETY: owned-range: the program knows of neither.
                    unsafe { managed.copy_out(from..from + part.len(), start + offset) }.map_err(|_| libc::ENOMEM)
                })
            })
            .and_then(|()| self.agree(managed, &beside, Some(READ_WRITE), prot))
            .and_then(|()| self.put(&beside.new, &wish.new, prot));
        if let Err(why) = copied {
            unmap_elsewhere(start, beside.new.len());
            return Err(why);
        }
        // What is said of parts makes mappings of them, and the kernel moves one at a time.
        let ended = self.move_wishes(managed, wish).and_then(|()| self.give_up(managed, wish));
        if ended.is_err() {
            let _ = self.unmap(managed, wish.new.clone());
        }
        ended
    }

    /// Puts a mapping of the kernel's that the program does not know of where it wants one.
    fn put(&mut self, from: &Range<usize>, to: &Range<usize>, prot: i32) -> Result<(), Errno> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: raw-call: the program replaces what it has there.
        kernel(unsafe { call(libc::SYS_mremap, [from.start, from.len(), to.len(), flags as usize, to.start, 0]) })?;
        self.forget(to.clone());
        // From here on it counts: what it has replaced does no longer.
        self.count(to.clone(), Counted::of(libc::MAP_ANONYMOUS, prot));
        Ok(())
    }

    /// Has `new`, which has the contents, be as `old` is. Its access is as for [`Maps::move_contents`].
    fn agree(&mut self, managed: &Managed, wish: &Move, access: Option<i32>, prot: i32) -> Result<(), Errno> {
        if wish.afterwards == Afterwards::Gone {
            // Where it counts, it does not at two places.
            self.unmanaged.remove(wish.old.clone());
        }
        match access {
            Some(access) if access == prot => {}
            Some(_) => drop(self.protect(managed, wish.new.clone(), prot, Key::Unchanged)?),
            None => {
                // SAFETY: owned-range: what the program had there is gone.
                kernel(unsafe { managed.protect_anew(wish.new.clone(), prot) })?;
                self.note_access(wish.new.clone(), prot);
            }
        }
        Ok(())
    }

    /// Moves what is not empty, and has no guard. `moved_to` is how far it came.
    fn move_filled(&self, managed: &Managed, wish: &Move, prot: i32, moved_to: &mut usize) -> Result<(), Errno> {
        let moved = self.move_rest(managed, wish, moved_to);
        if moved.is_ok() || prot & libc::PROT_READ != 0 {
            return moved;
        }
        // A page that frames do not move is copied by this thread, which may read what everybody may.
        // SAFETY: owned-range: the program's own, which is about to go.
        kernel(unsafe { managed.protect(wish.old.clone(), libc::PROT_READ) })?;
        let moved = self.move_rest(managed, wish, moved_to);
        // SAFETY: owned-range: as it was before.
        unsafe { managed.protect(wish.old.clone(), prot) };
        moved
    }

    /// The same from `moved_to` on, of what can be read where it is copied.
    fn move_rest(&self, managed: &Managed, wish: &Move, moved_to: &mut usize) -> Result<(), Errno> {
        self.each_with_contents(*moved_to..wish.moved().end, |part| {
            let there = wish.new.start + (part.start - wish.old.start);
            *moved_to = part.start;
            // SAFETY: owned-range: both are the program's, and do not meet.
            unsafe { managed.move_contents(part.clone(), there) }.map_err(|_| libc::ENOMEM)?;
            *moved_to = part.end;
            Ok(())
        })
    }

    /// Puts the contents of a part back where they were, for a move that cannot be completed.
    fn bring_back(&mut self, managed: &Managed, wish: &Move, moved: Range<usize>, prot: i32) {
        let Move { old, new, .. } = wish;
        // And no more than that: what nobody had access to may still be in the rest.
        let there = new.start..new.start + moved.len();
        if !there.is_empty() {
            // SAFETY: owned-range: it is about to go.
            unsafe { managed.protect_anew(there, access_on_the_way(prot)) };
        }
        let _ = self.each_with_contents(moved, |part| {
            let there = new.start + (part.start - old.start);
            return_contents(managed, there..there + part.len(), part.start);
            Ok(())
        });
        // SAFETY: owned-range: as it was before.
        unsafe { managed.protect(old.clone(), prot) };
        self.unmanaged.remove(new.clone());
        self.note_access(old.clone(), prot);
        // Pins went with the contents.
        self.lock_again(managed, old.clone());
    }

    /// Calls `visit` for each part of `left` that has no guard, and may have contents, until one fails.
    fn each_with_contents(
        &self,
        mut left: Range<usize>,
        mut visit: impl FnMut(Range<usize>) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        while !left.is_empty() {
            let (end, guarded) = self.guarded.stretch(&left);
            let (end, contents) = promises::stretch(&(left.start..end));
            if guarded == Standing::Out && contents == Standing::In {
                visit(left.start..end)?;
            }
            left.start = end;
        }
        Ok(())
    }

    /// Ends the old place, or empties it.
    fn give_up(&mut self, managed: &Managed, wish: &Move) -> Result<(), Errno> {
        let old = wish.old.clone();
        if wish.afterwards == Afterwards::Gone {
            // SAFETY: owned-range: what is left there is garbage.
            kernel(unsafe { managed.close(old.clone()) })?;
        }
        // From here on nothing is refused any more.
        self.move_locks(managed, wish);
        self.remove_guards(managed, &old);
        // One that is to be empty is so: what is there now came after its contents had left.
        if wish.afterwards == Afterwards::Gone {
            self.end(managed, old);
        }
        Ok(())
    }

    /// What was said of the old place's parts, but for locks, holds for those of the new one.
    fn move_wishes(&mut self, managed: &Managed, wish: &Move) -> Result<(), Errno> {
        let children: [(SetOf, i32); 2] =
            [(|maps| &maps.not_for_child, libc::MADV_DONTFORK), (|maps| &maps.empty_in_child, MADV_WIPEONFORK)];
        for (set, advice) in children {
            let mut left = wish.moved();
            while let Some(part) = set(self).first_within(&left) {
                left.start = part.end;
                self.advise(managed, wish.place_of(&part), advice)?;
            }
        }
        Ok(())
    }

    /// Locks leave the old place. First there has to be room for them at the new one.
    fn move_locks(&mut self, managed: &Managed, wish: &Move) {
        for why in Why::ALL {
            let mut left = wish.moved();
            while let Some(part) = self.staying(why).first_within(&left) {
                left.start = part.end;
                self.unlock_managed(managed, part.clone(), why);
                match why {
                    Why::Locked => {
                        // What it grows by may be more than may be locked.
                        let place = wish.place_of(&part);
                        for range in [place.start..place.start + part.len(), place] {
                            let _ = self.lock(managed, range);
                        }
                    }
                    Why::Kept => self.keep(managed, wish.place_of(&part)),
                }
            }
        }
    }
}

/// Maps memory of the kernel's, as long as `new`, that has no part in common with it.
fn map_beside(new: &Range<usize>) -> Result<usize, Errno> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let start = map_elsewhere([0, new.len(), READ_WRITE as usize, flags as usize, usize::MAX, 0], Some(PAGE))?;
    if start >= new.end || start + new.len() <= new.start {
        return Ok(start);
    }
    // As long as it is held the next one lies elsewhere. A second one may have a part of the other end of `new`, and a third one none.
    let beside = map_beside(new);
    unmap_elsewhere(start, new.len());
    beside
}

/// How often contents are sent back, a millisecond apart: a page has to be copied, and there is no frame for that, or it cannot be read.
const MOST_TRIES: u32 = 1000;

/// Moves contents back where they came from.
fn return_contents(managed: &Managed, from: Range<usize>, old: usize) {
    for _ in 0..MOST_TRIES {
        // SAFETY: owned-range: both are the program's, and do not meet.
        if unsafe { managed.move_contents(from.clone(), old) }.is_ok() {
            return;
        }
        sys::pause(sys::MOMENT);
    }
    sys::abort("a mapping can neither be moved nor stay")
}

/// What was said of a block of malloc's, but for access, holds for what it has grown by.
pub fn spread(old: &Range<usize>, more: Range<usize>) {
    if let Some(managed) = serving() {
        table().maps.spread(managed, old, more);
    }
}

/// What was said of a block of malloc's, but for access, holds for the place that its contents have moved to. Where there is no room to say
/// it, it holds no longer.
pub fn carry(old: Range<usize>, new: Range<usize>) {
    let Some(managed) = serving() else { return };
    let maps = &mut *table().maps;
    let wish = Move { old, new, afterwards: Afterwards::Gone };
    let _ = (maps.guard(managed, &wish), maps.move_wishes(managed, &wish));
    maps.move_locks(managed, &wish);
}

/// Whether the program has mapped nothing else over any part of a range of a region.
pub fn is_all_managed(range: &Range<usize>) -> bool {
    table().maps.foreign.first_within(range).is_none()
}
