//! What there is of a range of pages.

use crate::addr::{PageNo, PageRange};
use crate::domain::DomainState;
use crate::page::State;
use crate::region::Region;

/// Pages looked at between two visits of the gate: less than a millisecond's worth.
const MOST_LOOKS: u64 = 1 << 15;

/// The pages of `range`, which lies in one region, that are in core, on their way, or on their way out.
///
/// # Context
/// Any; the answer lasts only with the gate closed.
pub fn not_away(domain: &DomainState, range: PageRange) -> impl Iterator<Item = PageNo> {
    let region = domain.regions.find(range.first);
    let word = move |page| region.and_then(|region| region.word(page));
    range.pages().filter(move |page| word(*page).is_some_and(|word| !word.load().is_away()))
}

/// The first stretch of pages of `range`, which lies in one region, that hold something, as far as is known: what nobody has touched holds
/// nothing.
///
/// # Context
/// Normal.
pub fn first_held(domain: &DomainState, range: PageRange) -> Option<PageRange> {
    let mut first = None;
    let mut at = range.first;
    while at < range.end() {
        let _inside = domain.gate.enter(domain.mmu);
        let region = domain.regions.find(at)?;
        let end = range.end().min(at.plus(MOST_LOOKS));
        while at < end {
            match first {
                None if is_held(region, at) => first = Some(at),
                Some(first) if !is_held(region, at) => return Some(PageRange { first, count: at.0 - first.0 }),
                _ => {}
            }
            at = at.plus(1);
        }
    }
    first.map(|first| PageRange { first, count: at.0 - first.0 })
}

fn is_held(region: &Region, page: PageNo) -> bool {
    let (Some(word), Some(pager)) = (region.word(page), region.pager()) else { return false };
    let index = region.index(page);
    // Before the word: what a clone has from its source is in a frame before it is with the pager.
    region.sets.inherited.contains(index) || word.load().state() != State::Absent || pager.keeps(index)
}
