//! Contents that move from one place to another, of one region or of two: by their frames and by where the store has them.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::Duration;

use selfpage_core::addr::{PAGE_BYTES, PageBytes, PageNo, PageRange};
use selfpage_core::fault::relocate::{Unmoved, relocate};
use selfpage_core::fault::{Failure, Outcome, range};
use selfpage_core::linux::memory::{self, Advice};
use selfpage_core::mmu::Refusal;
use selfpage_core::pager::Context;

use super::{Bound, Region};
use crate::cancel::Uncancelled;
use crate::domain::Inner;
use crate::error::{Error, Kind, Result};

/// Pages that one errand moves, at most: whoever else needs a pager thread waits no longer than that takes.
const MOST_PAGES: u64 = 4096;

/// Pages that are copied at a time, at most, once some in a row could not move: each takes a second frame.
const MOST_COPIED: u64 = 16;

/// How often it is tried, a millisecond apart, to move a page back that moved a moment ago, or to copy it: who holds it at its new place, where
/// others may use it, does so for longer. And how often a page that is copied is given to a place that others use.
const MOST_TRIES: u32 = 1000;

impl Region {
    /// Moves the contents of `[offset, offset+len)` to `to_offset` of `to`, which may be the same region. What was there is dropped, and guards of
    /// the program's own ([`Region::set_guards`]) are taken away there; at the old place they stay.
    ///
    /// Where both regions are of one domain and kept in the same store, or in none, neither the program nor the store sees a byte of it:
    /// frames go along, and what is in the store stays where it is there. Each old page is as one that was never touched from the moment on
    /// in which its contents leave: what others write there since then stays. A page in core that the kernel holds, that is writable and executable,
    /// or that has a protection key, is copied: of such a page goes what others write between its copy and the moment in which it is dropped. Every
    /// page of other regions is copied too, and left in the old place as garbage. What has come to the new place and is given up there, for an access
    /// that is refused before all has moved, is lost as it would be after the move.
    ///
    /// # Errors
    /// A range is not in its region, or does not begin and end with a page; the two meet; what an old page held was given up to refuse an
    /// access. Then nothing has moved. A page has to be copied,
    /// and there is no frame for that, or the calling thread may not read it; or one is given up meanwhile: then all contents are where they were, but for their pins, and
    /// what was at the new place is gone.
    ///
    /// # Safety
    /// *region-contents*: nobody holds a reference into either range, and the program has mapped nothing of its own over them: that would not
    /// be seen. Where the two regions are not kept in the same store, the program
    /// may read all of the one and write all of the other: what is copied there is copied as by the program itself. A page of regions that are not kept in the same store is a `SIGBUS` if it cannot be had.
    pub unsafe fn move_contents(
        &self,
        offset_bytes: usize,
        len_bytes: usize,
        to: &Region,
        to_offset_bytes: usize,
    ) -> Result<()> {
        let refused =
            |cause: &str| Err(Error::new(Kind::Invalid, "move", format!("region {}", self.bound.name), cause));
        let from = self.whole_pages("move", offset_bytes, len_bytes)?;
        let new = to.whole_pages("move", to_offset_bytes, len_bytes)?;
        if from.first < new.end() && new.first < from.end() {
            return refused("the two places have pages in common: choose another, or move by way of a third place");
        }
        self.bound.has_all("move", from)?;
        let inner = self.inner();
        to.bound.clear_way(to.inner(), new);
        self.bound.take_refusals_back(inner, from);
        to.bound.take_refusals_back(to.inner(), new);
        let is_one_domain = std::ptr::eq(inner, to.inner());
        let place_of = |page: PageNo| new.first.plus(page.0 - from.first.0);
        let mut at = from.first;
        // Where one page has to be copied, the next ones may have to be, too.
        let mut count = 1;
        while at < from.end() {
            let rest = PageRange { first: at, count: from.end().0 - at.0 };
            at = match if is_one_domain { inner.relocate(rest, place_of(at)) } else { Err((at, Unmoved::Apart)) } {
                Ok(next) => {
                    count = 1;
                    next
                }
                // SAFETY: region-contents: passed on from our caller.
                Err((page, Unmoved::Apart)) => unsafe { copy(page, place_of(page), from.end().0 - page.0) },
                Err((page, Unmoved::Closed)) => {
                    // Since the way was cleared, and before its contents came.
                    to.bound.begin_anew(to.inner(), PageRange { first: place_of(page), count: 1 });
                    page
                }
                Err((page, Unmoved::GivenUp)) => {
                    // Since the look above.
                    let moved = PageRange { count: page.0 - from.first.0, ..new };
                    // SAFETY: region-contents: as above.
                    unsafe { to.take_back(moved, self, from.first) };
                    return Err(self.bound.lacks("move", page));
                }
                Err((page, _)) => {
                    let left = count.min(from.end().0 - page.0);
                    // SAFETY: region-contents: as above.
                    let (next, stopped) =
                        unsafe { self.copy_in_core(PageRange { first: page, count: left }, &to.bound, place_of(page)) };
                    if let Err(error) = stopped {
                        let moved = PageRange { count: next.0 - from.first.0, ..new };
                        // SAFETY: region-contents: as above.
                        unsafe { to.take_back(moved, self, from.first) };
                        return Err(error);
                    }
                    count = (2 * count).min(MOST_COPIED);
                    next
                }
            };
        }
        Ok(())
    }

    /// Copies pages in core that the machine would not move: the first of `from`, and those that follow it and are there, each of which is
    /// dropped at once. The first one that it has not copied; an error if that one cannot be.
    unsafe fn copy_in_core(&self, from: PageRange, new: &Bound, to: PageNo) -> (PageNo, Result<()>) {
        let first = self.core().index(from.first) as usize;
        let in_core = self.residency()[first + 1..].iter().take_while(|byte| byte.load(Ordering::Relaxed) == 1);
        let run = PageRange { count: 1 + in_core.take(from.count as usize - 1).count() as u64, ..from };
        // None of them goes before it is read.
        let (offset, len) = (first * PAGE_BYTES, run.count as usize * PAGE_BYTES);
        if let Err(error) = self.pin(offset, len) {
            return (run.first, Err(error));
        }
        // Where something stays at a new place it gets nothing, and whoever comes to that page says why.
        let _ = self.inner().discard(PageRange { first: to, ..run });
        let mut stopped = (run.end(), Ok(()));
        for page in run.pages() {
            // SAFETY: region-contents: passed on from our caller.
            if let Err(error) = unsafe { self.move_one(page, new, to.plus(page.0 - run.first.0)) } {
                stopped = (page, Err(error));
                break;
            }
        }
        // The pins of those that moved went too. The rest may have been dropped behind our back, and their pins with them.
        let copied = (stopped.0.0 - run.first.0) as usize * PAGE_BYTES;
        let _ = self.unpin(offset + copied, len - copied);
        stopped
    }

    /// Copies a page in core to an absent one, and drops it; an error if it is where it was, and nothing at the new place.
    unsafe fn move_one(&self, page: PageNo, new: &Bound, to: PageNo) -> Result<()> {
        // SAFETY: region-contents: passed on from our caller.
        unsafe { self.copy_one(page, new, to)? };
        self.inner().discard(PageRange { first: page, count: 1 }).map_err(|(page, why)| {
            let _ = self.inner().discard(PageRange { first: to, count: 1 });
            Error::failure("move", format!("{}, which its clone needs", self.bound.page_name(page)), why)
        })
    }

    /// Copies a page in core to an absent one.
    unsafe fn copy_one(&self, page: PageNo, new: &Bound, to: PageNo) -> Result<()> {
        // SAFETY: region-contents: a page that is there keeps its contents.
        if unsafe { memory::advise(page.addr().0, PAGE_BYTES, Advice::PopulateRead) }.is_err() {
            let cause = "it has to be copied, and this thread may not read it: allow it to (mprotect, pkey_set)";
            return Err(Error::new(Kind::Invalid, "move", self.bound.page_name(page), cause));
        }
        // SAFETY: region-contents: passed on from our caller, and it may be read.
        let contents = unsafe { std::ptr::read(page.addr().0 as *const PageBytes) };
        self.supply_copy(page, new, to, contents)
    }

    /// Gives an absent page of `new` a frame with these contents, which are those of `page`.
    fn supply_copy(&self, page: PageNo, new: &Bound, to: PageNo, contents: PageBytes) -> Result<()> {
        let (inner, state) = (self.inner(), self.inner().state());
        let give = || {
            let given = inner.on_table(move |context| range::supply(state, context, to, &contents));
            inner.go_on_supplying(given, to, &contents)
        };
        let mut given = give();
        for _ in 0..MOST_TRIES {
            if given != Outcome::Violation {
                break;
            }
            // Others that use the new place have had a page there since it was dropped, or one was given up there since the way was cleared.
            new.begin_anew(inner, PageRange { first: to, count: 1 });
            if let Err((_, why)) = inner.discard(PageRange { first: to, count: 1 }) {
                let object = format!("{}, to a place where a clone needs what is there", self.bound.page_name(page));
                return Err(Error::failure("move", object, why));
            }
            given = give();
        }
        match given {
            Outcome::Resolved => Ok(()),
            Outcome::Failed(failure) => Err(Error::failure("move", self.bound.page_name(page), failure)),
            _ => {
                let cause = "its new place is in use, or nobody may access it";
                Err(Error::new(Kind::Invalid, "move", self.bound.page_name(page), cause))
            }
        }
    }
}

impl Region {
    /// Moves contents back to `to`, a page of `old`, that came from there a moment ago.
    unsafe fn take_back(&self, from: PageRange, old: &Region, to: PageNo) {
        let _uncancelled = Uncancelled::begin();
        let (mut at, mut tries) = (from.first, 0);
        while at < from.end() {
            let place_of = |page: PageNo| to.plus(page.0 - from.first.0);
            let rest = PageRange { first: at, count: from.end().0 - at.0 };
            let (next, stays) = match self.inner().relocate(rest, place_of(at)) {
                Ok(next) => (next, false),
                Err((page, Unmoved::Closed)) => {
                    // It held nothing then.
                    old.bound.begin_anew(old.inner(), PageRange { first: place_of(page), count: 1 });
                    (page, false)
                }
                Err((page, Unmoved::GivenUp)) => {
                    // Nobody is to find zeros where it was, either.
                    let why =
                        format_args!("what it held was given up at its new place, from which it was to come back");
                    old.bound.give_up_since(old.inner(), place_of(page), why);
                    (page.plus(1), false)
                }
                Err((page, _)) => {
                    // SAFETY: region-contents: passed on from our caller.
                    let copied =
                        unsafe { self.copy_in_core(PageRange { first: page, count: 1 }, &old.bound, place_of(page)) };
                    (copied.0, copied.1.is_err())
                }
            };
            tries = if next == at { tries + u32::from(stays) } else { 0 };
            if tries > MOST_TRIES {
                crate::die("contents can neither move on nor back");
            }
            if stays {
                std::thread::sleep(Duration::from_millis(1));
            }
            at = next;
        }
    }
}

/// Copies pages. The first one behind them.
unsafe fn copy(from: PageNo, to: PageNo, count: u64) -> PageNo {
    let (old, new) = (from.addr().0 as *const u8, to.addr().0 as *mut u8);
    // SAFETY: region-contents: passed on from our caller, and the two do not meet.
    unsafe { std::ptr::copy_nonoverlapping(old, new, count as usize * PAGE_BYTES) };
    from.plus(count)
}

impl Inner {
    /// Moves as many pages from the front of `from` as one errand does. The first one behind them.
    ///
    /// # Errors
    /// The first page that has not moved, and why; those after it have not either.
    fn relocate(&self, from: PageRange, to: PageNo) -> std::result::Result<PageNo, (PageNo, Unmoved)> {
        let state = self.state();
        let some = PageRange { count: from.count.min(MOST_PAGES), ..from };
        let (page, why) = match self.on_table(move |context| relocate(state, context, some, to)) {
            Ok(()) => return Ok(some.end()),
            Err(unmoved) => unmoved,
        };
        let one = PageRange { first: page, count: 1 };
        let there = to.plus(page.0 - from.first.0);
        let done = match why {
            // The program has closed this thread's descriptors.
            Unmoved::Failed(Failure::Machine(Refusal::NoDescriptor)) => {
                self.on_pager_thread(move || relocate(state, Context::Normal, one, there))
            }
            why => Err((page, why)),
        };
        match done {
            Err((_, Unmoved::AwaitCut(wait))) => {
                wait.sleep(&state.cut, state.mmu);
                Ok(page)
            }
            done => done.map(|()| one.end()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use selfpage_core::addr::PageBytes;

    use super::*;
    use crate::domain::Domain;
    use crate::pager::UserPager;

    /// Moves four pages on and back; `meanwhile` is done in between. Which of them can be had.
    fn moved_and_back(meanwhile: impl FnOnce(&Region, PageNo)) -> [bool; 4] {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let mut region = domain.region(8 * PAGE_BYTES).zero().unwrap();
        region.as_mut_slice::<u64>()[..4 * PAGE_BYTES / 8].fill(7);
        let page = |index| region.core().range.first.plus(index);
        // SAFETY: region-contents: nobody holds a reference into it.
        unsafe { region.move_contents(0, 4 * PAGE_BYTES, &region, 4 * PAGE_BYTES) }.unwrap();
        meanwhile(&region, page(4));
        // SAFETY: region-contents: as above.
        unsafe { region.take_back(PageRange { first: page(4), count: 4 }, &region, page(0)) };
        [0, 1, 2, 3].map(|index| match region.pin(index * PAGE_BYTES, PAGE_BYTES) {
            Ok(()) => region.as_slice::<u64>()[index * PAGE_BYTES / 8] == 7,
            Err(why) => {
                assert_eq!(why.kind(), Kind::Lost, "{why}");
                false
            }
        })
    }

    /// Somebody's access to the new place was refused meanwhile.
    #[test]
    fn what_was_given_up_on_its_way_is_given_up_where_it_was() {
        let give_up = |region: &Region, first: PageNo| {
            region.bound.give_up_since(region.inner(), first.plus(2), format_args!("this is a test"));
        };
        assert_eq!(moved_and_back(give_up), [true, true, false, true]);
    }

    /// So was one to the old place, where what comes back is wanted.
    #[test]
    fn what_was_given_up_where_contents_had_been_does_not_keep_them_from_coming_back() {
        let give_up = |region: &Region, first: PageNo| {
            let old = PageNo(first.0 - 2);
            region.bound.give_up_since(region.inner(), old, format_args!("this is a test"));
        };
        assert_eq!(moved_and_back(give_up), [true; 4]);
    }

    /// So was one to a place where a copy comes, since the way was cleared.
    #[test]
    fn what_was_given_up_where_copies_come_does_not_keep_them_out() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let mut region = domain.region(8 * PAGE_BYTES).zero().unwrap();
        region.as_mut_slice::<u64>()[..4 * PAGE_BYTES / 8].fill(7);
        let page = |index| region.core().range.first.plus(index);
        region.bound.give_up_since(region.inner(), page(6), format_args!("this is a test"));
        // SAFETY: region-contents: nobody holds a reference into it, and all of it may be read and written.
        let (next, stopped) =
            unsafe { region.copy_in_core(PageRange { first: page(0), count: 4 }, &region.bound, page(4)) };
        stopped.unwrap();
        assert_eq!(next, page(4));
        assert!(region.as_slice::<u64>()[4 * PAGE_BYTES / 8..].iter().all(|word| *word == 7));
    }

    /// An access to a page that has come is refused while the one in the middle is filled.
    struct GivesUp(Mutex<Option<(Arc<Bound>, Arc<Inner>)>>);

    impl UserPager for GivesUp {
        fn fill(&self, index: u64, _: &mut PageBytes) -> io::Result<()> {
            if index == 3
                && let Some((bound, inner)) = self.0.lock().unwrap().take()
            {
                let core = bound.core();
                let is_there = core.residency().get(1).is_some_and(|byte| byte.load(Ordering::Relaxed) == 1);
                let came = core.range.first.plus(if is_there { 1 } else { 5 });
                bound.give_up_since(&inner, came, format_args!("this is a test"));
            }
            Ok(())
        }

        fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
            Ok(())
        }
    }

    /// In whichever order they are copied: the first and the last may be met at both ends of that.
    #[test]
    fn what_is_given_up_once_it_has_come_is_known_to_be() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let pager = Arc::new(GivesUp(Mutex::default()));
        let [old, new] = [domain.region(7 * PAGE_BYTES).user(pager.clone()), domain.region(7 * PAGE_BYTES).zero()];
        let (old, new) = (old.unwrap(), new.unwrap());
        *pager.0.lock().unwrap() = Some((new.bound.clone(), domain.life().inner.clone()));
        // SAFETY: region-contents: nobody holds a reference into either, and both may be read and written.
        unsafe { old.move_contents(0, 7 * PAGE_BYTES, &new, 0) }.unwrap();
        let lost = |page: &usize| new.pin(page * PAGE_BYTES, PAGE_BYTES).is_err_and(|why| why.kind() == Kind::Lost);
        assert_eq!((0..7).filter(lost).count(), 1);
    }
}
