//! The frames of a domain: which are free, what each holds, and access to their contents.
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::num::NonZeroU32;
use core::ptr::NonNull;
use core::slice;

use crate::addr::{Frame, FrameRun, PageBytes, PageNo};
use crate::sync::{AtomicU32, AtomicU64, Ordering, race};

/// A table in memory that somebody else supplied: core allocates nothing.
pub struct Table<T> {
    first: NonNull<T>,
    len: usize,
}

// SAFETY: table-shared: a Table only gives out `&T`.
unsafe impl<T: Sync> Send for Table<T> {}
// SAFETY: table-shared: a Table only gives out `&T`.
unsafe impl<T: Sync> Sync for Table<T> {}

impl<T> Table<T> {
    /// A table of `len` entries at `first`.
    ///
    /// # Safety
    /// *table-memory*: the memory holds `len` valid `T`s, is aligned for them, and outlives the table; nobody uses it
    /// otherwise than through shared references.
    pub const unsafe fn new(first: NonNull<T>, len: usize) -> Table<T> {
        Table { first, len }
    }

    /// An empty table.
    pub const fn empty() -> Table<T> {
        Table { first: NonNull::dangling(), len: 0 }
    }

    /// How many entries.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Entry `index`.
    pub fn get(&self, index: usize) -> Option<&T> {
        // SAFETY: table-memory: `index` is below `len`.
        (index < self.len).then(|| unsafe { &*self.first.as_ptr().add(index) })
    }

    /// Where entry `index` is, with `count - 1` more after it.
    pub(crate) fn place(&self, index: usize, count: usize) -> Option<NonNull<T>> {
        let end = index.checked_add(count)?;
        // SAFETY: table-memory: `index` is no further than `len`.
        (end <= self.len).then(|| unsafe { self.first.add(index) })
    }

    /// All entries in order.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: table-memory: that many entries in a row.
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }

    /// The same, one by one.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.as_slice().iter()
    }
}

/// Exclusive access to the contents of one unmapped frame, for whoever owns the page that the frame was taken for.
pub struct FrameBytes<'a> {
    at: NonNull<PageBytes>,
    lease: PhantomData<&'a mut PageBytes>,
}

impl<'a> FrameBytes<'a> {
    /// The contents at `at`.
    ///
    /// # Safety
    /// *frame-lease*: `at` is the populated slot of a frame that the caller owns for `'a` (it is neither free, nor mapped,
    /// nor owned by another page), so nobody else writes it, and nobody else reads it but a device that was asked to.
    pub unsafe fn new(at: *mut PageBytes) -> Option<FrameBytes<'a>> {
        NonNull::new(at).map(|at| FrameBytes { at, lease: PhantomData })
    }

    /// To read.
    pub fn get(&self) -> &PageBytes {
        // SAFETY: frame-lease: nobody writes it but through `&mut self`.
        unsafe { self.at.as_ref() }
    }

    /// To read, for whoever must not write: the lease ends, and what it was of is only read from here on.
    #[cfg(not(loom))]
    pub(crate) fn into_shared(self) -> &'a PageBytes {
        // SAFETY: frame-lease: nobody writes it but by a lease, and this one is gone.
        unsafe { self.at.as_ref() }
    }

    /// To write.
    pub fn get_mut(&mut self) -> &mut PageBytes {
        // SAFETY: frame-lease: and `&mut self` makes this the only reference.
        unsafe { self.at.as_mut() }
    }

    /// Clears the page.
    pub fn clear(&mut self) {
        // SAFETY: frame-lease: as above; a page of zero bytes is a valid page.
        unsafe { self.at.as_ptr().write_bytes(0, 1) }
    }
}

/// A lease of `frame`, whose slot is never null.
#[cfg(not(loom))]
pub(crate) fn lease(mmu: &dyn crate::mmu::Mmu, frame: Frame) -> FrameBytes<'_> {
    let at = NonNull::new(mmu.bytes(frame)).unwrap_or(NonNull::dangling());
    FrameBytes { at, lease: PhantomData }
}

/// The free frames, as a bitmap, so that neighbours are found together: a run of frames is mapped by one call.
///
/// # Source
/// Nemesis §6.2 (the frames allocator); the bitmap with a hint is §6.7's, applied to memory.
pub struct FrameSet {
    words: Table<AtomicU64>,
    /// A bit for each word that may have one set.
    summary: Table<AtomicU64>,
    count: AtomicU32,
    hint: AtomicU32,
}

impl FrameSet {
    /// An empty set over zeroed tables: one word for 64 frames, one summary word for 64 words.
    pub fn new(words: Table<AtomicU64>, summary: Table<AtomicU64>) -> FrameSet {
        FrameSet { words, summary, count: AtomicU32::new(0), hint: AtomicU32::new(0) }
    }

    /// How many frames it holds.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Adds frames.
    ///
    /// # Context
    /// Trap.
    pub fn give(&self, first: Frame, count: u32) {
        // Before the frames can be had: whoever takes one subtracts it, and the count must never pass below zero.
        self.count.fetch_add(count, Ordering::SeqCst);
        race();
        let (mut at, end) = (first.0, first.0.wrapping_add(count));
        while at < end {
            let bit = at % 64;
            let here = (64 - bit).min(end - at);
            if let Some(word) = self.words.get(at as usize / 64) {
                word.fetch_or(ones(here) << bit, Ordering::Release);
                self.mark(at / 64);
            }
            at += here;
        }
    }

    /// Takes up to `want` neighbouring frames, near the place where the last ones were taken. Frames that are given meanwhile may be
    /// hidden from other threads for a moment: `shown` is called when they can be seen again, for those who sleep since they saw none.
    ///
    /// # Context
    /// Trap.
    pub fn take(&self, want: NonZeroU32, shown: impl Fn()) -> Option<FrameRun> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let words = self.words.len() as u32;
        let start = self.hint.load(Ordering::Relaxed);
        let mut at = start;
        let mut wrapped = false;
        loop {
            match self.next_word(at) {
                Some(found) => {
                    if let Some(run) = self.take_at(found, want.get(), &shown) {
                        self.count.fetch_sub(run.count.get(), Ordering::SeqCst);
                        self.hint.store(found, Ordering::Relaxed);
                        return Some(run);
                    }
                    at = found + 1;
                }
                None => at = words,
            }
            if at >= words {
                if wrapped {
                    return None;
                }
                wrapped = true;
                at = 0;
            }
            if wrapped && at > start {
                return None;
            }
        }
    }

    /// The same of frames too that are hidden from other threads: it looks at every word.
    fn take_hidden(&self, want: NonZeroU32) -> Option<FrameRun> {
        let has_some =
            |index: &u32| self.words.get(*index as usize).is_some_and(|word| word.load(Ordering::Relaxed) != 0);
        let words = 0..self.words.len() as u32;
        let run = words.filter(has_some).find_map(|index| self.take_at(index, want.get(), &|| {}))?;
        self.count.fetch_sub(run.count.get(), Ordering::SeqCst);
        Some(run)
    }

    /// The first word from `at` on that may hold a free frame.
    fn next_word(&self, at: u32) -> Option<u32> {
        let mut group = at / 64;
        let mut mask = u64::MAX << (at % 64);
        while let Some(bits) = self.summary.get(group as usize) {
            let bits = bits.load(Ordering::Relaxed) & mask;
            if bits != 0 {
                return Some(group * 64 + bits.trailing_zeros());
            }
            mask = u64::MAX;
            group += 1;
        }
        None
    }

    /// Takes the first run in word `index`, and goes on into the next words where the run does.
    fn take_at(&self, index: u32, want: u32, shown: &impl Fn()) -> Option<FrameRun> {
        let word = self.words.get(index as usize)?;
        let mut seen = word.load(Ordering::Acquire);
        let (bit, mut got) = loop {
            if seen == 0 {
                self.unmark(index, shown);
                return None;
            }
            let bit = seen.trailing_zeros();
            let run = (!(seen >> bit)).trailing_zeros().min(64 - bit).min(want);
            let left = seen & !(ones(run) << bit);
            match word.compare_exchange_weak(seen, left, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break (bit, run),
                Err(other) => seen = other,
            }
        };
        let mut next = index + 1;
        while got < want && (bit + got).is_multiple_of(64) {
            let Some(word) = self.words.get(next as usize) else {
                break;
            };
            let seen = word.load(Ordering::Acquire);
            let run = (!seen).trailing_zeros().min(want - got);
            if run == 0 || word.compare_exchange(seen, seen & !ones(run), Ordering::AcqRel, Ordering::Relaxed).is_err()
            {
                break;
            }
            got += run;
            next += 1;
        }
        Some(FrameRun { first: Frame(index * 64 + bit), count: NonZeroU32::new(got)? })
    }

    fn mark(&self, index: u32) {
        if let Some(group) = self.summary.get(index as usize / 64) {
            group.fetch_or(1 << (index % 64), Ordering::SeqCst);
        }
    }

    fn unmark(&self, index: u32, shown: &impl Fn()) {
        let (Some(group), Some(word)) = (self.summary.get(index as usize / 64), self.words.get(index as usize)) else {
            return;
        };
        race();
        group.fetch_and(!(1 << (index % 64)), Ordering::SeqCst);
        // A give may have come between the look and the unmark.
        if word.load(Ordering::SeqCst) != 0 {
            self.mark(index);
            shown();
        }
    }
}

const fn ones(count: u32) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

/// Frames that a huge page has room for.
pub const GROUP: u32 = 512;

/// The frames without memory, by number. Whoever takes some has been counted as claiming them before, and whoever gives some
/// back is counted until after: no more are ever out than there are.
pub struct Unpopulated {
    slots: u32,
    /// Frames `[0, begun)` have had memory at one time or another.
    begun: AtomicU32,
    /// Those of them that have none any more.
    given_up: FrameSet,
}

impl Unpopulated {
    /// All of `slots` frames. `given_up` is an empty set with room for them.
    pub fn new(given_up: FrameSet, slots: u32) -> Unpopulated {
        Unpopulated { slots, begun: AtomicU32::new(0), given_up }
    }

    /// Takes up to `want` neighbours. `None`: those that were given up escaped the look, while others took and gave some.
    pub fn take(&self, want: NonZeroU32) -> Option<FrameRun> {
        let begin = || {
            let next = |begun: u32| (begun < self.slots).then(|| begun.saturating_add(want.get()).min(self.slots));
            let first = self.begun.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).ok()?;
            Some(FrameRun { first: Frame(first), count: NonZeroU32::new(want.get().min(self.slots - first))? })
        };
        // Who hides some may be stopped in the middle of it, and not go on before this thread sleeps.
        self.given_up.take(want, || {}).or_else(begin).or_else(|| self.given_up.take_hidden(want))
    }

    /// Frames from this one on never had memory.
    pub(crate) fn begun(&self) -> u32 {
        self.begun.load(Ordering::SeqCst)
    }

    /// How many frames are left of the group in which the next one without memory is.
    pub fn rest_of_group(&self) -> u32 {
        GROUP - self.begun.load(Ordering::Relaxed) % GROUP
    }

    /// Gives frames back that lost their memory.
    pub fn give(&self, first: Frame, count: u32) {
        self.given_up.give(first, count);
    }
}

/// What core knows of one frame. Zeroed memory is a frame that nobody holds.
#[derive(Default)]
pub struct FrameRecord {
    /// The page that owns it, plus one.
    owner: AtomicU64,
    /// The next frame on the admitted list, plus one.
    next: AtomicU32,
    marks: AtomicU32,
}

const LISTED: u32 = 1;
const ZEROED: u32 = 2;
/// The page came back since the policy was last told.
const AGAIN: u32 = 4;
const USED: u32 = 8;
/// Whether the page that was sampled in the frame still has it.
const SAMPLED: u32 = 16;
/// What is said of a page, and not of the next one in the frame.
const OF_ITS_PAGE: u32 = AGAIN | SAMPLED;

/// The frames of a domain, by number.
pub struct FrameTable {
    records: Table<FrameRecord>,
    /// Head of the admitted list, plus one.
    admitted: AtomicU32,
}

impl FrameTable {
    /// A table over zeroed records.
    pub fn new(records: Table<FrameRecord>) -> FrameTable {
        FrameTable { records, admitted: AtomicU32::new(0) }
    }

    /// How many frames there can be.
    pub fn capacity(&self) -> u32 {
        self.records.len() as u32
    }

    /// The page that holds `frame`, if one does.
    pub fn owner(&self, frame: Frame) -> Option<PageNo> {
        self.records.get(frame.0 as usize)?.owner.load(Ordering::Acquire).checked_sub(1).map(PageNo)
    }

    /// Says which page holds `frame` from now on. Only the owner of the frame may.
    pub fn set_owner(&self, frame: Frame, page: Option<PageNo>) {
        if let Some(record) = self.records.get(frame.0 as usize) {
            record.owner.store(page.map_or(0, |page| page.0 + 1), Ordering::Release);
            if record.marks.load(Ordering::Relaxed) & OF_ITS_PAGE != 0 {
                record.marks.fetch_and(!OF_ITS_PAGE, Ordering::AcqRel);
            }
        }
    }

    /// Says whether `frame` is known to hold only zeros.
    pub fn set_zeroed(&self, frame: Frame, zeroed: Zeroed) {
        if let Some(record) = self.records.get(frame.0 as usize) {
            match zeroed {
                Zeroed::Yes => record.marks.fetch_or(ZEROED, Ordering::Relaxed),
                Zeroed::Unknown => record.marks.fetch_and(!ZEROED, Ordering::Relaxed),
            };
        }
    }

    /// Whether `frame` is known to hold only zeros.
    pub fn zeroed(&self, frame: Frame) -> bool {
        self.records.get(frame.0 as usize).is_some_and(|record| record.marks.load(Ordering::Relaxed) & ZEROED != 0)
    }

    /// The page that was in `frame` is used again. Whether that is news: it was sampled, and not used since.
    ///
    /// # Context
    /// Trap.
    pub(crate) fn note_use(&self, frame: Frame) -> bool {
        self.records.get(frame.0 as usize).is_some_and(|record| {
            record.marks.load(Ordering::Acquire) & SAMPLED != 0
                && record.marks.fetch_or(USED, Ordering::AcqRel) & USED == 0
        })
    }

    /// From now on a use of the page in `frame` is news, as long as the frame is that page's.
    pub(crate) fn forget_use(&self, frame: Frame) {
        if let Some(record) = self.records.get(frame.0 as usize) {
            record.marks.fetch_or(SAMPLED, Ordering::AcqRel);
            record.marks.fetch_and(!USED, Ordering::AcqRel);
        }
    }

    /// Whether the page that was in `frame` was used since that was forgotten.
    pub fn used(&self, frame: Frame) -> bool {
        self.records.get(frame.0 as usize).is_some_and(|record| record.marks.load(Ordering::Acquire) & USED != 0)
    }

    /// Puts `frame` on the list of those that became resident, for the policy to learn of. The list cannot overflow: each
    /// frame is on it at most once, and stays where it is on it if it is admitted again, with another page perhaps.
    ///
    /// # Context
    /// Trap.
    pub fn admit(&self, frame: Frame, use_: Use) {
        let Some(record) = self.records.get(frame.0 as usize) else {
            return;
        };
        let marks = LISTED | if use_ == Use::Again { AGAIN } else { 0 };
        if record.marks.fetch_or(marks, Ordering::AcqRel) & LISTED != 0 {
            return;
        }
        let mut head = self.admitted.load(Ordering::Relaxed);
        loop {
            record.next.store(head, Ordering::Relaxed);
            match self.admitted.compare_exchange_weak(head, frame.0 + 1, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => head = other,
            }
        }
    }

    /// Takes the admitted list and gives it to `tell` in the order in which the frames were listed.
    ///
    /// # Context
    /// The evictor alone.
    pub fn drain_admitted(&self, mut tell: impl FnMut(Frame, Use)) {
        let mut at = self.admitted.swap(0, Ordering::AcqRel);
        // The list is newest first; turn it round.
        let mut turned = 0;
        while let Some(record) = at.checked_sub(1).and_then(|index| self.records.get(index as usize)) {
            let next = record.next.swap(turned, Ordering::Relaxed);
            turned = at;
            at = next;
        }
        while let Some((index, record)) =
            turned.checked_sub(1).and_then(|index| Some((index, self.records.get(index as usize)?)))
        {
            turned = record.next.load(Ordering::Relaxed);
            // The mark goes before the owner is read: a frame that changes hands from here on is listed again.
            let marks = record.marks.fetch_and(!(LISTED | AGAIN), Ordering::AcqRel);
            tell(Frame(index), if marks & AGAIN != 0 { Use::Again } else { Use::First });
        }
    }
}

/// Whether a frame's contents are known to be zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Zeroed {
    /// All zero.
    Yes,
    /// Anything.
    Unknown,
}

/// Whether a page came in from its pager or was used a second time while on standby.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// It was filled.
    First,
    /// It came back from standby.
    Again,
}

#[cfg(test)]
pub(crate) use tests::table;

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use core::any::Any;
    use std::{boxed::Box, sync::Mutex, vec::Vec};

    const ROUNDS: u32 = if cfg!(miri) { 30 } else { 20_000 };

    /// Miri takes memory for lost that no static leads to.
    static KEPT: Mutex<Vec<&'static (dyn Any + Send + Sync)>> = Mutex::new(Vec::new());

    /// A table of fresh entries, never freed.
    pub(crate) fn table<T: Default + Send + Sync + 'static>(len: usize) -> Table<T> {
        let memory: &'static Vec<T> = Box::leak(Box::new((0..len).map(|_| T::default()).collect()));
        KEPT.lock().unwrap().push(memory);
        // SAFETY: table-memory: leaked, and used by this table alone.
        unsafe { Table::new(NonNull::new(memory.as_ptr().cast_mut()).unwrap(), len) }
    }

    fn set(frames: usize) -> FrameSet {
        let words = frames.div_ceil(64);
        FrameSet::new(table(words), table(words.div_ceil(64)))
    }

    fn run(set: &FrameSet, want: u32) -> Option<(u32, u32)> {
        set.take(NonZeroU32::new(want).unwrap(), || {}).map(|run| (run.first.0, run.count.get()))
    }

    #[test]
    fn runs_cross_words_and_stop_at_gaps() {
        let set = set(400);
        set.give(Frame(10), 200);
        set.give(Frame(300), 3);
        assert_eq!(run(&set, 150), Some((10, 150)));
        assert_eq!(run(&set, 150), Some((160, 50)));
        assert_eq!(run(&set, 1), Some((300, 1)));
        assert_eq!(run(&set, 9), Some((301, 2)));
        assert_eq!((run(&set, 1), set.count()), (None, 0));
        set.give(Frame(0), 1);
        assert_eq!(run(&set, 1), Some((0, 1)));
    }

    #[test]
    fn threads_never_get_the_same_frame_and_lose_none() {
        let set = set(1000);
        set.give(Frame(0), 1000);
        let held: Vec<AtomicU32> = (0..1000).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for seed in 1..4u32 {
                let (set, held) = (&set, &held);
                scope.spawn(move || {
                    let mut dice = seed;
                    for _ in 0..ROUNDS {
                        dice = dice.wrapping_mul(1664525).wrapping_add(1013904223);
                        if let Some(run) = set.take(NonZeroU32::new(dice >> 25 | 1).unwrap(), || {}) {
                            for frame in run.first.0..run.first.0 + run.count.get() {
                                assert_eq!(held[frame as usize].swap(1, Ordering::AcqRel), 0);
                            }
                            for frame in run.first.0..run.first.0 + run.count.get() {
                                held[frame as usize].store(0, Ordering::Release);
                            }
                            set.give(run.first, run.count.get());
                        }
                    }
                });
            }
        });
        let mut left = 0;
        while let Some((_, count)) = run(&set, 64) {
            left += count;
        }
        assert_eq!(left, 1000);
    }

    #[test]
    fn the_admitted_list_keeps_order_and_lists_a_frame_once() {
        let frames = FrameTable::new(table(8));
        for frame in [3, 5, 3, 1] {
            frames.admit(Frame(frame), if frame == 5 { Use::Again } else { Use::First });
        }
        let mut seen = Vec::new();
        frames.drain_admitted(|frame, use_| seen.push((frame.0, use_)));
        assert_eq!(seen, [(3, Use::First), (5, Use::Again), (1, Use::First)]);
        frames.admit(Frame(3), Use::First);
        seen.clear();
        frames.drain_admitted(|frame, use_| seen.push((frame.0, use_)));
        assert_eq!(seen, [(3, Use::First)]);
    }

    #[test]
    fn a_page_in_a_frame_of_one_that_was_used_again_is_not_said_to_be() {
        let frames = FrameTable::new(table(8));
        let mut seen = Vec::new();
        for (page, use_) in [(10, Use::First), (10, Use::Again), (11, Use::First)] {
            frames.set_owner(Frame(0), Some(PageNo(page)));
            frames.admit(Frame(0), use_);
        }
        frames.drain_admitted(|frame, use_| seen.push((frame.0, use_)));
        assert_eq!(seen, [(0, Use::First)]);
    }
}
