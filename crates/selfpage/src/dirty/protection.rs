//! Dirty pages by a userfaultfd in `WP_ASYNC`, read by `PAGEMAP_SCAN`.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::descriptor::Descriptor;
use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::pagemap::{Afterwards, Pagemap, Scanned, Stretch};
use selfpage_core::linux::uffd::{Features, Modes, Reach, Reading, Uffd, Writing};
use selfpage_core::linux::{Errno, thread};

use super::{Dirty, object, tracked};
use crate::descriptors;
use crate::doctor::userfaultfd as remedy;
use crate::error::{Error, Kind, Result, SystemError};
use crate::region::Bound;
use crate::store::raised;

/// What the kernel tells in one call. It looks at 512 pages before it hands over anyway.
pub(super) const STRETCHES: usize = 512;
/// How often it is tried to let go of a range whose mappings others change meanwhile.
const MOST_TRIES: u32 = 100;

/// What becomes of addresses without a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Holes {
    /// They are armed, and found until they are.
    Found,
    /// Neither.
    Passed,
}

/// The descriptors of a [`WriteProtection`].
pub(super) type Opened = (Uffd, Pagemap);

/// A userfaultfd and the pagemap, of whichever process uses it: a forked child opens its own.
pub(super) struct WriteProtection {
    state: State,
    pub(super) holes: Holes,
    uffd: AtomicI32,
    pagemap: AtomicI32,
}

impl fmt::Debug for WriteProtection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteProtection").field("uffd", &self.uffd).field("pagemap", &self.pagemap).finish()
    }
}

impl WriteProtection {
    pub(super) fn new() -> Result<WriteProtection> {
        let (state, uffd, pagemap) = (State::new()?, AtomicI32::new(-1), AtomicI32::new(-1));
        let made = WriteProtection { state, holes: Holes::Found, uffd, pagemap };
        made.descriptors()?;
        Ok(made)
    }

    pub(super) fn arm(&self, range: Range<usize>) -> Result<()> {
        let (uffd, pagemap) = self.descriptors()?;
        register(uffd, pagemap, &range).map_err(|why| why.told("arm", &range))?;
        let protected = match self.holes {
            Holes::Found => pagemap.protect(range.start, range.end),
            Holes::Passed => Ok(()),
        };
        let armed = protected.and_then(|()| self.rearm(uffd, pagemap, &range, &mut Dirty::new()));
        armed.map_err(|errno| {
            forget(uffd, pagemap, &range);
            Error::system("arm", object(&range), errno)
        })
    }

    pub(super) fn disarm(&self, range: Range<usize>) -> Result<()> {
        let descriptors = self.descriptors()?;
        let_go(descriptors, &range).map_err(|why| why.told("disarm", &range))
    }

    pub(super) fn scan(&self, range: Range<usize>, found: &mut Dirty) -> Result<()> {
        let (_, pagemap) = self.descriptors()?;
        self.collect(pagemap, &range, Afterwards::Leave, found, |_| Ok(()))
            .map_err(|errno| Error::system("scan", object(&range), errno))
    }

    pub(super) fn scan_and_rearm(&self, range: Range<usize>, found: &mut Dirty) -> Result<()> {
        let descriptors = self.descriptors()?;
        self.find_and_rearm(descriptors, &range, found).map_err(|why| why.told("scan and re-arm", &range))
    }

    /// Finds what was written, and makes it clean again.
    pub(super) fn find_and_rearm(
        &self,
        (uffd, pagemap): Opened,
        range: &Range<usize>,
        found: &mut Dirty,
    ) -> std::result::Result<(), Refused> {
        // What was mapped over a part counts as written, and so does what mremap has merged with a mapping: the kernel watches neither, and
        // leaves the pages of the second one protected, as if nobody had written to them.
        let marked = self.mark_unwatched(pagemap, range, found).map_err(Refused::Reading)?;
        register(uffd, pagemap, range)?;
        self.rearm(uffd, pagemap, range, found).map_err(|errno| {
            forget(uffd, pagemap, range);
            Refused::Reading(errno)
        })?;
        if marked {
            found.end(range);
        }
        Ok(())
    }

    /// As the others, of a region that its domain pages.
    pub(super) fn scan_region(
        &self,
        operation: &'static str,
        region: &Bound,
        range: Range<usize>,
        afterwards: Afterwards,
        found: &mut Dirty,
    ) -> Result<()> {
        let (_, pagemap) = self.descriptors()?;
        tracked::scan(pagemap, region, &range, afterwards, found).map_err(|errno| {
            if errno != Errno::PERM {
                return Error::system(operation, object(&range), errno);
            }
            let cause =
                "the program has mapped something else over a part of the region; name the parts that are the region's";
            Error::new(Kind::Invalid, operation, object(&range), cause)
        })
    }

    /// This process's descriptors, if it has opened them.
    pub(super) fn opened(&self) -> Option<Opened> {
        let load = |cell: &AtomicI32| Descriptor::from_raw(cell.load(Ordering::Relaxed));
        let is_open = self.state.word().load(Ordering::Acquire) == OPEN;
        is_open.then(|| (Uffd(load(&self.uffd)), Pagemap(load(&self.pagemap))))
    }

    /// This process's descriptors.
    fn descriptors(&self) -> Result<Opened> {
        loop {
            if let Some(opened) = self.opened() {
                return Ok(opened);
            }
            match self.state.word().compare_exchange(CLOSED, OPENING, Ordering::Acquire, Ordering::Relaxed) {
                Err(_) => thread::give_way(),
                Ok(_) => {
                    let opened = self.open();
                    let state = if opened.is_ok() { OPEN } else { CLOSED };
                    self.state.word().store(state, Ordering::Release);
                    opened?;
                }
            }
        }
    }

    fn open(&self) -> Result<()> {
        // A forked child has its parent's.
        self.close();
        let uffd = Uffd::open(Reach::UserFaults, Reading::Polls);
        let uffd = Uffd(raised(uffd.map_err(|errno| descriptors::no_userfaultfd(Reach::UserFaults, errno))?.0));
        self.uffd.store(uffd.0.raw(), Ordering::Relaxed);
        let wanted = Features::WP.and(Features::WP_ASYNC).and(Features::WP_UNPOPULATED).and(Features::WP_SHMEM);
        uffd.agree(wanted).map_err(|errno| descriptors::not_agreed("WP_ASYNC", remedy::NEWER_6_7, errno))?;
        let pagemap =
            Descriptor::open_pagemap().map_err(|errno| Error::system("open", "/proc/thread-self/pagemap", errno))?;
        self.pagemap.store(raised(pagemap).raw(), Ordering::Relaxed);
        Ok(())
    }

    fn close(&self) {
        for cell in [&self.uffd, &self.pagemap] {
            descriptors::close_number(cell.swap(-1, Ordering::Relaxed));
        }
    }

    /// Marks what the kernel does not watch. Whether there was any.
    fn mark_unwatched(
        &self,
        pagemap: Pagemap,
        range: &Range<usize>,
        found: &mut Dirty,
    ) -> std::result::Result<bool, Errno> {
        let mut marked = false;
        let scan = |at, stretches: &mut [Stretch]| pagemap.unnoted(at, range.end, stretches);
        each_stretch(range, scan, |stretch| {
            if !self.passes(stretch) {
                found.mark(stretch.start()..stretch.end());
                marked = true;
            }
            Ok(())
        })?;
        Ok(marked)
    }

    /// Finds what is not protected in a range that is registered, and protects it.
    fn rearm(
        &self,
        uffd: Uffd,
        pagemap: Pagemap,
        range: &Range<usize>,
        found: &mut Dirty,
    ) -> std::result::Result<(), Errno> {
        self.collect(pagemap, range, Afterwards::Protect, found, |hole| {
            // The scan protects pages, and not every hole. Whoever writes here in between is found already.
            // SAFETY: owned-range: registered with WP_ASYNC just now.
            unsafe { uffd.set_writing(hole.start, hole.len(), Writing::Protected) }
        })
    }

    fn collect(
        &self,
        pagemap: Pagemap,
        range: &Range<usize>,
        afterwards: Afterwards,
        found: &mut Dirty,
        mut hole: impl FnMut(Range<usize>) -> std::result::Result<(), Errno>,
    ) -> std::result::Result<(), Errno> {
        let scan = |at, stretches: &mut [Stretch]| match (self.holes, afterwards) {
            // Not `unprotected`, which protects some of the holes.
            (Holes::Passed, Afterwards::Protect) => pagemap.written(at, range.end, afterwards, stretches),
            _ => pagemap.unprotected(at, range.end, afterwards, stretches),
        };
        each_stretch(range, scan, |stretch| {
            let (pages, known) = (stretch.start()..stretch.end(), stretch.categories());
            if known.protected() || self.passes(stretch) {
                return Ok(());
            }
            if afterwards == Afterwards::Protect && !known.populated() {
                hole(pages.clone())?;
            }
            found.add(pages);
            Ok(())
        })
    }

    fn passes(&self, stretch: &Stretch) -> bool {
        self.holes == Holes::Passed && !stretch.categories().populated()
    }
}

impl Drop for WriteProtection {
    fn drop(&mut self) {
        self.close();
    }
}

/// Ends what [`WriteProtection::arm`] began.
pub(super) fn let_go((uffd, pagemap): Opened, range: &Range<usize>) -> std::result::Result<(), Refused> {
    // So that what another userfaultfd watches is refused, which older kernels do not when it ends.
    register(uffd, pagemap, range)?;
    // SAFETY: owned-range: registered for writes only, so nobody waits there, and absent pages read as they did.
    unsafe { uffd.unregister(range.start, range.len()) }.map_err(Refused::Reading)
}

/// Why the kernel would not. To put it into words takes memory, which whoever has stopped threads cannot ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refused {
    /// It does not watch a part of the range.
    Watching(Errno),
    /// It does not say what was written, or does not make it clean.
    Reading(Errno),
}

impl Refused {
    fn told(self, operation: &'static str, range: &Range<usize>) -> Error {
        let (Refused::Watching(errno) | Refused::Reading(errno)) = self;
        let why = SystemError::into_io(errno);
        let cause = match self {
            Refused::Watching(Errno::BUSY) => format!(
                "another userfaultfd watches part of it ({why}): a region of a domain (make it with `RegionBuilder::tracked`), \
                 or another tracker (disarm it there); or leave that part out"
            ),
            Refused::Watching(Errno::INVAL) => {
                format!("it cuts a huge page of hugetlb ({why}); round both bounds to its size")
            }
            Refused::Watching(Errno::PERM) => format!(
                "part of it is a shared mapping of a file that was opened for reading only ({why}); leave that part out"
            ),
            Refused::Watching(Errno::BADF | Errno::NOTTY) => {
                format!("the program closed the tracker's descriptor ({why}); make a new tracker")
            }
            _ => return Error::system(operation, object(range), errno),
        };
        Error::new(Kind::Invalid, operation, object(range), cause)
    }
}

fn register(uffd: Uffd, pagemap: Pagemap, range: &Range<usize>) -> std::result::Result<(), Refused> {
    // SAFETY: owned-range: for writes only, and with WP_ASYNC: no access waits.
    unsafe { uffd.register(range.start, range.len(), Modes::WP) }.map_err(|errno| {
        // Those the kernel finds first. Any other it may meet at any mapping, and it watches those before by then, of which a page may be
        // protected and written to: see `find_and_rearm`.
        if !matches!(errno, Errno::BUSY | Errno::INVAL | Errno::PERM | Errno::BADF | Errno::NOTTY) {
            forget(uffd, pagemap, range);
        }
        Refused::Watching(errno)
    })
}

/// Has the whole range count as written, after a call that was done in part.
fn forget(uffd: Uffd, pagemap: Pagemap, range: &Range<usize>) {
    // SAFETY: owned-range: registered for writes only, so nobody waits there.
    if unsafe { uffd.unregister(range.start, range.len()) }.is_ok() {
        return;
    }
    // Of a range with a mapping that is of a file, and was never registered, the kernel lets go of nothing.
    for _ in 0..MOST_TRIES {
        if unprotect(uffd, pagemap, range) == Ok(()) {
            break;
        }
    }
}

/// Has what is protected in a range count as written.
///
/// # Errors
/// The mappings have changed meanwhile.
fn unprotect(uffd: Uffd, pagemap: Pagemap, range: &Range<usize>) -> std::result::Result<(), Errno> {
    let scan = |at, stretches: &mut [Stretch]| pagemap.protected(at, range.end, stretches);
    each_stretch(range, scan, |stretch| {
        // SAFETY: owned-range: writes are noted there, and never wait; who notes them has one page too many.
        unsafe { uffd.set_writing(stretch.start(), stretch.end() - stretch.start(), Writing::Allowed) }
    })
}

/// Shows what `scan` finds from an address on, until the whole range was scanned.
fn each_stretch(
    range: &Range<usize>,
    scan: impl Fn(usize, &mut [Stretch]) -> std::result::Result<Scanned, Errno>,
    mut each: impl FnMut(&Stretch) -> std::result::Result<(), Errno>,
) -> std::result::Result<(), Errno> {
    let mut stretches = [Stretch::default(); STRETCHES];
    let mut at = range.start;
    while at < range.end {
        let scanned = scan(at, &mut stretches)?;
        stretches[..scanned.stretches].iter().try_for_each(&mut each)?;
        if scanned.end <= at {
            return Err(Errno::AGAIN); // The mappings have changed meanwhile.
        }
        at = scanned.end;
    }
    Ok(())
}

const CLOSED: u32 = 0;
const OPENING: u32 = 1;
const OPEN: u32 = 2;

/// A word that is [`CLOSED`] at first, and again in each forked child, however it was forked.
struct State(NonNull<AtomicU32>);

// SAFETY: tracker-memory: the word is an atomic in a mapping of its own, which lives until this is dropped.
unsafe impl Send for State {}
// SAFETY: tracker-memory: as above.
unsafe impl Sync for State {}

impl State {
    fn new() -> Result<State> {
        let failed = |errno| Error::system("map", "the tracker's page", errno);
        // SAFETY: owned-range: the kernel chooses an address that is free.
        let addr = unsafe { memory::map_anonymous(Place::Anywhere, PAGE_BYTES, Access::ReadWrite) }.map_err(failed)?;
        let state = State(NonNull::new(addr as *mut AtomicU32).unwrap_or(NonNull::dangling()));
        // SAFETY: owned-range: just mapped, and not written yet.
        unsafe { memory::advise(addr, PAGE_BYTES, Advice::WipeForChild) }.map_err(failed)?;
        Ok(state)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: tracker-memory: mapped, aligned, and zero is a value of an atomic.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // SAFETY: owned-range: mapped by `new`, and the word is borrowed from `self` only.
        let _ = unsafe { memory::unmap(self.0.as_ptr() as usize, PAGE_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_scan_that_fails_in_the_middle_loses_no_write() {
        const PAGES: usize = 1600;
        let protection = match WriteProtection::new() {
            Ok(protection) => protection,
            Err(why) => return crate::skip::skip("dirty", &why.to_string()),
        };
        // SAFETY: a fresh mapping.
        let start = unsafe { memory::map_anonymous(Place::Anywhere, PAGES * PAGE_BYTES, Access::ReadWrite) }.unwrap();
        let range = start..start + PAGES * PAGE_BYTES;
        let page = |number: usize| start + number * PAGE_BYTES;
        // SAFETY: mapped, and nobody holds a reference to it.
        let write = |number: usize| unsafe { (page(number) as *mut u8).write_volatile(1) };
        (0..PAGES - 5).for_each(write); // The rest are holes.
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE_BYTES as u64).unwrap();
        for replaced in [700, 20, PAGES - 1] {
            protection.arm(range.clone()).unwrap();
            [3, 15, 600, PAGES - 2].into_iter().for_each(write);
            // Another thread maps a file over a page after the range was registered, and before the scan comes there.
            let (protect, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_FIXED);
            // SAFETY: over a page of the test's.
            let mapped =
                unsafe { libc::mmap(page(replaced) as *mut _, PAGE_BYTES, protect, flags, file.as_raw_fd(), 0) };
            assert_eq!(mapped as usize, page(replaced));
            let (uffd, pagemap) = protection.descriptors().unwrap();
            protection.rearm(uffd, pagemap, &range, &mut Dirty::new()).unwrap_err();
            forget(uffd, pagemap, &range);
            let mut found = Dirty::new();
            found.begin(&range);
            protection.scan(range.clone(), &mut found).unwrap();
            let missed: Vec<usize> = (0..PAGES).filter(|number| !found.contains(page(*number))).collect();
            assert_eq!(missed, [], "page {replaced} was replaced");
        }
        protection.disarm(range).unwrap();
        // SAFETY: mapped above, and nobody holds a reference to it.
        unsafe { memory::unmap(start, PAGES * PAGE_BYTES) }.unwrap();
    }
}
