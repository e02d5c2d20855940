//! Pages that the program protects: what it wants of each stands in the page's word, and the machine follows.
//!
//! # Source
//! AVM §2.1 and Appel & Li: a program changes the protection of its own pages, and answers the faults. Nemesis §6.1 protects whole
//! stretches; ours are pages.

use super::{Failure, Outcome, Step, lost, range, refused_whole};
use crate::addr::{Frame, PageBytes, PageNo, PageRange};
use crate::domain::DomainState;
use crate::mmu::{Partial, Refusal, Writing};
use crate::page::{PageWord, State, Wishes, Word};
use crate::region::{Access, Region};
use crate::sync::Ordering;

/// Pages worked on between two visits of the gate.
const STRETCH: usize = 256;
/// The same where there are few: room for many takes longer to lay out than one page takes to protect.
const FEW: usize = 4;

/// What the program may do with a page before its handler is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// Nothing: every access is a fault.
    None,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

impl Protection {
    const fn wishes(self) -> Wishes {
        match self {
            Protection::None => Wishes::PROGRAM_ACCESSES,
            Protection::Read => Wishes::PROGRAM_WRITES,
            Protection::ReadWrite => Wishes::NONE,
        }
    }

    fn of(wishes: Wishes) -> Protection {
        if wishes.unmapped() {
            Protection::None
        } else if wishes.forbid(Access::Write) {
            Protection::Read
        } else {
            Protection::ReadWrite
        }
    }
}

/// Why a page could not be protected as the program wanted; it is as it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unprotected {
    /// It is pinned, and so must stay mapped.
    Pinned,
    /// The machine would not do it.
    Machine(Refusal),
}

/// A resident page that is claimed, and what was wanted of it before.
type Claimed = (PageNo, Frame, Wishes);

/// Protects `range`, which must lie in one region: from its return on no access that the protection does not allow goes through.
/// Pages that are not in core are protected too, when they come. A page that nobody may access keeps its frame, unmapped, until
/// somebody wants it.
///
/// # Context
/// Normal, outside the gate; also in a handler of the program's, which runs outside of everything.
///
/// # Errors
/// The first page that could not be, and why. A pinned page is found before anything is changed, unless it is pinned meanwhile; else
/// pages before it are protected, and it and those after it are as they were.
pub fn protect(domain: &DomainState, range: PageRange, protection: Protection) -> Result<(), (PageNo, Unprotected)> {
    if protection == Protection::None {
        if let Some(page) = first_pinned(domain, range) {
            return Err((page, Unprotected::Pinned));
        }
        domain.hides.store(true, Ordering::SeqCst);
    }
    match range.count as usize <= FEW {
        true => protect_with_room::<FEW>(domain, range, protection),
        false => protect_with_room::<STRETCH>(domain, range, protection),
    }
}

fn protect_with_room<const ROOM: usize>(
    domain: &DomainState,
    range: PageRange,
    protection: Protection,
) -> Result<(), (PageNo, Unprotected)> {
    let mut at = range.first;
    while at < range.end() {
        let mut next = at;
        let mut failed = None;
        range::settle_step(domain, at, |region| {
            let claimed = [(PageNo(0), Frame(0), Wishes::NONE); ROOM];
            let mut stretch = Stretch { domain, region, claimed, len: 0 };
            let step;
            let count = (range.end().0 - at.0).min(range::MOST_LOOKS);
            (next, step) = stretch.claim(PageRange { first: at, count }, protection);
            failed = match (stretch.apply(protection), &step) {
                (Err(failed), _) => Some(failed),
                (Ok(()), Step::Done(Outcome::Violation)) => Some((next, Unprotected::Pinned)),
                (Ok(()), _) => None,
            };
            step
        });
        if let Some(failed) = failed {
            return Err(failed);
        }
        // Outside of any region nothing is done, and there is nothing to wait for.
        at = if next == at { at.plus(1) } else { next };
    }
    Ok(())
}

fn first_pinned(domain: &DomainState, range: PageRange) -> Option<PageNo> {
    range.pieces(range::MOST_LOOKS).find_map(|piece| {
        let _inside = domain.gate.enter(domain.mmu);
        let region = domain.regions.find(piece.first)?;
        piece.pages().find(|page| region.word(*page).is_some_and(|word| word.load().pins() > 0))
    })
}

/// How `page` is protected now. `None`: it is in no region.
///
/// # Context
/// Any, outside the gate.
pub fn protection(domain: &DomainState, page: PageNo) -> Option<Protection> {
    let _inside = domain.gate.enter(domain.mmu);
    let word = domain.regions.find(page)?.word(page)?;
    Some(Protection::of(word.load().wishes()))
}

/// Shows the pages in core whose writes trap, in no order.
///
/// # Context
/// Normal, with the gate closed.
pub fn each_protected(domain: &DomainState, mut visit: impl FnMut(PageNo)) {
    domain.each_held(|region, page, seen| {
        if seen.state() == State::Resident && region.write_protected(page) {
            visit(page);
        }
    });
}

/// In a forked child: the kernel forgets what it protected for us, so the machine is told anew of what [`each_protected`] has
/// shown, `pages` (ascending), in as few calls as their neighbourhood allows.
///
/// # Context
/// Normal, with the gate closed.
///
/// # Errors
/// The machine would not do it.
pub fn protect_again(domain: &DomainState, pages: &[PageNo]) -> Result<(), Refusal> {
    let mut rest = pages;
    while let Some(&first) = rest.first() {
        let Some(region) = domain.regions.find(first) else { return Ok(()) };
        let neighbours =
            (0..).zip(rest).take_while(|(step, page)| **page == first.plus(*step) && region.range.contains(**page));
        let run = neighbours.count();
        let protected = domain.mmu.set_writing(region.trap, first, run as u32, Writing::Protected);
        protected.map_err(|partial| partial.why)?;
        rest = rest.get(run..).unwrap_or(&[]);
    }
    Ok(())
}

/// Lets a write to a page in core go on that is protected where nobody wants that. `None`: it is none, or not so. Linux keeps a protection
/// with a page that it has swapped out, also while the page moves from a region to its slot and back, where nobody knows of it.
pub(super) fn end_protection(
    domain: &DomainState,
    region: &Region,
    page: PageNo,
    seen: Word,
    access: Access,
) -> Option<Step> {
    let word = region.word(page)?;
    // A save ends by itself, and the access is tried again.
    let passes_by = access != Access::Write || region.trap.is_tracked() || seen.in_save();
    if passes_by || !domain.mmu.faults_writes(page) || region.write_protected(page) {
        return None;
    }
    if !word.claim(seen) {
        return Some(Step::Again);
    }
    let allowed = if region.write_protected(page) { Err(Step::Again) } else { allow_writing(domain, region, page) };
    domain.settle(region, page, Word::new(State::Resident, seen.frame()));
    // Nothing tells that this is done: whoever had it handed over, and looked again, would have it so again.
    Some(allowed.map_or_else(|step| step, |()| Step::Done(Outcome::Retry)))
}

/// Lets the program write to a claimed page, and the write that brought us here go on.
///
/// # Errors
/// What is to be done instead.
pub(super) fn allow_writing(domain: &DomainState, region: &Region, page: PageNo) -> Result<(), Step> {
    let allowed = domain.mmu.set_writing(region.trap, page, 1, Writing::Allowed);
    allowed.map_err(|partial| match refused_whole(domain, region, page, partial.why) {
        // What else fails may be of a page that was absent then, and is there by the time that somebody looks.
        Step::Done(Outcome::Failed(Failure::Machine(why))) => Step::Done(Outcome::Failed(Failure::Writing(why))),
        step => step,
    })
}

/// Whether `page` is in core, and a write to it is a fault still. A page that somebody is at is waited for.
///
/// # Context
/// PagerThread, outside the gate.
pub fn traps_writes(domain: &DomainState, page: PageNo) -> bool {
    range::settled(domain, page, |region, seen| {
        seen.state() == State::Resident && (region.write_protected(page) || domain.mmu.faults_writes(page))
    })
}

/// Shows what is in the frames of pages that nobody may access: nobody else has it.
///
/// # Context
/// Normal, with the gate closed.
pub fn each_aside(domain: &DomainState, mut visit: impl FnMut(Frame, &PageBytes)) {
    if !domain.hides.load(Ordering::SeqCst) {
        return;
    }
    domain.each_held(|_, _, seen| {
        if seen.state() == State::Aside && seen.wishes().unmapped() {
            visit(seen.frame(), domain.lease(seen.frame()).get());
        }
    });
}

/// In a forked child, whose frames are others: puts into one what [`each_aside`] has shown.
///
/// # Context
/// As for [`each_aside`].
///
/// # Errors
/// The system has no memory for the frame.
pub fn put_aside(domain: &DomainState, frame: Frame, contents: &PageBytes) -> Result<(), Refusal> {
    domain.mmu.populate(frame, 1).map_err(|partial| partial.why)?;
    *domain.lease(frame).get_mut() = *contents;
    Ok(())
}

/// Changes what is wanted of a page that is claimed. Pins are taken back, and saves end, at any time.
pub(super) fn wish(word: &PageWord, wishes: Wishes) {
    while !word.wish(word.load(), wishes) {}
}

struct Stretch<'a, const ROOM: usize> {
    domain: &'a DomainState,
    region: &'a Region,
    claimed: [Claimed; ROOM],
    len: usize,
}

impl<const ROOM: usize> Stretch<'_, ROOM> {
    /// Says in the word of each page from the front of `range` on what is wanted of it, and claims those that are mapped, until
    /// there are many of them or one must be waited for. How far it came.
    fn claim(&mut self, range: PageRange, protection: Protection) -> (PageNo, Step) {
        let mut next = range.first;
        while next < range.end() && self.len < ROOM {
            let Some(word) = self.region.word(next) else { break };
            let seen = word.load();
            let wishes = seen.wishes().with_program(protection.wishes());
            let resident = seen.state() == State::Resident;
            if seen.is_busy_or_saved_in_core() {
                if next > range.first {
                    break;
                }
                return (next, word.await_change(seen).map_or(Step::Again, Step::AwaitPage));
            }
            if wishes == seen.wishes() {
                next = next.plus(1);
            } else if resident && wishes.unmapped() && seen.pins() > 0 {
                return (next, Step::Done(Outcome::Violation));
            } else if !resident && self.len > 0 {
                // The machine may refuse one of those before it: then this one stays as it is.
                break;
            } else if !resident {
                let wished = self.wish_of_unmapped(word, seen, wishes);
                next = next.plus(u64::from(wished));
            } else if word.claim(seen) {
                self.push((next, seen.frame(), seen.wishes()), wishes);
                next = next.plus(1);
            }
        }
        (next, Step::Done(Outcome::Resolved))
    }

    /// Changes what is wanted of a page that is not mapped. A page aside that the program no longer wants there waits for its next
    /// use, as one that was sampled.
    fn wish_of_unmapped(&self, word: &PageWord, seen: Word, wishes: Wishes) -> bool {
        let aside = seen.state() == State::Aside;
        if aside && !wishes.unmapped() && seen.wishes().unmapped() {
            self.domain.stack.joins_sampled();
            let wished = word.wish(seen, wishes);
            if !wished {
                self.domain.stack.leaves_sampled();
            }
            return wished;
        }
        let wished = word.wish(seen, wishes);
        if wished && aside && wishes.unmapped() {
            self.domain.leaves_aside(seen);
        }
        wished
    }

    fn push(&mut self, page: Claimed, wishes: Wishes) {
        if let Some(entry) = self.claimed.get_mut(self.len) {
            *entry = page;
            self.len += 1;
            self.wish(page.0, wishes);
        }
    }

    fn wish(&self, page: PageNo, wishes: Wishes) {
        if let Some(word) = self.region.word(page) {
            wish(word, wishes);
        }
    }

    fn claimed(&self) -> &[Claimed] {
        self.claimed.get(..self.len).unwrap_or(&[])
    }

    /// Has the machine follow for the claimed pages, in as few calls as their neighbourhood allows, and settles them. A page that the
    /// program has dropped or mapped over is lost.
    fn apply(&self, protection: Protection) -> Result<(), (PageNo, Unprotected)> {
        let state = if protection == Protection::None { State::Aside } else { State::Resident };
        let mut at = 0;
        while let Some(rest) = self.claimed().get(at..)
            && !rest.is_empty()
        {
            let (done, refusal) = if state == State::Aside { self.unmap(rest) } else { self.set_writing(rest) };
            for &(page, frame, _) in rest.get(..done).unwrap_or(rest) {
                self.domain.settle(self.region, page, Word::new(state, frame));
            }
            at += done;
            match (refusal, self.claimed().get(at), self.region.pager()) {
                (None, ..) => {}
                (Some(Refusal::Hole | Refusal::Foreign), Some(&(page, frame, _)), Some(pager)) => {
                    lost(self.domain, self.region, pager, page, frame);
                    at += 1;
                }
                (Some(why), stopped, _) => {
                    let first = stopped.map_or(PageNo(0), |entry| entry.0);
                    for &(page, frame, before) in self.claimed().get(at..).unwrap_or(&[]) {
                        self.wish(page, before);
                        self.domain.settle(self.region, page, Word::new(State::Resident, frame));
                    }
                    return Err((first, Unprotected::Machine(why)));
                }
            }
        }
        Ok(())
    }

    /// How many pages at the front are neighbours and alike.
    fn run(&self, pages: &[Claimed], alike: impl Fn(&Claimed, &Claimed) -> bool) -> usize {
        let next = |pair: &(&Claimed, &Claimed)| pair.1.0.0 == pair.0.0.0 + 1 && alike(pair.0, pair.1);
        1 + pages.iter().zip(pages.iter().skip(1)).take_while(next).count()
    }

    /// Allows or forbids writing to the first run of the pages. To how many, and what stopped it.
    fn set_writing(&self, pages: &[Claimed]) -> (usize, Option<Refusal>) {
        let Some(&(first, ..)) = pages.first() else { return (0, None) };
        let protected = |page: PageNo| self.region.write_protected(page);
        let run = self.run(pages, |one, other| protected(one.0) == protected(other.0));
        let writing = if protected(first) { Writing::Protected } else { Writing::Allowed };
        Partial::split(self.domain.mmu.set_writing(self.region.trap, first, run as u32, writing), run)
    }

    /// Unmaps the first run of the pages, whose frames keep their contents. How many, and what stopped it.
    fn unmap(&self, pages: &[Claimed]) -> (usize, Option<Refusal>) {
        let Some(&(first, frame, _)) = pages.first() else { return (0, None) };
        let run = self.run(pages, |one, other| other.1.0 == one.1.0 + 1);
        let (done, refusal) = Partial::split(self.domain.mmu.unmap(first, frame, run as u32), run);
        let (Some(why), Some(&(page, frame, _))) = (refusal, pages.get(done)) else { return (done, refusal) };
        match self.domain.unmap_keyed(self.region, page, frame, why) {
            Ok(()) => (done + 1, None),
            Err(why) => (done, Some(why)),
        }
    }
}
