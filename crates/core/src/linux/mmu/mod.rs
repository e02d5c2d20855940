//! The machine that every Linux from 6.8 on is: frames are pages of a pool, and mapping moves them.

mod copy;

use super::clock::Clock;
use super::descriptor::Descriptor;
use super::errno::Errno;
use super::memory::{self, Advice, HUGE_PAGE_BYTES};
use super::pagemap::{Categories, Pagemap, Stretch};
use super::uffd::{Stopped, Uffd, Waiters, Writing};
use super::{futex, thread};
use crate::addr::{Frame, PAGE_BYTES, PageBytes, PageNo, PageRange};
use crate::mmu::{Mmu, Partial, Refusal, Trap};
use crate::region::Access;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// How often a busy page is tried: the kernel lets go of a buffer some microseconds after it told that the transfer is done.
/// Longer would be wasted on a page that is pinned for good.
const BUSY_TRIES: u32 = 32;

/// The descriptors that [`LinuxMmu`] works through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptors {
    /// The userfaultfd of the pool, registered for write protection only: what lets pages move back into it.
    pub pool: Uffd,
    /// The userfaultfd of the [`Trap::Worker`] regions.
    pub worker: Uffd,
    /// The userfaultfd of the [`Trap::Upcall`] regions.
    pub upcall: Uffd,
    /// The userfaultfd of the [`Trap::TrackedWorker`] regions.
    pub tracked_worker: Uffd,
    /// The userfaultfd of the [`Trap::TrackedUpcall`] regions.
    pub tracked_upcall: Uffd,
    /// `/proc/self/mem`, to read pages that the program may not write.
    pub memory: Descriptor,
    /// `/proc/self/pagemap`.
    pub pagemap: Pagemap,
}

impl Descriptors {
    /// None yet.
    pub const ABSENT: Descriptors = Descriptors {
        pool: Uffd(Descriptor::ABSENT),
        worker: Uffd(Descriptor::ABSENT),
        upcall: Uffd(Descriptor::ABSENT),
        tracked_worker: Uffd(Descriptor::ABSENT),
        tracked_upcall: Uffd(Descriptor::ABSENT),
        memory: Descriptor::ABSENT,
        pagemap: Pagemap(Descriptor::ABSENT),
    };

    /// Those without which absent pages would read as zero.
    pub const fn userfaultfds(&self) -> [Descriptor; 5] {
        [self.pool.0, self.worker.0, self.upcall.0, self.tracked_worker.0, self.tracked_upcall.0]
    }
}

/// Translation by `UFFDIO_MOVE`, between a pool of populated anonymous pages and regions registered with a userfaultfd.
///
/// # Source
/// Nemesis §6.3, Cichlid §3.2. They write page tables; here a frame is a page of the pool that moves to where it is mapped.
///
/// Pages move between mappings that are both locked in memory or both not. Where they differ, a page comes in by copying, and
/// stays.
///
/// # Context
/// As [`Mmu`] says: any.
pub struct LinuxMmu {
    pool: NonNull<PageBytes>,
    frames: u32,
    pool_uffd: AtomicI32,
    worker_uffd: AtomicI32,
    upcall_uffd: AtomicI32,
    tracked_worker_uffd: AtomicI32,
    tracked_upcall_uffd: AtomicI32,
    memory: AtomicI32,
    pagemap: AtomicI32,
    clock: Clock,
}

// SAFETY: pool-owned: the pointer is a number to compute slots from; this type never turns it into a reference.
unsafe impl Send for LinuxMmu {}
// SAFETY: pool-owned: as above; the rest are atomics.
unsafe impl Sync for LinuxMmu {}

impl LinuxMmu {
    /// A machine over the `frames` slots from `pool` on.
    ///
    /// # Safety
    /// - pool-owned: the slots are one private anonymous mapping, readable and writable, without huge pages (this value has some made
    ///   and split) and out of forked children, registered for write protection only with `descriptors.pool`; it lives as long as this
    ///   value, and only the holder of a frame touches its slot.
    /// - region-owned: each page that is passed to this value lies in a private anonymous mapping of the caller's, registered
    ///   for absent pages with the descriptor of its trap, without huge pages; the caller is the only one who maps and unmaps
    ///   there, and serialises that with changes of the mapping's protection. A page whose contents must not move is
    ///   not unmapped.
    pub unsafe fn new(pool: NonNull<PageBytes>, frames: u32, descriptors: Descriptors, clock: Clock) -> LinuxMmu {
        let mmu = LinuxMmu {
            pool,
            frames,
            pool_uffd: AtomicI32::new(-1),
            worker_uffd: AtomicI32::new(-1),
            upcall_uffd: AtomicI32::new(-1),
            tracked_worker_uffd: AtomicI32::new(-1),
            tracked_upcall_uffd: AtomicI32::new(-1),
            memory: AtomicI32::new(-1),
            pagemap: AtomicI32::new(-1),
            clock,
        };
        // SAFETY: pool-owned, region-owned: passed on from our caller.
        unsafe { mmu.adopt(descriptors) };
        mmu
    }

    /// Works through other descriptors from now on: in a forked child, where the old ones are the parent's and would fill
    /// the parent's pages. Nothing may be mapped in the child before.
    ///
    /// # Safety
    /// pool-owned and region-owned hold with the new descriptors, which all belong to this process, and no other thread is
    /// in a call of this value.
    pub unsafe fn adopt(&self, descriptors: Descriptors) {
        for (cell, descriptor) in [
            (&self.pool_uffd, descriptors.pool.0),
            (&self.worker_uffd, descriptors.worker.0),
            (&self.upcall_uffd, descriptors.upcall.0),
            (&self.tracked_worker_uffd, descriptors.tracked_worker.0),
            (&self.tracked_upcall_uffd, descriptors.tracked_upcall.0),
            (&self.memory, descriptors.memory),
            (&self.pagemap, descriptors.pagemap.0),
        ] {
            cell.store(descriptor.raw(), Ordering::Release);
        }
    }

    /// What tells of the pages of the process that this value works in.
    ///
    /// # Context
    /// Any; the descriptor is there for pager threads, and the program may have closed it elsewhere.
    pub fn pagemap(&self) -> Pagemap {
        Pagemap(load(&self.pagemap))
    }

    fn region_uffd(&self, trap: Trap) -> Uffd {
        Uffd(load(match trap {
            Trap::Worker => &self.worker_uffd,
            Trap::Upcall => &self.upcall_uffd,
            Trap::TrackedWorker => &self.tracked_worker_uffd,
            Trap::TrackedUpcall => &self.tracked_upcall_uffd,
        }))
    }

    /// The address of the frame's slot, if the pool has all `count` of them.
    fn slots(&self, frame: Frame, count: u32) -> Option<usize> {
        let end = frame.0.checked_add(count)?;
        (end <= self.frames).then(|| self.slot(frame).addr().get())
    }

    fn slot(&self, frame: Frame) -> NonNull<PageBytes> {
        let slot = self.pool.as_ptr().wrapping_add(frame.0 as usize);
        NonNull::new(slot).unwrap_or(self.pool)
    }

    /// What the kernel knows of the page at `addr`, or `None` where nothing tells. Where the descriptor is gone (the program
    /// closed it, perhaps opened something else in its place, which the scan notices) another one is opened for the moment.
    fn categories(&self, addr: usize) -> Option<Categories> {
        self.pagemap().categories(addr).ok().or_else(|| {
            let moment = Descriptor::open_pagemap().ok()?;
            let categories = Pagemap(moment).categories(addr).ok();
            let _ = moment.close();
            categories
        })
    }

    /// Whether a page is known to be absent.
    fn absent(&self, addr: usize) -> bool {
        self.categories(addr).is_some_and(|known| !known.populated())
    }

    /// Whether a range lies in one mapping of a region still: the program may have mapped memory of its own over it, which is not
    /// ours to move, copy or drop. Where nothing tells (the descriptor is gone), it is taken to be ours.
    pub fn is_ours(&self, addr: usize, len_bytes: usize) -> bool {
        // Any userfaultfd answers for all of them.
        self.region_uffd(Trap::Worker).registered(addr, len_bytes) != Ok(false)
    }

    /// How many of the `count` pages from `addr` on are ours, at the front.
    fn ours_in_front(&self, addr: usize, count: u32) -> u32 {
        if self.is_ours(addr, count as usize * PAGE_BYTES) {
            return count;
        }
        // The mapping may only be split, by other rights for a part of it.
        (0..count).find(|at| !self.is_ours(addr.wrapping_add(*at as usize * PAGE_BYTES), PAGE_BYTES)).unwrap_or(count)
    }

    /// What an error of a move or copy from `from` to `to` means. Slots are ours.
    fn refusal(&self, why: Errno, to: usize, from: usize) -> Refusal {
        match why {
            Errno::EXIST => Refusal::Occupied,
            Errno::BUSY | Errno::AGAIN => Refusal::Pinned,
            Errno::NOENT if mapped(to) && mapped(from) => Refusal::Hole,
            Errno::BADF | Errno::NOTTY => Refusal::NoDescriptor,
            Errno::SRCH | Errno::INTR => Refusal::Ending,
            Errno::NOMEM => Refusal::NoMemory,
            Errno::NOENT => Refusal::Foreign,
            // A filter answers with any number, and what is taken for the program's is given up.
            _ if self.is_ours(to, PAGE_BYTES) && self.is_ours(from, PAGE_BYTES) => Refusal::Denied,
            _ => Refusal::Foreign,
        }
    }

    /// Moves pages, as [`Uffd::move_pages`]. A page whose place is said to be taken is looked for there: by its source, Linux 6.18 can
    /// move pages and not count them, so that it finds the places of some taken by themselves. The caller alone moves the pages, so
    /// nobody else has.
    fn move_pages(
        &self,
        uffd: Uffd,
        to: usize,
        from: usize,
        len_bytes: usize,
        waiters: Waiters,
    ) -> Result<(), Stopped> {
        let mut done_bytes = 0;
        while done_bytes < len_bytes {
            let (to, from) = (to.wrapping_add(done_bytes), from.wrapping_add(done_bytes));
            // SAFETY: pool-owned, region-owned: one side are slots, the other pages of a region.
            let Err(stopped) = (unsafe { uffd.move_pages(to, from, len_bytes - done_bytes, waiters) }) else {
                return Ok(());
            };
            done_bytes += stopped.done_bytes;
            let (to, from) = (to.wrapping_add(stopped.done_bytes), from.wrapping_add(stopped.done_bytes));
            let moved = || self.absent(from) && self.categories(to).is_some_and(Categories::populated);
            if stopped.why != Errno::EXIST || !moved() {
                return Err(Stopped { done_bytes, why: stopped.why });
            }
            // The kernel woke nobody.
            let _ = uffd.wake(to, PAGE_BYTES);
            done_bytes += PAGE_BYTES;
        }
        Ok(())
    }

    /// Moves one page that a batch stopped at because of `why`, if a little patience is all it takes.
    fn coax(&self, uffd: Uffd, to: usize, from: usize, waiters: Waiters, why: Errno) -> Result<(), Errno> {
        let alone = || self.move_pages(uffd, to, from, PAGE_BYTES, waiters).map_err(|stopped| stopped.why);
        // The batch may have crossed into another mapping: one page alone does not.
        let mut moved = if why == Errno::INVAL { alone() } else { Err(why) };
        for tries in 0..BUSY_TRIES {
            match (moved, tries) {
                (Err(Errno::BUSY), 0) => self.break_sharing(from),
                (Err(Errno::BUSY), _) => thread::give_way(),
                _ => break,
            }
            moved = alone();
        }
        moved
    }

    /// Gives the page at `addr` memory of its own if it is shared with a forked child, as a write would.
    fn break_sharing(&self, addr: usize) {
        // Populating an absent page, or writing to one that traps, would make this thread wait for itself.
        match self.categories(addr) {
            Some(known) if known.contains(Categories::PRESENT) && traps_writes(known) => {
                let _ = memory::own_to_read(addr);
            }
            Some(known) if known.contains(Categories::PRESENT) => {
                // SAFETY: pool-owned, region-owned: a populated page keeps its contents.
                let _ = unsafe { memory::advise(addr, PAGE_BYTES, Advice::PopulateWrite) };
            }
            _ => {}
        }
    }

    /// Maps one page that a batch stopped at.
    fn map_one(&self, uffd: Uffd, page: usize, slot: usize, waiters: Waiters, why: Errno) -> Result<(), Refusal> {
        match self.coax(uffd, page, slot, waiters, why) {
            Ok(()) => Ok(()),
            // The program may not write the page, so nothing can move there; copies are let in.
            Err(Errno::INVAL) if self.absent(slot) => Err(Refusal::Hole), // The kernel would copy zeros.
            Err(Errno::INVAL) => {
                self.copy_in(uffd, page, slot, 1, waiters, Writing::Allowed).map_err(|partial| partial.why)
            }
            Err(why) => Err(self.refusal(why, page, slot)),
        }
    }

    /// Makes pages out of a huge page that nobody uses yet, neighbours as they were. The kernel splits one for good when a page of it
    /// moves, but not while a device is at any other: so one moves now, into the place of the last, and back. Where they were no
    /// huge page, that is all that happens.
    fn split(&self, slot: usize) {
        let last = slot + HUGE_PAGE_BYTES - PAGE_BYTES;
        let pool = Uffd(load(&self.pool_uffd));
        drop_contents(last, PAGE_BYTES);
        // From a page that holds only zeros the kernel would take the memory (since 6.13).
        mark_each(slot..last, 1);
        for (to, from) in [(last, last - PAGE_BYTES), (last - PAGE_BYTES, last)] {
            // SAFETY: pool-owned: both are slots that the caller holds.
            let _ = unsafe { pool.move_pages(to, from, PAGE_BYTES, Waiters::Wake) };
        }
        for emptied in [last - PAGE_BYTES, last] {
            // SAFETY: pool-owned: as above.
            let _ = unsafe { memory::advise(emptied, PAGE_BYTES, Advice::PopulateWrite) };
        }
        mark_each(slot..last + PAGE_BYTES, 0);
    }

    /// How many of the `count` slots from `slot` on have contents, at the front: the kernel would copy zeros for the others. Where
    /// nothing tells, all of them.
    fn populated_in_front(&self, slot: usize, count: u32) -> u32 {
        let mut front = [Stretch::default()];
        let end = slot.wrapping_add(count as usize * PAGE_BYTES);
        match (self.pagemap().populated(slot, end, &mut front), front) {
            (Ok(found), [front]) if found.stretches == 1 && front.start() == slot => {
                ((front.end() - slot) / PAGE_BYTES) as u32
            }
            (Ok(_), _) => 0,
            (Err(_), _) if self.absent(slot) => 0,
            // One by one, where the descriptor is gone.
            (Err(_), _) => {
                (1..count).find(|at| self.absent(slot.wrapping_add(*at as usize * PAGE_BYTES))).unwrap_or(count)
            }
        }
    }

    /// Unmaps one page that a batch stopped at.
    fn unmap_one(&self, uffd: Uffd, page: usize, slot: usize, why: Errno) -> Result<(), Refusal> {
        let why = if why == Errno::EXIST {
            // The frame is mapped, so what is in its slot is nobody's: whoever touches all memory (mlockall(2), a debugger) had the
            // kernel fill it.
            drop_contents(slot, PAGE_BYTES);
            Errno::INVAL
        } else {
            why
        };
        match self.coax(uffd, slot, page, Waiters::Wake, why) {
            Ok(()) => Ok(()),
            Err(Errno::INVAL) => self.copy_and_drop(page, slot),
            Err(why) => Err(self.refusal(why, slot, page)),
        }
    }

    /// Moves `count` pages, and lets `one` see to each that a batch stops at.
    fn batch(
        &self,
        uffd: Uffd,
        to: usize,
        from: usize,
        count: u32,
        waiters: Waiters,
        one: impl Fn(usize, usize, Errno) -> Result<(), Refusal>,
    ) -> Result<(), Partial> {
        let mut done = 0;
        while done < count {
            let at = done as usize * PAGE_BYTES;
            let (to, from, len_bytes) =
                (to.wrapping_add(at), from.wrapping_add(at), (count - done) as usize * PAGE_BYTES);
            let Err(Stopped { done_bytes, why }) = self.move_pages(uffd, to, from, len_bytes, waiters) else {
                return Ok(());
            };
            done += (done_bytes / PAGE_BYTES) as u32;
            let (to, from) = (to.wrapping_add(done_bytes), from.wrapping_add(done_bytes));
            one(to, from, why).map_err(|why| Partial { done, why })?;
            done += 1;
        }
        Ok(())
    }
}

impl Mmu for LinuxMmu {
    fn map(&self, trap: Trap, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        let uffd = self.region_uffd(trap);
        let slot = self.slots(frame, count).ok_or(Partial { done: 0, why: Refusal::Foreign })?;
        let one = |page, slot, why| self.map_one(uffd, page, slot, Waiters::Wake, why);
        self.batch(uffd, page.addr().0, slot, count, Waiters::Wake, one)
    }

    /// Copies, since a page that moves in can be written to before it is protected.
    fn map_to_read(&self, trap: Trap, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        let uffd = self.region_uffd(trap);
        let slot = self.slots(frame, count).ok_or(Partial { done: 0, why: Refusal::Foreign })?;
        let held = self.populated_in_front(slot, count);
        self.copy_in(uffd, page.addr().0, slot, held, Waiters::Wake, Writing::Protected)?;
        if held < count { Err(Partial { done: held, why: Refusal::Hole }) } else { Ok(()) }
    }

    fn set_writing(&self, trap: Trap, page: PageNo, count: u32, writing: Writing) -> Result<(), Partial> {
        let uffd = self.region_uffd(trap);
        let set = |page: PageNo, count: u32| {
            let (addr, len_bytes) = (page.addr().0, count as usize * PAGE_BYTES);
            // SAFETY: region-owned: the caller has claimed the pages; reads of them go on.
            unsafe { uffd.set_writing(addr, len_bytes, writing) }.map_err(|why| match why {
                Errno::NOENT => Refusal::Foreign,
                why => self.refusal(why, addr, addr),
            })
        };
        set(page, count).or_else(|_| {
            // The kernel did what lies before the mapping that it refused, and does not say how much that is.
            (0..count).try_for_each(|at| set(page.plus(at.into()), 1).map_err(|why| Partial { done: at, why }))
        })
    }

    fn unmap(&self, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        let uffd = Uffd(load(&self.pool_uffd));
        let slot = self.slots(frame, count).ok_or(Partial { done: 0, why: Refusal::Foreign })?;
        let ours = self.ours_in_front(page.addr().0, count);
        let one = |slot, page, why| self.unmap_one(uffd, page, slot, why);
        self.batch(uffd, slot, page.addr().0, ours, Waiters::Wake, one)?;
        if ours < count { Err(Partial { done: ours, why: Refusal::Foreign }) } else { Ok(()) }
    }

    fn unmap_by_copy(&self, trap: Trap, page: PageNo, frame: Frame) -> Result<(), Refusal> {
        let (slot, addr) = (self.slots(frame, 1).ok_or(Refusal::Foreign)?, page.addr().0);
        if !self.is_ours(addr, PAGE_BYTES) {
            return Err(Refusal::Foreign);
        }
        match self.coax(Uffd(load(&self.pool_uffd)), slot, addr, Waiters::Wake, Errno::INVAL) {
            Ok(()) => return Ok(()),
            Err(Errno::INVAL) => {}
            Err(why) => return Err(self.refusal(why, slot, addr)),
        }
        if trap.is_tracked() {
            // Writes to a protected page are noted there, and do not wait.
            return Err(Refusal::Pinned);
        }
        // Where somebody wants it protected it is so already, and stays.
        match self.categories(addr).is_some_and(traps_writes) {
            true => self.copy_and_drop_fixed(addr, slot),
            false => self.copy_and_drop_held(trap, page, slot),
        }
    }

    fn copy_out(&self, page: PageNo, frame: Frame) -> Result<(), Refusal> {
        let slot = self.slots(frame, 1).ok_or(Refusal::Foreign)?;
        if !self.is_ours(page.addr().0, PAGE_BYTES) {
            return Err(Refusal::Foreign);
        }
        if self.absent(page.addr().0) {
            return Err(Refusal::Hole);
        }
        self.read(page.addr().0, slot)
    }

    fn present(&self, page: PageNo) -> bool {
        // Where nothing tells, "absent" would throw contents away and "present" costs another try.
        !self.absent(page.addr().0)
    }

    fn faults_writes(&self, page: PageNo) -> bool {
        self.categories(page.addr().0).is_some_and(traps_writes)
    }

    fn drop_pages(&self, page: PageNo, count: u32) {
        for page in (PageRange { first: page, count: count.into() }).pages() {
            if self.is_ours(page.addr().0, PAGE_BYTES) {
                drop_contents(page.addr().0, PAGE_BYTES);
            }
        }
    }

    fn fails_of_itself(&self, page: PageNo, access: Access) -> bool {
        let addr = page.addr().0;
        let advice = if access == Access::Write { Advice::PopulateWrite } else { Advice::PopulateRead };
        // SAFETY: region-owned: a populated page keeps its contents.
        !self.is_ours(addr, PAGE_BYTES) && unsafe { memory::advise(addr, PAGE_BYTES, advice) } == Err(Errno::FAULT)
    }

    fn wake_faulters(&self, trap: Trap, page: PageNo, count: u32) -> bool {
        self.region_uffd(trap).wake(page.addr().0, count as usize * PAGE_BYTES).is_ok()
    }

    fn poison(&self, trap: Trap, page: PageNo) -> bool {
        let (uffd, addr) = (self.region_uffd(trap), page.addr().0);
        if !self.is_ours(addr, PAGE_BYTES) {
            // Whoever is stopped there meets what there is now.
            return self.wake_faulters(trap, page, 1);
        }
        drop_contents(addr, PAGE_BYTES);
        // SAFETY: region-owned: the caller has claimed the page, and it was just dropped.
        if unsafe { uffd.poison(addr, PAGE_BYTES, Waiters::Wake) }.is_ok() {
            return true;
        }
        // Never wrong data: a guard answers with SIGSEGV where poison is not to be had. Locked pages take none.
        let _ = memory::unlock(addr, PAGE_BYTES);
        // SAFETY: region-owned: as above.
        let _ = unsafe { memory::advise(addr, PAGE_BYTES, Advice::GuardInstall) };
        self.wake_faulters(trap, page, 1)
    }

    fn populate(&self, frame: Frame, count: u32) -> Result<(), Partial> {
        let slot = self.slots(frame, count).ok_or(Partial { done: 0, why: Refusal::Foreign })?;
        let len_bytes = count as usize * PAGE_BYTES;
        let populate = || {
            // SAFETY: pool-owned: populated slots keep their contents.
            unsafe { memory::advise(slot, len_bytes, Advice::PopulateWrite) }
                .map_err(|_| Partial { done: self.populated_in_front(slot, count), why: Refusal::NoMemory })
        };
        if len_bytes != HUGE_PAGE_BYTES || !slot.is_multiple_of(HUGE_PAGE_BYTES) {
            return populate();
        }
        // SAFETY: pool-owned: advice changes no contents.
        let _ = unsafe { memory::advise(slot, len_bytes, Advice::HugePages) };
        let populated = populate();
        // SAFETY: pool-owned: as above.
        let _ = unsafe { memory::advise(slot, len_bytes, Advice::NoHugePages) };
        populated.map(|()| self.split(slot))
    }

    fn release(&self, frame: Frame, count: u32) {
        if let Some(slot) = self.slots(frame, count) {
            drop_contents(slot, count as usize * PAGE_BYTES);
        }
    }

    /// Null for a frame that the pool has not.
    fn bytes(&self, frame: Frame) -> *mut PageBytes {
        if frame.0 < self.frames { self.slot(frame).as_ptr() } else { core::ptr::null_mut() }
    }

    fn sleep(&self, word: &AtomicU32, expected: u32, timeout_us: u32) {
        let _ = futex::wait(word, expected, timeout_us);
    }

    fn rouse(&self, word: &AtomicU32, count: u32) {
        futex::wake(word, count);
    }

    fn now_ns(&self) -> u64 {
        (self.clock)()
    }
}

/// Whether a write to the page is told to a userfaultfd, and waits.
fn traps_writes(known: Categories) -> bool {
    !known.contains(Categories::WRITTEN) && !known.contains(Categories::NOTED)
}

fn load(cell: &AtomicI32) -> Descriptor {
    Descriptor::from_raw(cell.load(Ordering::Acquire))
}

/// Writes the first byte of each page of populated slots.
fn mark_each(slots: Range<usize>, mark: u8) {
    for addr in slots.step_by(PAGE_BYTES) {
        // SAFETY: pool-owned: the caller holds the frames.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(addr).write_volatile(mark) }
    }
}

/// Drops what a range of slots or of a region's pages holds.
fn drop_contents(addr: usize, len_bytes: usize) {
    let _ = dropped(addr, len_bytes);
}

/// The same. Whether the kernel has done it.
fn dropped(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: pool-owned, region-owned: the caller holds the frames, or the pages are its to drop.
    unsafe { memory::advise(addr, len_bytes, Advice::Drop) }.is_ok()
}

/// Whether there is a mapping at `addr` at all.
fn mapped(addr: usize) -> bool {
    memory::residency(addr, &mut [0]).is_ok()
}
