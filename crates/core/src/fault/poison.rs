//! Pages whose contents could not be had: every access to one fails until somebody asks for it by name.

use super::Step;
use crate::addr::{Frame, PageNo};
use crate::domain::DomainState;
use crate::mmu::{Refusal, Trap};
use crate::page::{State, Word};
use crate::pager::Context;
use crate::region::{Region, Serial};

/// Ends the claim of a page that the machine would not map, and that loses its frame.
pub(super) fn settle_refused(domain: &DomainState, region: &Region, page: PageNo, frame: Frame, why: Refusal) {
    match why {
        // With these the access fails.
        Refusal::NoMemory | Refusal::Denied => domain.settle_failed(region, page, frame),
        _ => domain.settle_absent(region, page, frame),
    }
}

/// Notes that whoever wanted `page` of this region could not have it, for [`poison`] to tell whether that is so still. Whoever has claimed
/// the page for that says so as the claim ends: the page may have come and gone by the time that it comes here.
///
/// # Context
/// Any, outside the gate.
pub(super) fn note_failure(domain: &DomainState, page: PageNo, of: Serial) {
    let _inside = domain.gate.enter(domain.mmu);
    let Some(word) = domain.regions.find_same(page, of).and_then(|region| region.word(page)) else { return };
    loop {
        let seen = word.load();
        if seen.state() != State::Absent || word.fail(seen) {
            return;
        }
    }
}

/// Somebody asks for a page that could not be had the last time: try anew. What takes the poison away would take what the program has mapped
/// over it, which only a pager thread tells for sure.
pub(super) fn cure(domain: &DomainState, context: Context, region: &Region, page: PageNo, seen: Word) -> Step {
    if context == Context::Trap {
        return Step::HandOver;
    }
    if let Some(word) = region.word(page)
        && word.claim(seen)
    {
        domain.mmu.drop_pages(page, 1);
        domain.settle(region, page, Word::ABSENT);
    }
    Step::Again
}

/// Lets accesses to a page find out anew whether its contents can be had, if they fail now. `false`: somebody is at the page, and may leave
/// it as it was.
///
/// # Context
/// PagerThread, outside the gate.
pub fn try_anew(domain: &DomainState, page: PageNo) -> bool {
    let _inside = domain.gate.enter(domain.mmu);
    let Some((region, word)) = domain.regions.find(page).and_then(|region| Some((region, region.word(page)?))) else {
        return true;
    };
    // One that was given up since stays so.
    if region.guarded.contains(region.index(page)) {
        return true;
    }
    let seen = word.load();
    if seen.state() == State::Poisoned {
        cure(domain, Context::PagerThread, region, page, seen);
    }
    !matches!(word.load().state(), State::Poisoned | State::Busy)
}

/// Makes every access to a page fail whose contents could not be had, until somebody asks for it by name: whoever is stopped
/// on it must be told, and must not see anything else in its place. A page that has been brought in meanwhile stays as it
/// is, wherever it is by now. `false`: whoever is stopped there could not be woken.
///
/// `note` is done once it fails, before anybody can close the gate.
///
/// # Context
/// PagerThread, outside the gate; `note` runs inside, and waits for nobody.
pub fn poison(domain: &DomainState, page: PageNo, note: impl FnOnce()) -> bool {
    loop {
        let inside = domain.gate.enter(domain.mmu);
        let Some((region, word)) = domain.regions.find(page).and_then(|region| Some((region, region.word(page)?)))
        else {
            // It went meanwhile: its accesses meet whatever is there now.
            return [Trap::Worker, Trap::TrackedWorker].iter().all(|trap| domain.mmu.wake_faulters(*trap, page, 1));
        };
        let seen = word.load();
        match seen.state() {
            State::Absent if seen.failed() => {
                if word.claim(seen) {
                    let told = domain.mmu.poison(region.trap, page);
                    domain.settle(region, page, Word::new(State::Poisoned, Frame(0)));
                    note();
                    return told;
                }
            }
            // Another thread may meet the same failure: if all only woke the stopped ones, they would all come again.
            State::Busy => {
                if let Some(seen) = word.await_change(seen) {
                    drop(inside);
                    domain.mmu.sleep(word.low_half(), seen.low(), 0);
                }
            }
            _ => return domain.mmu.wake_faulters(region.trap, page, 1),
        }
    }
}
