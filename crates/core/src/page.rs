//! The page word: what is known of one page of a region, in 64 bits, and the only lock a page has.
//!
//! ```text
//! 63            32 31    23 22    20 19       8 7      4 3     0
//! |     frame     | unused | wishes |   pins   | flags  | state |
//! ```
//! Whoever moves a word to [`State::Busy`] owns the page until it settles the word again. Sleepers wait on the low half.
//!
//! # Source
//! Nemesis §6.3: ours is what the page table's entry and the stretch driver's own table know together.
#![allow(unsafe_code)]

use crate::addr::Frame;
use crate::region::Access;
use crate::sync::{AtomicU64, Ordering, race};

/// What a page is. `Absent` is zero, so that fresh zeroed memory is a valid table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum State {
    /// No frame holds it; its contents, if any, are with the pager.
    Absent = 0,
    /// One thread is working on it.
    Busy = 1,
    /// The frame is mapped at the page.
    Resident = 2,
    /// Unmapped; the frame still holds the contents, and so does the pager: either may be used.
    Standby = 3,
    /// Unmapped; the frame holds the only copy of the contents, and they are being saved.
    Saving = 4,
    /// No frame holds it, and every access fails: its contents could not be had.
    Poisoned = 5,
    /// Unmapped, to see whether it is used or because the program wants every access to trap; the frame holds the contents,
    /// perhaps the only copy.
    Aside = 6,
}

const STATE: u64 = 0xf;
const WAITERS: u64 = 1 << 4;
const IN_SAVE: u64 = 1 << 5;
const TRIP: u64 = 1 << 6;
const FAILED: u64 = 1 << 7;
const PIN_SHIFT: u32 = 8;
const PIN_MASK: u64 = 0xfff;
const WISH_SHIFT: u32 = 20;
const WISH_MASK: u64 = 0x7;
const WISHES: u64 = WISH_MASK << WISH_SHIFT;
const FRAME_SHIFT: u32 = 32;

/// Who wants accesses to a page to trap. They belong to the page and not to its contents: they stay when it is evicted, and when
/// it is discarded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Wishes(u8);

impl Wishes {
    /// Nobody wants any.
    pub const NONE: Wishes = Wishes(0);
    /// The program wants to know of writes.
    pub const PROGRAM_WRITES: Wishes = Wishes(1);
    /// The program wants to know of every access: while it does, the page is not mapped.
    pub const PROGRAM_ACCESSES: Wishes = Wishes(2);
    /// A snapshot wants a copy before the first write.
    pub const COPY_FIRST: Wishes = Wishes(4);

    /// These and those.
    pub const fn and(self, other: Wishes) -> Wishes {
        Wishes(self.0 | other.0)
    }
    /// These, but not those.
    pub const fn without(self, other: Wishes) -> Wishes {
        Wishes(self.0 & !other.0)
    }
    /// Whether a snapshot wants a copy before the first write.
    pub const fn copied_first(self) -> bool {
        self.0 & Wishes::COPY_FIRST.0 != 0
    }
    /// These, with the program's own replaced by `program`.
    pub const fn with_program(self, program: Wishes) -> Wishes {
        Wishes(self.0 & !(Wishes::PROGRAM_WRITES.0 | Wishes::PROGRAM_ACCESSES.0) | program.0)
    }
    /// The rule: the machine protects a page that it maps against writes if, and only if, somebody wants that.
    pub const fn write_protected(self) -> bool {
        self.0 != 0
    }
    /// Whether the page may not be mapped at all.
    pub const fn unmapped(self) -> bool {
        self.0 & Wishes::PROGRAM_ACCESSES.0 != 0
    }
    /// Whether the program wants to be asked before this access.
    pub fn forbid(self, access: Access) -> bool {
        self.unmapped() || (access == Access::Write && self.0 & Wishes::PROGRAM_WRITES.0 != 0)
    }
}

/// One reading of a page word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word(u64);

impl core::fmt::Debug for Word {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Word")
            .field("state", &self.state())
            .field("frame", &self.frame().0)
            .field("pins", &self.pins())
            .field("in_save", &self.in_save())
            .field("waiters", &(self.0 & WAITERS != 0))
            .field("wishes", &self.wishes())
            .finish()
    }
}

impl Word {
    /// A word in `state` with `frame`, unpinned.
    pub const fn new(state: State, frame: Frame) -> Word {
        Word(state as u64 | (frame.0 as u64) << FRAME_SHIFT)
    }
    /// An absent page.
    pub const ABSENT: Word = Word(0);

    /// The same, as a tripwire: whoever touches it has reached the next chunk of a stream.
    pub const fn with_trip(self) -> Word {
        Word(self.0 | TRIP)
    }
    /// The same, marked as being saved.
    pub const fn with_save(self) -> Word {
        Word(self.0 | IN_SAVE)
    }
    /// The same, absent: whoever wanted it last could not have it.
    pub const fn with_failure(self) -> Word {
        Word(self.0 | FAILED)
    }
    /// The state.
    pub const fn state(self) -> State {
        match self.0 & STATE {
            0 => State::Absent,
            1 => State::Busy,
            2 => State::Resident,
            3 => State::Standby,
            4 => State::Saving,
            5 => State::Poisoned,
            _ => State::Aside,
        }
    }
    /// The frame, in the states that have one.
    pub const fn frame(self) -> Frame {
        Frame((self.0 >> FRAME_SHIFT) as u32)
    }
    /// How many pins hold it in core.
    pub const fn pins(self) -> u32 {
        (self.0 >> PIN_SHIFT & PIN_MASK) as u32
    }
    /// Whether a save of it is still in flight (perhaps of an older copy).
    pub const fn in_save(self) -> bool {
        self.0 & IN_SAVE != 0
    }

    /// Whether somebody is at the page, or it is saved where it is in core. Either ends by itself, and tells those who wait.
    pub fn is_busy_or_saved_in_core(self) -> bool {
        self.state() == State::Busy || (self.state() == State::Resident && self.in_save())
    }
    /// Whether the page is nowhere but with its pager, if there: neither in core nor on its way out.
    pub fn is_away(self) -> bool {
        self.state() == State::Absent && !self.in_save()
    }
    /// Whether it is a tripwire.
    pub const fn trip(self) -> bool {
        self.0 & TRIP != 0
    }
    /// Whether it is absent, and whoever wanted it last could not have it.
    pub const fn failed(self) -> bool {
        self.0 & FAILED != 0
    }
    /// Who wants accesses to trap.
    pub const fn wishes(self) -> Wishes {
        Wishes((self.0 >> WISH_SHIFT & WISH_MASK) as u8)
    }
    /// The half that sleepers wait on.
    pub const fn low(self) -> u32 {
        self.0 as u32
    }
}

/// What [`PageWord::settle`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settled {
    /// Somebody waits, and the caller must wake them.
    pub awaited: bool,
    /// A save is still in flight.
    pub in_save: bool,
}

/// What [`PageWord::end_save`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SaveEnd {
    /// What became of the page during the save.
    pub found: Found,
    /// Somebody waits, and the caller must wake them.
    pub awaited: bool,
}

/// What became of a page while it was being saved. Whoever ends second gives the old frame back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// Nothing: its frame is the saver's to settle.
    Untouched,
    /// Its contents are being copied to another frame just now: the copier gives the old frame back.
    BeingCopied,
    /// Its contents were copied to another frame: the saver gives the old frame back.
    Copied,
}

/// The page word itself.
#[repr(transparent)]
#[derive(Default)]
pub struct PageWord(AtomicU64);

impl PageWord {
    /// An absent page.
    pub fn new() -> PageWord {
        PageWord(AtomicU64::new(0))
    }

    /// Reads it.
    pub fn load(&self) -> Word {
        let word = Word(self.0.load(Ordering::Acquire));
        race();
        word
    }

    /// Takes the page: `seen` → Busy, everything else in the word kept. `false`: the word changed meanwhile.
    #[must_use]
    pub fn claim(&self, seen: Word) -> bool {
        debug_assert!(seen.state() != State::Busy);
        let busy = seen.0 & !STATE | State::Busy as u64;
        self.0.compare_exchange(seen.0, busy, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Takes the page if it is on standby in `frame`, whatever else becomes of its word meanwhile: nobody else may find that frame.
    #[must_use]
    pub fn claim_standby(&self, frame: Frame) -> bool {
        loop {
            let seen = self.load();
            if seen.state() != State::Standby || seen.frame() != frame {
                return false;
            }
            if self.claim(seen) {
                return true;
            }
        }
    }

    /// Ends a claim: the page is `next` from now on. Keeps the wishes, the mark of a save in flight, and the pins of a page that
    /// stays resident: they may have been taken back meanwhile.
    #[must_use]
    pub fn settle(&self, next: Word) -> Settled {
        race();
        let kept = if next.state() == State::Resident { PIN_MASK << PIN_SHIFT } else { 0 };
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            debug_assert!(Word(seen).state() == State::Busy);
            let new = next.0 & !(kept | WISHES) | seen & (IN_SAVE | WISHES | kept);
            match self.0.compare_exchange_weak(seen, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    return Settled { awaited: seen & WAITERS != 0, in_save: seen & IN_SAVE != 0 };
                }
                Err(other) => seen = other,
            }
        }
    }

    /// Says that somebody waits for the word to change from `seen`, and gives what to sleep on. `None`: it changed
    /// already.
    #[must_use]
    pub fn await_change(&self, seen: Word) -> Option<Word> {
        let marked = seen.0 | WAITERS;
        (seen.0 == marked || self.0.compare_exchange(seen.0, marked, Ordering::AcqRel, Ordering::Relaxed).is_ok())
            .then_some(Word(marked))
    }

    /// Adds a pin to a resident page. `false`: the word changed, or there are 4095 already.
    #[must_use]
    pub fn pin(&self, seen: Word) -> bool {
        debug_assert!(seen.state() == State::Resident);
        seen.pins() < PIN_MASK as u32 && self.exchange(seen, Word(seen.0 + (1 << PIN_SHIFT)))
    }

    /// Takes a pin back. `false`: the word changed, or there is none.
    #[must_use]
    pub fn unpin(&self, seen: Word) -> bool {
        seen.pins() > 0 && self.exchange(seen, Word(seen.0 - (1 << PIN_SHIFT)))
    }

    /// Notes that an absent page could not be had, which nobody has claimed for it, until somebody has settled it anew. `false`: the word
    /// changed.
    #[must_use]
    pub fn fail(&self, seen: Word) -> bool {
        debug_assert!(seen.state() == State::Absent);
        self.exchange(seen, Word(seen.0 | FAILED))
    }

    /// Takes all pins of a claimed page back: they were on what is dropped there, and settling it would keep them.
    pub fn drop_pins(&self) {
        self.0.fetch_and(!(PIN_MASK << PIN_SHIFT), Ordering::AcqRel);
    }

    /// Replaces the wishes. While a page is mapped only whoever has claimed it may: what the machine does must follow. `false`: the
    /// word changed.
    #[must_use]
    pub fn wish(&self, seen: Word, wishes: Wishes) -> bool {
        debug_assert!(seen.state() != State::Resident);
        self.exchange(seen, Word(seen.0 & !WISHES | u64::from(wishes.0) << WISH_SHIFT))
    }

    /// A save that was in flight has ended. If nobody touched the page meanwhile it becomes `settled`, else only the mark
    /// goes.
    #[must_use]
    pub fn end_save(&self, settled: Word) -> SaveEnd {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            debug_assert!(Word(seen).in_save());
            let (new, found) = match Word(seen).state() {
                State::Saving => (settled.0 & !WISHES | seen & WISHES, Found::Untouched),
                // A Busy page keeps its sleepers: its owner wakes them.
                State::Busy => (seen & !IN_SAVE, Found::BeingCopied),
                _ => (seen & !IN_SAVE & !WAITERS, Found::Copied),
            };
            match self.0.compare_exchange_weak(seen, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    return SaveEnd { found, awaited: seen & WAITERS != 0 && new & WAITERS == 0 };
                }
                Err(other) => seen = other,
            }
        }
    }

    fn exchange(&self, seen: Word, new: Word) -> bool {
        self.0.compare_exchange(seen.0, new.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// What sleepers on this page sleep on.
    #[cfg(not(loom))]
    pub fn low_half(&self) -> &core::sync::atomic::AtomicU32 {
        const { assert!(cfg!(target_endian = "little")) };
        // SAFETY: page-word-low-half: the low half of a live, 8-byte aligned AtomicU64, itself aligned for an AtomicU32
        // and only ever read through this reference (the kernel compares it).
        unsafe { core::sync::atomic::AtomicU32::from_ptr(self.0.as_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An unpinned word, pinned.
    fn with_pins(word: Word, pins: u64) -> Word {
        Word(word.0 | pins << PIN_SHIFT)
    }

    #[test]
    fn a_word_keeps_what_is_put_into_it() {
        let word = with_pins(Word::new(State::Resident, Frame(0xdead_beef)), 77).with_trip();
        assert_eq!((word.state(), word.frame().0, word.pins(), word.trip()), (State::Resident, 0xdead_beef, 77, true));
        assert!(!word.in_save());
    }

    #[test]
    fn settling_keeps_the_save_mark_and_reports_sleepers() {
        let page = PageWord::new();
        assert!(page.claim(Word::ABSENT));
        assert!(page.await_change(page.load()).is_some());
        assert!(page.settle(Word::new(State::Saving, Frame(3)).with_save()).awaited);
        assert!(page.claim(page.load()));
        assert_eq!(page.settle(Word::new(State::Resident, Frame(4))), Settled { awaited: false, in_save: true });
        assert_eq!(page.end_save(Word::ABSENT), SaveEnd { found: Found::Copied, awaited: false });
        assert_eq!(page.load(), Word::new(State::Resident, Frame(4)));
    }

    #[test]
    fn a_pin_taken_back_during_a_claim_is_gone() {
        let page = PageWord::new();
        assert!(page.claim(Word::ABSENT));
        let _ = page.settle(Word::new(State::Resident, Frame(3)));
        assert!(page.pin(page.load()));
        let seen = page.load();
        assert!(page.claim(seen));
        assert!(page.unpin(page.load()));
        let _ = page.settle(seen);
        assert_eq!(page.load(), Word::new(State::Resident, Frame(3)));
    }

    #[test]
    fn wishes_outlive_whatever_becomes_of_the_page() {
        let page = PageWord::new();
        let wishes = Wishes::PROGRAM_WRITES.and(Wishes::COPY_FIRST);
        assert!(page.wish(page.load(), wishes));
        for next in [
            with_pins(Word::new(State::Resident, Frame(3)), 2),
            Word::ABSENT,
            Word::new(State::Saving, Frame(3)).with_save(),
        ] {
            assert!(page.claim(page.load()));
            let _ = page.settle(next);
            assert_eq!((page.load().wishes(), page.load().state()), (wishes, next.state()));
        }
        let _ = page.end_save(Word::new(State::Standby, Frame(3)));
        assert_eq!(page.load().wishes(), wishes);
        assert!(page.wish(page.load(), wishes.with_program(Wishes::NONE)));
        assert_eq!(page.load().wishes(), Wishes::COPY_FIRST);
        assert_eq!((page.load().state(), page.load().frame()), (State::Standby, Frame(3)));
    }

    #[test]
    fn a_save_that_nobody_disturbed_settles_the_page() {
        let page = PageWord::new();
        assert!(page.claim(Word::ABSENT));
        assert!(!page.settle(Word::new(State::Saving, Frame(3)).with_save()).awaited);
        let end = page.end_save(Word::new(State::Standby, Frame(3)));
        assert_eq!(end, SaveEnd { found: Found::Untouched, awaited: false });
        assert_eq!(page.load().state(), State::Standby);
    }
}
