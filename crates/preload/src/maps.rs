//! The program's mappings: which are managed, and what each call of the mmap family means for them.
//!
//! Every call is answered part by part, since a range that a program names may lie in a region, beside it, or across. The
//! table of what each call means is in `docs/run.md`.

mod advice;
mod fork;
mod locking;
mod moving;
mod protecting;
mod replacing;
mod room;
mod sealing;
mod syncing;
mod unmanaged;

use std::ops::Range;

use crate::caller::Caller;
use crate::heap;
use crate::limits::MAPS_BYTES;
use crate::lock::{Held, Lock};
use crate::managed::{self, Managed};
use crate::ranges::{Ranges, Standing};
use crate::space::PAGE;
use crate::sys::{Quiet, call};
use crate::{filters, program, promises};

pub use advice::{madvise, process_madvise};
pub use fork::{hold, let_go, settle_in_child};
pub use locking::{keep, mincore, mlock, mlockall, munlock, munlockall, renew_locks, while_in_core};
pub use moving::{carry, is_all_managed, mremap, spread};
pub use protecting::{mprotect, pkey_mprotect};
use room::NoRoom;
pub use sealing::mseal;
pub use syncing::{msync, msync_in_c};
use unmanaged::map_by_kernel;

/// A larger mapping is address space for later, as runtimes reserve it, and stays the kernel's.
const MOST_BYTES: usize = MAPS_BYTES / 4;
/// Flags of mappings that are not managed.
const NEVER: i32 = libc::MAP_FIXED
    | libc::MAP_FIXED_NOREPLACE
    | libc::MAP_GROWSDOWN
    | libc::MAP_HUGETLB
    | libc::MAP_32BIT
    | libc::MAP_STACK;
const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ACCESS: i32 = READ_WRITE | libc::PROT_EXEC;

/// Where a program's addresses end that did not ask for more: the kernel refuses to unmap what goes on beyond, all of it.
const HIGHEST: usize = (1 << 47) - PAGE;

/// Where no program has a mapping: for holes in a region, where the kernel has one and the program must not.
const NOWHERE: Range<usize> = usize::MAX - 2 * PAGE + 1..usize::MAX - PAGE + 1;

/// What is known of mappings.
pub struct Maps {
    /// The program's, in the region.
    taken: Ranges,
    /// Of these, and of the heap, where something else was mapped over the region.
    foreign: Ranges,
    /// Managed, and without access.
    closed: Ranges,
    /// Managed, and not to be written.
    read_only: Ranges,
    /// Managed, and to be executed.
    executable: Ranges,
    /// Managed, with guards in the place of pages.
    guarded: Ranges,
    /// Managed, and locked in core by the program.
    locked: Ranges,
    /// Managed, and kept in core for the kernel.
    kept: Ranges,
    /// Managed, and not for a forked child.
    not_for_child: Ranges,
    /// Managed, and empty in a forked child.
    empty_in_child: Ranges,
    /// Managed, and sealed.
    sealed: Ranges,
    /// Anonymous memory that is not managed.
    unmanaged: Ranges,
    /// The same, as long as nobody has access.
    reserved: Ranges,
    unmanaged_max_bytes: usize,
    /// Where what counts is set aside next.
    next_aside: usize,
    /// Over a fork: keeps signals blocked.
    forking: Option<Quiet>,
}

static MAPS: Lock<Maps> = Lock::new(Maps {
    taken: Ranges::new(),
    foreign: Ranges::new(),
    closed: Ranges::new(),
    read_only: Ranges::new(),
    executable: Ranges::new(),
    guarded: Ranges::new(),
    locked: Ranges::new(),
    kept: Ranges::new(),
    not_for_child: Ranges::new(),
    empty_in_child: Ranges::new(),
    sealed: Ranges::new(),
    unmanaged: Ranges::new(),
    reserved: Ranges::new(),
    unmanaged_max_bytes: 0,
    next_aside: unmanaged::ASIDE,
    forking: None,
});

/// How a part of a range stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Memory of the domain's.
    Managed,
    /// In a region, under something that the program mapped there.
    Foreign,
    /// In the region of mappings, and nobody's: the program sees no mapping here.
    Free,
    /// Not in a region.
    Outside,
}

/// A kernel's error number.
type Errno = i32;

/// The lock, with signals blocked: a handler may call us too, as it may call the kernel.
struct Table {
    maps: Held<'static, Maps>,
    _quiet: Quiet,
}

fn table() -> Table {
    let quiet = Quiet::begin();
    Table { maps: MAPS.take(), _quiet: quiet }
}

impl Maps {
    fn part(&self, range: &Range<usize>) -> (Part, usize) {
        let regions = managed::ranges();
        for region in &regions {
            if region.contains(&range.start) {
                let range = range.start..range.end.min(region.end);
                let (end, standing) = self.foreign.stretch(&range);
                if standing == Standing::In {
                    return (Part::Foreign, end);
                }
                if *region != managed::maps_range() {
                    return (Part::Managed, end);
                }
                let (end, standing) = self.taken.stretch(&(range.start..end));
                return (if standing == Standing::In { Part::Managed } else { Part::Free }, end);
            }
        }
        let next = regions.iter().map(|region| region.start).filter(|start| *start > range.start).min();
        (Part::Outside, next.unwrap_or(usize::MAX).min(range.end))
    }

    /// The parts of a range, ascending.
    fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (Part, Range<usize>)> + '_ {
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let (part, end) = self.part(&(at..range.end));
            let found = at..end;
            at = end;
            Some((part, found))
        })
    }

    /// The next part of what is left of a range, with the part cut off it.
    fn next(&self, left: &mut Range<usize>) -> Option<(Part, Range<usize>)> {
        let (part, range) = self.parts(left.clone()).next()?;
        left.start = range.end;
        Some((part, range))
    }

    /// Forgets what was said of a range.
    fn forget(&mut self, range: Range<usize>) {
        for set in [
            &mut self.closed,
            &mut self.read_only,
            &mut self.executable,
            &mut self.guarded,
            &mut self.locked,
            &mut self.kept,
            &mut self.not_for_child,
            &mut self.empty_in_child,
            &mut self.unmanaged,
            &mut self.reserved,
        ] {
            set.remove(range.clone());
        }
    }

    fn note_access(&mut self, range: Range<usize>, prot: i32) {
        self.closed.remove(range.clone());
        self.read_only.remove(range.clone());
        self.executable.remove(range.clone());
        self.unmanaged.remove(range.clone());
        if prot & libc::PROT_EXEC != 0 {
            self.executable.add(range.clone());
        }
        match prot & ACCESS {
            libc::PROT_NONE => self.closed.add(range),
            access if access & libc::PROT_WRITE == 0 => self.read_only.add(range),
            // A page that can be written and executed cannot be moved: it stays in core.
            access if access & libc::PROT_EXEC != 0 => self.count_unmanaged(range),
            _ => {}
        }
    }

    /// The access that the program gave a managed range; an error where its parts have different ones.
    fn access(&self, range: &Range<usize>) -> Result<i32, Errno> {
        let within = |set: &Ranges| match set.stretch(range) {
            (end, standing) if end == range.end => Ok(standing == Standing::In),
            _ => Err(libc::EFAULT),
        };
        let (closed, read_only, executable) =
            (within(&self.closed)?, within(&self.read_only)?, within(&self.executable)?);
        let prot = if read_only { libc::PROT_READ } else { READ_WRITE };
        Ok(match closed {
            true => libc::PROT_NONE,
            false if executable => prot | libc::PROT_EXEC,
            false => prot,
        })
    }
}

/// Whether a part of a range of a region cannot be read: it has no access, or guards.
pub fn hides_any(range: &Range<usize>) -> bool {
    let maps = &table().maps;
    [&maps.closed, &maps.guarded].iter().any(|hidden| hidden.first_within(range).is_some())
}

/// What the calls get as a range: whole pages.
fn pages(address: usize, len: usize) -> Result<Range<usize>, Errno> {
    let len = len.checked_next_multiple_of(PAGE).ok_or(libc::ENOMEM)?;
    match address.checked_add(len) {
        Some(end) if address.is_multiple_of(PAGE) => Ok(address..end),
        Some(_) => Err(libc::EINVAL),
        None => Err(libc::ENOMEM),
    }
}

/// What of a range `len` bytes hold, and the rest.
fn split(range: &Range<usize>, len: usize) -> (Range<usize>, Range<usize>) {
    let end = range.end.min(range.start.saturating_add(len));
    (range.start..end, end..range.end)
}

/// The domain, where calls are to be answered from it: not on pager threads, which must not wait for our lock.
fn serving() -> Option<&'static Managed> {
    if heap::is_pager() { None } else { managed::get() }
}

/// What the program's filters answer to a call on such memory, of which pager threads change what is managed.
fn answer(ranges: &[&Range<usize>], number: i64, args: [usize; 6]) -> Option<isize> {
    if ranges.iter().any(|range| managed::holds_any(range)) { filters::answer(number, args, 0) } else { None }
}

fn kernel(result: isize) -> Result<usize, Errno> {
    if (-4095..0).contains(&result) { Err(-result as i32) } else { Ok(result as usize) }
}

fn as_kernel(result: Result<usize, Errno>) -> isize {
    result.map_or_else(|errno| -errno as isize, |value| value as isize)
}

/// mmap(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn mmap(
    address: usize,
    len: usize,
    prot: i32,
    flags: i32,
    file: i32,
    offset: usize,
    caller: Caller,
) -> isize {
    let args = [address, len, prot as usize, flags as usize, file as usize, offset];
    // Of other bits mmap(2) takes no notice. We give access by mprotect(2), which does.
    let prot = prot & ACCESS;
    let asked = match flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) {
        // The kernel rounds a hint, and forgets one that there is no room at.
        0 => pages(address & !(PAGE - 1), len).or_else(|_| pages(0, len)),
        _ => pages(address, len),
    };
    let (Some(managed), Ok(range), 1.., true) = (serving(), asked, len, offset.is_multiple_of(PAGE)) else {
        // SAFETY: raw-call: passed on from our caller.
        return unsafe { call(libc::SYS_mmap, args) };
    };
    let anonymous = flags & libc::MAP_ANONYMOUS != 0 && flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
    let ours = anonymous
        && prot & libc::PROT_EXEC == 0
        && range.len() <= MOST_BYTES
        // Without a store no page is out of core: what is dropped past us is gone.
        && (promises::are_counted() || !caller.is_go());
    let is_over =
        flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == libc::MAP_FIXED && managed::holds_any(&range);
    let ours = ours && flags & NEVER == if is_over { libc::MAP_FIXED } else { 0 };
    if ours && let Some(answer) = filters::answer(libc::SYS_mmap, args, 5) {
        return answer;
    }
    let mut held = table();
    if let Err(why) = held.maps.has_room(1) {
        return -why as isize;
    }
    if is_over {
        if ours {
            return as_kernel(held.maps.map_anew(managed, range, prot, flags));
        }
        drop(held);
        // SAFETY: raw-call: passed on from our caller.
        return as_kernel(unsafe { replacing::map_over(managed, range, args) });
    }
    if ours {
        if program::may_want_for_code(&range) {
            drop(held);
            let there = (flags | libc::MAP_FIXED_NOREPLACE) as usize;
            // SAFETY: raw-call: as our caller's, at the place that it hints at, if that is free.
            let result = unsafe { map_by_kernel([range.start, len, prot as usize, there, file as usize, offset]) };
            if result >= 0 {
                return result;
            }
            held = table();
        }
        match held.maps.map_anywhere(managed, range.len(), prot) {
            Ok(range) => {
                if flags & libc::MAP_LOCKED != 0 {
                    let _ = held.maps.lock_managed(managed, range.clone(), locking::Why::Locked);
                }
                return range.start as isize;
            }
            Err(NoRoom::InRegion) if prot & ACCESS == libc::PROT_NONE || !promises::are_counted() => {}
            // What the kernel has instead would be beyond the frames.
            Err(_) => return -libc::ENOMEM as isize,
        }
    }
    drop(held);
    // SAFETY: raw-call: passed on from our caller.
    unsafe { map_by_kernel(args) }
}

impl Maps {
    fn map_anywhere(&mut self, managed: &Managed, len: usize, prot: i32) -> Result<Range<usize>, NoRoom> {
        let start = self.taken.gap(managed::maps_range(), len, PAGE).ok_or(NoRoom::InRegion)?;
        let range = start..start + len;
        // SAFETY: owned-range: nobody had it.
        if prot & ACCESS != 0 && unsafe { managed.open(range.clone(), prot) } < 0 {
            return Err(NoRoom::InKernel);
        }
        self.taken.add(range.clone());
        self.tell_reach(managed);
        self.note_access(range.clone(), prot);
        Ok(range)
    }

    /// Nothing is fetched ahead beyond the last mapping.
    fn tell_reach(&self, managed: &Managed) {
        let start = managed::maps_range().start;
        managed.maps.set_reach(self.taken.end(start) - start);
    }

    fn unmap(&mut self, managed: &Managed, mut left: Range<usize>) -> Result<(), Errno> {
        self.may_unmap(&left)?;
        while let Some((part, range)) = self.next(&mut left) {
            self.unmap_part(managed, part, range)?;
        }
        Ok(())
    }

    fn may_unmap(&self, range: &Range<usize>) -> Result<(), Errno> {
        if range.start < HIGHEST && range.end > HIGHEST {
            return Err(libc::EINVAL);
        }
        self.unless_sealed(range)?;
        self.may_lose(range)
    }

    fn unmap_part(&mut self, managed: &Managed, part: Part, range: Range<usize>) -> Result<(), Errno> {
        match part {
            Part::Free => {}
            Part::Outside => drop(unmap_by_kernel(&range)?),
            Part::Foreign => self.reclaim(managed, range.clone(), libc::PROT_NONE)?,
            Part::Managed => {
                // SAFETY: owned-range: the program gives it up.
                kernel(unsafe { managed.close(range.clone()) })?;
                self.remove_guards(managed, &range);
            }
        }
        self.end(managed, range);
        Ok(())
    }

    /// A range that is closed is no mapping of the program's any more.
    fn end(&mut self, managed: &Managed, range: Range<usize>) {
        self.taken.remove(range.clone());
        self.forget(range);
        self.tell_reach(managed);
    }
}

fn unmap_by_kernel(range: &Range<usize>) -> Result<usize, Errno> {
    // SAFETY: raw-call: the program asked for it.
    kernel(unsafe { call(libc::SYS_munmap, [range.start, range.len(), 0, 0, 0, 0]) })
}

/// munmap(2) of each part.
fn unmap_parts(managed: &Managed, mut left: Range<usize>) -> Result<usize, Errno> {
    let mut held = table();
    held.maps.may_unmap(&left)?;
    while let Some((part, range)) = held.maps.next(&mut left) {
        if part != Part::Outside {
            held.maps.unmap_part(managed, part, range)?;
            continue;
        }
        let aside = held.maps.set_aside(&range);
        // The kernel may wait for a thread of the program's that is told of it: not under our lock, for which that may be waiting.
        drop(held);
        let unmapped = unmap_by_kernel(&range);
        held = table();
        if unmapped.is_err() {
            held.maps.carry_counts(&aside, range.start);
            return unmapped;
        }
        held.maps.forget(aside);
    }
    Ok(0)
}

/// munmap(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn munmap(address: usize, len: usize) -> isize {
    let args = [address, len, 0, 0, 0, 0];
    match (serving(), pages(address, len)) {
        (Some(managed), Ok(range)) if len != 0 => {
            answer(&[&range], libc::SYS_munmap, args).unwrap_or_else(|| as_kernel(unmap_parts(managed, range)))
        }
        // SAFETY: raw-call: passed on from our caller.
        _ => unsafe { call(libc::SYS_munmap, args) },
    }
}

/// Opens a part of the region of objects. `false`: the kernel has no room for one more mapping.
pub fn open_for_objects(range: Range<usize>) -> bool {
    let Some(managed) = serving() else { return false };
    // A fork waits for the table: it finds no change half done.
    let _table = table();
    // SAFETY: owned-range: the heap's, which nobody has used yet.
    unsafe { managed.protect(range, READ_WRITE) >= 0 }
}

/// Drops what is in a range of objects, but for what the program has locked, or mapped there itself. What stayed for the kernel's sake was
/// in objects that are gone.
///
/// # Safety
/// *owned-range*: what is in the range is garbage.
pub unsafe fn drop_garbage(range: Range<usize>) {
    let Some(managed) = serving() else { return };
    let mut table = table();
    table.maps.unlock_managed(managed, range.clone(), locking::Why::Kept);
    for (_, range) in table.maps.parts(range).filter(|(part, _)| *part == Part::Managed) {
        let mut at = range.start;
        while at < range.end {
            let (end, locked) = table.maps.locked.stretch(&(at..range.end));
            if locked == Standing::Out {
                // SAFETY: owned-range: passed on from our caller.
                unsafe { managed.end(at..end) };
            }
            at = end;
        }
    }
}

/// A part of a block of malloc's goes back to the heap: what the program said of it holds no longer. `false`: what the program mapped into it
/// is there still, and it is to be nobody's.
pub fn forget(range: Range<usize>) -> bool {
    let Some(managed) = serving() else { return true };
    let mut table = table();
    let maps = &mut *table.maps;
    // What the program mapped into the block ends with it. The next block must not be a part of a file.
    while let Some(part) = maps.foreign.first_within(&range) {
        if maps.reclaim(managed, part, libc::PROT_NONE).is_err() {
            return false;
        }
    }
    maps.remove_guards(managed, &range);
    maps.forget(range);
    true
}

/// Bytes of anonymous memory that was mapped and not managed, at most.
pub fn unmanaged_bytes_max() -> usize {
    table().maps.unmanaged_max_bytes
}
