//! A page that is claimed for the moment in which somebody outside of this crate changes what stands in its place.

use super::range::settle_step;
use super::{Outcome, Step};
use crate::addr::PageNo;
use crate::domain::DomainState;
use crate::page::State;

/// Does `work` while nobody else is at `page`, and tells it what it found there; the word says the same afterwards. `None`: the page is in
/// no region.
///
/// # Context
/// Normal or PagerThread, outside the gate; `work` runs inside, and waits for nobody.
pub fn with_claim<T>(domain: &DomainState, page: PageNo, work: impl FnOnce(State) -> T) -> Option<T> {
    let (mut work, mut result) = (Some(work), None);
    settle_step(domain, page, |region| {
        let Some(word) = region.word(page) else { return Step::Done(Outcome::NotOurs) };
        let seen = word.load();
        // Whoever ends a save leaves what it saved from to the owner of a claimed page.
        if seen.state() == State::Busy || seen.in_save() {
            return word.await_change(seen).map_or(Step::Again, Step::AwaitPage);
        }
        if !word.claim(seen) {
            return Step::Again;
        }
        result = work.take().map(|work| work(seen.state()));
        domain.put_back(region, page, seen);
        Step::Done(Outcome::Resolved)
    });
    result
}
