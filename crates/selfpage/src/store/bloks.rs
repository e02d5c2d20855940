//! Which bloks of a store are taken, and by whom.
//!
//! Parent and forked children share one store file: a page saved before the fork belongs to both. Each process of such a
//! family is a *member* with a bitmap of its own in memory that all of them map, and a blok is free when it is set in no
//! bitmap. Nothing else is recorded, so nothing can disagree: whatever instant a member is killed at, its bitmap says what it
//! held, and forgetting the bitmap gives all of that back.
//!
//! A child is no member before it [adopts](Bloks::adopt) a number: what it has of its parent's store it neither claims from nor
//! gives back to. So one that was made behind our back, or that could not become a member, does its parent no harm when it
//! drops what it has.
//!
//! A claim sets the bit in the member's own bitmap first and looks at the others' second. Of two members that want the same
//! blok the later sees the earlier, so at most one keeps it; it may happen that both give way.
//!
//! A file takes space for every blok that was ever written. So claims go round below a [mark](Bloks::mark), which the whole family has,
//! and move it on only where they find no long run below it, and more than about half of what is below it is taken: then bloks that are
//! written together lie together, and what was ever claimed stays within twice what is held at a time.
//!
//! # Source
//! Nemesis §6.7 (bloks, a bitmap, first fit with a hint). The mark is ours. Members are ours: Nemesis has no fork. A fork hands bloks from
//! bitmap to bitmap, and a claim that reads the bitmaps one by one could miss one on its way; so each fork ends with a
//! step of the generation, and a claim that sees it step looks again.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, fence};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::thread;
use selfpage_core::pager::PagerError;

use super::Blok;
use super::linux::mapping::{Mapping, Sharing};

/// The most members of a family. Each has addresses for a bitmap of its own, and memory only where there is such a member.
pub(super) const MEMBERS: u32 = 1024;
/// A claim that has found a run looks this many words further for a longer one.
const SEARCH_WORDS: usize = 64;
/// What may lie below the mark beyond twice what is taken.
const SPARE_BLOKS: u64 = (4 << 20) / PAGE_BYTES as u64;
const WORD_BLOKS: u32 = 64;
const PAGE_WORDS: usize = PAGE_BYTES / 8;

/// The bloks of one store. Blok 0 is always taken.
pub struct Bloks {
    /// A page with the family's state, then the bitmap of what was [written](Bloks::wrote), then each member's, in whole pages.
    map: Arc<Mapping>,
    count: u32,
    bitmap_pages: usize,
    /// The number of the member that this process is, and one: 0 is none. A family's child finds 0.
    me: Mapping,
    /// Where the next claim starts to look.
    hint: AtomicU32,
    /// How many bloks may be claimed in short runs before it is worth counting whether the mark may move.
    patience: AtomicI64,
    /// A write found no space: what was written before goes first.
    no_space: AtomicBool,
    /// How often somebody has begun to hold free bloks for a moment, [`Bloks::sweep`], and how often that has ended.
    /// A child, which has not the thread that sweeps, finds zeros.
    sweeps: Mapping,
}

/// Which bloks to look at.
#[derive(Clone, Copy)]
enum Among {
    All,
    Written,
}

/// A run of bloks found free.
#[derive(Clone, Copy)]
struct Run {
    first: u32,
    len: u32,
}

impl Bloks {
    /// The bloks `1..count` for one process. A forked child gets a copy.
    pub fn private(count: u32) -> io::Result<Bloks> {
        Bloks::new(count, 1, Sharing::Private)
    }

    /// The bloks `1..count` for a family; the caller is member 0.
    pub fn family(count: u32) -> io::Result<Bloks> {
        Bloks::new(count, MEMBERS, Sharing::Family)
    }

    fn new(count: u32, members: u32, sharing: Sharing) -> io::Result<Bloks> {
        let bitmap_pages = (count as usize).div_ceil(PAGE_BYTES * 8);
        let map = Arc::new(Mapping::new(1 + (1 + members as usize) * bitmap_pages, sharing)?);
        let own = if sharing == Sharing::Family { Sharing::Own } else { Sharing::Private };
        let bloks = Bloks {
            map,
            count,
            bitmap_pages,
            me: Mapping::new(1, own)?,
            hint: 1.into(),
            patience: 0.into(),
            no_space: false.into(),
            sweeps: Mapping::new(1, Sharing::Own)?,
        };
        bloks.family_mark().store(1, SeqCst);
        bloks.members_end().store(1, SeqCst);
        bloks.be(0);
        Ok(bloks)
    }

    /// Claims up to `want` neighbouring bloks: a run that long where one is found before the others have been looked at,
    /// else the longest of those found, or, where that is short and much is taken, one past all that was ever claimed. Where all are
    /// taken, and some of them by a [sweep](Bloks::sweep), it waits for that.
    ///
    /// # Context
    /// Any: no lock, no allocation.
    ///
    /// # Errors
    /// [`PagerError::Full`]: every blok is taken. [`PagerError::NoStore`]: this process is no member.
    pub fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError> {
        if self.me().is_none() {
            return Err(PagerError::NoStore);
        }
        let want = want.max(1);
        loop {
            let [begun, ended] = self.sweeps();
            let before = ended.load(SeqCst);
            // Someone else's claim may get in the way of what was found, and give way itself: look again before saying no.
            for _ in 0..3 {
                while let Some(run) = self.choose(want) {
                    let len = self.take(run);
                    self.hint.store(run.first.saturating_add(len.max(1)), Relaxed);
                    if len > 0 {
                        return Ok((Blok(run.first), len));
                    }
                }
            }
            // After the look at the bits. A child that a handler forked in the midst of a sweep ends one that it did not begin.
            fence(Acquire);
            if begun.load(SeqCst) <= before {
                return Err(PagerError::Full);
            }
            // What a sweep held meanwhile is free in a moment.
            thread::give_way();
        }
    }

    /// Gives `count` bloks from `first` on back. Those of a process that is no member are its parent's, and stay.
    ///
    /// # Context
    /// Any: no lock, no allocation.
    ///
    /// # Panics
    /// Where this member does not hold them all.
    pub fn release(&self, first: Blok, count: u32) {
        if self.me().is_none() {
            return;
        }
        for (word, mask) in masks(Run { first: first.0, len: count }) {
            let before = self.mine()[word].fetch_and(!mask, SeqCst);
            assert!(before & mask == mask, "bloks {first:?}+{count} are given back, but are not all held");
        }
    }

    /// The end of what was ever claimed, by whomever of the family.
    pub fn mark(&self) -> u32 {
        self.family_mark().load(SeqCst) as u32
    }

    /// There is no more to be had by keeping the mark low: all bloks have their space.
    pub fn have_space(&self) {
        self.family_mark().store(self.count.into(), SeqCst);
    }

    /// The blok has space from now on, also where no other gets any.
    ///
    /// # Context
    /// Any: no lock, no allocation.
    pub fn wrote(&self, blok: Blok) {
        let (word, bit) = ((blok.0 / WORD_BLOKS) as usize, 1 << (blok.0 % WORD_BLOKS));
        let word = &self.written()[word];
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, SeqCst);
        }
    }

    /// A blok could not be written for want of space: the next claims are of those that were written before, while any are free.
    ///
    /// # Context
    /// Any: no lock, no allocation.
    pub fn found_no_space(&self) {
        // They may lie in short runs, in a crowd, and are to be had all the same.
        self.patience.fetch_max(step(self.mark()), Relaxed);
        self.no_space.store(true, Relaxed);
    }

    /// Has `give_back` do something to the memory of every free blok, run by run; meanwhile nobody can save a page there.
    pub(super) fn sweep(&self, give_back: impl Fn(Blok, u32)) {
        for word in 0..self.words() {
            let free = !self.taken(word) & self.below(self.mark(), word);
            if free == 0 {
                continue;
            }
            let [begun, ended] = self.sweeps();
            begun.fetch_add(1, SeqCst);
            let mut held = self.take_word(word, free);
            while held != 0 {
                let first = held.trailing_zeros();
                let len = (held >> first).trailing_ones();
                held &= !(!0_u64 >> (64 - len) << first);
                let first = Blok(word as u32 * WORD_BLOKS + first);
                give_back(first, len);
                self.release(first, len);
            }
            ended.fetch_add(1, SeqCst);
        }
    }

    fn sweeps(&self) -> [&AtomicU64; 2] {
        let words = self.sweeps.words();
        [&words[0], &words[1]]
    }

    /// How many bloks are taken, by whomever.
    pub fn taken_count(&self) -> u64 {
        (0..self.words()).map(|word| self.taken(word).count_ones() as u64).sum()
    }

    /// How many bloks there are to claim in all.
    pub fn count(&self) -> u32 {
        self.count - 1
    }

    /// How many words of the bitmap have ever had a bit set, at most.
    pub(super) fn words(&self) -> usize {
        self.mark().div_ceil(WORD_BLOKS) as usize
    }

    /// The members that there are, and those below them that have been, but for this process.
    pub fn others(&self) -> impl DoubleEndedIterator<Item = u32> {
        let me = self.me();
        (0..self.members_end().load(SeqCst) as u32).filter(move |&member| Some(member) != me)
    }

    /// Gives `child` a reference to every blok of this member, and forgets what an earlier member of that number held.
    ///
    /// # Context
    /// Normal, with the process quiet; the caller holds the child's lock.
    pub fn hand_to(&self, child: u32) {
        self.members_end().fetch_max(child as u64 + 1, SeqCst);
        // Only what was ever claimed: to look at a word takes memory.
        for (mine, its) in self.mine().iter().zip(self.bitmap(child)).take(self.words()) {
            let held = mine.load(SeqCst);
            if its.load(SeqCst) != held {
                its.store(held, SeqCst);
            }
        }
        self.generation().fetch_add(1, SeqCst);
    }

    /// This process is that member from now on.
    ///
    /// # Context
    /// Normal, in a forked child, before its first claim.
    pub fn adopt(&self, member: u32) {
        self.be(member);
        // Apart from the parent, who would write side by side with us else.
        self.hint.store((self.mark() as u64 * member as u64 / MEMBERS as u64) as u32, Relaxed);
    }

    /// Gives back whatever the member held.
    ///
    /// # Context
    /// PagerThread or Normal; the caller holds the member's lock, so the member is dead and stays so.
    pub fn forget(&self, member: u32) {
        // Without a look at it before or after, for which the kernel would find memory.
        if self.map.discard(self.bitmap_page(member), self.bitmap_pages).is_err() {
            // The member is dead, so the mark is past all that it ever claimed.
            self.bitmap(member)[..self.words()].iter().for_each(|word| word.store(0, SeqCst));
        }
        // Nobody looks at the last any more. Nor does its number become another's meanwhile: that takes its lock.
        let (end, last) = (u64::from(member) + 1, u64::from(member));
        let _ = self.members_end().compare_exchange(end, last, SeqCst, SeqCst);
    }

    /// The run to claim from.
    fn choose(&self, want: u32) -> Option<Run> {
        loop {
            let mark = self.mark();
            let among = if self.no_space.load(Relaxed) { Among::Written } else { Among::All };
            match self.find(want, mark, among) {
                Some(run) if run.len >= want.div_ceil(2) || !self.is_crowded(mark, run.len) => return Some(run),
                // There may be space again, which a write would tell.
                _ if self.no_space.swap(false, Relaxed) => self.patience.store(step(mark), Relaxed),
                _ if mark < self.count => self.move_mark(mark, want),
                found => return found,
            }
        }
    }

    /// Whether the mark may move, where a run of only `len` was found. All is counted, but not each time.
    fn is_crowded(&self, mark: u32, len: u32) -> bool {
        if mark == self.count || self.patience.fetch_sub(len.into(), Relaxed) > 0 {
            return false;
        }
        let spare = (mark as u64).saturating_sub(2 * self.taken_count() + SPARE_BLOKS);
        if spare > 0 {
            self.patience.store((spare as i64 / 2).max(step(mark)), Relaxed);
        }
        spare == 0
    }

    fn move_mark(&self, mark: u32, want: u32) {
        let moved = (mark as u64 + (step(mark) as u64).max(want.into())).min(self.count.into());
        if self.family_mark().compare_exchange(mark.into(), moved, SeqCst, SeqCst).is_ok() {
            self.hint.store(mark, Relaxed);
        }
    }

    /// The first run of at least `want` free bloks from the hint on, or the longest found by then; below `end`.
    fn find(&self, want: u32, end: u32, among: Among) -> Option<Run> {
        let words = end.div_ceil(WORD_BLOKS) as usize;
        let hint = self.hint.load(Relaxed) % end;
        let start = (hint / WORD_BLOKS) as usize;
        let mut best: Option<Run> = None;
        let mut run = Run { first: 0, len: 0 };
        // The word with the hint comes twice: its later bloks first, its earlier ones last.
        for step in 0..=words {
            let word = (start + step) % words;
            if word == 0 {
                run.len = 0;
            }
            let from = if step == 0 { !0 << (hint % WORD_BLOKS) } else { !0 };
            let among = match among {
                Among::All => !0,
                Among::Written => self.written()[word].load(Relaxed),
            };
            let free = !self.taken(word) & self.below(end, word) & from & among;
            let mut at = 0;
            while at < WORD_BLOKS {
                let skip = (free >> at).trailing_zeros();
                if skip > 0 {
                    run.len = 0;
                    at += skip;
                }
                if at >= WORD_BLOKS {
                    break;
                }
                if run.len == 0 {
                    run.first = word as u32 * WORD_BLOKS + at;
                }
                let len = (free >> at).trailing_ones();
                run.len += len;
                at += len;
                if run.len >= want {
                    return Some(Run { len: want, ..run });
                }
                if best.is_none_or(|best| run.len > best.len) {
                    best = Some(run);
                }
            }
            if best.is_some() && step >= SEARCH_WORDS {
                break;
            }
        }
        best
    }

    /// Claims as many bloks from the start of the run on as nobody else was faster with.
    fn take(&self, run: Run) -> u32 {
        let mut len = 0;
        for (word, mask) in masks(run) {
            let got = self.take_word(word, mask);
            // What hangs together with the start.
            let first = mask.trailing_zeros();
            let kept = got & !(!0_u64).checked_shl(first + (got >> first).trailing_ones()).unwrap_or(0);
            if kept != got {
                self.mine()[word].fetch_and(!(got & !kept), SeqCst);
            }
            len += kept.count_ones();
            if kept != mask {
                break;
            }
        }
        len
    }

    fn take_word(&self, word: usize, mask: u64) -> u64 {
        let before = self.mine()[word].fetch_or(mask, SeqCst);
        let got = mask & !before;
        let lost = got & self.taken_by_others(word);
        if lost != 0 {
            self.mine()[word].fetch_and(!lost, SeqCst);
        }
        got & !lost
    }

    fn taken_by_others(&self, word: usize) -> u64 {
        loop {
            let generation = self.generation().load(SeqCst);
            let taken = self.others().fold(0, |taken, member| taken | self.bitmap(member)[word].load(SeqCst));
            if self.generation().load(SeqCst) == generation {
                return taken;
            }
        }
    }

    fn taken(&self, word: usize) -> u64 {
        let members = 0..self.members_end().load(Relaxed) as u32;
        members.fold(0, |taken, member| taken | self.bitmap(member)[word].load(Relaxed))
    }

    /// The bloks of the word that lie below `end` and may be given out.
    fn below(&self, end: u32, word: usize) -> u64 {
        let below = (end as u64).saturating_sub(word as u64 * WORD_BLOKS as u64).min(WORD_BLOKS as u64) as u32;
        let valid = !(!0_u64).checked_shl(below).unwrap_or(0);
        if word == 0 { valid & !1 } else { valid }
    }

    /// The member that this process is.
    pub fn me(&self) -> Option<u32> {
        (self.me.words()[0].load(Relaxed) as u32).checked_sub(1)
    }

    fn be(&self, member: u32) {
        self.me.words()[0].store(u64::from(member) + 1, Relaxed);
    }

    fn mine(&self) -> &[AtomicU64] {
        match self.me() {
            Some(member) => self.bitmap(member),
            None => panic!("this process has no part in the store"),
        }
    }

    fn bitmap(&self, member: u32) -> &[AtomicU64] {
        self.bitmap_at(self.bitmap_page(member))
    }

    fn written(&self) -> &[AtomicU64] {
        self.bitmap_at(1)
    }

    fn bitmap_at(&self, page: usize) -> &[AtomicU64] {
        let first = page * PAGE_WORDS;
        &self.map.words()[first..first + self.count.div_ceil(WORD_BLOKS) as usize]
    }

    fn bitmap_page(&self, member: u32) -> usize {
        1 + (1 + member as usize) * self.bitmap_pages
    }

    fn members_end(&self) -> &AtomicU64 {
        &self.map.words()[0]
    }

    fn generation(&self) -> &AtomicU64 {
        &self.map.words()[1]
    }

    fn family_mark(&self) -> &AtomicU64 {
        &self.map.words()[2]
    }
}

/// How far the mark moves at a time: so far that to look at all below it first costs each blok little.
fn step(mark: u32) -> i64 {
    i64::from(mark / 64 + 256)
}

/// The words of the run with the bits that it covers in each.
fn masks(run: Run) -> impl Iterator<Item = (usize, u64)> {
    let (mut at, end) = (run.first as u64, run.first as u64 + run.len as u64);
    std::iter::from_fn(move || {
        let bit = at % WORD_BLOKS as u64;
        let len = (end - at).min(WORD_BLOKS as u64 - bit);
        let word = (at / WORD_BLOKS as u64) as usize;
        at += len;
        (len > 0).then(|| (word, (!0 >> (WORD_BLOKS as u64 - len)) << bit))
    })
}

#[cfg(test)]
#[path = "bloks_tests.rs"]
mod tests;
