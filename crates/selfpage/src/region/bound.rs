//! A region with all that it stands on, from its making to its end.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use selfpage_core::addr::{PAGE_BYTES, PageNo, PageRange, VirtAddr};
use selfpage_core::cut::PageSets;
use selfpage_core::fault::{Failure, inherit, range};
use selfpage_core::linux::Errno;
use selfpage_core::linux::memory::{self, Advice};
use selfpage_core::linux::mmu::Descriptors;
use selfpage_core::linux::pagemap::{Scanned, Stretch};
use selfpage_core::linux::uffd::Modes;
use selfpage_core::mmu::Trap;
use selfpage_core::page::PageWord;
use selfpage_core::pager::{Context, Pager};
use selfpage_core::pageset::PageSet;
use selfpage_core::region::{self, Rights};
use selfpage_core::sync::{AtomicU8, AtomicU64};

use super::place::Place;
use super::{ADDRESS, Builder, Joined, Lent, Means, Region};
use crate::arena::Arena;
use crate::config::DescriptorTable;
use crate::dirty::{self, Owner};
use crate::domain::{Closer, Inner, Life, MOST_REGIONS, threads};
use crate::error::{Error, Kind, Result};
use crate::handler::Asking;
use crate::pager::PageHash;
use crate::placement::{self, taken};
use crate::store::{BackingStore, Numbered};
use crate::trap::thread;
use crate::trap::upcall::{self, MOST_DOMAINS};

/// To look at the words of fewer pages takes less than to have the kernel tell which were written to.
const LARGE: u64 = 4096;

/// Where a pager is, at an address that core can keep in one word.
struct PagerAt(&'static dyn Pager);

/// A region with all that it stands on. The tables and the pager live until it is dropped, which is after it has left its
/// domain's map and the gate was closed once.
pub(crate) struct Bound {
    pub(super) region: Box<region::Region>,
    /// What `region` points to; in this order, so that the pager, and what is refused, go before their tables.
    _reference: Box<PagerAt>,
    pub(super) pager: Box<dyn Pager>,
    pub(crate) asking: Asking,
    _pager_tables: Option<Arena>,
    _tables: Arena,
    pub(super) means: Means,
    pub(crate) name: String,
    /// Whether the program gave it.
    pub(super) is_named: bool,
    /// Its pages may be dropped from now on. Changed and asked for with the domain's regions held.
    leaving: AtomicBool,
    /// It has or had contents of another region's, at pages that nobody has used.
    is_clone: bool,
    /// Whose its dirty bits are.
    pub(crate) tracker: Owner,
    pub(super) place: Place,
}

impl Bound {
    pub(super) fn new(
        builder: &Builder<'_>,
        rights: Rights,
        means: Means,
        asking: Asking,
        make: impl FnOnce(usize, Arc<PageHash>) -> Result<(Box<dyn Pager>, Option<Arena>)>,
    ) -> Result<Arc<Bound>> {
        let inner = &builder.life.inner;
        let object = || format!("a region of {} bytes", builder.len_bytes);
        let (trap, table) = (builder.trap, inner.config.descriptor_table);
        inner.is_here("make", object)?;
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
            let cause = format!(
                "{MOST_DOMAINS} domains of this process have had upcall regions, and no more can: drop one of them, make the region in \
                 one, or leave its faults to workers (Trap::Worker)"
            );
            return Err(Error::new(Kind::OutOfSpace, "make", object(), cause));
        }
        let len = builder.len_bytes.div_ceil(PAGE_BYTES);
        let made = make(len, inner.hash.clone()).map_err(|why| why.for_a(object()))?;
        // In this order: where the region cannot be made, the pager goes before its tables.
        let pager_tables = made.1;
        let pager = made.0;
        if pager.fills_in() == Context::PagerThread {
            inner.runs_own_code.store(true, Ordering::Relaxed);
        }
        let armed = if trap.is_tracked() { len } else { 0 };
        let set = Arena::bytes_for::<AtomicU64>(PageSet::words(len));
        let bytes = Arena::bytes_for::<PageWord>(len) + Arena::bytes_for::<AtomicU8>(len);
        let bytes = bytes + Arena::bytes_for::<AtomicU8>(armed) + 7 * set;
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
        (region.guarded, region.given_up) = (set(), set());
        if let Some(source) = builder.source {
            // SAFETY: region-in-map: the caller has the source's handle until the two are linked, and `leave` parts them, or have parted.
            unsafe { region.clone_of(source) };
        }
        let asking = asking.with_room(set());
        region.priority.store(builder.priority, Ordering::Relaxed);
        region.asks_first.store(asking.first.into(), Ordering::Relaxed);
        // SAFETY: pager-outlives: the box stays where it is until the region is dropped, and the reference before it.
        let reference = Box::new(PagerAt(unsafe { std::mem::transmute::<&dyn Pager, &'static dyn Pager>(&*pager) }));
        let name = if builder.name.is_empty() { format!("{ADDRESS}{start:#x}") } else { builder.name.clone() };
        let bound = Bound {
            region: Box::new(region),
            _reference: reference,
            pager,
            _pager_tables: pager_tables,
            _tables: tables,
            means,
            name,
            is_named: !builder.name.is_empty(),
            asking,
            leaving: AtomicBool::new(false),
            is_clone: builder.source.is_some(),
            tracker: Owner::default(),
            place: Place::new(start..start + len_bytes),
        };
        // SAFETY: pager-outlives: as above.
        let new = unsafe { bound.region.bind(&raw const bound._reference.0) };
        debug_assert!(new);
        // SAFETY: owned-range: just mapped.
        unsafe { memory::keep_hands_off(start, len_bytes) }
            .map_err(|errno| Error::system("set up", object(), errno))?;
        let bound = Arc::new(bound);
        bound.region.keeper.store(Arc::as_ptr(&bound).cast_mut().cast(), Ordering::Release);
        Ok(bound)
    }

    /// Registers the region for faults, gives pager threads its descriptors, makes it accessible as `reserved` says, and puts it into the map.
    /// From before it has its addresses until then no handler of a signal is let in: the child of one that forked has nothing there.
    pub(super) fn join(self: Arc<Bound>, life: &Arc<Life>, reserved: memory::Access) -> Result<Joined> {
        let inner = &life.inner;
        if let Some(number) = self.descriptors().iter().find(|number| **number < 0) {
            let cause = format!("its store names the descriptor {number}, which is none; name those that it has");
            return Err(Error::new(Kind::Invalid, "add", format!("region {}", self.name), cause));
        }
        let mut regions = inner.regions();
        let unlocked = inner.lock_or_give_up(&regions, &self.addresses());
        let descriptors = *inner.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        // The program may have closed this thread's descriptors.
        let bound = &*self;
        inner.on_pager_thread(move || bound.register(descriptors, &bound.addresses()))?;
        // What another region's pager has in common with ours, pager threads have already, and of a store's file the program no more.
        let known = |number: &RawFd| regions.values().any(|bound| bound.descriptors().contains(number));
        let (known, numbers): (Vec<RawFd>, Vec<RawFd>) = self.descriptors().into_iter().partition(known);
        // Before it can be found: an access by an old address would fail, and its page with it.
        inner.has_descriptors(&self, &known)?;
        inner.share_descriptors(&self, &numbers)?;
        // Before it is shown: from then on the program may unmap a part, where nothing else is to come.
        taken::insert(&self, self.means.part.as_ref()).inspect_err(|_| inner.release_descriptors(&numbers))?;
        self.show(inner, reserved).inspect_err(|_| {
            inner.release_descriptors(&numbers);
            // With the regions held, as it was put in.
            taken::remove(&self.addresses());
        })?;
        regions.insert(self.region.range.first.0, self.clone());
        // With the regions held: a child that was forked in the middle of it would have the lock of what the pager was lent.
        inner.hide_descriptors_of(&self, &numbers);
        drop(regions);
        Ok(Joined { region: Region { life: life.clone(), bound: self }, unlocked })
    }

    /// Lets the program access it, and faults find it.
    fn show(&self, inner: &Inner, reserved: memory::Access) -> Result<()> {
        // Not before it is locked our way, without pages: in what a program has locked when it is mapped the kernel puts some here. And not
        // before it is registered: an access by an old address would find zeros.
        // SAFETY: owned-range: nobody has its addresses yet.
        unsafe { memory::protect(self.start(), self.len_bytes(), reserved) }
            .map_err(|errno| Error::system("reserve", format!("region {}", self.name), errno))?;
        // SAFETY: region-in-map: the domain keeps the region until it has left the map and the gate was closed.
        if unsafe { inner.state().regions.insert(&raw const *self.region) } {
            return Ok(());
        }
        let cause = format!(
            "the domain has {MOST_REGIONS} regions, and no more can be: drop one, make fewer and larger ones, or another domain"
        );
        Err(Error::new(Kind::OutOfSpace, "add", format!("region {}", self.name), cause))
    }

    /// Has faults of a part of the region go to its userfaultfd.
    pub(crate) fn register(&self, descriptors: Descriptors, part: &Range<usize>) -> Result<()> {
        let uffd = match self.region.trap {
            Trap::Worker => descriptors.worker,
            Trap::Upcall => descriptors.upcall,
            Trap::TrackedWorker => descriptors.tracked_worker,
            Trap::TrackedUpcall => descriptors.tracked_upcall,
        };
        // A write to a page that is protected is told too, or noted.
        let modes = Modes::MISSING.and(Modes::WP);
        // SAFETY: owned-range: the region is ours, and absent pages of it are what the domain is for.
        unsafe { uffd.register(part.start, part.len(), modes) }
            .map_err(|errno| Error::system("register", format!("region {}", self.name), errno))
    }

    /// Takes the region out of its domain; soon, and on another thread, where this one may be inside the gate that is closed for that: a
    /// pager of the program's may own regions.
    pub(super) fn end(self: &Arc<Bound>, life: &Arc<Life>) {
        if !thread::may_be_inside() {
            return self.leave(&life.inner);
        }
        let (bound, life) = (self.clone(), life.clone());
        if let Some(why) = threads::end_on_another(move || bound.leave(&life.inner)) {
            tracing::error!(region = %self.name, %why, "no thread to end a region with: it stays as long as its domain");
        }
    }

    /// Takes the region out of its domain: its pages are dropped.
    fn leave(&self, inner: &Inner) {
        if !inner.is_served() {
            // A child that did not get it.
            return;
        }
        let state = inner.state();
        // In an upcall the program's own thread is in its access, or has jumped out.
        if !self.region.trap.is_signal() {
            self.place.await_handlers();
        }
        let (mut tried, mut closer) = (false, Closer::default());
        let regions = inner.regions();
        self.leaving.store(true, Ordering::Relaxed);
        drop(regions);
        loop {
            self.discard_all(inner);
            let mut regions = inner.regions();
            let core = &*self.region;
            let (closed, tries) = inner.on_pager_thread(move || {
                if closer.close(&state.gate, state.mmu).is_err() {
                    return (None, closer);
                }
                // Nobody is inside: what pager threads have read ahead since then shows now.
                let empty = self.is_absent(inner, core.range);
                if empty || tried {
                    // What its clone could not be given by now it does not get.
                    inherit::part(core);
                }
                if empty {
                    let removed = state.regions.remove(core);
                    debug_assert!(removed);
                }
                state.gate.open(state.mmu);
                (Some(empty), closer)
            });
            closer = tries;
            let Some(empty) = closed else {
                // One inside may wait for a kernel lock whose holder waits to get in, or, in a pager of the program's, for the regions.
                drop(regions);
                closer.pause();
                continue;
            };
            tried = true;
            if empty {
                regions.remove(&core.range.first.0);
                let parts = inner.on_pager_thread(move || inner.parts_of(self));
                let used: Vec<RawFd> = regions.values().flat_map(|bound| bound.descriptors()).collect();
                let mut numbers = self.descriptors();
                numbers.retain(|number| !used.contains(number));
                // Still under the lock: the next region's descriptors may come at these numbers.
                inner.release_descriptors(&numbers);
                // And no handler is let in before: in the child of one that forked, other memory is there by then.
                self.place.leave(parts);
                return;
            }
        }
    }

    /// Drops all of its pages, also what is pinned: nobody may use the region any more.
    fn discard_all(&self, inner: &Inner) {
        let all = self.region.range;
        let _ = match self.pager.keeps_untouched() {
            true => inner.discard(all),
            false => self.discard_touched(inner, all),
        };
    }

    /// Drops what the pages of a range hold, of which those that nobody has used are passed over where they hold nothing.
    ///
    /// # Errors
    /// As for [`Inner::discard`].
    pub(super) fn discard_used(&self, inner: &Inner, range: PageRange) -> std::result::Result<(), (PageNo, Failure)> {
        // A tracker that has armed pages is told of all of them.
        let looks_at_all =
            range.count < LARGE || self.region.trap.is_tracked() || self.is_clone || self.pager.forgets_untouched();
        if looks_at_all { inner.discard(range) } else { self.discard_touched(inner, range) }
    }

    fn discard_touched(&self, inner: &Inner, range: PageRange) -> std::result::Result<(), (PageNo, Failure)> {
        let (mut rest, mut done) = (range, Ok(()));
        while let Some((part, behind)) = inner.on_pager_thread(move || self.next_touched(inner, rest)) {
            done = done.and(inner.discard(part));
            rest = behind;
        }
        done
    }

    /// Whether no page of a range of the region is in core, on its way, or on its way out.
    ///
    /// # Context
    /// PagerThread; the answer lasts only with the gate closed.
    fn is_absent(&self, inner: &Inner, range: PageRange) -> bool {
        self.touched(inner, range).all(|part| range::is_absent(inner.state(), part))
    }

    /// The parts of `range`, a range of the region, that may have pages in core, in order.
    ///
    /// # Context
    /// PagerThread.
    pub(crate) fn touched(&self, inner: &Inner, range: PageRange) -> impl Iterator<Item = PageRange> {
        let mut rest = range;
        std::iter::from_fn(move || {
            let part;
            (part, rest) = self.next_touched(inner, rest)?;
            Some(part)
        })
    }

    /// The first of them in `rest`, and what is behind it. A large region that is hardly used has few: the kernel gave memory to the words that
    /// were written to, and of all others knows at once that it did not. Where it does not tell, or few pages are left, it is all of `rest`. What a clone or the
    /// image of a snapshot needs is among them: their pages are armed, each by its word.
    ///
    /// # Context
    /// PagerThread: its descriptors are the domain's.
    pub(super) fn next_touched(&self, inner: &Inner, rest: PageRange) -> Option<(PageRange, PageRange)> {
        if rest.count == 0 {
            return None;
        }
        if rest.count < LARGE {
            return Some((rest, PageRange { first: rest.end(), count: 0 }));
        }
        let all = self.region.range;
        let first = ptr::from_ref(self.region.word(all.first)?).addr();
        let word = |page: PageNo| first + (page.0 - all.first.0) as usize * size_of::<PageWord>();
        let page = |word: usize| all.first.plus((word.saturating_sub(first) / size_of::<PageWord>()) as u64);
        let at = word(rest.first) / PAGE_BYTES * PAGE_BYTES;
        let end = word(rest.end()).next_multiple_of(PAGE_BYTES);
        let mut found = [Stretch::default()];
        let (begin, end) = match inner.mmu.pagemap().written_to(at, end, &mut found) {
            Ok(Scanned { stretches: 0, .. }) => return None,
            Ok(_) => (page(found[0].start()).max(rest.first), page(found[0].end()).min(rest.end())),
            Err(_) => (rest.first, rest.end()),
        };
        let behind = PageRange { first: end, count: rest.end().0 - end.0 };
        Some((PageRange { first: begin, count: end.0 - begin.0 }, behind))
    }

    /// Whether its owner drops it. Where not, whoever does so later sees all that the caller has done before.
    pub(crate) fn is_leaving(&self, inner: &Inner) -> bool {
        let _regions = inner.regions();
        self.leaving.load(Ordering::Relaxed)
    }

    pub(crate) fn start(&self) -> usize {
        self.region.range.first.addr().0
    }

    pub(super) fn len_bytes(&self) -> usize {
        self.region.range.count as usize * PAGE_BYTES
    }

    pub(crate) fn addresses(&self) -> Range<usize> {
        self.start()..self.start() + self.len_bytes()
    }

    /// The descriptors of its own and those lent, which are no store's.
    pub(crate) fn own_descriptors(&self) -> Vec<RawFd> {
        self.means.files.iter().map(|file| file.number).chain(self.lent_descriptors()).collect()
    }

    /// Those that stay the program's.
    pub(crate) fn lent_descriptors(&self) -> Vec<RawFd> {
        self.lent().iter().map(|file| file.number).collect()
    }

    fn lent(&self) -> Vec<Numbered> {
        self.means.lent.as_ref().map_or_else(Vec::new, Lent::files)
    }

    /// What the calling thread has at the numbers of what its pager was lent.
    pub(crate) fn lent_now(&self) -> Vec<Option<Numbered>> {
        self.means.lent.as_ref().map_or_else(Vec::new, Lent::now)
    }

    /// In a forked child, as [`Lent::over_fork`].
    pub(crate) fn lent_over_fork(&self, before: &[Option<Numbered>]) -> Vec<RawFd> {
        self.means.lent.as_ref().map_or_else(Vec::new, |lent| lent.over_fork(before))
    }

    /// That `found`, which a thread of the program's has at `number`, is what the pager uses at that number.
    pub(crate) fn check_descriptor(&self, number: RawFd, found: BorrowedFd<'_>) -> Result<()> {
        if let Some(file) = self.means.files.iter().chain(&self.lent()).find(|file| file.number == number) {
            return self.check_file(file, found);
        }
        let Some(store) = self.store() else { return Ok(()) };
        let checked = store.check_descriptor(number, found);
        checked.map_err(|why| not_its_own(format!("store {}", why.object), why.cause, why.remedy))
    }

    /// The same of a file that is no store's.
    pub(crate) fn check_file(&self, file: &Numbered, found: BorrowedFd<'_>) -> Result<()> {
        let remedy =
            "make the region anew, and close no descriptors meanwhile, nor in a child before its regions are there";
        file.check(found).map_err(|cause| not_its_own(format!("the file of region {}", self.name), cause, remedy))
    }

    /// The descriptors that its pager uses now.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let stores = self.store().map_or_else(Vec::new, |store| store.descriptors());
        self.own_descriptors().into_iter().chain(stores).collect()
    }

    /// Whether a forked child gets a part of the region.
    pub(crate) fn give_to_child(&self, part: &Range<usize>, child: Advice) -> std::result::Result<(), Errno> {
        // SAFETY: owned-range: the region is ours; only what a child gets of it changes.
        unsafe { memory::advise(part.start, part.len(), child) }
    }

    pub(crate) fn core(&self) -> &region::Region {
        &self.region
    }

    pub(crate) fn store(&self) -> Option<&Arc<dyn BackingStore>> {
        self.means.store.as_ref()
    }
}

/// The error for a descriptor that is not of what it is to be of.
fn not_its_own(object: String, cause: std::io::Error, remedy: &str) -> Error {
    Error::new(Kind::Invalid, "share", object, format!("{cause}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::fd::AsRawFd;
    use std::sync::Mutex;

    use rustix::io::fcntl_getfd;
    use selfpage_core::addr::{PAGE_BYTES, PageBytes};
    use selfpage_core::linux::thread as own_thread;
    use selfpage_core::pager::PagerError;

    use super::*;
    use crate::domain::Domain;
    use crate::over_memory::over_memory;
    use crate::pager::UserPager;
    use crate::store::{Blok, MemoryStore, ReadBlok, StoreError, WriteBlok, borrow_number};

    /// Whether its domain's regions were held, each time that a thread of the program's looked at its descriptor.
    struct Looks {
        store: MemoryStore,
        domain: Arc<Inner>,
        held: Mutex<Vec<bool>>,
    }

    impl BackingStore for Looks {
        over_memory!(store: claim, release, reads_in_trap, read, write);

        fn descriptors(&self) -> Vec<RawFd> {
            vec![2]
        }

        fn check_descriptor(&self, _: RawFd, _: BorrowedFd<'_>) -> std::result::Result<(), StoreError> {
            if !thread::is_pager_thread(own_thread::id()) {
                self.held.lock().unwrap().push(self.domain.regions.try_lock().is_err());
            }
            Ok(())
        }
    }

    /// A fork in the middle of that would give its child locks that nobody has there: a fork waits for the regions.
    #[test]
    fn a_regions_descriptors_are_looked_at_while_no_fork_can_be() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let store = Arc::new(Looks {
            store: MemoryStore::new(16 * PAGE_BYTES as u64).unwrap(),
            domain: domain.life().inner.clone(),
            held: Mutex::default(),
        });
        drop(domain.region(PAGE_BYTES).stored_in(store.clone()).unwrap());
        let held = store.held.lock().unwrap();
        assert!(!held.is_empty() && held.iter().all(|held| *held), "{held:?}");
    }

    struct Names(Vec<RawFd>);

    impl UserPager for Names {
        fn fill(&self, _: u64, _: &mut PageBytes) -> io::Result<()> {
            Ok(())
        }

        fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
            Ok(())
        }

        fn descriptors(&self) -> Vec<RawFd> {
            self.0.clone()
        }
    }

    #[test]
    fn what_regions_name_in_common_pager_threads_have_until_the_last_of_them_ends() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let inner = domain.life().inner.clone();
        let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
        let numbers = files.each_ref().map(AsRawFd::as_raw_fd);
        let lend = |numbers: &[RawFd]| domain.region(PAGE_BYTES).user(Names(numbers.to_vec())).unwrap();
        let are_there =
            || numbers.map(|number| inner.on_pager_thread(move || fcntl_getfd(borrow_number(number)).is_ok()));
        let (both, second) = (lend(&numbers), lend(&numbers[1..]));
        assert_eq!(are_there(), [true, true]);
        drop(both);
        assert_eq!(are_there(), [false, true]);
        drop(second);
        assert_eq!(are_there(), [false, false]);
    }
}
