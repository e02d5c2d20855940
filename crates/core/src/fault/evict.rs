//! Taking frames back from pages: move out, *then* compare, *then* save if changed. A page that is moved out first cannot
//! change while it is looked at, so no update is lost.
//!
//! # Source
//! Nemesis §6.2 (intrusive revocation: the application cleans and unmaps); AVM §3.

use super::fill::neighbours;
use super::{lost, save};
use crate::addr::{Frame, PageNo};
use crate::domain::DomainState;
use crate::frame::Use;
use crate::mmu::{Partial, Refusal};
use crate::page::{State, Word};
use crate::pager::{Pager, Verdict};
use crate::policy::Policy;
use crate::region::Region;
use crate::stack;
use crate::sync::Ordering;
use crate::trace::Counters;
use crate::tracer::Kind;

/// Pages evicted at once, at most.
pub const BATCH: usize = 256;

/// How often one eviction asks the policy, at most.
const MOST_LOOKS: u32 = 4 * BATCH as u32;

/// What an eviction came to, in pages.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Their frames can be used at once.
    pub ready: u32,
    /// On their way to the store.
    pub queued: u32,
    /// They had to stay.
    pub kept: u32,
    /// How many suggestions of the policy that took, wrong ones among them.
    pub looked_at: u32,
    /// The policy knew of no more.
    pub was_all: bool,
}

/// Whether changed pages find room on the way to the store.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// Where there is some; else they stay.
    IfAny,
    /// The caller has seen to it.
    Promised,
}

/// Tells the policy what has been admitted since it was last told.
///
/// # Context
/// The evictor alone, inside the gate.
fn tell(domain: &DomainState, policy: &mut dyn Policy) {
    domain.frames.drain_admitted(|frame, use_| {
        let Some(page) = domain.frames.owner(frame) else { return };
        let Some(region) = domain.regions.find(page) else {
            return;
        };
        policy.admitted(frame, page, region.priority.load(Ordering::Relaxed), use_);
    });
}

/// Lets the policy choose victims and evicts them, until the frames of `want` are ready or on their way to the store.
///
/// Past those that must stay (a device holds them) it asks for others, a bounded number of times: the policy may suggest the
/// same ones first whenever it is asked. It stops where no page more may be queued. Where that is so from the start, changed ones
/// must stay as well, and it tries `want` of them and no more.
///
/// # Context
/// The evictor alone (PagerThread), outside the gate.
pub fn evict(domain: &DomainState, policy: &mut dyn Policy, want: u32) -> Evicted {
    let _inside = domain.gate.enter(domain.mmu);
    tell(domain, policy);
    let was_full = save::room(domain) == 0;
    let mut search = Search { looks: MOST_LOOKS, tries: if was_full { want } else { MOST_LOOKS } };
    let mut evicted = Evicted::default();
    let mut most = want;
    while let left = want.saturating_sub(evicted.ready + evicted.queued)
        && left > 0
    {
        // Each may turn out to be changed, and what finds no room has been moved out for nothing.
        most = if was_full { left } else { left.min(save::room(domain) as u32) };
        if most == 0 || !evict_some(domain, policy, most, &mut search, &mut evicted) {
            break;
        }
    }
    evicted.looked_at = MOST_LOOKS - search.looks;
    evicted.was_all = evicted.ready + evicted.queued < want && search.looks > 0 && search.tries > 0 && most > 0;
    evicted
}

/// How much more one eviction may look for victims: a policy may suggest anything, and again and again.
struct Search {
    /// Suggestions of the policy.
    looks: u32,
    /// Pages that are moved out, and perhaps back.
    tries: u32,
}

/// Evicts up to `want` pages of those that the policy suggests next. `false`: there was none to try.
fn evict_some(
    domain: &DomainState,
    policy: &mut dyn Policy,
    want: u32,
    search: &mut Search,
    evicted: &mut Evicted,
) -> bool {
    let mut victims = [(PageNo(0), Frame(0)); BATCH];
    let mut by_age = victims;
    let (mut mapped, mut len) = (0, 0);
    while len < want.min(search.tries) as usize
        && len < BATCH
        && search.looks > 0
        && let Some(frame) = policy.victim()
    {
        search.looks -= 1;
        match check(domain, frame) {
            Suggestion::Claimed(page, from) => {
                if let Some(entry) = by_age.get_mut(len) {
                    *entry = (page, frame);
                    len += 1;
                }
                match from {
                    Whereabouts::Page => {
                        if let Some(entry) = victims.get_mut(mapped) {
                            *entry = (page, frame);
                            mapped += 1;
                        }
                    }
                    Whereabouts::Aside => {
                        if let Some(region) = domain.regions.find(page) {
                            decide(domain, region, page, frame, Room::IfAny, evicted);
                        }
                    }
                }
            }
            Suggestion::Held => {
                evicted.kept += 1;
                domain.frames.admit(frame, Use::First);
            }
            Suggestion::Wrong => Counters::add(&domain.counters.bad_victims_total, 1),
        }
    }
    search.tries = search.tries.saturating_sub(len as u32);
    let victims = victims.get_mut(..mapped).unwrap_or(&mut []);
    victims.sort_unstable_by_key(|entry| entry.0);
    move_out(domain, victims, Room::IfAny, evicted);
    list_standby(domain, by_age.get(..len).unwrap_or(&[]));
    len > 0
}

/// Lists those of the pages that are on standby now, in this order: the first loses its frame first. In the order of
/// addresses, in which they were unmapped, some would never get a second chance.
pub(super) fn list_standby(domain: &DomainState, pages: &[(PageNo, Frame)]) {
    for &(page, frame) in pages {
        if let Some(region) = domain.regions.find(page)
            && let Some(seen) = region.word(page).map(|word| word.load())
            && seen.state() == State::Standby
            && seen.frame() == frame
        {
            domain.publish_standby(region, page, frame);
        }
    }
}

/// Where the contents of a victim were when it was claimed.
enum Whereabouts {
    /// At its page.
    Page,
    /// In its frame's slot already.
    Aside,
}

enum Suggestion {
    Claimed(PageNo, Whereabouts),
    /// Resident, but it cannot go now.
    Held,
    /// Not a resident frame.
    Wrong,
}

/// Checks a victim, and claims its page.
fn check(domain: &DomainState, frame: Frame) -> Suggestion {
    let Some(page) = domain.frames.owner(frame) else {
        return Suggestion::Wrong;
    };
    let Some(word) = domain.regions.find(page).and_then(|region| region.word(page)) else {
        return Suggestion::Wrong;
    };
    let seen = word.load();
    if !matches!(seen.state(), State::Resident | State::Busy | State::Aside) || seen.frame() != frame {
        return Suggestion::Wrong;
    }
    // Whoever works on a page may leave it resident, and would not admit it again.
    if seen.state() == State::Busy || seen.pins() > 0 || seen.in_save() || !word.claim(seen) {
        return Suggestion::Held;
    }
    if seen.state() == State::Aside {
        domain.leaves_aside(seen);
        return Suggestion::Claimed(page, Whereabouts::Aside);
    }
    Suggestion::Claimed(page, Whereabouts::Page)
}

/// Unmaps claimed pages (ascending), and decides on each. The caller lists those that are on standby then.
pub(super) fn move_out(domain: &DomainState, pages: &[(PageNo, Frame)], room: Room, evicted: &mut Evicted) {
    unmap_each(domain, pages, |region, page, frame, unmapped| match unmapped {
        Ok(()) => decide(domain, region, page, frame, room, evicted),
        Err(why) => stays(domain, region, page, frame, room, why, evicted),
    });
}

/// Unmaps claimed pages (ascending) in as few calls as their neighbourhood allows, and has `then` settle each: its contents are in
/// its frame's slot, or the machine would not move it.
pub(super) fn unmap_each(
    domain: &DomainState,
    pages: &[(PageNo, Frame)],
    mut then: impl FnMut(&Region, PageNo, Frame, Result<(), Refusal>),
) {
    let mut at = 0;
    while let Some(rest) = pages.get(at..)
        && let Some(&(page, frame)) = rest.first()
    {
        let run = neighbours(rest);
        let (done, refusal) = Partial::split(domain.mmu.unmap(page, frame, run as u32), run);
        for &(page, frame) in rest.get(..done).unwrap_or(rest) {
            if let Some(region) = domain.regions.find(page) {
                then(region, page, frame, Ok(()));
            }
        }
        at += done;
        if let Some(why) = refusal
            && let Some(&(page, frame)) = pages.get(at)
            && let Some(region) = domain.regions.find(page)
        {
            then(region, page, frame, Err(why));
            at += 1;
        }
    }
}

/// The machine would not move the page out.
fn stays(
    domain: &DomainState,
    region: &Region,
    page: PageNo,
    frame: Frame,
    room: Room,
    why: Refusal,
    evicted: &mut Evicted,
) {
    let why = match domain.unmap_keyed(region, page, frame, why) {
        Ok(()) => return decide(domain, region, page, frame, room, evicted),
        Err(why) => why,
    };
    match (why, region.pager()) {
        (Refusal::Hole | Refusal::Foreign, Some(pager)) => {
            lost(domain, region, pager, page, frame);
            evicted.ready += 1;
        }
        _ => {
            if why == Refusal::Pinned {
                Counters::add(&domain.counters.pinned_skips_total, 1);
            }
            keep(domain, region, page, frame, evicted);
        }
    }
}

fn keep(domain: &DomainState, region: &Region, page: PageNo, frame: Frame, evicted: &mut Evicted) {
    domain.settle(region, page, Word::new(State::Resident, frame));
    domain.admit(region, frame, Use::First);
    evicted.kept += 1;
}

/// An unmapped page: clean, to be saved, or to be put back.
pub(super) fn decide(
    domain: &DomainState,
    region: &Region,
    page: PageNo,
    frame: Frame,
    room: Room,
    evicted: &mut Evicted,
) {
    let Some(pager) = region.pager() else { return };
    match pager.changed(region.index(page), domain.lease(frame).get()) {
        // Asked only now: the frame may have been taken away while the pager looked.
        _ if !domain.mmu.holds(frame) => {
            lost(domain, region, pager, page, frame);
            evicted.ready += 1;
        }
        Verdict::Clean => {
            domain.stack.joins_standby();
            // Before it is settled, and others note what they do with it.
            domain.trace(page, Kind::Evict);
            let _ = domain.settle(region, page, Word::new(State::Standby, frame));
            evicted.ready += 1;
        }
        Verdict::Changed if room == Room::Promised || save::room(domain) > 0 => {
            domain.trace(page, Kind::Evict);
            domain.settle(region, page, Word::new(State::Saving, frame).with_save());
            save::enqueue(domain, page, frame);
            evicted.queued += 1;
        }
        Verdict::Changed | Verdict::Stays => put_back(domain, region, pager, page, frame, evicted),
    }
}

/// Maps a page again that cannot go now.
fn put_back(
    domain: &DomainState,
    region: &Region,
    pager: &dyn Pager,
    page: PageNo,
    frame: Frame,
    evicted: &mut Evicted,
) {
    if region.word(page).is_some_and(|word| word.load().wishes().unmapped()) {
        domain.settle(region, page, Word::new(State::Aside, frame));
        domain.admit(region, frame, Use::First);
        evicted.kept += 1;
        return;
    }
    // What the machine had noted of the page went with its translation, and a scan may have passed the place meanwhile.
    region.disarm(page);
    match domain.map(region, page, frame, 1) {
        Ok(()) => keep(domain, region, page, frame, evicted),
        Err(partial) if partial.why == Refusal::Hole => {
            lost(domain, region, pager, page, frame);
            evicted.ready += 1;
        }
        Err(partial) if is_mapped_over(partial.why) => {
            mapped_over(domain, region, pager, page, frame);
            evicted.ready += 1;
        }
        Err(_) => {
            // It cannot be mapped, so nobody can use it; it must be saved, room or not.
            domain.trace(page, Kind::Evict);
            domain.settle(region, page, Word::new(State::Saving, frame).with_save());
            save::enqueue(domain, page, frame);
            evicted.queued += 1;
        }
    }
}

/// Whether the machine would not map a page because something of the program's own is there, or nothing any more.
pub(super) fn is_mapped_over(why: Refusal) -> bool {
    matches!(why, Refusal::Occupied | Refusal::Foreign)
}

/// The place of a claimed page is not the domain's any more: what was in it is lost, its frame is not.
///
/// # Context
/// Normal or PagerThread, as for [`Pager::forget`].
pub(super) fn mapped_over(domain: &DomainState, region: &Region, pager: &dyn Pager, page: PageNo, frame: Frame) {
    Counters::add(&domain.counters.lost_total, 1);
    pager.forget(region.index(page), 1);
    region.sets.changed.insert(region.index(page));
    domain.settle_absent(region, page, frame);
}

/// Turns standby frames beyond `keep` into free ones, oldest first. How many.
///
/// # Context
/// The evictor alone (PagerThread), outside the gate.
pub fn trim_standby(domain: &DomainState, keep: u32) -> u32 {
    let _inside = domain.gate.enter(domain.mmu);
    let mut freed = 0;
    while domain.stack.on_standby() > keep
        && let Some(frame) = stack::reclaim_standby(domain)
    {
        domain.stack.give(domain.mmu, frame, 1);
        freed += 1;
    }
    freed
}
