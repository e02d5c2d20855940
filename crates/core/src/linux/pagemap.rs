//! What the kernel knows about each page of this process.

use super::descriptor::{Descriptor, read_write};
use super::errno::Errno;
use linux_raw_sys::general as raw;

const SCAN: u32 = read_write::<raw::pm_scan_arg>(b'f' as u32, 16);

/// What is known of a page: a set of `PAGE_IS_*`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Categories(pub u64);

impl Categories {
    /// Nothing: a hole.
    pub const NONE: Categories = Categories(0);
    /// Writes to the mapping are noted and never wait ([`super::uffd::Features::WP_ASYNC`]).
    pub const NOTED: Categories = Categories(raw::PAGE_IS_WPALLOWED as u64);
    /// Not write-protected by a userfaultfd: written since it was. **Holes count as written.**
    pub const WRITTEN: Categories = Categories(raw::PAGE_IS_WRITTEN as u64);
    /// In memory.
    pub const PRESENT: Categories = Categories(raw::PAGE_IS_PRESENT as u64);
    /// Swapped out; guards and poison count as swapped.
    pub const SWAPPED: Categories = Categories(raw::PAGE_IS_SWAPPED as u64);
    /// The page of zeros.
    pub const ZERO: Categories = Categories(raw::PAGE_IS_PFNZERO as u64);
    /// Part of a huge page.
    pub const HUGE: Categories = Categories(raw::PAGE_IS_HUGE as u64);

    /// These and those.
    pub const fn and(self, other: Categories) -> Categories {
        Categories(self.0 | other.0)
    }
    /// Whether all of `other` are in the set.
    pub const fn contains(self, other: Categories) -> bool {
        self.0 & other.0 == other.0
    }
    /// Whether the page, or the hole, is protected and every write to it is noted: it was not written since. Outside of private anonymous
    /// memory its contents may have been removed.
    pub const fn protected(self) -> bool {
        self.contains(Categories::NOTED) && self.populated() && !self.contains(Categories::WRITTEN)
    }
    /// Whether the page has contents somewhere.
    pub const fn populated(self) -> bool {
        self.0 & (Categories::PRESENT.0 | Categories::SWAPPED.0) != 0
    }
}

/// Neighbouring pages of the same categories: the kernel's `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stretch {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(size_of::<Stretch>() == size_of::<raw::page_region>());

impl Stretch {
    /// Where it begins.
    pub const fn start(&self) -> usize {
        self.start as usize
    }
    /// Where it ends.
    pub const fn end(&self) -> usize {
        self.end as usize
    }
    /// What its pages are.
    pub const fn categories(&self) -> Categories {
        Categories(self.categories)
    }
}

/// What a scan found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scanned {
    /// How many stretches were written.
    pub stretches: usize,
    /// How far the scan came: resume here.
    pub end: usize,
}

/// What becomes of a page that a scan reports as written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Afterwards {
    /// It stays written.
    Leave,
    /// It is write-protected in the same step, so that the next write is seen by the next scan.
    Protect,
}

impl Afterwards {
    const fn flags(self) -> u32 {
        match self {
            Afterwards::Leave => 0,
            Afterwards::Protect => raw::PM_SCAN_WP_MATCHING | raw::PM_SCAN_CHECK_WPASYNC,
        }
    }
}

/// `/proc/self/pagemap`, by its descriptor; not owned. It tells of the process that opened it, also in a forked child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pagemap(pub Descriptor);

impl Pagemap {
    /// What is known of the page at `addr`: presence, swapping and writes.
    ///
    /// # Errors
    /// `EBADF`, `ENOTTY`: the descriptor is gone, or is something else by now.
    pub fn categories(self, addr: usize) -> Result<Categories, Errno> {
        let mut stretches = [Stretch::default()];
        let wanted = Wanted { any_of: populated(), reported: reported(), ..Wanted::EVERYTHING };
        let found = self.scan(addr, addr.wrapping_add(crate::addr::PAGE_BYTES), wanted, &mut stretches)?;
        Ok(match (found.stretches, stretches) {
            (1, [stretch]) => stretch.categories(),
            _ => Categories::NONE,
        })
    }

    /// Finds the populated pages of a range, in order.
    ///
    /// # Errors
    /// As for [`Pagemap::categories`].
    pub fn populated(self, start: usize, end: usize, stretches: &mut [Stretch]) -> Result<Scanned, Errno> {
        let wanted = Wanted { any_of: populated(), reported: populated(), ..Wanted::EVERYTHING };
        self.scan(start, end, wanted, stretches)
    }

    /// Finds the pages of a range that have memory of their own, in order: what was only read has the kernel's page of zeros.
    ///
    /// # Errors
    /// As for [`Pagemap::categories`].
    pub fn written_to(self, start: usize, end: usize, stretches: &mut [Stretch]) -> Result<Scanned, Errno> {
        let zero = Categories::ZERO;
        let any_of = populated();
        let wanted = Wanted { inverted: zero, all_of: zero, any_of, reported: any_of, ..Wanted::EVERYTHING };
        self.scan(start, end, wanted, stretches)
    }

    /// Finds the pages of a range, registered with `WP_ASYNC`, that were written since they were protected. Swapped pages
    /// that are not protected are among them; holes are not, and are not protected either.
    ///
    /// # Errors
    /// As for [`Pagemap::categories`]. `EPERM`: the range is not registered so.
    pub fn written(
        self,
        start: usize,
        end: usize,
        afterwards: Afterwards,
        stretches: &mut [Stretch],
    ) -> Result<Scanned, Errno> {
        // Asking for WRITTEN alone would report holes, and protecting them would arm markers that later moves run into.
        let wanted = Wanted {
            all_of: Categories::WRITTEN,
            any_of: populated(),
            reported: reported(),
            flags: raw::PM_SCAN_CHECK_WPASYNC | afterwards.flags(),
            ..Wanted::EVERYTHING
        };
        self.scan(start, end, wanted, stretches)
    }

    /// Finds the pages of a range that may have been written since they were protected, holes and mappings that are not
    /// registered among them. An absent page that is protected (by a marker) is reported as well: it is swapped and not
    /// written, which [`Categories::protected`] knows. Gaps between mappings are passed over.
    ///
    /// With [`Afterwards::Protect`] the written pages are protected in the same step, and some of the holes.
    ///
    /// # Errors
    /// As for [`Pagemap::categories`]. `EPERM`, with [`Afterwards::Protect`]: part of the range is not registered with
    /// `WP_ASYNC`; what came before it is protected, and not reported.
    pub fn unprotected(
        self,
        start: usize,
        end: usize,
        afterwards: Afterwards,
        stretches: &mut [Stretch],
    ) -> Result<Scanned, Errno> {
        let inverted = Categories::PRESENT.and(Categories::NOTED);
        let wanted = Wanted {
            inverted,
            any_of: inverted.and(Categories::WRITTEN),
            reported: reported(),
            flags: afterwards.flags(),
            ..Wanted::EVERYTHING
        };
        self.scan(start, end, wanted, stretches)
    }

    /// Finds the pages and holes of a range whose writes are not noted: those of mappings that are not registered with `WP_ASYNC`.
    ///
    /// # Errors
    /// As for [`Pagemap::categories`].
    pub fn unnoted(self, start: usize, end: usize, stretches: &mut [Stretch]) -> Result<Scanned, Errno> {
        let noted = Categories::NOTED;
        // By what all of them are to be, the kernel passes over a mapping as a whole that is none of these.
        let wanted = Wanted { inverted: noted, all_of: noted, reported: reported(), ..Wanted::EVERYTHING };
        self.scan(start, end, wanted, stretches)
    }

    /// Finds the pages and holes of a range that are protected, and whose writes are noted: what [`Categories::protected`] knows.
    ///
    /// # Errors
    /// As for [`Pagemap::categories`].
    pub fn protected(self, start: usize, end: usize, stretches: &mut [Stretch]) -> Result<Scanned, Errno> {
        let wanted = Wanted {
            inverted: Categories::WRITTEN,
            all_of: Categories::NOTED.and(Categories::WRITTEN),
            any_of: populated(),
            reported: populated(),
            ..Wanted::EVERYTHING
        };
        self.scan(start, end, wanted, stretches)
    }

    /// Protects the pages of a range that is registered with `WP_ASYNC`, and its holes but those of hugetlb: what
    /// [`super::uffd::Uffd::set_writing`] does, in a fifth of the time, since the kernel changes a table of pages in one loop here where
    /// nothing is reported.
    ///
    /// # Errors
    /// As for [`Pagemap::categories`]. `EPERM`: part of the range is not registered so; what came before it is protected.
    pub fn protect(self, start: usize, end: usize) -> Result<(), Errno> {
        // Of all categories, also none: a scan for WRITTEN passes over holes that have no table.
        let wanted = Wanted { flags: Afterwards::Protect.flags(), ..Wanted::EVERYTHING };
        let mut at = start;
        while at < end {
            let scanned = self.scan(at, end, wanted, &mut [])?;
            if scanned.end <= at {
                return Err(Errno::AGAIN);
            }
            at = scanned.end;
        }
        Ok(())
    }

    fn scan(self, start: usize, end: usize, wanted: Wanted, stretches: &mut [Stretch]) -> Result<Scanned, Errno> {
        let mut argument = raw::pm_scan_arg {
            size: size_of::<raw::pm_scan_arg>() as u64,
            flags: u64::from(wanted.flags),
            start: start as u64,
            end: end as u64,
            walk_end: 0,
            // None: the kernel need not look at what each page is.
            vec: if stretches.is_empty() { 0 } else { stretches.as_mut_ptr() as u64 },
            vec_len: stretches.len() as u64,
            max_pages: 0,
            category_inverted: wanted.inverted.0,
            category_mask: wanted.all_of.0,
            category_anyof_mask: wanted.any_of.0,
            return_mask: wanted.reported.0,
        };
        // SAFETY: syscall-contract: the kernel writes at most `vec_len` stretches, and any bytes make one. Protecting pages of a
        // range registered with WP_ASYNC stops nobody and changes no contents.
        let stretches = unsafe { self.0.control(SCAN, &mut argument) }?;
        Ok(Scanned { stretches, end: argument.walk_end as usize })
    }
}

/// Which pages a scan looks for, and what it says of them.
#[derive(Clone, Copy)]
struct Wanted {
    /// Categories that count where they are absent, in the two that follow.
    inverted: Categories,
    all_of: Categories,
    any_of: Categories,
    reported: Categories,
    flags: u32,
}

impl Wanted {
    const EVERYTHING: Wanted = Wanted {
        inverted: Categories::NONE,
        all_of: Categories::NONE,
        any_of: Categories::NONE,
        reported: Categories::NONE,
        flags: 0,
    };
}

const fn populated() -> Categories {
    Categories::PRESENT.and(Categories::SWAPPED)
}

const fn reported() -> Categories {
    populated().and(Categories::WRITTEN).and(Categories::NOTED)
}
