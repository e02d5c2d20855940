//! Faults that a thread cannot resolve where it is: a pager thread does it, and tells the one that waits what came of it.

use super::{Failure, Outcome, Request, request};
use crate::addr::PageNo;
use crate::domain::DomainState;
use crate::mmu::{Mmu, Refusal};
use crate::pager::PagerError;
use crate::region::{Access, Serial};
use crate::shortage::Shortage;
use crate::sync::{AtomicU32, Ordering};

/// Threads that wait for a pager thread at once. Others wait for a place.
const PLACES: usize = 64;

const FREE: u32 = 0;
const WAITING: u32 = 1;
const ANSWERED: u32 = 1 << 31;
const FAILED: u32 = 1 << 30;
const SHORTAGE: u32 = 1 << 29;
const MACHINE: u32 = 1 << 28;
const RETRY: u32 = 1 << 27;
const BUSY: u32 = 1 << 26;
const WRITING: u32 = SHORTAGE | MACHINE;

/// The places where threads wait for the answer to a fault that they handed over: one word each, which only its thread and
/// the pager thread that has its request know. So nobody is told what is meant for another, or what is long past.
pub struct Handovers([AtomicU32; PLACES]);

/// A place in [`Handovers`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place(pub(super) u32);

impl Default for Handovers {
    fn default() -> Self {
        Handovers([const { AtomicU32::new(FREE) }; PLACES])
    }
}

impl Handovers {
    fn word(&self, place: Place) -> Option<&AtomicU32> {
        self.0.get(place.0 as usize)
    }

    fn take(&self) -> Option<Place> {
        let taken = |word: &AtomicU32| {
            word.load(Ordering::Relaxed) == FREE
                && word.compare_exchange(FREE, WAITING, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        self.0.iter().position(taken).map(|at| Place(at as u32))
    }

    /// Sleeps until there is an answer, and leaves the place.
    fn wait(&self, mmu: &dyn Mmu, place: Place) -> Outcome {
        let Some(word) = self.word(place) else { return Outcome::Retry };
        while word.load(Ordering::Acquire) == WAITING {
            mmu.sleep(word, WAITING, 0);
        }
        outcome(word.swap(FREE, Ordering::AcqRel))
    }

    /// Tells the thread at `place` what came of its fault.
    pub(super) fn answer(&self, mmu: &dyn Mmu, place: Place, outcome: Outcome) {
        if let Some(word) = self.word(place) {
            word.store(answer(outcome), Ordering::Release);
            mmu.rouse(word, 1);
        }
    }

    /// In a forked child: those who waited are not here.
    ///
    /// # Context
    /// Normal, with the gate closed.
    pub fn forget_all(&self) {
        self.0.iter().for_each(|word| word.store(FREE, Ordering::Release));
    }
}

/// Has a pager thread resolve a fault, and waits until it has. `None`: they have more than enough to do.
pub(super) fn hand_over(domain: &DomainState, page: PageNo, of: Serial, access: Access) -> Option<Outcome> {
    let place = domain.handovers.take()?;
    if request(domain, Request::Fault(page, of, access, place)) {
        return Some(domain.handovers.wait(domain.mmu, place));
    }
    domain.handovers.word(place)?.store(FREE, Ordering::Release);
    None
}

/// What is neither a failure, nor an access to be tried again, nor a page to wait for is met by another look at the page.
const fn answer(outcome: Outcome) -> u32 {
    match outcome {
        Outcome::Failed(failure) => ANSWERED | FAILED | code(failure),
        Outcome::Retry => ANSWERED | RETRY,
        Outcome::Busy => ANSWERED | BUSY,
        _ => ANSWERED,
    }
}

const fn outcome(answer: u32) -> Outcome {
    let code = answer & !(ANSWERED | FAILED | SHORTAGE | MACHINE);
    if answer & FAILED == 0 {
        match answer & (RETRY | BUSY) {
            RETRY => Outcome::Retry,
            BUSY => Outcome::Busy,
            _ => Outcome::Resolved,
        }
    } else if answer & WRITING == WRITING {
        Outcome::Failed(Failure::Writing(Refusal::from_code(code)))
    } else if answer & MACHINE != 0 {
        Outcome::Failed(Failure::Machine(Refusal::from_code(code)))
    } else if answer & SHORTAGE != 0
        && let Some(shortage) = Shortage::from_code(code)
    {
        Outcome::Failed(Failure::Shortage(shortage))
    } else {
        Outcome::Failed(Failure::Pager(PagerError::from_code(code)))
    }
}

const fn code(failure: Failure) -> u32 {
    match failure {
        Failure::Pager(error) => error.code(),
        Failure::Shortage(shortage) => SHORTAGE | shortage.code(),
        Failure::Machine(refusal) => MACHINE | refusal as u32,
        Failure::Writing(refusal) => WRITING | refusal as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_keeps_the_failure() {
        let pager = [PagerError::Corrupt, PagerError::Io(5), PagerError::Full, PagerError::Orphaned];
        let mut failures = pager.map(Failure::Pager).to_vec();
        failures.extend(pager.map(|error| Failure::Shortage(Shortage::Unsaved(error))));
        failures.push(Failure::Shortage(Shortage::AllHeld));
        failures.extend([Refusal::NoDescriptor, Refusal::NoMemory, Refusal::Denied].map(Failure::Machine));
        failures.extend([Refusal::NoMemory, Refusal::Denied].map(Failure::Writing));
        for failure in failures {
            assert_eq!(outcome(answer(Outcome::Failed(failure))), Outcome::Failed(failure));
        }
        assert_eq!(outcome(answer(Outcome::Resolved)), Outcome::Resolved);
        assert_eq!(outcome(answer(Outcome::Violation)), Outcome::Resolved);
        assert_eq!(outcome(answer(Outcome::Retry)), Outcome::Retry);
        assert_eq!(outcome(answer(Outcome::Busy)), Outcome::Busy);
    }

    extern crate std;
    use std::prelude::v1::*;
}
