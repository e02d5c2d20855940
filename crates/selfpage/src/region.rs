//! Regions: memory of the program's that its domain pages.
//!
//! # Source
//! Nemesis §6.1 (stretches); a region is bound to its pager when it is made, at run time.
#![allow(unsafe_code)]

mod batches;
mod bound;
mod lent;
mod moving;
mod part;
mod place;

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, PoisonError};

use bytemuck::{AnyBitPattern, Pod};
use selfpage_core::addr::{PAGE_BYTES, PageRange};
use selfpage_core::fault::{Outcome, range};
use selfpage_core::linux::memory::Access;
use selfpage_core::linux::{Errno, signal};
use selfpage_core::mmu::Trap;
use selfpage_core::pager::Pager;
use selfpage_core::pageset::PageSet;
use selfpage_core::region::{self, Rights};
use selfpage_core::sync::{AtomicU8, AtomicU32, AtomicU64};

use crate::FileAccess;
use crate::arena::Arena;
use crate::domain::Life;
use crate::error::{Error, Kind, Result};
use crate::handler::{Asking, FaultHandler};
use crate::pager::{Custom, File, Noted, Opened, PageHash, Physical, Stored, UserPager, Zero};
use crate::placement::Placement;
use crate::placement::taken::FilePart;
use crate::store::{BackingStore, Numbered};
use crate::trap::thread;

mod clone;
mod restored;

pub(crate) use bound::Bound;
use lent::Lent;
pub(crate) use place::InPlace;

/// What the names of regions without a name begin with.
pub(crate) const ADDRESS: &str = "at ";

/// A region to be.
#[must_use = "it is no region until one of its last calls (`stored`, `file`, `zero` and so on) says what backs it"]
pub struct Builder<'a> {
    life: &'a Arc<Life>,
    len_bytes: usize,
    name: String,
    pub(crate) trap: Trap,
    priority: u8,
    reserved: Access,
    pub(crate) placement: Placement,
    handler: Option<Box<dyn FaultHandler>>,
    /// What it is to be a clone of.
    source: Option<&'a region::Region>,
}

/// What a region's pager works with.
#[derive(Default)]
struct Means {
    /// Its own, which are no store's, nor lent.
    files: Vec<Numbered>,
    store: Option<Arc<dyn BackingStore>>,
    lent: Option<Lent>,
    part: Option<FilePart>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(life: &'a Arc<Life>, len_bytes: usize) -> Builder<'a> {
        let (name, placement) = (String::new(), Placement::Anywhere);
        let reserved = Access::ReadWrite;
        let (trap, handler, source) = (Trap::Worker, None, None);
        Builder { life, len_bytes, name, trap, priority: 0, reserved, placement, handler, source }
    }

    /// A name for messages. A snapshot keeps its first 255 bytes ([`SavedRegion::name`]).
    ///
    /// [`SavedRegion::name`]: crate::snapshot::SavedRegion::name
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
    ///
    /// Access is the program's alone to give there. Where a worker region refuses an access, the mapping of that page forbids it, and neither
    /// [`Region::protect`] nor [`Region::pin`] or [`Region::discard`] takes that back, as they do elsewhere: the program gives itself access to
    /// the page anew.
    pub fn without_access(mut self) -> Self {
        self.reserved = Access::None;
        self
    }

    /// Frames from the beginning, cleared and pinned: never a fault.
    ///
    /// # Errors
    /// As for [`Builder::zero`]; not enough frames.
    pub fn pinned(self) -> Result<Region> {
        let region = self.bind(Rights::ReadWrite, |_, _| Ok(Box::new(Zero)))?;
        region.pin(0, region.len_bytes())?;
        Ok(region)
    }

    /// Frames as they come, with undefined contents.
    ///
    /// # Errors
    /// As for [`Builder::zero`].
    pub fn physical(self) -> Result<Region> {
        self.bind(Rights::ReadWrite, |_, _| Ok(Box::new(Physical)))
    }

    /// Anonymous memory without a store: zero at first, and it stays in core.
    ///
    /// # Errors
    /// A length of 0; no address space, or something is at the address that was [chosen](Builder::at); too many regions; upcalls where the
    /// domain has a [table of descriptors of its own][private]; a pager, policy or store of the program's own asks for it.
    ///
    /// [private]: crate::DescriptorTable::Private
    pub fn zero(self) -> Result<Region> {
        self.bind(Rights::ReadWrite, |_, _| Ok(Box::new(Zero)))
    }

    /// Anonymous memory that is paged to a store.
    ///
    /// # Errors
    /// As for [`Builder::stored_in`].
    pub fn stored(self, store: impl BackingStore + 'static) -> Result<Region> {
        self.stored_in(Arc::new(store))
    }

    /// Anonymous memory that is paged to a store which other regions may use as well. With [`DescriptorTable::Private`] these are regions of
    /// this domain, and the store ends with the last of them: the program does not have its file any more.
    ///
    /// [`DescriptorTable::Private`]: crate::DescriptorTable::Private
    ///
    /// # Errors
    /// As for [`Builder::zero`]. The program has closed the store's file, or with [`DescriptorTable::Private`] has given it to
    /// another domain, or to regions that are gone.
    pub fn stored_in(self, store: Arc<dyn BackingStore>) -> Result<Region> {
        self.join(|builder| builder.over(store))
    }

    /// The same, before it is in its domain's map.
    fn over(self, store: Arc<dyn BackingStore>) -> Result<Arc<Bound>> {
        let means = Means { store: Some(store.clone()), ..Means::default() };
        self.make(Rights::ReadWrite, means, move |len, hash| {
            let mut arena = Arena::new(Arena::bytes_for::<AtomicU32>(len) + Arena::bytes_for::<AtomicU64>(len))?;
            // SAFETY: table-memory: the arena goes with the region, after its pager.
            let pager = unsafe { Stored::new(store, arena.table(len), Noted::new(hash, arena.table(len))) };
            Ok((Box::new(pager), Some(arena)))
        })
    }

    /// A file from `offset_bytes` on. A length of 0 stands for the rest of the file.
    ///
    /// # Errors
    /// The file cannot be opened, is not a regular one, or is empty; the offset is not a page's, or not below 16 TiB; or the file is shorter than
    /// asked for. To be written, it takes no shared mappings of single pages ([`Kind::Unsupported`]): its file system has none, or it is
    /// sealed. Pages of it are another region's of this process, and one of the two may be written ([`Kind::Held`]). Else as for
    /// [`Builder::zero`].
    pub fn file(mut self, path: impl AsRef<Path>, offset_bytes: u64, access: FileAccess) -> Result<Region> {
        let opened = Opened::new(path.as_ref(), offset_bytes, access)?;
        if self.len_bytes == 0 {
            self.len_bytes = opened.len_bytes as usize;
        }
        opened.check(self.len_bytes)?;
        if self.name.is_empty() {
            self.name = path.as_ref().display().to_string();
        }
        let means = Means { files: opened.files(), part: Some(opened.part(self.len_bytes)), ..Means::default() };
        self.bind_with(access, means, |len, hash| {
            let written = if access == FileAccess::ReadWrite { len } else { 0 };
            let apart = PageSet::words(written);
            let bytes = Arena::bytes_for::<AtomicU64>(written) + Arena::bytes_for::<AtomicU16>(written);
            let mut arena = Arena::new(bytes + Arena::bytes_for::<AtomicU64>(apart))?;
            // SAFETY: table-memory: the arena goes with the region, after its pager.
            let (noted, tails, apart) = unsafe { (arena.table(written), arena.table(written), arena.table(apart)) };
            let pager = File::new(opened, Noted::new(hash, noted), tails, PageSet::new(apart));
            Ok((Box::new(pager), Some(arena)))
        })
    }

    /// A pager of the program's own.
    ///
    /// # Errors
    /// As for [`Builder::zero`]. It names a [descriptor](UserPager::descriptors) that is none of the program's, or that pager threads
    /// have something else at.
    pub fn user(self, pager: impl UserPager + 'static) -> Result<Region> {
        let pager: Arc<dyn UserPager> = Arc::new(pager);
        let lent = Lent::to(pager.clone()).map_err(|why| why.for_a(format!("the pager of region {}", self.name)))?;
        let means = Means { lent: Some(lent), ..Means::default() };
        self.bind_with(Rights::ReadWrite, means, |len, hash| {
            let mut arena = Arena::new(Arena::bytes_for::<AtomicU64>(len))?;
            // SAFETY: table-memory: the arena goes with the region, after its pager.
            let pager = unsafe { Custom::new(pager, Noted::new(hash, arena.table(len))) };
            Ok((Box::new(pager), Some(arena)))
        })
    }

    /// A pager for those who want the whole of core's trait. Its memory is the caller's affair.
    ///
    /// # Errors
    /// As for [`Builder::zero`].
    pub fn pager(self, pager: Box<dyn Pager>) -> Result<Region> {
        self.bind(Rights::ReadWrite, |_, _| Ok(pager))
    }

    fn bind(self, rights: Rights, make: impl FnOnce(usize, Arc<PageHash>) -> Result<Box<dyn Pager>>) -> Result<Region> {
        self.bind_with(rights, Means::default(), |len, hash| Ok((make(len, hash)?, None)))
    }

    fn bind_with(
        self,
        rights: Rights,
        means: Means,
        make: impl FnOnce(usize, Arc<PageHash>) -> Result<(Box<dyn Pager>, Option<Arena>)>,
    ) -> Result<Region> {
        self.join(|builder| builder.make(rights, means, make))
    }

    fn join(self, make: impl FnOnce(Self) -> Result<Arc<Bound>>) -> Result<Region> {
        let (life, reserved) = (self.life, self.reserved);
        let quiet = signal::Quiet::begin();
        let joined = make(self)?.join(life, reserved)?;
        drop(quiet);
        Ok(joined.told())
    }

    fn make(
        mut self,
        rights: Rights,
        means: Means,
        make: impl FnOnce(usize, Arc<PageHash>) -> Result<(Box<dyn Pager>, Option<Arena>)>,
    ) -> Result<Arc<Bound>> {
        thread::may_make(|| format!("a region of {} bytes", self.len_bytes))?;
        let asking = Asking::of(self.handler.take(), self.reserved);
        asking.make_ready(self.trap, &self.life.inner)?;
        Bound::new(&self, rights, means, asking, make)
    }
}

/// A region that has just come into its domain.
struct Joined {
    region: Region,
    /// Why the domain locks no more from here on.
    unlocked: Option<Errno>,
}

impl Joined {
    /// The same, told to those who listen. They may start threads, which would have the mask of signals.
    fn told(self) -> Region {
        let bound = &*self.region.bound;
        if let Some(why) = self.unlocked {
            tracing::warn!(region = %bound.name, ?why, "it cannot be locked (RLIMIT_MEMLOCK): frames are locked no more");
        }
        tracing::debug!(region = %bound.name, len_bytes = bound.len_bytes(), trap = ?bound.region.trap, "region bound");
        self.region
    }
}

/// Memory that its domain pages. Dropping it drops its contents. The domain goes on as long as it has regions, handle or no
/// handle.
///
/// # Context
/// Normal. A pager, policy or store of the program's own makes no call on regions of any domain but to drop them: it may be what the call
/// waits for.
pub struct Region {
    pub(crate) bound: Arc<Bound>,
    life: Arc<Life>,
}

impl Region {
    /// How many bytes it has: whole pages.
    pub fn len_bytes(&self) -> usize {
        self.bound.len_bytes()
    }

    /// Its first byte. Any thread may read and write through it, as long as nobody has a slice of the region that meets those bytes, and threads
    /// that meet there use atomics. Calls with `&self` may be made meanwhile, since paging changes no contents: how several writers each
    /// prefetch, evict and flush their part (docs/pagers.md). It is good until the region is dropped.
    pub fn as_ptr(&self) -> *mut u8 {
        self.bound.start() as *mut u8
    }

    /// Its contents as values of `T`, as many as fit.
    ///
    /// # Panics
    /// A `T` is to be aligned to more than a page.
    pub fn as_slice<T: AnyBitPattern>(&self) -> &[T] {
        let count = self.count_of::<T>();
        // SAFETY: region-view: the region is memory of its own, aligned to pages, initialised by its pager before it is
        // seen; it lives as long as `self`, and any bit pattern is a `T`.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), count) }
    }

    /// Its contents as values of `T`, to be changed.
    ///
    /// # Panics
    /// The region is read-only: what is written to it would be lost. A `T` is to be aligned to more than a page.
    ///
    /// # Examples
    /// ```no_run
    /// # fn main() -> selfpage::Result<()> {
    /// use selfpage::bytemuck::{Pod, Zeroable};
    ///
    /// #[derive(Clone, Copy)]
    /// #[repr(C)]
    /// struct Record {
    ///     key: u64,
    ///     value: [u8; 120],
    /// }
    ///
    /// // SAFETY: all of its fields are `Pod`, with no bytes between or behind them, and it is laid out as in C.
    /// unsafe impl Zeroable for Record {}
    /// unsafe impl Pod for Record {}
    ///
    /// # let domain = selfpage::Domain::with_frames(1 << 20).build()?;
    /// let mut region = domain.region(1 << 22).stored(selfpage::store::MemoryStore::new(1 << 23)?)?;
    /// region.as_mut_slice::<Record>()[5] = Record { key: 5, value: [7; 120] };
    /// region.as_mut_slice::<[u8; 100]>()[50].fill(1);
    /// # Ok(()) }
    /// ```
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        assert!(self.bound.region.rights == Rights::ReadWrite, "region {} is read-only", self.bound.name);
        let count = self.count_of::<T>();
        // SAFETY: region-view: as for `as_slice`, and `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast(), count) }
    }

    /// Its contents as words that several threads read and change at once.
    ///
    /// # Panics
    /// The region is read-only.
    ///
    /// # Examples
    /// ```no_run
    /// # fn main() -> selfpage::Result<()> {
    /// # use std::sync::atomic::Ordering;
    /// # let domain = selfpage::Domain::with_frames(1 << 20).build()?;
    /// # let mut region = domain.region(1 << 22).stored(selfpage::store::MemoryStore::new(1 << 23)?)?;
    /// let words = region.as_atomics();
    /// std::thread::scope(|scope| {
    ///     for _ in 0..4 {
    ///         scope.spawn(|| words.iter().for_each(|word| _ = word.fetch_add(1, Ordering::Relaxed)));
    ///     }
    /// });
    /// # Ok(()) }
    /// ```
    pub fn as_atomics(&mut self) -> &[std::sync::atomic::AtomicU64] {
        let words = self.as_mut_slice::<u64>();
        // SAFETY: region-view: atomic words lie as plain ones do, and the only view of those is given up for them.
        unsafe { std::slice::from_raw_parts(words.as_mut_ptr().cast(), words.len()) }
    }

    /// How many values of `T` fit into it.
    fn count_of<T>(&self) -> usize {
        let align = align_of::<T>();
        assert!(align <= PAGE_BYTES, "region {} is aligned to {PAGE_BYTES} bytes, and not to {align}", self.bound.name);
        self.len_bytes() / size_of::<T>().max(1)
    }

    /// Whether each page is in core: 1 or 0, a byte a page. Plain memory: reading it costs a load, not a call. A page that the program can
    /// use without a fault counts as in core; so does one just before it is mapped, when a first use may still wait a moment for that.
    /// A page that the program itself dropped with madvise(2) counts as in core until it is next touched.
    pub fn residency(&self) -> &[AtomicU8] {
        self.bound.region.residency().as_slice()
    }

    /// Brings `[offset, offset+len)` in, with the whole of its first and last page, and keeps it in core until it is unpinned as often, or
    /// discarded: for system calls in upcall regions, and for I/O. What could not be had for an earlier access is tried anew.
    ///
    /// # Errors
    /// The contents cannot be had, or there are not enough frames; then nothing of it is pinned. As for [`Region::prefetch`].
    pub fn pin(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.range("pin", offset_bytes, len_bytes)?;
        self.bound.has_all("pin", range)?;
        let (state, bound) = (self.life.inner.state(), &*self.bound);
        self.life.inner.on_table(move |context| {
            for page in range.pages() {
                let why = match range::pin(state, context, page) {
                    Outcome::Resolved => continue,
                    Outcome::Failed(failure) => Error::failure("pin", bound.page_name(page), failure),
                    other => Error::new(Kind::Held, "pin", bound.page_name(page), not_pinned(other)),
                };
                for pinned in range.pages().take_while(|pinned| *pinned < page) {
                    range::unpin(state, pinned);
                }
                return Err(why);
            }
            Ok(())
        })?;
        self.bound.take_refusals_back(&self.life.inner, range);
        Ok(())
    }

    /// Takes one pin of each page back.
    ///
    /// # Errors
    /// A page of it is not pinned; the others are unpinned. As for [`Region::prefetch`].
    pub fn unpin(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.range("unpin", offset_bytes, len_bytes)?;
        let state = self.life.inner.state();
        let unpin = move || range.pages().filter(|page| !range::unpin(state, *page)).reduce(|first, _| first);
        match self.life.inner.undisturbed(unpin) {
            None => Ok(()),
            Some(page) => Err(Error::new(
                Kind::Invalid,
                "unpin",
                self.bound.page_name(page),
                "it is not pinned: unpin it as often as it was pinned",
            )),
        }
    }

    /// Has pager threads bring `[offset, offset+len)` in, as much of it as the frames can hold, and does not wait.
    ///
    /// # Errors
    /// The range is not in the region; the thread's protection domain does not have the right `META` on it; or this is a forked child that did not
    /// get the region.
    pub fn prefetch(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.range("prefetch", offset_bytes, len_bytes)?;
        // More than the pager threads can take is not fetched: it is only advice.
        let _ = self.advise(range);
        Ok(())
    }

    /// Has pager threads bring `range` in. `false`: they have too much to do already.
    fn advise(&self, range: PageRange) -> bool {
        let (state, core) = (self.life.inner.state(), self.bound.core());
        self.life.inner.undisturbed(move || range::prefetch(state, core, range))
    }

    /// Drops the contents of `[offset, offset+len)`, whole pages: they are garbage, are never saved, and read as in a new region. Pins on its pages go
    /// too, however many: they are not to be taken back. What the program has mapped over a part of it stays. Where others use the region
    /// too, so that there is no `&mut` to be had: [`Region::drop_contents`].
    ///
    /// It takes as long as pages of the range were used; as long as there are pages, where the region is restored, tracked, a clone, or has a
    /// pager of the program's own.
    ///
    /// # Errors
    /// As for [`Region::prefetch`], or the range begins or ends within a page. A page that a clone still needs cannot be given to it: it is as it
    /// was, and the others are dropped.
    pub fn discard(&mut self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.whole_pages("discard", offset_bytes, len_bytes)?;
        self.bound.discard_large(&self.life.inner, range)
    }

    /// The region's standing with the `priority` policy, for pages that come in from now on.
    pub fn set_priority(&self, priority: u8) {
        self.bound.region.priority.store(priority, Ordering::Relaxed);
    }

    /// Has faults of a part of the region go to its userfaultfd again.
    pub(crate) fn register_part(&self, start: usize, len_bytes: usize) -> Result<()> {
        // A fork waits for it, and leaves no lock behind that somebody holds.
        let _regions = self.life.inner.regions();
        let descriptors = *self.life.inner.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        let bound = &*self.bound;
        // The program may have closed this thread's.
        self.life.inner.on_pager_thread(move || bound.register(descriptors, &(start..start + len_bytes)))
    }
}

/// Why a page cannot be pinned, and what helps.
fn not_pinned(outcome: Outcome) -> String {
    match outcome {
        Outcome::Protected => "the program has it protected against reading: allow that first (Region::protect)".into(),
        Outcome::Violation => format!("it is pinned {} times already: unpin it as often", range::MOST_PINS),
        Outcome::NotOurs => "its region is gone".into(),
        other => format!("it cannot be brought in ({other:?})"),
    }
}

impl fmt::Debug for Builder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionBuilder({:?}, {} bytes, {:?})", self.name, self.len_bytes, self.trap)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.bound.end(&self.life);
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({}, {} bytes)", self.bound.name, self.len_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    #[test]
    fn threads_change_words_at_once() {
        let domain = crate::Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let store = MemoryStore::new(1 << 20).unwrap();
        let mut region = domain.region(64 * PAGE_BYTES).stored(store).unwrap();
        let words = region.as_atomics();
        assert_eq!(words.len(), 64 * 512);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| words.iter().for_each(|word| _ = word.fetch_add(1, Ordering::Relaxed)));
            }
        });
        assert!(region.as_slice::<u64>().iter().all(|word| *word == 4));
    }
}
