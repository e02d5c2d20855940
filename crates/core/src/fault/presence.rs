//! What there is of a range of pages.

use crate::addr::{PageNo, PageRange};
use crate::domain::DomainState;

/// The pages of `range`, which lies in one region, that are in core, on their way, or on their way out.
///
/// # Context
/// Any; the answer lasts only with the gate closed.
pub fn not_away(domain: &DomainState, range: PageRange) -> impl Iterator<Item = PageNo> {
    let region = domain.regions.find(range.first);
    let word = move |page| region.and_then(|region| region.word(page));
    range.pages().filter(move |page| word(*page).is_some_and(|word| !word.load().is_away()))
}
