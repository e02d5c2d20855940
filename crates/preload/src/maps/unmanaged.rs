//! Mappings that stay the kernel's, and what is known of them.

use std::ops::Range;

use super::{ACCESS, Errno, Maps, kernel, pages, table};
use crate::filters;
use crate::space::PAGE;
use crate::sys::{self, call};

/// No program has addresses from here on.
pub(super) const ASIDE: usize = 1 << 63;

impl Maps {
    /// An error where the change of access of a range may not fit that has so many parts: as many stretches as it takes from the one set come
    /// to the other.
    pub(super) fn may_note_unmanaged_access(&self, range: &Range<usize>, prot: i32, parts: usize) -> Result<(), Errno> {
        let (from, to) = match prot & ACCESS {
            libc::PROT_NONE => (&self.unmanaged, &self.reserved),
            _ => (&self.reserved, &self.unmanaged),
        };
        if to.has_room(from.count_within(range) + 2 * parts + 2) { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// Anonymous memory counts as long as it can be accessed.
    pub(super) fn note_unmanaged_access(&mut self, range: &Range<usize>, prot: i32) {
        let (from, to) = match prot & ACCESS {
            libc::PROT_NONE => (&mut self.unmanaged, &mut self.reserved),
            _ => (&mut self.reserved, &mut self.unmanaged),
        };
        from.within(range.clone(), |part| to.add(part));
        from.remove(range.clone());
        self.note_most();
    }

    /// How one mapping counts.
    pub(super) fn counted(&self, range: &Range<usize>) -> Counted {
        if self.unmanaged.covers(range) {
            Counted::Used
        } else if self.reserved.covers(range) {
            Counted::Reserved
        } else {
            Counted::Not
        }
    }

    pub(super) fn count(&mut self, range: Range<usize>, counted: Counted) {
        match counted {
            Counted::Used => self.count_unmanaged(range),
            Counted::Reserved => self.reserved.add(range),
            Counted::Not => {}
        }
    }

    /// What counts of memory that a call may take from its place counts aside meanwhile: the place may be somebody else's before we hear of it.
    /// Where that is: a place of this call's own, for somebody may have another call on the same addresses. They are used again when no call goes
    /// on for so long.
    pub(super) fn set_aside(&mut self, range: &Range<usize>) -> Range<usize> {
        let range = range.start.min(ASIDE - 1)..range.end.min(ASIDE - 1);
        let start = if usize::MAX - self.next_aside < range.len() { ASIDE } else { self.next_aside };
        self.next_aside = start + range.len();
        self.carry_counts(&range, start);
        start..self.next_aside
    }

    /// What counts of a range counts at another place.
    pub(super) fn carry_counts(&mut self, from: &Range<usize>, to: usize) {
        for set in [&mut self.unmanaged, &mut self.reserved] {
            set.carry(from, to);
        }
    }

    pub(super) fn count_unmanaged(&mut self, range: Range<usize>) {
        self.unmanaged.add(range);
        self.note_most();
    }

    fn note_most(&mut self) {
        self.unmanaged_max_bytes = self.unmanaged_max_bytes.max(self.unmanaged.bytes());
    }
}

/// How a mapping that is not managed counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Counted {
    Used,
    /// Not before somebody has access.
    Reserved,
    Not,
}

impl Counted {
    /// What mmap(2) was asked for with those flags.
    pub(super) fn of(flags: i32, prot: i32) -> Counted {
        match (flags & libc::MAP_ANONYMOUS, prot & ACCESS) {
            (0, _) => Counted::Not,
            (_, libc::PROT_NONE) => Counted::Reserved,
            _ => Counted::Used,
        }
    }
}

/// Makes a mapping that is not managed. Its pages may come in at once (MAP_POPULATE, MAP_LOCKED), from whoever serves its file: not under our
/// lock, for which that may be waiting.
///
/// # Safety
/// *raw-call*: as for mmap(2).
pub(super) unsafe fn map_by_kernel(args: [usize; 6]) -> isize {
    let [_, len, prot, flags, ..] = args;
    // SAFETY: raw-call: our caller's.
    let result = unsafe { call(libc::SYS_mmap, args) };
    if let Ok(range) = kernel(result).and_then(|start| pages(start, len)) {
        let counted = Counted::of(flags as i32, prot as i32);
        // What does not count, as a file's, may be of any length.
        let page_bytes = if counted == Counted::Not { PAGE } else { page_bytes(args).unwrap_or(PAGE) };
        let range = range.start..range.end.next_multiple_of(page_bytes);
        let maps = &mut *table().maps;
        maps.forget(range.clone());
        maps.count(range, counted);
    }
    result
}

/// How long the pages are that mmap(2) maps with such arguments: whole ones, however long a range was asked for. `None`: nobody may ask that of
/// the file.
pub(super) fn page_bytes([_, _, _, flags, file, _]: [usize; 6]) -> Option<usize> {
    /// Where the flags have the length of huge pages, as a power of two; 0: the machine's own.
    const MASK: usize = libc::MAP_HUGE_MASK as usize;
    let is_anonymous = flags & libc::MAP_ANONYMOUS as usize != 0;
    if !is_anonymous {
        return page_bytes_of(file);
    }
    Some(match flags >> libc::MAP_HUGE_SHIFT & MASK {
        _ if flags & libc::MAP_HUGETLB as usize == 0 => PAGE,
        0 => own_huge_page_bytes(),
        power => 1usize.checked_shl(power as u32).unwrap_or(PAGE),
    })
}

/// Of an open file, as hugetlbfs says it.
fn page_bytes_of(file: usize) -> Option<usize> {
    // SAFETY: zeroed-valid: plain numbers.
    let mut about: libc::statfs64 = unsafe { std::mem::zeroed() };
    // A filter may forbid to ask, or have been there before and give no answer.
    // SAFETY: raw-call: the kernel fills a structure of our own.
    let is_known =
        !filters::are_set() && unsafe { call(libc::SYS_fstatfs, [file, &raw mut about as usize, 0, 0, 0, 0]) } == 0;
    let page_bytes = if about.f_type == libc::HUGETLBFS_MAGIC { about.f_bsize as usize } else { PAGE };
    (is_known && about.f_bsize != 0).then_some(page_bytes)
}

/// The least length of huge pages, and what they mostly have where nobody says how long they are to be.
const USUAL: usize = 2 << 20;

/// Of the machine, where nobody says it.
fn own_huge_page_bytes() -> usize {
    if filters::are_set() {
        return USUAL;
    }
    let mut text = [0; 8192];
    let mut lines = sys::read_small(c"/proc/meminfo", &mut text).split(|byte| *byte == b'\n');
    let kib = lines
        .find_map(|line| std::str::from_utf8(line.strip_prefix(b"Hugepagesize:")?).ok()?.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<usize>().ok()).map_or(USUAL, |kib| kib << 10)
}

/// Makes the mapping that mmap(2) was asked for with MAP_FIXED at some other place, of pages so long as [`page_bytes`] says.
pub(super) fn map_elsewhere(
    [_, len, prot, flags, file, offset]: [usize; 6],
    page_bytes: Option<usize>,
) -> Result<usize, Errno> {
    let args = [0, len, prot, flags & !(libc::MAP_FIXED as usize), file, offset];
    // SAFETY: raw-call: a new mapping replaces nothing.
    let map = || kernel(unsafe { call(libc::SYS_mmap, args) });
    if page_bytes.is_none() {
        // Never at a place of ours: where a file's driver refuses, the kernel leaves a hole, which may be another thread's by then.
        unmap_small_pages(map()?, len)?;
    }
    map()
}

/// Ends what was mapped, and says whether its pages are such as everybody has: of huge ones whole ones would replace more than was asked for.
fn unmap_small_pages(start: usize, len: usize) -> Result<(), Errno> {
    let unmap = |start, len| {
        // SAFETY: raw-call: nobody was told of the mapping.
        kernel(unsafe { call(libc::SYS_munmap, [start, len, 0, 0, 0, 0]) })
    };
    let len = len.next_multiple_of(PAGE);
    let before_last = len - PAGE;
    // The kernel divides no page.
    match unmap(start + before_last, PAGE) {
        Ok(_) => {
            // The place of that one may be another thread's by now.
            unmap_elsewhere(start, before_last);
            Ok(())
        }
        Err(why) => {
            let mut page_bytes = PAGE;
            // The mapping ends with a page, as long as that may be.
            while unmap(start, len.next_multiple_of(page_bytes)) == Err(libc::EINVAL) && page_bytes < ASIDE {
                page_bytes *= 2;
            }
            Err(why)
        }
    }
}

/// Ends what was mapped at some other place for a call that failed.
pub(super) fn unmap_elsewhere(start: usize, len: usize) {
    // SAFETY: raw-call: the program was not told of it.
    unsafe { call(libc::SYS_munmap, [start, len, 0, 0, 0, 0]) };
}

/// Whether the kernel has room to give access to so many bytes cut out of a larger mapping: asked at some other place.
pub(super) fn rehearse(len: usize, prot: i32) -> Result<(), Errno> {
    let whole = len + 2 * PAGE;
    let start = sys::reserve(whole).ok_or(libc::ENOMEM)?;
    // Another access than what is beside it: that makes three mappings of the one.
    let access = if prot == libc::PROT_NONE { libc::PROT_READ } else { prot };
    // SAFETY: owned-range: ours, and nobody else knows of it.
    let cut = unsafe { sys::protect(start + PAGE, len, access) };
    unmap_elsewhere(start, whole);
    kernel(cut).map(drop)
}
