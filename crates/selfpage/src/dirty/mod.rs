//! Which pages were written: over any memory of the process, without a handler and without stopping anybody.
//!
//! # Source
//! Cichlid §3.3 and §4.5: a program reads and clears the dirty bits of its own pages. There they are the CPU's; stock Linux
//! shows none, so the bit here is the kernel's note that a write-protected page was written (`WP_ASYNC`, Linux 6.7).
#![allow(unsafe_code)]

mod found;
mod owner;
mod protection;
mod registered;
mod tracked;
pub(crate) mod traps;

use std::ops::Range;
use std::sync::Arc;

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::pagemap::Afterwards;
use selfpage_core::linux::{memory, probe};

use crate::error::{Error, Kind, Result};
use crate::region::Bound;
pub use found::Dirty;
use owner::Id;
pub(crate) use owner::Owner;
use protection::{Holes, WriteProtection};
use registered::Registered;
pub(crate) use tracked::check_tracked;

/// How writes are noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Mechanism {
    /// Pages are write-protected by a userfaultfd; at the first write the kernel takes the protection off, and nobody waits.
    /// Linux 6.7.
    WriteProtection,
    /// `mprotect` and a handler for `SIGSEGV`, for memory that may be read and written and not executed. System calls that write to a
    /// clean page fail with `EFAULT`, discarding is not noticed, a range is scanned as it was armed, and nobody writes to it while it is
    /// disarmed. Disarm it before it is unmapped: a tracker that is dropped leaves it armed. A forked child goes on with what its parent
    /// had noted. 64 ranges in a process are armed at a time.
    Traps,
    /// The kernel's soft-dirty bits (`CONFIG_MEM_SOFT_DIRTY`). Never to be had here: what is written between the look at them and the call
    /// that clears them would be missed, and that call clears the whole process's, other trackers' notes included.
    SoftDirty,
}

/// Tells which pages of a range were written since it was armed.
///
/// What counts as written: a page that anybody in this process wrote to, system calls included; a page of private anonymous memory
/// (hugetlb not included) that was discarded; a mapping that was put over a part of the range; a page in a buffer that is registered with
/// an io_uring of this process, at every scan, and everything where those cannot be looked for; after a fork, in the child, everything
/// until the child arms it (but see [`Mechanism::Traps`]). What does not: a hole that nobody touched, reading, a page that was swapped out or moved by the kernel; and
/// contents that are removed in other memory (`MADV_REMOVE`, a hole punched in a file), where whoever removes them must write to the
/// pages too.
///
/// A huge page is written as a whole where the kernel keeps it whole: always with hugetlb; a transparent one is split by the
/// first write.
///
/// One tracker at a time watches a range, and all of a region that it armed a part of; that is refused to others until it has disarmed what
/// it armed, or is dropped; in a forked child it is the first one's there that arms it. Memory that is watched by
/// [`Mechanism::WriteProtection`] is armed no more when its tracker is dropped.
///
/// # Context
/// Normal.
///
/// # Examples
/// ```no_run
/// # fn main() -> selfpage::Result<()> {
/// use selfpage::dirty::{Dirty, DirtyTracker};
/// let tracker = DirtyTracker::new()?;
/// let mut memory = vec![0u8; 64 * 4096];
/// let begin = memory.as_ptr().addr();
/// let start = begin.next_multiple_of(4096);
/// let range = start..start + 32 * 4096;
///
/// // SAFETY: the memory is ours, and no system call minds that it is watched.
/// unsafe { tracker.arm(range.clone())? };
/// let mut found = Dirty::new();
/// memory[start - begin + 5 * 4096] = 1;
/// tracker.scan_and_rearm(range.clone(), &mut found)?;
/// assert_eq!(found.pages(), 1);
/// assert!(found.contains(range.start + 5 * 4096 + 17));
/// // Before the memory goes: by traps it would stay armed.
/// tracker.disarm(range)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct DirtyTracker {
    id: Id,
    /// None: by traps.
    protection: Option<WriteProtection>,
}

impl DirtyTracker {
    /// A tracker that works by the best mechanism that this machine has.
    ///
    /// # Errors
    /// `Unsupported`: it has none. `OutOfSpace`: no descriptors, no memory.
    pub fn new() -> Result<DirtyTracker> {
        let best = Self::with(Mechanism::WriteProtection);
        if best.as_ref().is_err_and(|why| why.kind() == Kind::Unsupported) {
            return Self::with(Mechanism::Traps);
        }
        best
    }

    /// A tracker that works by `mechanism`.
    ///
    /// # Errors
    /// `Unsupported`: this machine does not have it. `OutOfSpace`: no descriptors, no memory.
    pub fn with(mechanism: Mechanism) -> Result<DirtyTracker> {
        match mechanism {
            Mechanism::WriteProtection => Ok(DirtyTracker { id: Id::new(), protection: Some(WriteProtection::new()?) }),
            Mechanism::Traps => Ok(DirtyTracker { id: Id::new(), protection: None }),
            Mechanism::SoftDirty => Err(Error::new(Kind::Unsupported, "use", "soft-dirty bits", no_soft_dirty())),
        }
    }

    /// Has it pass over holes, outside of regions: they are neither armed nor found. A page that comes to one counts as written; one that
    /// was discarded counts when it comes again, and not before. So it is for whoever wants to know what memory refers to, over much
    /// that was never touched: arming that takes no page tables. By [`Mechanism::Traps`] nothing is different.
    ///
    /// For private anonymous memory alone: a written page of a file, or of shared memory, is a hole once the kernel takes it back, and
    /// would be passed over.
    #[must_use]
    pub fn passing_holes(mut self) -> DirtyTracker {
        if let Some(protection) = &mut self.protection {
            protection.holes = Holes::Passed;
        }
        self
    }

    /// How it notices writes.
    pub fn mechanism(&self) -> Mechanism {
        if self.protection.is_some() { Mechanism::WriteProtection } else { Mechanism::Traps }
    }

    /// Notes every write to `range` from now on. What was noted of it before is forgotten.
    ///
    /// Holes are armed by markers in page tables: 4 KiB for each 2 MiB of them, and no huge page comes there later (but see
    /// [`DirtyTracker::passing_holes`]).
    ///
    /// # Errors
    /// `Invalid`, and nothing was changed: the range is no range of whole pages (of hugetlb pages, where there are some), part
    /// of it is not mapped, or another userfaultfd watches part of it. Any other, and `Invalid` where the program has mapped something
    /// else over a part of a region: the range counts as written.
    ///
    /// # Safety
    /// owned-range: the memory is the caller's: neither the library's own nor another component's that protects it. By [`Mechanism::Traps`]
    /// it stays mapped, readable and writable until it is disarmed: not freed, unmapped nor mapped over, also where the tracker is dropped.
    pub unsafe fn arm(&self, range: Range<usize>) -> Result<()> {
        check("arm", &range)?;
        if range.is_empty() {
            return Ok(());
        }
        let Some(protection) = &self.protection else { return traps::arm(self.id, range) };
        match self.own_region("arm", &range)? {
            Some(region) => self.arm_region(protection, "arm", &region, range, &mut Dirty::new()),
            None => protection.arm(range),
        }
    }

    /// Finds the pages of `range` that were written since they were armed. A part that was never armed counts as written; by
    /// [`Mechanism::Traps`] a range that is not one that was armed is an error.
    ///
    /// # Errors
    /// `Invalid`: as for [`DirtyTracker::arm`]. Any other: nothing is known, and nothing has changed. `found` is empty.
    pub fn scan(&self, range: Range<usize>, found: &mut Dirty) -> Result<()> {
        check("scan", &range).inspect_err(|_| found.clear())?;
        fill(found, &range, |found| match &self.protection {
            None => traps::scan(range.clone(), found),
            Some(protection) => match tracked::region("scan", &range)? {
                Some(region) => protection.scan_region("scan", &region, range.clone(), Afterwards::Leave, found),
                None => protection.scan(range.clone(), found),
            },
        })
    }

    /// As [`DirtyTracker::scan`], and what was found is clean again. Each write is found by this call or by a later one.
    ///
    /// # Errors
    /// As for [`DirtyTracker::arm`]. `found` is empty.
    pub fn scan_and_rearm(&self, range: Range<usize>, found: &mut Dirty) -> Result<()> {
        check("scan and re-arm", &range).inspect_err(|_| found.clear())?;
        fill(found, &range, |found| match &self.protection {
            None => traps::scan_and_rearm(self.id, range.clone(), found),
            Some(protection) => match self.own_region("scan and re-arm", &range)? {
                Some(region) => self.arm_region(protection, "scan and re-arm", &region, range.clone(), found),
                None => protection.scan_and_rearm(range.clone(), found),
            },
        })
    }

    /// Ends what [`DirtyTracker::arm`] began; the range counts as written afterwards.
    ///
    /// # Errors
    /// As for [`DirtyTracker::arm`].
    pub fn disarm(&self, range: Range<usize>) -> Result<()> {
        check("disarm", &range)?;
        if range.is_empty() {
            return Ok(());
        }
        let Some(protection) = &self.protection else { return traps::disarm(self.id, range) };
        match self.own_region("disarm", &range)? {
            Some(region) => tracked::disarm_and_release(&region, self.id, &range),
            None => protection.disarm(range)?,
        }
        Ok(())
    }

    /// `None`: it works by another mechanism.
    #[doc(hidden)]
    pub fn wordless(&self) -> Option<Wordless<'_>> {
        self.protection.as_ref().map(Wordless)
    }

    fn arm_region(
        &self,
        protection: &WriteProtection,
        operation: &'static str,
        region: &Bound,
        range: Range<usize>,
        found: &mut Dirty,
    ) -> Result<()> {
        let armed = protection.scan_region(operation, region, range.clone(), Afterwards::Protect, found);
        // Another thread may have disarmed another part meanwhile, when this one was not armed yet.
        let armed = armed.and_then(|()| region.tracker.claim(self.id, operation, &range));
        // What was found is told to nobody, and the kernel has it clean.
        armed.inspect_err(|_| tracked::disarm_and_release(region, self.id, &range))
    }

    /// The tracked region that a range is of, if it is of one; its notes are this tracker's from now on.
    fn own_region(&self, operation: &'static str, range: &Range<usize>) -> Result<Option<Arc<Bound>>> {
        let region = tracked::region(operation, range)?;
        if let Some(region) = &region {
            region.tracker.claim(self.id, operation, range)?;
        }
        Ok(region)
    }
}

impl Drop for DirtyTracker {
    fn drop(&mut self) {
        match self.protection {
            Some(_) => tracked::release(self.id),
            None => traps::release(self.id),
        }
    }
}

/// A tracker of memory outside of regions, for whoever has stopped threads, one of which may hold the lock of malloc: an error is not put into
/// words, for which it would ask for memory. A forked child has none before its tracker has armed something.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Wordless<'a>(&'a WriteProtection);

impl Wordless<'_> {
    /// [`DirtyTracker::disarm`]. `false`: an error.
    #[must_use]
    pub fn disarm(self, range: &Range<usize>) -> bool {
        self.opened(range).is_some_and(|opened| protection::let_go(opened, range).is_ok())
    }

    /// [`DirtyTracker::scan_and_rearm`]. `false`: an error.
    #[must_use]
    pub fn scan_and_rearm(self, range: &Range<usize>, found: &mut Dirty) -> bool {
        let rearmed = |opened| fill(found, range, |found| self.0.find_and_rearm(opened, range, found)).is_ok();
        self.opened(range).is_some_and(rearmed)
    }

    /// The tracker's descriptors, where all of the range is mapped.
    fn opened(self, range: &Range<usize>) -> Option<protection::Opened> {
        self.0.opened().filter(|_| memory::mapped(range.start, range.len()))
    }
}

/// Fills `found` with what `scan` finds and the buffers that devices write to; with nothing where that fails.
fn fill<E>(
    found: &mut Dirty,
    range: &Range<usize>,
    scan: impl FnOnce(&mut Dirty) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    found.begin(range);
    if range.is_empty() {
        return Ok(());
    }
    // First: a buffer that is given back during the scan is seen.
    let registered = registered::mark(range, found);
    let scanned = scan(found);
    if scanned.is_err() {
        found.clear();
    } else if registered == Registered::Some {
        found.end(range);
    }
    scanned
}

fn no_soft_dirty() -> &'static str {
    match probe::has_soft_dirty() {
        Ok(()) => {
            "this kernel has them, and a write between the look at them and the call that clears them, the whole process's at once, \
             would be missed: use Mechanism::WriteProtection, or Mechanism::Traps"
        }
        Err(_) => {
            "this kernel has none (CONFIG_MEM_SOFT_DIRTY), and where there are some, a write between the look at them and the call that \
             clears them would be missed: use Mechanism::WriteProtection, or Mechanism::Traps"
        }
    }
}

fn check(operation: &'static str, range: &Range<usize>) -> Result<()> {
    let why = if range.start > range.end {
        "it ends before it begins; swap the bounds"
    } else if !range.start.is_multiple_of(PAGE_BYTES) || !range.end.is_multiple_of(PAGE_BYTES) {
        "it cuts a page; round both bounds to multiples of 4096"
    } else if !memory::mapped(range.start, range.len()) {
        "part of it is not mapped; map it first, or name the parts that are"
    } else {
        return Ok(());
    };
    Err(Error::new(Kind::Invalid, operation, object(range), why))
}

/// What an error about a range calls it.
fn object(range: &Range<usize>) -> String {
    format!("memory {:#x}..{:#x}", range.start, range.end)
}
