//! Pages that are given up: an access to one is to be refused, and its mapping cannot be changed to do that. They hold nothing, and nothing
//! comes there before they are discarded.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::atomic::Ordering;

use selfpage_core::addr::{PAGE_BYTES, PageNo, PageRange};
use selfpage_core::fault::claim::{with_claim, with_emptied};
use selfpage_core::fault::range::Undone;
use selfpage_core::linux::memory::{self, Advice};
use selfpage_core::linux::{Errno, thread};
use selfpage_core::page::{PageWord, State, Word};
use selfpage_core::region::Region;

use crate::doctor::limits::MORE_MAPPINGS;
use crate::domain::Inner;
use crate::error::{self, Error, Kind, Result};
use crate::region::Bound;
use crate::trap::ask::Asked;
use crate::trap::thread::is_pager_thread;

/// That a page is to be given up whatever has become of it.
pub(crate) fn always(_: &Region, _: Word) -> bool {
    true
}

impl Bound {
    /// Refuses every access to a page whose mapping cannot be changed, because of `why`. A guard changes no mapping, but only an empty page
    /// takes a guard: what the page holds goes, once a clone and the image of a snapshot that need it have it, and nothing comes there until it
    /// is discarded. Where a pager thread would have to wait for that image it gives nothing up: the access is tried again. So it is where
    /// `still` says no of the page and its word: nobody is to refuse the access any more, and who may make it has written there.
    pub(crate) fn give_up(
        &self,
        inner: &Inner,
        page: PageNo,
        why: Errno,
        still: impl Fn(&Region, Word) -> bool + Copy + Send,
    ) {
        let remedy = match why {
            Errno::PERM => "leave out mseal",
            _ => MORE_MAPPINGS,
        };
        let why =
            format_args!("to refuse the access what the page holds is given up: mprotect fails with {why}; {remedy}");
        self.give_up_while(inner, page, why, still);
    }

    /// The same for another reason, which is told, and whatever has become of the page since.
    pub(crate) fn give_up_since(&self, inner: &Inner, page: PageNo, why: fmt::Arguments<'_>) {
        self.give_up_while(inner, page, why, always);
    }

    fn give_up_while(
        &self,
        inner: &Inner,
        page: PageNo,
        why: fmt::Arguments<'_>,
        still: impl Fn(&Region, Word) -> bool + Copy + Send,
    ) {
        let (state, index, on_pager_thread) = (inner.state(), self.core().index(page), is_pager_thread(thread::id()));
        let awaits_image = move |region: &Region| on_pager_thread && region.sets.pending.contains(index);
        let is_owed = move |heir: &Region| heir.sets.inherited.contains(index);
        if awaits_image(self.core()) || self.heir_of(inner, page, |heir| is_owed(heir) && awaits_image(heir)).is_some()
        {
            return;
        }
        // First: the signal may end the program.
        self.tell_given_up(page, why);
        // Whether it is to be given up in the clone, too: not where the clone has had it since, and who may write there has written.
        let lacks = move |heir: &Region| {
            let here = self.core().word(page).map(PageWord::load);
            is_owed(heir) && !awaits_image(heir) && here.is_some_and(|here| still(self.core(), here))
        };
        let mut told_of_clone = false;
        loop {
            let mut emptied = self.empty_and_close(inner, page, still);
            if let Err(Undone::Failed(_)) = emptied {
                // Its clone cannot have it, so nobody has: there it is given up too, and is owed no more.
                let Some((clone, there)) = self.heir_of(inner, page, lacks) else { return };
                if !std::mem::replace(&mut told_of_clone, true) {
                    clone.bound.tell_given_up(there, why);
                }
                emptied = clone.bound.empty_and_close(inner, there, move |heir, _| lacks(heir));
                if emptied.is_ok() {
                    continue;
                }
            }
            match emptied {
                Err(Undone::AwaitCut(wait)) if !on_pager_thread => wait.sleep(&state.cut, state.mmu),
                _ => return,
            }
        }
    }

    /// Says that a page is given up, unless it was before.
    fn tell_given_up(&self, page: PageNo, why: fmt::Arguments<'_>) {
        let index = self.core().index(page);
        if !self.core().given_up.contains(index) {
            let offset = index as usize * PAGE_BYTES;
            error::tell_of_signal("SIGSEGV or SIGBUS", self.given_name(), self.start(), offset, why);
        }
    }

    /// Empties a page and closes it in one: whoever met it empty in between would read zeros.
    fn empty_and_close(
        &self,
        inner: &Inner,
        page: PageNo,
        still: impl Fn(&Region, Word) -> bool + Send,
    ) -> std::result::Result<Option<()>, Undone> {
        let close = move || with_emptied(inner.state(), page, still, || self.close(inner, page));
        // Threads for handlers may not have our descriptors, and a pager thread would wait for itself.
        if is_pager_thread(thread::id()) { close() } else { inner.on_pager_thread(close) }
    }

    /// Where the clone has the page, if it lacks that.
    fn heir_of(&self, inner: &Inner, page: PageNo, lacks: impl Fn(&Region) -> bool) -> Option<(Asked, PageNo)> {
        let state = inner.state();
        let _inside = state.gate.enter(state.mmu);
        let heir = self.core().heir().filter(|heir| lacks(heir))?;
        Some((Asked::of(inner, heir)?, heir.range.first.plus(self.core().index(page))))
    }

    /// Has every access to a page fail that is claimed, and empty, unless the program has mapped something else over it.
    fn close(&self, inner: &Inner, page: PageNo) {
        let index = self.core().index(page);
        if !inner.is_ours(page) {
            return;
        }
        // With the claim: a page that somebody discards in between would be closed, and nobody would know.
        self.core().given_up.insert(index);
        self.asking.refusals.fetch_add(1, Ordering::SeqCst);
        // A copy would replace what refuses the access.
        self.core().guarded.insert(index);
        self.shut(inner, page);
    }

    /// The program has no guard in the place of a page any more. What was given up has one of ours, or poison.
    pub(crate) fn take_guard_away(&self, inner: &Inner, page: PageNo) {
        let index = self.core().index(page);
        if !self.core().given_up.contains(index) {
            self.core().guarded.remove(index);
        } else if inner.is_ours(page) {
            self.shut(inner, page);
        }
    }

    /// Puts what refuses every access into the place of a page that was given up. It holds nothing, and nobody is at it.
    fn shut(&self, inner: &Inner, page: PageNo) {
        // SAFETY: region-owned: a page that holds nothing, and is refused to the program.
        if unsafe { memory::advise(page.addr().0, PAGE_BYTES, Advice::GuardInstall) }.is_ok() {
            return;
        }
        let mmu = inner.state().mmu;
        // Locked pages take no guard. Our caller wakes whoever could not be woken.
        let _ = mmu.poison(self.core().trap, page);
        if !mmu.present(page) {
            crate::die(
                "a page was to be given up, and nothing refuses an access to it: a filter on system calls (seccomp) forbids \
                 ioctl(UFFDIO_POISON); allow it, or set the filter before the domain is built",
            );
        }
    }

    /// Pages of a range that were given up.
    fn given_up(&self, range: PageRange) -> impl Iterator<Item = PageNo> {
        let count = if self.asking.refusals.load(Ordering::SeqCst) == 0 { 0 } else { range.count };
        let is_given_up = |page: &PageNo| self.core().given_up.contains(self.core().index(*page));
        PageRange { count, ..range }.pages().filter(is_given_up)
    }

    /// The first page that was given up. It costs no look at each page: whoever asks may keep writers waiting.
    pub(crate) fn first_given_up(&self) -> Option<PageNo> {
        let was_any = self.asking.refusals.load(Ordering::SeqCst) != 0;
        let index = was_any.then(|| self.core().given_up.next(0)).flatten()?;
        Some(self.core().range.first.plus(index))
    }

    /// Refuses to work on a page that was given up.
    ///
    /// # Errors
    /// There is one.
    pub(crate) fn has_all(&self, operation: &'static str, range: PageRange) -> Result<()> {
        self.given_up(range).next().map_or(Ok(()), |page| Err(self.lacks(operation, page)))
    }

    /// That a page was given up.
    pub(crate) fn lacks(&self, operation: &'static str, page: PageNo) -> Error {
        let cause = "what it held was given up to refuse an access, as a line on standard error said; discard it to use it anew";
        Error::new(Kind::Lost, operation, self.page_name(page), cause)
    }

    /// Makes those pages of a range usable again that were given up, and hold nothing.
    pub(crate) fn begin_anew(&self, inner: &Inner, range: PageRange) {
        self.given_up(range).for_each(|page| self.open(inner, page));
    }

    /// The same, and of those with a guard of the program's own: contents come there, which a guard would keep in their frames alone. There a
    /// fork has none of them, and an eviction that cannot save them drops them.
    pub(crate) fn clear_way(&self, inner: &Inner, range: PageRange) {
        let core = self.core();
        let is_closed = |index| core.guarded.contains(index) || core.given_up.contains(index);
        range.pages().filter(|page| is_closed(core.index(*page))).for_each(|page| self.open(inner, page));
    }

    /// Takes away what refuses every access to a page.
    fn open(&self, inner: &Inner, page: PageNo) {
        let (state, index) = (inner.state(), self.core().index(page));
        let clear = move |found| {
            self.core().given_up.remove(index);
            self.core().guarded.remove(index);
            if !inner.is_ours(page) {
                return;
            }
            if found != State::Resident {
                // Poison, which locked pages have in place of a guard. Something is there only where the program took it away itself.
                state.mmu.drop_pages(page, 1);
            }
            // SAFETY: region-owned: a page that is claimed; what is in one that has none stays.
            let _ = unsafe { memory::advise(page.addr().0, PAGE_BYTES, Advice::GuardRemove) };
        };
        // A thread of the program's could not tell whether it is ours, where the program has closed our descriptors.
        inner.on_pager_thread(move || with_claim(state, page, clear));
    }
}
