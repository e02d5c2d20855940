//! Which pages are used: some are unmapped while their contents stay in their frames, and whoever uses one takes a fault
//! without I/O, which is noted. Those on standby are unmapped already.
//!
//! # Source
//! Denning's working set (CACM 1968), by the statistical sampling of Waldspurger's "Memory Resource Management in VMware ESX
//! Server" (§5.3): stock Linux shows no accessed bits of a program's own pages.

use core::ops::Range;

use super::evict::{is_mapped_over, mapped_over, unmap_each};
use super::lost;
use crate::addr::{Frame, PageNo, PageRange};
use crate::domain::DomainState;
use crate::mmu::Refusal;
use crate::page::{State, Word};
use crate::region::Region;
use crate::sync::Ordering;
use crate::trace::Counters;
use crate::tracer::Kind;

/// Pages worked on between two visits of the gate.
pub const STRETCH: usize = 256;

/// Up to [`STRETCH`] pages, each with the frame that it was found in.
#[derive(Clone, Copy)]
pub struct Stretch {
    pages: [(PageNo, Frame); STRETCH],
    len: usize,
}

impl Stretch {
    const EMPTY: Stretch = Stretch { pages: [(PageNo(0), Frame(0)); STRETCH], len: 0 };

    fn push(&mut self, page: PageNo, frame: Frame) {
        if let Some(entry) = self.pages.get_mut(self.len) {
            *entry = (page, frame);
            self.len += 1;
        }
    }

    /// The pages.
    pub fn pages(&self) -> &[(PageNo, Frame)] {
        self.pages.get(..self.len).unwrap_or(&[])
    }
}

/// The pages of `range` that have one of `frames` in core and could be sampled. No more than [`STRETCH`] frames are looked at.
///
/// # Context
/// Normal, outside the gate.
pub fn in_core(domain: &DomainState, frames: Range<u32>, range: PageRange) -> Stretch {
    let _inside = domain.gate.enter(domain.mmu);
    let mut found = Stretch::EMPTY;
    for frame in frames.take(STRETCH).map(Frame) {
        if let Some(page) = domain.frames.owner(frame)
            && range.contains(page)
            && let Some(word) = domain.regions.find(page).and_then(|region| region.word(page))
            && let seen = word.load()
            && match seen.state() {
                State::Resident | State::Standby | State::Aside => {
                    seen.frame() == frame && seen.pins() == 0 && !seen.wishes().unmapped()
                }
                state => state == State::Busy && may_be_used(domain, page),
            }
        {
            found.push(page, frame);
        }
    }
    found
}

/// Whether a page that somebody is at is mapped, or just being: the program may use it before its word says so, and after it says that
/// it is about to go. A page that its pager still fills is not.
fn may_be_used(domain: &DomainState, page: PageNo) -> bool {
    let region = domain.regions.find(page);
    let byte = region.and_then(|region| region.residency().get(region.index(page) as usize));
    byte.is_some_and(|byte| byte.load(Ordering::Acquire) != 0)
}

/// Waits for those of `pages` that somebody is at while the program can use them already: whoever has used a page runs on before its
/// word says so. For no longer than until `deadline_ns`: a flush has pages claimed while their pager saves them.
///
/// # Context
/// Normal, outside the gate.
pub fn await_settled(domain: &DomainState, pages: &[(PageNo, Frame)], deadline_ns: u64) {
    for &(page, _) in pages {
        loop {
            let inside = domain.gate.enter(domain.mmu);
            let Some(word) = domain.regions.find(page).and_then(|region| region.word(page)) else { break };
            let seen = word.load();
            if seen.state() != State::Busy || !may_be_used(domain, page) {
                break;
            }
            let Some(seen) = word.await_change(seen) else { continue };
            drop(inside);
            let left_us = deadline_ns.saturating_sub(domain.mmu.now_ns()) / 1000;
            if left_us == 0 {
                return;
            }
            domain.mmu.sleep(word.low_half(), seen.low(), u32::try_from(left_us).unwrap_or(u32::MAX));
        }
    }
}

/// Unmaps those of `pages` (ascending) that still are where they were found, for their next use to be seen. A page that has been
/// unmapped so since an earlier time need not be unmapped again. Which pages those are; a page that is pinned, being saved, held by the
/// kernel, or that somebody is at, is not among them.
///
/// # Context
/// PagerThread or Normal, outside the gate.
pub fn begin(domain: &DomainState, pages: &[(PageNo, Frame)]) -> Stretch {
    let _inside = domain.gate.enter(domain.mmu);
    let (mut sample, mut claimed) = (Stretch::EMPTY, Stretch::EMPTY);
    for &(page, frame) in pages.iter().take(STRETCH) {
        match set_out(domain, page, frame) {
            Some(State::Resident) => claimed.push(page, frame),
            Some(_) => sample.push(page, frame),
            None => {}
        }
    }
    unmap(domain, claimed.pages(), &mut sample);
    Counters::add(&domain.counters.sampled_total, sample.len as u64);
    sample
}

/// Forgets that the page was used. Claims it where it is mapped; the state that it was found in. `None`: not now.
fn set_out(domain: &DomainState, page: PageNo, frame: Frame) -> Option<State> {
    let word = domain.regions.find(page)?.word(page)?;
    loop {
        let seen = word.load();
        if seen.frame() != frame || seen.pins() > 0 || seen.in_save() || seen.wishes().unmapped() {
            return None;
        }
        match seen.state() {
            State::Resident if word.claim(seen) => {
                domain.frames.forget_use(frame);
                return Some(State::Resident);
            }
            State::Resident => {}
            state @ (State::Standby | State::Aside) => {
                domain.frames.forget_use(frame);
                // Whoever used it meanwhile may have noted that before it was forgotten: then it is mapped by now.
                if word.load() == seen {
                    return Some(state);
                }
            }
            _ => return None,
        }
    }
}

/// Unmaps claimed pages, and adds them to the sample.
fn unmap(domain: &DomainState, pages: &[(PageNo, Frame)], sample: &mut Stretch) {
    unmap_each(domain, pages, |region, page, frame, unmapped| match (unmapped, region.pager()) {
        (Ok(()), _) => {
            domain.stack.joins_sampled();
            domain.settle(region, page, Word::new(State::Aside, frame));
            sample.push(page, frame);
            domain.trace(page, Kind::Sample);
        }
        (Err(Refusal::Hole | Refusal::Foreign), Some(pager)) => lost(domain, region, pager, page, frame),
        (Err(_), _) => {
            domain.settle(region, page, Word::new(State::Resident, frame));
        }
    });
}

/// How many of `pages` are still in their frames, and nobody has used them since they were sampled.
///
/// # Context
/// Normal, outside the gate.
pub fn unused(domain: &DomainState, pages: &[(PageNo, Frame)]) -> usize {
    let _inside = domain.gate.enter(domain.mmu);
    let waits = |&&(page, frame): &&(PageNo, Frame)| {
        let word = domain.regions.find(page).and_then(|region| region.word(page));
        word.map(|word| word.load()).is_some_and(|seen| {
            let waits = matches!(seen.state(), State::Standby | State::Aside) && seen.frame() == frame;
            waits && !domain.frames.used(frame)
        })
    };
    pages.iter().filter(waits).count()
}

/// Maps all pages again that are unmapped to see whether they are used, and notes no use: before a fork, which does not copy
/// what is in frames only.
///
/// # Context
/// PagerThread, outside the gate.
pub fn end_all(domain: &DomainState) {
    let mut first = 0;
    while domain.stack.sampled() > 0 && first < domain.stack.begun() {
        let _inside = domain.gate.enter(domain.mmu);
        for frame in (first..domain.stack.begun()).take(STRETCH).map(Frame) {
            if let Some(page) = domain.frames.owner(frame)
                && let Some(region) = domain.regions.find(page)
            {
                map_unused(domain, region, page, frame);
            }
        }
        first += STRETCH as u32;
    }
}

fn map_unused(domain: &DomainState, region: &Region, page: PageNo, frame: Frame) {
    let (Some(word), Some(pager)) = (region.word(page), region.pager()) else { return };
    let seen = word.load();
    if seen.state() != State::Aside || seen.wishes().unmapped() || seen.frame() != frame || !word.claim(seen) {
        return;
    }
    let mapped = if domain.mmu.holds(frame) {
        domain.map(region, page, frame, 1).map_err(|partial| partial.why)
    } else {
        Err(Refusal::Hole)
    };
    match mapped {
        Ok(()) => {
            domain.leaves_aside(seen);
            domain.settle(region, page, Word::new(State::Resident, frame));
        }
        Err(Refusal::Hole) => {
            domain.leaves_aside(seen);
            lost(domain, region, pager, page, frame);
        }
        Err(why) if is_mapped_over(why) => {
            domain.leaves_aside(seen);
            mapped_over(domain, region, pager, page, frame);
        }
        Err(_) => {
            domain.settle(region, page, seen);
        }
    }
}
