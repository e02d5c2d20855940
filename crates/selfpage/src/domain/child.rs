//! A domain over a fork: brought to rest before it, and in the child made anew or given up.
#![allow(unsafe_code)]

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use rustix::io::fcntl_getfd;
use selfpage_core::addr::{Frame, PAGE_BYTES, PageBytes, PageNo};
use selfpage_core::fault::{Failure, copy_first, inherit, protect};
use selfpage_core::linux::memory::{self, Access, Place};
use selfpage_core::linux::mmu::Descriptors;
use selfpage_core::linux::uffd::Reach;
use selfpage_core::mmu::Trap;
use selfpage_core::pager::Pager;
use selfpage_core::stack;

use super::threads::Kept;
use super::{Closer, Inner, monotonic_ns};
use crate::error::{Error, Result};
use crate::placement::taken;
use crate::region::Bound;
use crate::store::{OwnFiles, Reserved, borrow_number};
use crate::trap::ask::may_be_in_handler;
use crate::trap::handlers::start_one;
use crate::trap::thread::is_a_domains;
use crate::{descriptors, maps};

/// A region, and a range of its addresses where its mapping is there still.
pub(crate) type Part = (Arc<Bound>, Range<usize>);

/// Why a gate stays open.
pub(crate) enum Open {
    /// Somebody is inside.
    InUse,
    /// So many pages are on their way to a store, or unmapped to see whether they are used.
    Undrained(usize),
}

/// The mappings of the process, by address, read when they are first asked for; none where they cannot be.
type Mappings = LazyCell<Option<Vec<maps::Mapping>>>;

fn read_mappings() -> Option<Vec<maps::Mapping>> {
    maps::of_this_process().ok()
}

impl Inner {
    /// What there is of the regions, by address.
    pub(crate) fn own_parts(&self, regions: &BTreeMap<u64, Arc<Bound>>) -> Vec<Part> {
        let mappings = Mappings::new(read_mappings);
        let mut parts = Vec::new();
        for bound in regions.values() {
            parts.extend(self.parts_among(bound, &mappings).into_iter().map(|part| (bound.clone(), part)));
        }
        parts
    }

    /// Whether a page is its region's still: the program may have mapped something else over it.
    pub(crate) fn is_ours(&self, page: PageNo) -> bool {
        self.mmu.is_ours(page.addr().0, PAGE_BYTES)
    }

    /// Where the region's mapping is there still: the program may have unmapped a part, or mapped something else over it.
    pub(crate) fn parts_of(&self, bound: &Bound) -> Vec<Range<usize>> {
        self.parts_among(bound, &Mappings::new(read_mappings))
    }

    /// The same, where these are the mappings of the process: they are looked at only if something is missing.
    fn parts_among(&self, bound: &Bound, mappings: &Mappings) -> Vec<Range<usize>> {
        let all = bound.addresses();
        let is_ours = |part: &Range<usize>| self.mmu.is_ours(part.start, part.len());
        if is_ours(&all) {
            return vec![all];
        }
        let mut parts: Vec<Range<usize>> = Vec::new();
        let Some(mappings) = &**mappings else {
            self.add_ours(all, &mut parts);
            return parts;
        };
        let first = mappings.partition_point(|mapping| mapping.range.end <= all.start);
        for mapping in mappings[first..].iter().take_while(|mapping| mapping.range.start < all.end) {
            let part = mapping.range.start.max(all.start)..mapping.range.end.min(all.end);
            let pages = [part.start, part.end - PAGE_BYTES].map(|page| page..page + PAGE_BYTES);
            if pages.iter().any(is_ours) {
                self.add_ours(part, &mut parts);
            }
        }
        parts
    }

    /// Adds what is ours of a mapping, which may have been split since somebody looked, by other rights for a part of it.
    fn add_ours(&self, part: Range<usize>, parts: &mut Vec<Range<usize>>) {
        if self.mmu.is_ours(part.start, part.len()) {
            match parts.last_mut() {
                Some(before) if before.end == part.start => before.end = part.end,
                _ => parts.push(part),
            }
        } else if part.len() > PAGE_BYTES {
            let middle = part.start + (part.len() / 2).next_multiple_of(PAGE_BYTES);
            self.add_ours(part.start..middle, parts);
            self.add_ours(middle..part.end, parts);
        }
    }

    /// Closes the gate, if nothing is on its way to a store just now, and no page is unmapped to see whether it is used: a fork copies
    /// neither.
    pub(crate) fn try_close_gate_drained(&self, closer: &mut Closer) -> std::result::Result<(), Open> {
        closer.close(&self.state.gate, self.state.mmu).map_err(|_| Open::InUse)?;
        let left = self.state.undrained();
        if left > 0 || self.ends_samples.load(Ordering::SeqCst) {
            self.state.gate.open(self.state.mmu);
            return Err(Open::Undrained(left));
        }
        Ok(())
    }

    /// Has what keeps the gate from being closed so come to its end.
    pub(crate) fn drain(&self) {
        if self.state.stack.sampled() > 0 {
            self.samples.fetch_add(1, Ordering::SeqCst);
            self.own_sample.store(0, Ordering::SeqCst);
            // Pager threads may all be waiting for frames, which the evictor cannot free while a fork has its policy.
            self.ends_samples.store(true, Ordering::SeqCst);
        }
        self.state.draining.store(true, Ordering::SeqCst);
        self.state.to_save.signal(self.state.mmu);
    }

    /// In a forked child: the domain with everything that a fork does not copy made anew, over the parts of its regions that are here.
    /// The caller has the gate closed, and holds the regions and the policy.
    pub(crate) fn rebuild_in_child(
        self: &Arc<Self>,
        regions: &BTreeMap<u64, Arc<Bound>>,
        parts: &[Part],
        aside: &[(Frame, PageBytes)],
        files: &OwnFiles,
        reserved: &Reserved,
    ) -> Result<()> {
        let state = &self.state;
        let refused = |why| Error::failure("make", "the pages of a forked child", Failure::Machine(why));
        // They are the parent's: a call on them would work on its pages.
        self.close_descriptors();
        let (descriptors, reach) = descriptors::open(&self.config)?;
        self.serves_system_calls.store(reach == Reach::EveryFault, Ordering::Relaxed);
        *self.descriptors.lock().unwrap_or_else(PoisonError::into_inner) = descriptors;
        // SAFETY: pool-owned, region-owned: the descriptors are new, and no other thread is left.
        unsafe { self.mmu.adopt(descriptors) };
        self.lock_in_child(parts);
        self.pool.register(descriptors.pool)?;
        stack::forget_unmapped(state);
        copy_first::forget(state);
        // The parent's saver may have been at work, as it waited for the gate.
        self.saver_turns.store(0, Ordering::SeqCst);
        self.snapshots.store(false, Ordering::Release);
        // Who would drop it may be a thread that is not here.
        self.own_sample.store(0, Ordering::SeqCst);
        self.cutting.end();
        self.drawing.end();
        self.syncing.end();
        for (bound, part) in parts {
            bound.register(descriptors, part)?;
        }
        // On a thread of the program's it is in a handler of an upcall region at most.
        let (is_asked, of_any) = (may_be_in_handler(), is_a_domains());
        for bound in regions.values() {
            bound.core().let_all_go();
            bound.tracker.forget();
            if !is_asked || !of_any && bound.core().trap != Trap::Upcall {
                bound.forget_asked();
            }
            // The thread that was to make the cut is not here, nor the handle that keeps the source.
            if bound.core().source().is_some() && !bound.core().is_linked() {
                inherit::give_up(bound.core());
            }
        }
        let kept = tell_pagers(regions, files, reserved)?;
        let mut protected = Vec::new();
        let here = |addr: usize| {
            let at = parts.partition_point(|(_, part)| part.end <= addr);
            parts.get(at).is_some_and(|(_, part)| part.contains(&addr))
        };
        protect::each_protected(state, |page| {
            if here(page.addr().0) {
                protected.push(page);
            }
        });
        protected.sort_unstable();
        protect::protect_again(state, &protected).map_err(refused)?;
        for (frame, contents) in aside {
            protect::put_aside(state, *frame, contents).map_err(refused)?;
        }
        self.handlers.forget_all();
        // Other threads may have been in the middle of a push or a pop.
        self.errands.reset();
        state.requests.reset();
        state.advice.reset();
        state.handovers.forget_all();
        state.counters.reset();
        state.counters.frames_held_max.store(state.stack.claimed().into(), Ordering::Relaxed);
        state.tracer.restart(monotonic_ns());
        self.writing.restart();
        self.forget_threads();
        self.start_threads(kept)?;
        let asks = |bound: &&Arc<Bound>| bound.handler().is_some() && bound.core().trap == Trap::Worker;
        regions.values().find(asks).map_or(Ok(()), |_| start_one(self))
    }

    /// In a forked child that does not get the domain, before anything else is mapped: nothing is to lie in the places of its memory,
    /// where the child would take it for the domain's.
    pub(crate) fn reserve_in_child(&self, parts: &[Part]) {
        for place in parts.iter().map(|(_, part)| part.clone()).chain([self.pool.addresses()]) {
            // SAFETY: owned-range: places that DONTFORK left empty.
            let _ = unsafe { memory::map_anonymous(Place::Free(place.start), place.len(), Access::None) };
        }
    }

    /// In a forked child that does not get the domain: it and its regions can be dropped, and nothing else, without touching what is the
    /// parent's.
    pub(crate) fn abandon(&self, regions: &BTreeMap<u64, Arc<Bound>>) {
        self.stop.store(true, Ordering::SeqCst);
        // Who forked in a handler of a signal may have waited for one of these.
        self.state.cut.forget(self.state.mmu);
        self.cutting.end();
        self.drawing.end();
        self.syncing.end();
        self.close_descriptors();
        *self.descriptors.lock().unwrap_or_else(PoisonError::into_inner) = Descriptors::ABSENT;
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // SAFETY: pool-owned, region-owned: no descriptor is left to work through, and no other thread.
        unsafe { self.mmu.adopt(Descriptors::ABSENT) };
        for bound in regions.values() {
            let _ = self.state.regions.remove(bound.core());
            taken::remove(&bound.addresses());
            // What its pager has in a store is the parent's, and would be given back with it.
            std::mem::forget(bound.clone());
        }
        self.handlers.forget_all();
        self.forget_threads();
    }

    /// In a forked child: the handles are of threads that are not here.
    fn forget_threads(&self) {
        std::mem::take(&mut *self.threads()).into_iter().for_each(std::mem::forget);
    }
}

/// In a forked child: tells all pagers so, and says what pager threads are to have of the regions, which are the files that these mean.
fn tell_pagers(regions: &BTreeMap<u64, Arc<Bound>>, files: &OwnFiles, reserved: &Reserved) -> Result<Kept> {
    // Before the first is told, who may come by a file for others, too.
    let before: Vec<_> = regions.values().map(|bound| (bound, bound.lent_now())).collect();
    regions.values().filter_map(|bound| bound.core().pager()).for_each(Pager::forked);
    let anew: Vec<RawFd> = before.iter().flat_map(|(bound, before)| bound.lent_over_fork(before)).collect();
    // What nobody names any more nobody would let go of.
    let named: Vec<RawFd> = regions.values().flat_map(|bound| bound.descriptors()).collect();
    let mut astray: Vec<_> = files.ways().collect();
    astray.retain(|way| named.contains(&way.1) && !anew.contains(&way.1));
    // Nothing is there, whatever reserves it.
    let reserved: Vec<RawFd> = reserved.numbers().collect();
    let mut all = Vec::new();
    for bound in regions.values() {
        let own = bound.own_descriptors();
        for number in bound.descriptors() {
            let way = astray.iter().find(|way| way.1 == number);
            if way.is_none() && reserved.contains(&number) {
                continue;
            }
            // The parent's pager threads may have had what a pager put in its place there.
            let is_kept = way.is_some() && own.contains(&number);
            let found = borrow_number(way.map_or(number, |way| way.0));
            // What is closed is noticed by whoever uses it.
            if !is_kept && fcntl_getfd(found).is_ok() {
                match files.here(number).filter(|_| own.contains(&number) && !anew.contains(&number)) {
                    // Which it need not have been when the region was made.
                    Some(file) => bound.check_file(file, found)?,
                    None => bound.check_descriptor(number, found)?,
                }
            }
            if way.is_none() {
                all.push(number);
            }
        }
    }
    let lent = regions.values().flat_map(|bound| bound.lent_descriptors()).collect();
    Ok(Kept { all, lent, astray, reserved })
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::mem::ManuallyDrop;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use selfpage_core::pager::{Context, PagerError};

    use super::*;
    use crate::child::{FORKS, child_ends_after, fork_here, forked};
    use crate::over_memory::over_memory;
    use crate::snapshot::Snapshots;
    use crate::store::{BackingStore, Blok, MemoryStore, ReadBlok, StoreError, WriteBlok};
    use crate::{Domain, Region};

    #[test]
    fn a_mapping_that_is_split_after_somebody_looked_is_ours_whole() {
        const PAGES: usize = 37;
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let region = domain.region(PAGES * PAGE_BYTES).zero().unwrap();
        let (inner, all) = (&domain.life().inner, region.bound.addresses());
        let before = || Mappings::new(read_mappings);
        let stale = before();
        LazyCell::force(&stale);
        for page in [0, 5, 6, 20, PAGES - 1] {
            // SAFETY: owned-range: rights of the test's own region, which nobody uses.
            unsafe { memory::protect(all.start + page * PAGE_BYTES, PAGE_BYTES, Access::Read) }.unwrap();
        }
        assert_eq!(inner.parts_among(&region.bound, &stale), std::slice::from_ref(&all));
        assert_eq!(inner.parts_among(&region.bound, &before()), std::slice::from_ref(&all));
        // What the program has mapped over a part of it since is not.
        let at = all.start + 9 * PAGE_BYTES;
        // SAFETY: owned-range: as above.
        unsafe { memory::map_anonymous(Place::Over(at), PAGE_BYTES, Access::ReadWrite) }.unwrap();
        let around = [all.start..at, at + PAGE_BYTES..all.end];
        assert_eq!(inner.parts_among(&region.bound, &stale), around);
        assert_eq!(inner.parts_among(&region.bound, &before()), around);
    }

    /// Whoever makes it is not in the child, and its source may go there.
    #[test]
    fn a_child_forked_while_a_clone_is_made_has_a_region_that_is_none() {
        let domain = Domain::with_frames(64 * PAGE_BYTES).build().unwrap();
        let region = || domain.region(PAGE_BYTES).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
        let (source, clone) = (region(), region());
        // SAFETY: region-in-map: the source is here until the two have parted.
        unsafe { clone.core().clone_of(source.core()) };
        let here = ManuallyDrop::new(source);
        forked(|| {
            // SAFETY: test: not used in the child any more.
            drop(unsafe { std::ptr::read(&*here) });
            assert!(clone.core().source().is_none());
            clone.pin(0, PAGE_BYTES).unwrap();
        });
        inherit::give_up(clone.core());
        drop(ManuallyDrop::into_inner(here));
    }

    /// A store that no child can have.
    struct NotForChildren(MemoryStore);

    impl BackingStore for NotForChildren {
        over_memory!(0: claim, release, reads_in_trap, read, write);

        fn before_fork(&self, _: i32) -> std::result::Result<(), StoreError> {
            Err(StoreError { object: "of this test".into(), cause: io::Error::other("no"), remedy: "there is none" })
        }
    }

    /// Which regions of the domain a child gets.
    #[derive(Clone, Copy, PartialEq)]
    enum Gets {
        All,
        Nothing,
    }

    /// Has a thread do `work` on a region, which waits until `go_on`; there a handler of a signal forks, and the child's copy of the thread
    /// comes to the end of the work as well.
    fn forks_while_it_waits<Waits>(
        gets: Gets,
        begin: impl FnOnce(&Region) -> Waits,
        work: fn(&Region),
        go_on: fn(Waits, &Region),
    ) {
        // A process of its own, which a signal ends where it hangs.
        forked(|| {
            // SAFETY: test: a handler for a signal that nobody else here uses.
            unsafe {
                libc::alarm(30);
                libc::signal(libc::SIGUSR1, fork_here as *const () as libc::sighandler_t);
            }
            let domain = Domain::with_frames(64 * PAGE_BYTES).build().unwrap();
            let mut region = domain.region(16 * PAGE_BYTES).zero().unwrap();
            let store = NotForChildren(MemoryStore::new(1 << 20).unwrap());
            let _other = (gets == Gets::Nothing).then(|| domain.region(PAGE_BYTES).stored(store).unwrap());
            region.as_mut_slice::<u64>().fill(7);
            let waits = begin(&region);
            let ended = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (region, ended) = (&region, &ended);
                let (tell, told) = channel();
                scope.spawn(move || {
                    // SAFETY: test: the name of this thread.
                    tell.send(unsafe { libc::pthread_self() }).unwrap();
                    child_ends_after(|| work(region));
                    ended.store(true, Ordering::SeqCst);
                });
                let a_moment = || std::thread::sleep(Duration::from_millis(300));
                a_moment();
                // SAFETY: test: the thread waits.
                unsafe { libc::pthread_kill(told.recv().unwrap(), libc::SIGUSR1) };
                while FORKS.load(Ordering::SeqCst) == 0 {
                    a_moment();
                }
                assert!(!ended.load(Ordering::SeqCst), "it did not wait");
                go_on(waits, region);
            });
        });
    }

    /// Has an image need the region's pages, which nobody reads.
    fn begin_image(region: &Region) -> Snapshots {
        let dir = tempfile::tempdir().unwrap();
        let mut snapshots = Snapshots::of(&[region], dir.path().join("one.snap")).unwrap();
        snapshots.arm().unwrap();
        let (state, cores) = (region.life().inner.state(), [region.core()]);
        cores[0].sets.changed.fill(cores[0].range.count);
        copy_first::cut(state, &cores, || copy_first::note_image(&cores)).unwrap();
        snapshots
    }

    fn empties_a_page(region: &Region) {
        // SAFETY: region-contents: nobody refers to what is in there.
        let _ = unsafe { region.while_empty(PAGE_BYTES, PAGE_BYTES, || ()) };
    }

    #[test]
    fn a_handler_forks_while_a_call_waits_for_an_image() {
        for gets in [Gets::All, Gets::Nothing] {
            forks_while_it_waits(gets, begin_image, empties_a_page, |_, region| {
                copy_first::end(region.life().inner.state(), &[region.core()]);
            });
        }
    }

    #[test]
    fn a_handler_forks_while_a_call_waits_for_the_turn_of_a_cut() {
        // On another thread, where alone signals are blocked then.
        let takes_the_turn = |region: &Region| {
            let inner = &region.life().inner;
            std::thread::scope(|scope| _ = scope.spawn(|| std::mem::forget(inner.cutting.begin())));
        };
        let clones = |region: &Region| {
            let clone = region.cow_clone(MemoryStore::new(1 << 20).unwrap());
            // A child that did not get the region has no clone of it, either.
            assert_eq!(clone.as_ref().map(drop).ok(), (!region.inner().stopping()).then_some(()), "{clone:?}");
            assert!(clone.is_err() || clone.unwrap().as_slice::<u64>().iter().all(|word| *word == 7));
        };
        for gets in [Gets::All, Gets::Nothing] {
            forks_while_it_waits(gets, takes_the_turn, clones, |(), region| region.life().inner.cutting.end());
        }
    }
}
