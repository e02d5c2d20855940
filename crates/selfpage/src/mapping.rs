//! A region as part of the program's address space: for whoever answers mmap(2) and its family over it, and changes its
//! mappings under the domain.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::Ordering;

use selfpage_core::addr::{PAGE_BYTES, PageRange};
use selfpage_core::fault::range::{self, Undone};
use selfpage_core::fault::{Outcome, presence};
use selfpage_core::linux::memory::{self, Access, Place};
use selfpage_core::pager::Context;

use crate::domain::Inner;
use crate::error::{Error, Result};
use crate::region::Region;

/// What became of the guards in a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Guards {
    /// They are there from now on.
    Installed,
    /// There are none any more.
    Removed,
}

/// Pages that [`Region::while_empty`] drops again at once, at most.
const MOST_LEFT: usize = 64;

fn with_gate_closed<T>(inner: &Inner, change: impl FnOnce() -> T) -> T {
    inner.close_gate();
    let result = change();
    inner.state().gate.open(inner.state().mmu);
    result
}

impl Region {
    /// Runs `change` on a pager thread while no page of the domain is mapped or unmapped: what it does to the region's
    /// protection is all there before, or all there after, any page that moves.
    ///
    /// # Context
    /// Normal. `change` touches no managed memory, and neither allocates nor waits. A pager thread runs it, whose stack is
    /// never managed, even where the caller's is.
    ///
    /// # Errors
    /// [`Kind::Denied`](crate::Kind::Denied): the calling thread is in a protection domain without the right to change the region's mappings.
    /// [`Kind::Lost`](crate::Kind::Lost): this is a forked child that did not get the region. `change`, which the pager thread runs outside of all
    /// domains, has not run.
    pub fn while_still<T: Send>(&self, change: impl FnOnce() -> T + Send) -> Result<T> {
        self.bound.may_change(self.inner(), "change")?;
        Ok(self.still(change))
    }

    fn still<T: Send>(&self, change: impl FnOnce() -> T + Send) -> T {
        let inner = self.inner();
        inner.on_pager_thread(move || with_gate_closed(inner, change))
    }

    /// As [`Region::while_still`], for a change of what there is of the region: what the program has mapped over a part is not the region's.
    /// In a child that has not its pages, that is nothing: what reserves its addresses there is to stay closed.
    pub(crate) fn while_parts_are_still<T: Send>(&self, change: impl FnOnce(&[Range<usize>]) -> T + Send) -> T {
        let (inner, bound) = (self.inner(), &*self.bound);
        if !inner.is_served() {
            return change(&[]);
        }
        inner.on_pager_thread(move || {
            let parts = inner.parts_of(bound);
            with_gate_closed(inner, || change(&parts))
        })
    }

    /// Where its mapping is there still, as a pager thread finds it, whose descriptors nobody closes.
    pub(crate) fn parts(&self) -> Vec<Range<usize>> {
        let (inner, bound) = (self.inner(), &*self.bound);
        if inner.is_served() { inner.on_pager_thread(move || inner.parts_of(bound)) } else { Vec::new() }
    }

    /// Says that the program has guards (`MADV_GUARD_INSTALL`) in the place of the pages of `[offset, offset+len)`, or none any more.
    /// Nothing is brought in over them: where the program may not write, the kernel would let a copy replace a guard. A page that was given up
    /// to refuse an access keeps its guard, which is installed again (or poison, where it is locked), until it is discarded.
    ///
    /// Call it in the change that installs guards ([`Region::while_empty`]) or removes them ([`Region::while_still`]).
    ///
    /// # Errors
    /// The range is not in the region.
    ///
    /// # Examples
    /// ```no_run
    /// use selfpage::{Domain, Guards, PAGE_BYTES};
    ///
    /// const MADV_GUARD_INSTALL: i32 = 102;
    /// # fn main() -> selfpage::Result<()> {
    /// let domain = Domain::with_frames(1 << 20).build()?;
    /// let region = domain.region(4 << 20).zero()?;
    /// let start = region.as_ptr() as usize;
    /// // SAFETY: nobody holds a reference into the first page, and its contents may go.
    /// let installed = unsafe {
    ///     region.while_empty(0, PAGE_BYTES, || {
    ///         let refused = libc::madvise(start as *mut libc::c_void, PAGE_BYTES, MADV_GUARD_INSTALL);
    ///         (refused == 0).then(|| region.set_guards(0, PAGE_BYTES, Guards::Installed))
    ///     })?
    /// };
    /// installed.expect("Linux 6.13, and memory that is not locked")?;
    /// # Ok(()) }
    /// ```
    pub fn set_guards(&self, offset_bytes: usize, len_bytes: usize, guards: Guards) -> Result<()> {
        let range = self.range("guard", offset_bytes, len_bytes)?;
        for page in range.pages() {
            match guards {
                Guards::Installed => self.core().guarded.insert(self.core().index(page)),
                Guards::Removed => self.bound.take_guard_away(self.inner(), page),
            }
        }
        Ok(())
    }

    /// Drops the contents of `[offset, offset+len)`, and runs `change` as [`Region::while_still`] does, with no page of the
    /// range in core. Waits while the image of a snapshot needs one of them.
    ///
    /// # Errors
    /// The range is not in the region. A page that a clone still needs cannot be given to it: `change` has not run.
    ///
    /// # Safety
    /// *region-contents*: nobody holds a reference into the range whose contents must stay.
    pub unsafe fn while_empty<T: Send>(
        &self,
        offset_bytes: usize,
        len_bytes: usize,
        change: impl FnOnce() -> T + Send,
    ) -> Result<T> {
        let range = self.range("empty", offset_bytes, len_bytes)?;
        let (inner, bound) = (self.inner(), &*self.bound);
        let state = inner.state();
        let mut change = change;
        let (mut left, mut count) = ([range; MOST_LEFT], 1);
        loop {
            let tried = inner.on_pager_thread(move || {
                for (at, part) in left[..count].iter().enumerate() {
                    if let Err((page, undone)) = range::discard(state, Context::Normal, *part) {
                        return (left, count, Err((change, Some((at, page, undone)))));
                    }
                }
                inner.close_gate();
                // Others may have used a page since, or a stream that is read ahead have brought it back.
                let (mut left, mut count) = ([range; MOST_LEFT], 0);
                let there = bound.touched(inner, range).flat_map(|part| presence::not_away(state, part));
                for (place, page) in left.iter_mut().zip(there) {
                    *place = PageRange { first: page, count: 1 };
                    count += 1;
                }
                let tried = if count == 0 { Ok(change()) } else { Err((change, None)) };
                state.gate.open(state.mmu);
                (left, count, tried)
            });
            let (undone, result);
            // Those pages alone: all of a long range once more would give others the time to use them again.
            (left, count, result) = tried;
            (change, undone) = match result {
                Ok(result) => return Ok(result),
                Err(again) => again,
            };
            match undone {
                None => {}
                Some((at, page, Undone::AwaitCut(wait))) => {
                    wait.sleep(&state.cut, state.mmu);
                    left[at] = PageRange { first: page, count: left[at].end().0 - page.0 };
                }
                Some((_, page, Undone::Failed(why))) => {
                    return Err(Error::failure("empty", bound.page_name(page), why));
                }
            }
        }
    }

    /// The first stretch of `[offset, offset+len)` whose pages hold something, as far as is known: what nobody has touched holds nothing. For
    /// whoever copies a range, or looks through it, and brings in no more than there is. With a pager of the program's own every page may.
    ///
    /// # Errors
    /// The range is not in the region, or does not begin and end with a page.
    pub fn first_held(&self, offset_bytes: usize, len_bytes: usize) -> Result<Option<Range<usize>>> {
        let range = self.whole_pages("look at", offset_bytes, len_bytes)?;
        let (inner, state) = (self.inner(), self.inner().state());
        let held = inner.undisturbed(move || presence::first_held(state, range));
        Ok(held.map(|held| {
            let start = self.core().index(held.first) as usize * PAGE_BYTES;
            start..start + held.count as usize * PAGE_BYTES
        }))
    }

    /// Nothing from `len_bytes` on is fetched before it is asked for: the program has no access there.
    ///
    /// For `selfpage run` alone.
    #[doc(hidden)]
    pub fn set_reach(&self, len_bytes: usize) {
        let pages = len_bytes.div_ceil(PAGE_BYTES) as u64;
        self.core().reach.store(pages, Ordering::Relaxed);
    }

    /// As [`Region::discard`], for callers that share the region.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// *region-contents*: nobody holds a reference into the range whose contents must stay.
    pub unsafe fn drop_contents(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.whole_pages("discard", offset_bytes, len_bytes)?;
        self.bound.discard_large(self.inner(), range)
    }

    /// Makes the region's mapping of `[offset, offset+len)` anew, empty and with that access, where something else was mapped
    /// over it. Call it in [`Region::while_empty`]'s place. With access nobody is refused in between, and what other threads write there from
    /// the moment on in which the mapping is new stays; or, where there is no frame for it, the page is given up, and refuses every access.
    ///
    /// For `selfpage run` alone: `Access` is a type of core's.
    ///
    /// # Errors
    /// The range is not in the region, or the kernel has no room for the mapping, or may no longer lock it.
    ///
    /// # Safety
    /// *region-contents*: nobody holds a reference into the range.
    #[doc(hidden)]
    pub unsafe fn restore(&self, offset_bytes: usize, len_bytes: usize, access: Access) -> Result<()> {
        let range = self.range("restore", offset_bytes, len_bytes)?;
        let (start, len) = (range.first.addr().0, range.count as usize * PAGE_BYTES);
        let pool = &self.inner().pool;
        self.bound.begin_anew(self.inner(), range);
        // A pager thread does it: what it uses has moved into it.
        let close = move || {
            // SAFETY: owned-range: nobody answers faults there, and nobody is to take what is absent for zero.
            let _ = unsafe { memory::protect(start, len, Access::None) };
        };
        let mapped = self.still(move || {
            // SAFETY: owned-range, region-contents: the addresses are the region's, and what is there is done with.
            unsafe { memory::map_anonymous(Place::Over(start), len, access)? };
            // SAFETY: owned-range: just mapped.
            let kept = unsafe { memory::keep_hands_off(start, len) };
            kept.and_then(|()| pool.lock_alike(&(start..start + len))).inspect_err(|_| close())
        });
        mapped.map_err(|errno| Error::system("restore", format!("{len} bytes of a region"), errno))?;
        self.register_part(start, len).inspect_err(|_| close())?;
        if access != Access::None {
            self.take_up(range);
        }
        Ok(())
    }

    /// Takes up the pages that other threads have used before the region heard of faults there, and the kernel gave memory.
    fn take_up(&self, range: PageRange) {
        let (inner, state, bound) = (self.inner(), self.inner().state(), &*self.bound);
        let mut in_core = [0; 4096];
        for at in (0..range.count).step_by(in_core.len()) {
            let first = range.first.plus(at);
            let some = &mut in_core[..(range.count - at).min(4096) as usize];
            if memory::residency(first.addr().0, some).is_err() {
                // What is not known is looked at.
                some.fill(1);
            }
            let used = (0..).zip(some.iter()).filter(|(_, byte)| **byte & 1 != 0);
            for page in used.map(|(index, _)| first.plus(index)) {
                let taken = loop {
                    match inner.on_pager_thread(move || range::take_up(state, page)) {
                        Ok(outcome) => break outcome,
                        Err(wait) => wait.sleep(&state.cut, state.mmu),
                    }
                };
                if let Outcome::Failed(failure) = taken {
                    // Nobody else has what was written there: not even whoever asks for the page by name may find zeros in its place.
                    inner.undisturbed(move || {
                        let why = format_args!("{failure}; what was written to it as it was mapped anew is given up");
                        bound.give_up_since(inner, page, why);
                    });
                }
            }
        }
    }
}
