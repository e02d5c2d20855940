//! Regions: memory of the program's that its domain pages.
//!
//! # Source
//! Nemesis §6.1 (stretches); a region is bound to its pager when it is made, at run time.
#![allow(unsafe_code)]

mod part;

use std::fmt;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, PoisonError};

use bytemuck::{AnyBitPattern, Pod};
use selfpage_core::addr::{PAGE_BYTES, PageRange, VirtAddr};
use selfpage_core::cut::PageSets;
use selfpage_core::fault::range;
use selfpage_core::fault::{Failure, Outcome, evict};
use selfpage_core::linux::memory::{self, Access, Advice};
use selfpage_core::linux::mmu::Descriptors;
use selfpage_core::linux::uffd::Modes;
use selfpage_core::mmu::Trap;
use selfpage_core::page::PageWord;
use selfpage_core::pager::Pager;
use selfpage_core::pageset::PageSet;
use selfpage_core::region::{self, Rights};
use selfpage_core::sync::{AtomicU8, AtomicU32, AtomicU64};

use crate::arena::Arena;
use crate::config::DescriptorTable;
use crate::dirty;
use crate::domain::{Inner, Life};
use crate::error::{Error, Kind, Result};
use crate::handler::{Asking, FaultHandler};
use crate::pager::{Custom, File, Opened, PageHash, Physical, Stored, Tables, UserPager, Zero};
use crate::placement::{self, Placement};
use crate::pool::FramePool;
use crate::store::BackingStore;
use crate::trap::upcall;

mod clone;
mod restored;

/// What the names of regions without a name begin with.
pub(crate) const ADDRESS: &str = "at ";

/// A region to be.
pub struct Builder<'a> {
    life: &'a Arc<Life>,
    len_bytes: usize,
    name: String,
    pub(crate) trap: Trap,
    priority: u8,
    reserved: Access,
    pub(crate) placement: Placement,
    handler: Option<Box<dyn FaultHandler>>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(life: &'a Arc<Life>, len_bytes: usize) -> Builder<'a> {
        let (name, placement) = (String::new(), Placement::Anywhere);
        let reserved = Access::ReadWrite;
        Builder { life, len_bytes, name, trap: Trap::Worker, priority: 0, reserved, placement, handler: None }
    }

    /// A name for messages.
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.into();
        self
    }

    /// How faults arrive: [`Trap::Worker`] unless stated otherwise.
    pub fn trap(mut self, trap: Trap) -> Self {
        self.trap = if self.trap.is_tracked() { trap.tracked() } else { trap };
        self
    }

    /// The region's standing with the `priority` policy: pages of a lower one go first.
    pub fn priority(mut self, priority: u8) -> Self {
        self.priority = priority;
        self
    }

    /// The program's own handler of faults on pages that it protects.
    pub fn handler(mut self, handler: impl FaultHandler + 'static) -> Self {
        self.handler = Some(Box::new(handler));
        self
    }

    /// Reserve addresses that nobody may touch yet: the program gives itself access to parts of them, with mprotect(2).
    pub fn without_access(mut self) -> Self {
        self.reserved = Access::None;
        self
    }

    /// Frames from the beginning, cleared and pinned: never a fault.
    ///
    /// # Errors
    /// Not enough frames.
    pub fn pinned(self) -> Result<Region> {
        let region = self.bind(Rights::ReadWrite, |_, _| Ok(Box::new(Zero)))?;
        region.pin(0, region.len_bytes())?;
        Ok(region)
    }

    /// Frames as they come, with undefined contents.
    ///
    /// # Errors
    /// No address space, or too many regions.
    pub fn physical(self) -> Result<Region> {
        self.bind(Rights::ReadWrite, |_, _| Ok(Box::new(Physical)))
    }

    /// Anonymous memory without a store: zero at first, and it stays in core.
    ///
    /// # Errors
    /// No address space, or too many regions.
    pub fn zero(self) -> Result<Region> {
        self.bind(Rights::ReadWrite, |_, _| Ok(Box::new(Zero)))
    }

    /// Anonymous memory that is paged to a store.
    ///
    /// # Errors
    /// No address space, or too many regions.
    pub fn stored(self, store: impl BackingStore + 'static) -> Result<Region> {
        self.stored_in(Arc::new(store))
    }

    /// Anonymous memory that is paged to a store which other regions may use as well.
    ///
    /// # Errors
    /// No address space, or too many regions.
    pub fn stored_in(self, store: Arc<dyn BackingStore>) -> Result<Region> {
        let kept = Some(store.clone());
        self.bind_with(Rights::ReadWrite, Vec::new(), kept, move |len, hash| {
            let mut arena = Arena::new(Arena::bytes_for::<AtomicU32>(len) + Arena::bytes_for::<AtomicU64>(len))?;
            // SAFETY: table-memory: the arena goes with the region, after its pager.
            let pager = unsafe { Stored::new(store, hash, arena.table(len), arena.table(len)) };
            Ok((Box::new(pager), Some(arena)))
        })
    }

    /// A file from `offset_bytes` on. A length of 0 stands for the rest of the file.
    ///
    /// # Errors
    /// The file cannot be opened, the offset is not a page's, or the file is shorter than asked for.
    pub fn file(mut self, path: impl AsRef<Path>, offset_bytes: u64, rights: Rights) -> Result<Region> {
        let opened = Opened::new(path.as_ref(), offset_bytes, rights)?;
        if self.len_bytes == 0 {
            self.len_bytes = opened.len_bytes as usize;
        }
        if self.len_bytes == 0 || self.len_bytes as u64 > opened.len_bytes {
            let cause = format!("{} bytes wanted, the file has {}", self.len_bytes, opened.len_bytes);
            return Err(Error::new(Kind::Invalid, "map", path.as_ref().display().to_string(), cause));
        }
        if self.name.is_empty() {
            self.name = path.as_ref().display().to_string();
        }
        let descriptors = opened.descriptors();
        self.bind_with(rights, descriptors, None, |len, hash| {
            let written = if rights == Rights::ReadWrite { len } else { 0 };
            let bytes = Arena::bytes_for::<AtomicU64>(written) + Arena::bytes_for::<AtomicU16>(written);
            let mut arena = Arena::new(bytes)?;
            // SAFETY: table-memory: the arena goes with the region, after its pager.
            let tables = unsafe { Tables { hashes: arena.table(written), tails: arena.table(written) } };
            Ok((Box::new(File::new(opened, hash, tables)), Some(arena)))
        })
    }

    /// A pager of the program's own.
    ///
    /// # Errors
    /// No address space, or too many regions.
    pub fn user(self, pager: impl UserPager + 'static) -> Result<Region> {
        self.bind_with(Rights::ReadWrite, Vec::new(), None, |len, hash| {
            let mut arena = Arena::new(Arena::bytes_for::<AtomicU64>(len))?;
            // SAFETY: table-memory: the arena goes with the region, after its pager.
            let pager = unsafe { Custom::new(pager, hash, arena.table(len)) };
            Ok((Box::new(pager), Some(arena)))
        })
    }

    /// A pager for those who want the whole of core's trait. Its memory is the caller's affair.
    ///
    /// # Errors
    /// No address space, or too many regions.
    pub fn pager(self, pager: Box<dyn Pager>) -> Result<Region> {
        self.bind(Rights::ReadWrite, |_, _| Ok(pager))
    }

    fn bind(self, rights: Rights, make: impl FnOnce(usize, Arc<PageHash>) -> Result<Box<dyn Pager>>) -> Result<Region> {
        self.bind_with(rights, Vec::new(), None, |len, hash| Ok((make(len, hash)?, None)))
    }

    fn bind_with(
        mut self,
        rights: Rights,
        descriptors: Vec<RawFd>,
        store: Option<Arc<dyn BackingStore>>,
        make: impl FnOnce(usize, Arc<PageHash>) -> Result<(Box<dyn Pager>, Option<Arena>)>,
    ) -> Result<Region> {
        let asking = Asking::of(self.handler.take(), self.reserved);
        asking.make_ready(self.trap, &self.life.inner)?;
        let bound = Bound::new(&self, rights, descriptors, store, asking, make)?;
        bound.join(&self.life.inner)?;
        Ok(Region { life: self.life.clone(), bound })
    }
}

/// Where a pager is, at an address that core can keep in one word.
struct PagerAt(&'static dyn Pager);

/// A region with all that it stands on. The tables and the pager live until it is dropped, which is after it has left its
/// domain's map and the gate was closed once.
pub(crate) struct Bound {
    region: Box<region::Region>,
    /// What `region` points to; in this order, so that the pager goes before its tables.
    _reference: Box<PagerAt>,
    pager: Option<Box<dyn Pager>>,
    _pager_tables: Option<Arena>,
    _tables: Arena,
    descriptors: Vec<RawFd>,
    store: Option<Arc<dyn BackingStore>>,
    pub(crate) name: String,
    len_bytes: usize,
    pub(crate) asking: Asking,
}

impl Bound {
    fn new(
        builder: &Builder<'_>,
        rights: Rights,
        descriptors: Vec<RawFd>,
        store: Option<Arc<dyn BackingStore>>,
        asking: Asking,
        make: impl FnOnce(usize, Arc<PageHash>) -> Result<(Box<dyn Pager>, Option<Arena>)>,
    ) -> Result<Arc<Bound>> {
        let inner = &builder.life.inner;
        let object = || format!("a region of {} bytes", builder.len_bytes);
        let (trap, table) = (builder.trap, inner.config.descriptor_table);
        if builder.len_bytes == 0 || builder.len_bytes > isize::MAX as usize / 2 {
            return Err(Error::new(Kind::Invalid, "make", object(), "a region needs bytes, and fewer than 2^62"));
        }
        dirty::check_tracked(trap, rights).map_err(|why| why.for_a(object()))?;
        if trap.is_signal() && table == DescriptorTable::Private {
            let cause =
                "upcall regions need a domain whose descriptors the program's threads have (DescriptorTable::Shared)";
            return Err(Error::new(Kind::Invalid, "make", object(), cause));
        }
        if trap.is_signal() && !upcall::enlist(&raw const **inner) {
            let cause = "there are too many domains with upcall regions in this process";
            return Err(Error::new(Kind::OutOfSpace, "make", object(), cause));
        }
        let len = builder.len_bytes.div_ceil(PAGE_BYTES);
        let made = make(len, inner.hash.clone()).map_err(|why| why.for_a(object()))?;
        // In this order: where the region cannot be made, the pager goes before its tables.
        let pager_tables = made.1;
        let pager = made.0;
        let armed = if trap.is_tracked() { len } else { 0 };
        let set = Arena::bytes_for::<AtomicU64>(PageSet::words(len));
        let bytes = Arena::bytes_for::<PageWord>(len) + Arena::bytes_for::<AtomicU8>(len);
        let bytes = bytes + Arena::bytes_for::<AtomicU8>(armed) + 4 * set;
        let mut tables = Arena::new(bytes).map_err(|why| why.for_a(object()))?;
        let len_bytes = len * PAGE_BYTES;
        let start = placement::reserve(builder.placement, len_bytes, &object())?;
        let first = VirtAddr(start).page();
        let range = PageRange { first, count: len as u64 };
        // SAFETY: table-memory: the tables are dropped after the region.
        let region = unsafe { region::Region::new(range, trap, rights, tables.table(len), tables.table(len)) };
        // SAFETY: table-memory: as above.
        let mut region = region.track(unsafe { tables.table(armed) });
        // SAFETY: table-memory: as above.
        let mut set = || PageSet::new(unsafe { tables.table(PageSet::words(len)) });
        let (unarmed, changed, pending, inherited) = (set(), set(), set(), set());
        region.sets = PageSets { unarmed, changed, pending, inherited, ..PageSets::none() };
        region.priority.store(builder.priority, Ordering::Relaxed);
        region.asks_first.store(asking.first.into(), Ordering::Relaxed);
        // SAFETY: pager-outlives: the box stays where it is until the region is dropped, and the reference before it.
        let reference = Box::new(PagerAt(unsafe { std::mem::transmute::<&dyn Pager, &'static dyn Pager>(&*pager) }));
        let name = if builder.name.is_empty() { format!("{ADDRESS}{start:#x}") } else { builder.name.clone() };
        let bound = Bound {
            region: Box::new(region),
            _reference: reference,
            pager: Some(pager),
            _pager_tables: pager_tables,
            _tables: tables,
            descriptors,
            store,
            name,
            len_bytes,
            asking,
        };
        // SAFETY: pager-outlives: as above.
        let new = unsafe { bound.region.bind(&raw const bound._reference.0) };
        debug_assert!(new);
        for advice in [Advice::NoHugePages, Advice::NotForChild] {
            // SAFETY: owned-range: just mapped.
            unsafe { memory::advise(start, len_bytes, advice) }
                .map_err(|errno| Error::system("set up", object(), errno))?;
        }
        bound.lock_as(&inner.pool)?;
        // SAFETY: owned-range: just mapped.
        unsafe { memory::protect(start, len_bytes, builder.reserved) }
            .map_err(|errno| Error::system("reserve", object(), errno))?;
        let bound = Arc::new(bound);
        bound.region.keeper.store(Arc::as_ptr(&bound).cast_mut().cast(), Ordering::Release);
        Ok(bound)
    }

    /// Locks the region if the pool is: its pages as they come.
    pub(crate) fn lock_as(&self, pool: &FramePool) -> Result<()> {
        pool.lock_alike(self.start(), self.len_bytes).map_err(|errno| {
            let object = format!("region {} of {} bytes", self.name, self.len_bytes);
            let cause = format!(
                "the domain's frames are locked, and the kernel locks no more for this process ({errno:?}): leave it \
                 CAP_IPC_LOCK or an unlimited RLIMIT_MEMLOCK, or build the domain with Locking::Never"
            );
            Error::new(Kind::OutOfSpace, "lock", object, cause)
        })
    }

    /// Registers the region for faults, and puts it into the map.
    fn join(self: &Arc<Bound>, inner: &Arc<Inner>) -> Result<()> {
        let mut regions = inner.regions();
        let descriptors = *inner.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        // The program may have closed this thread's descriptors.
        inner.on_pager_thread(|| self.register(descriptors))?;
        // SAFETY: region-in-map: the domain keeps the region until it has left the map and the gate was closed.
        if !unsafe { inner.state().regions.insert(&raw const *self.region) } {
            let cause = "the domain has as many regions as its map can hold";
            return Err(Error::new(Kind::OutOfSpace, "add", format!("region {}", self.name), cause));
        }
        regions.insert(self.region.range.first.0, self.clone());
        // What another region's store has in common with ours, pager threads have already, and the program no more.
        let known = |number: &RawFd| {
            regions.values().any(|bound| !Arc::ptr_eq(bound, self) && bound.descriptors().contains(number))
        };
        let numbers: Vec<RawFd> = self.descriptors().into_iter().filter(|number| !known(number)).collect();
        let shared = if numbers.is_empty() { Ok(()) } else { inner.share_descriptors(&numbers) };
        drop(regions);
        tracing::debug!(region = %self.name, len_bytes = self.len_bytes, trap = ?self.region.trap, "region bound");
        match shared {
            Ok(()) => inner.hide_descriptors(&numbers),
            Err(_) => self.leave(inner),
        }
        shared
    }

    /// Has faults of the region go to its userfaultfd.
    pub(crate) fn register(&self, descriptors: Descriptors) -> Result<()> {
        self.register_range(descriptors, self.start(), self.len_bytes)
    }

    fn register_range(&self, descriptors: Descriptors, start: usize, len_bytes: usize) -> Result<()> {
        let uffd = match self.region.trap {
            Trap::Worker => descriptors.worker,
            Trap::Upcall => descriptors.upcall,
            Trap::TrackedWorker => descriptors.tracked_worker,
            Trap::TrackedUpcall => descriptors.tracked_upcall,
        };
        // A write to a page that is protected is told too, or noted.
        let modes = Modes::MISSING.and(Modes::WP);
        // SAFETY: owned-range: the region is ours, and absent pages of it are what the domain is for.
        unsafe { uffd.register(start, len_bytes, modes) }
            .map_err(|errno| Error::system("register", format!("region {}", self.name), errno))
    }

    /// Takes the region out of its domain: its pages are dropped.
    fn leave(&self, inner: &Inner) {
        let state = inner.state();
        let mut tried = false;
        loop {
            // What is pinned is dropped all the same: nobody may use the region any more.
            let _ = inner.discard(self.region.range);
            let mut regions = inner.regions();
            inner.close_gate();
            // Nobody is inside: what pager threads have read ahead since then shows now.
            let empty = self.region.is_empty();
            if empty || tried {
                // What its clone could not be given by now it does not get.
                self.region.part();
            }
            tried = true;
            if empty {
                let removed = state.regions.remove(&raw const *self.region);
                debug_assert!(removed);
                regions.remove(&self.region.range.first.0);
            }
            state.gate.open(state.mmu);
            if empty {
                let used: Vec<RawFd> = regions.values().flat_map(|bound| bound.descriptors()).collect();
                let mut numbers = self.descriptors();
                numbers.retain(|number| !used.contains(number));
                // Still under the lock: the next region's descriptors may come at these numbers.
                return inner.release_descriptors(&numbers);
            }
        }
    }

    pub(crate) fn start(&self) -> usize {
        self.region.range.first.addr().0
    }

    /// The descriptors that its pager uses now.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let stores = self.store().map_or_else(Vec::new, |store| store.descriptors());
        self.descriptors.iter().copied().chain(stores).collect()
    }

    /// Whether a forked child gets the region.
    pub(crate) fn give_to_child(&self, child: Advice) -> Result<()> {
        // SAFETY: owned-range: the region is ours; only what a child gets of it changes.
        unsafe { memory::advise(self.start(), self.len_bytes, child) }
            .map_err(|errno| Error::system("fork with", format!("region {}", self.name), errno))
    }

    pub(crate) fn core(&self) -> &region::Region {
        &self.region
    }

    pub(crate) fn store(&self) -> Option<&Arc<dyn BackingStore>> {
        self.store.as_ref()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        drop(self.pager.take());
        // SAFETY: owned-range: the region is in no map, and nobody holds a reference into it.
        let _ = unsafe { memory::unmap(self.start(), self.len_bytes) };
    }
}

/// Memory that its domain pages. Dropping it drops its contents. The domain goes on as long as it has regions, handle or no
/// handle.
pub struct Region {
    pub(crate) bound: Arc<Bound>,
    life: Arc<Life>,
}

impl Region {
    /// How many bytes it has: whole pages.
    pub fn len_bytes(&self) -> usize {
        self.bound.len_bytes
    }

    /// Its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.bound.start() as *mut u8
    }

    /// Its contents as values of `T`, as many as fit.
    pub fn as_slice<T: AnyBitPattern>(&self) -> &[T] {
        // SAFETY: region-view: the region is memory of its own, aligned to pages, initialised by its pager before it is
        // seen; it lives as long as `self`, and any bit pattern is a `T`.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.len_bytes() / size_of::<T>().max(1)) }
    }

    /// Its contents as values of `T`, to be changed.
    ///
    /// # Panics
    /// The region is read-only: what is written to it would be lost.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        assert!(self.bound.region.rights == Rights::ReadWrite, "region {} is read-only", self.bound.name);
        // SAFETY: region-view: as for `as_slice`, and `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast(), self.len_bytes() / size_of::<T>().max(1)) }
    }

    /// Whether each page is in core: 1 or 0, a byte a page. Plain memory: reading it costs a load, not a call. A page that
    /// the program itself dropped with madvise(2) counts as in core until it is next touched.
    pub fn residency(&self) -> &[AtomicU8] {
        let table = self.bound.region.residency();
        match table.get(0) {
            // SAFETY: table-memory: a table is `len` entries in a row, and lives as long as the region.
            Some(first) => unsafe { std::slice::from_raw_parts(first, table.len()) },
            None => &[],
        }
    }

    /// Brings `[offset, offset+len)` in and keeps it in core until it is unpinned as often: for system calls in upcall
    /// regions, and for I/O.
    ///
    /// # Errors
    /// The contents cannot be had, or there are not enough frames; then nothing of it is pinned.
    pub fn pin(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.range("pin", offset_bytes, len_bytes)?;
        let state = self.life.inner.state();
        self.life.inner.on_table(move |context| {
            for page in range.pages() {
                let why = match range::pin(state, context, page) {
                    Outcome::Resolved => continue,
                    Outcome::Failed(failure) => Error::failure("pin", self.bound.page_name(page), failure),
                    other => Error::new(Kind::Held, "pin", self.bound.page_name(page), format!("{other:?}")),
                };
                for pinned in range.pages().take_while(|pinned| *pinned < page) {
                    range::unpin(state, pinned);
                }
                return Err(why);
            }
            Ok(())
        })
    }

    /// Takes one pin of each page back.
    ///
    /// # Errors
    /// A page of it is not pinned.
    pub fn unpin(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.range("unpin", offset_bytes, len_bytes)?;
        let state = self.life.inner.state();
        let unpinned = || range.pages().find(|page| !range::unpin(state, *page));
        match self.life.inner.undisturbed(unpinned) {
            None => Ok(()),
            Some(page) => Err(Error::new(Kind::Invalid, "unpin", self.bound.page_name(page), "it is not pinned")),
        }
    }

    /// Has pager threads bring `[offset, offset+len)` in, as much of it as the frames can hold, and does not wait.
    ///
    /// # Errors
    /// The range is not in the region.
    pub fn prefetch(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.range("prefetch", offset_bytes, len_bytes)?;
        // More than the pager threads can take is not fetched: it is only advice.
        let _ = self.life.inner.undisturbed(|| range::prefetch(self.life.inner.state(), range));
        Ok(())
    }

    /// Drops the contents of `[offset, offset+len)`: they are garbage, are never saved, and read as in a new region. What the
    /// program has mapped over a part of it stays.
    ///
    /// # Errors
    /// The range is not in the region. A page that a clone still needs cannot be given to it: it is as it was, and the others are dropped.
    pub fn discard(&mut self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.range("discard", offset_bytes, len_bytes)?;
        self.bound.discard(&self.life.inner, range)
    }

    /// Takes the frames of `[offset, offset+len)` back; changed pages are on their way to the store. Returns how many pages
    /// went.
    ///
    /// # Errors
    /// The range is not in the region, or none of its resident pages could go: they are pinned, or held by the kernel.
    pub fn evict(&self, offset_bytes: usize, len_bytes: usize) -> Result<u32> {
        let range = self.range("evict", offset_bytes, len_bytes)?;
        let state = self.life.inner.state();
        let evict::Evicted { ready, queued, kept, .. } = self.life.inner.on_pager_thread(|| range::evict(state, range));
        if ready + queued == 0 && kept > 0 {
            let failure = Failure::Shortage(selfpage_core::shortage::Shortage::AllHeld);
            return Err(Error::failure("evict", self.bound.range_name(range), failure));
        }
        Ok(ready + queued)
    }

    /// Saves what has changed in `[offset, offset+len)`, and returns when it is saved; for a file, when it would survive a
    /// crash of the machine.
    ///
    /// # Errors
    /// A page could not be saved; it stays in core, changed.
    pub fn flush(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.range("flush", offset_bytes, len_bytes)?;
        let state = self.life.inner.state();
        self.life.inner.on_pager_thread(|| {
            range::flush(state, range)
                .map_err(|(page, failure)| Error::failure("flush", self.bound.page_name(page), failure))?;
            let pager = self.bound.pager.as_deref();
            pager
                .map_or(Ok(()), |pager| pager.sync())
                .map_err(|error| Error::failure("flush", self.bound.range_name(range), Failure::Pager(error)))
        })
    }

    /// The region's standing with the `priority` policy, for pages that come in from now on.
    pub fn set_priority(&self, priority: u8) {
        self.bound.region.priority.store(priority, Ordering::Relaxed);
    }

    /// Has faults of a part of the region go to its userfaultfd again.
    pub(crate) fn register_part(&self, start: usize, len_bytes: usize) -> Result<()> {
        let descriptors = *self.life.inner.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        let bound = &*self.bound;
        self.life.inner.on_table(move |_| bound.register_range(descriptors, start, len_bytes))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.bound.leave(&self.life.inner);
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({}, {} bytes)", self.bound.name, self.len_bytes())
    }
}
