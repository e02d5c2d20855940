//! madvise(2) and process_madvise(2) on managed mappings.

use std::ffi::CStr;
use std::ops::Range;

use selfpage::{Guards, Region};

use super::{Errno, Maps, NOWHERE, Part, answer, as_kernel, kernel, pages, serving, table};
use crate::managed::{self, Managed};
use crate::sys::{self, call};

const MADV_POPULATE_READ: i32 = 22;
const MADV_POPULATE_WRITE: i32 = 23;
const MADV_DONTNEED_LOCKED: i32 = 24;
const MADV_COLLAPSE: i32 = 25;
pub(super) const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;
pub(super) const MADV_WIPEONFORK: i32 = 18;
const MADV_KEEPONFORK: i32 = 19;
const MADV_COLD: i32 = 20;
const MADV_PAGEOUT: i32 = 21;
/// What contents may go by, here or in a child.
const DROPS: [i32; 6] = [
    libc::MADV_DONTNEED,
    libc::MADV_FREE,
    MADV_DONTNEED_LOCKED,
    libc::MADV_DONTFORK,
    MADV_WIPEONFORK,
    MADV_GUARD_INSTALL,
];

/// Of these a thread of the program's may be told, for which the kernel waits (userfaultfd), or may serve the file: not under our lock, for
/// which that may be waiting.
const WAITS: [i32; 8] = [
    libc::MADV_DONTNEED,
    libc::MADV_FREE,
    libc::MADV_REMOVE,
    MADV_DONTNEED_LOCKED,
    libc::MADV_WILLNEED,
    MADV_COLD,
    MADV_PAGEOUT,
    MADV_COLLAPSE,
];

/// madvise(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn madvise(address: usize, len: usize, advice: i32) -> isize {
    let args = [address, len, advice as usize, 0, 0, 0];
    let Some(managed) = serving() else {
        // SAFETY: raw-call: passed on from our caller.
        return unsafe { call(libc::SYS_madvise, args) };
    };
    let Ok(range) = pages(address, len) else { return -libc::EINVAL as isize };
    // SAFETY: raw-call: passed on from our caller.
    answer(&[&range], libc::SYS_madvise, args).unwrap_or_else(|| unsafe { advise(managed, range, args) })
}

/// The same where no filter is to be asked.
///
/// # Safety
/// *raw-call*: `args` are those of an madvise(2) that the program asked for, of that range.
unsafe fn advise(managed: &Managed, range: Range<usize>, args: [usize; 6]) -> isize {
    let advice = args[2] as i32;
    let populates = matches!(advice, MADV_POPULATE_READ | MADV_POPULATE_WRITE);
    // The program sees no mapping where nothing was mapped in a region; the kernel does.
    if populates && table().maps.parts(range.clone()).any(|(part, _)| part == Part::Free) {
        return -libc::ENOMEM as isize;
    }
    // The kernel populates by faults, which a pager thread answers: not under our lock. Asked about nothing, it says whether
    // there is such advice.
    if populates || range.is_empty() {
        // SAFETY: raw-call: passed on from our caller.
        return unsafe { call(libc::SYS_madvise, args) };
    }
    as_kernel(advise_parts(managed, range, advice))
}

/// madvise(2) of each part.
fn advise_parts(managed: &Managed, mut left: Range<usize>, advice: i32) -> Result<usize, Errno> {
    let mut result = Ok(0);
    loop {
        let mut held = table();
        let Some((part, range)) = held.maps.next(&mut left) else { return result };
        let waits = part == Part::Outside || part == Part::Foreign && WAITS.contains(&advice);
        let advised = if waits {
            drop(held);
            advise_by_kernel(range, advice)
        } else if part == Part::Managed && advice == MADV_PAGEOUT {
            let may_go = held.maps.may_go(&range);
            // Other calls would wait until the store has all of it.
            drop(held);
            may_go.map(|()| page_out(managed, range))
        } else {
            held.maps.advise_part(managed, part, range, advice)
        };
        match advised {
            // The kernel has advised what there is, beside a hole, and the rest is advised all the same.
            Err(libc::ENOMEM) if part != Part::Managed => result = Err(libc::ENOMEM),
            advised => advised?,
        }
    }
}

/// What cannot go, or has nowhere to go, stays.
fn page_out(managed: &Managed, range: Range<usize>) {
    if let Some((region, offset)) = managed.region_of(range.start) {
        let _ = region.evict(offset, range.len());
    }
}

fn advise_by_kernel(range: Range<usize>, advice: i32) -> Result<(), Errno> {
    // SAFETY: raw-call: the program asked for it.
    kernel(unsafe { call(libc::SYS_madvise, [range.start, range.len(), advice as usize, 0, 0, 0]) }).map(drop)
}

impl Maps {
    pub(super) fn advise(&mut self, managed: &Managed, mut left: Range<usize>, advice: i32) -> Result<(), Errno> {
        while let Some((part, range)) = self.next(&mut left) {
            self.advise_part(managed, part, range, advice)?;
        }
        Ok(())
    }

    fn advise_part(&mut self, managed: &Managed, part: Part, range: Range<usize>, advice: i32) -> Result<(), Errno> {
        match part {
            Part::Managed => self.advise_managed(managed, range, advice),
            Part::Free => advise_by_kernel(NOWHERE, advice),
            Part::Outside => advise_by_kernel(range, advice),
            // As for mprotect(2): a filter would kill this thread.
            Part::Foreign => {
                managed.maps.while_still(move || advise_by_kernel(range, advice)).map_err(|_| libc::EACCES)?
            }
        }
    }

    /// As the kernel: a locked page does not go.
    fn may_go(&self, range: &Range<usize>) -> Result<(), Errno> {
        if self.locked_within(range) { Err(libc::EINVAL) } else { Ok(()) }
    }

    fn advise_managed(&mut self, managed: &Managed, range: Range<usize>, advice: i32) -> Result<(), Errno> {
        let Some((region, offset)) = managed.region_of(range.start) else { return Ok(()) };
        let (start, len) = (range.start, range.len());
        if DROPS.contains(&advice) {
            self.unless_sealed_for_good(&range)?;
        }
        let fits = match advice {
            MADV_GUARD_INSTALL => self.guarded.has_room(1) && self.kept.may_lose(&range),
            MADV_GUARD_REMOVE => self.guarded.may_lose(&range),
            libc::MADV_DONTFORK => self.not_for_child.has_room(1),
            libc::MADV_DOFORK => self.not_for_child.may_lose(&range),
            MADV_WIPEONFORK => self.empty_in_child.has_room(1),
            MADV_KEEPONFORK => self.empty_in_child.may_lose(&range),
            _ => true,
        };
        if !fits {
            // As the kernel, where it has no room for one more mapping.
            return Err(libc::EAGAIN);
        }
        match advice {
            libc::MADV_DONTNEED | libc::MADV_FREE if self.locked_within(&range) => return Err(libc::EINVAL),
            libc::MADV_DONTNEED | libc::MADV_FREE | MADV_DONTNEED_LOCKED => {
                // SAFETY: owned-range: the program says that the contents are garbage. A page that stays in core does so as a page.
                unsafe { managed.drop_contents(range.clone()) };
                self.lock_again(managed, range);
            }
            MADV_GUARD_INSTALL if self.locked_within(&range) => return Err(libc::EINVAL),
            MADV_GUARD_INSTALL => {
                let install = move || {
                    // SAFETY: raw-call: the program asked for it, and the range is empty.
                    unsafe { guard(region, offset, start..start + len, Guards::Installed) }
                };
                // SAFETY: region-contents: a guard drops what it covers.
                let result = unsafe { region.while_empty(offset, len, install) };
                kernel(result.map_err(|_| libc::EINVAL)?)?;
                self.kept.remove(range.clone());
                self.guarded.add(range);
            }
            MADV_GUARD_REMOVE => {
                let removed = region.while_still(move || {
                    // SAFETY: raw-call: the program asked for it.
                    unsafe { guard(region, offset, start..start + len, Guards::Removed) }
                });
                kernel(removed.map_err(|_| libc::EACCES)?)?;
                self.guarded.remove(range);
            }
            // About dumps the kernel knows; our pages may move under it meanwhile.
            libc::MADV_DONTDUMP | libc::MADV_DODUMP => {
                let advised = region.while_still(move || {
                    // SAFETY: raw-call: the program asked for it.
                    unsafe { call(libc::SYS_madvise, [start, len, advice as usize, 0, 0, 0]) }
                });
                kernel(advised.map_err(|_| libc::EACCES)?)?;
            }
            libc::MADV_WILLNEED => {
                let _ = region.prefetch(offset, len);
            }
            libc::MADV_DONTFORK => self.not_for_child.add(range),
            libc::MADV_DOFORK => {
                self.not_for_child.remove(range);
            }
            MADV_COLD => self.may_go(&range)?,
            MADV_WIPEONFORK => self.empty_in_child.add(range),
            MADV_KEEPONFORK => {
                self.empty_in_child.remove(range);
            }
            // Frames have one size here: as on a kernel that finds no huge page.
            MADV_COLLAPSE => return Err(libc::EINVAL),
            // What is only a hint is heard, and the policy decides.
            libc::MADV_NORMAL
            | libc::MADV_RANDOM
            | libc::MADV_SEQUENTIAL
            | libc::MADV_HUGEPAGE
            | libc::MADV_NOHUGEPAGE
            | libc::MADV_MERGEABLE
            | libc::MADV_UNMERGEABLE => {}
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    }
}

impl Maps {
    /// Guards do not end with a mapping of the program's by themselves: the region's own mapping goes on.
    pub(super) fn remove_guards(&mut self, managed: &Managed, range: &Range<usize>) {
        while let Some(part) = self.guarded.first_within(range) {
            if let Some((region, offset)) = managed.region_of(part.start) {
                let part = part.clone();
                // SAFETY: raw-call: the program gives up the guards, or what they stand in.
                let _ = region.while_still(move || unsafe { guard(region, offset, part, Guards::Removed) });
            }
            self.guarded.remove(part);
        }
    }
}

/// Has the kernel install guards or remove them, and the region know. For use in a change, with no page on its way.
///
/// # Safety
/// *raw-call*: the range is the region's from `offset` on. Installed: it is empty.
unsafe fn guard(region: &Region, offset: usize, range: Range<usize>, guards: Guards) -> isize {
    let advice = match guards {
        Guards::Installed => MADV_GUARD_INSTALL,
        Guards::Removed => MADV_GUARD_REMOVE,
    };
    // SAFETY: raw-call: passed on from our caller.
    let advised = unsafe { call(libc::SYS_madvise, [range.start, range.len(), advice as usize, 0, 0, 0]) };
    if advised >= 0 {
        let _ = region.set_guards(offset, range.len(), guards);
    }
    advised
}

/// process_madvise(2): on this process it means what madvise(2) means.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn process_madvise(args: [usize; 6]) -> isize {
    let [pidfd, vector, count, advice, flags, _] = args;
    let whole = |args| {
        // SAFETY: raw-call: passed on from our caller.
        unsafe { call(libc::SYS_process_madvise, args) }
    };
    let Some(managed) = serving() else { return whole(args) };
    if flags != 0 || !is_own(pidfd) {
        return whole(args);
    }
    // The kernel reads the vector first of all: whether that can be read, and has so many parts, it says before it finds no process.
    let looked = whole([usize::MAX, vector, count, advice, 0, 0]);
    if looked != -libc::EBADF as isize {
        return looked;
    }
    let mut done = 0;
    for index in 0..count {
        // SAFETY: raw-call: the kernel has just read it.
        let one = unsafe { (vector as *const libc::iovec).add(index).read_unaligned() };
        let (start, len) = (one.iov_base as usize, one.iov_len);
        let result = match pages(start, len) {
            // SAFETY: raw-call: passed on from our caller.
            Ok(range) if managed::holds_any(&range) => unsafe { advise(managed, range, [start, len, advice, 0, 0, 0]) },
            _ => whole([pidfd, &raw const one as usize, 1, advice, 0, 0]),
        };
        match kernel(result) {
            Ok(_) => done += len,
            Err(_) if done > 0 => break,
            Err(_) => return result,
        }
    }
    done as isize
}

/// Whether what a pidfd names has this memory.
fn is_own(pidfd: usize) -> bool {
    // From 6.13 on the kernel lets nobody else drop contents: asked about no range, it says whether this process may, without a
    // descriptor, and whatever /proc is mounted. An older one drops nothing by this call, and where it is not told apart there,
    // no contents go by it.
    let drops = [pidfd, 0, 0, libc::MADV_DONTNEED as usize, 0, 0];
    // SAFETY: raw-call: a vector of no parts is not read.
    unsafe { call(libc::SYS_process_madvise, drops) == 0 || is_told_own(pidfd) }
}

/// Whether /proc says so.
fn is_told_own(pidfd: usize) -> bool {
    // `/proc/self` shows none where the first thread has ended.
    let mut path = *b"/proc/thread-self/fdinfo/0000000000\0";
    let mut number = pidfd as u32;
    for digit in path[25..35].iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
    // No leading zeros in the name.
    let zeros = path[25..34].iter().take_while(|digit| **digit == b'0').count();
    path.copy_within(25 + zeros..36, 25);
    let mut text = [0u8; 512];
    let Ok(path) = CStr::from_bytes_until_nul(&path) else { return false };
    let mut lines = sys::read_small(path, &mut text).split(|byte| *byte == b'\n');
    let pid = lines.find_map(|line| line.strip_prefix(b"Pid:\t"));
    pid.and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<u32>().ok()) == Some(sys::pid())
}
