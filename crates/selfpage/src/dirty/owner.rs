//! Whose notes of writes those of a range are: two trackers of one range would take each other's.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::object;
use crate::error::{Error, Kind, Result};

/// A tracker's number in this process, and in the children that it forks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Id(NonZeroU64);

impl Id {
    pub(super) fn new() -> Id {
        static MADE: AtomicU64 = AtomicU64::new(0);
        Id(NonZeroU64::MIN.saturating_add(MADE.fetch_add(1, Ordering::Relaxed)))
    }
}

/// The tracker that has the notes, if one has.
#[derive(Default, Debug)]
pub(crate) struct Owner(AtomicU64);

impl Owner {
    /// Has the notes be this tracker's.
    ///
    /// # Errors
    /// `Invalid`: they are another's.
    pub(super) fn claim(&self, id: Id, operation: &'static str, range: &Range<usize>) -> Result<()> {
        match self.0.compare_exchange(0, id.0.get(), Ordering::SeqCst, Ordering::SeqCst) {
            Err(owner) if owner != id.0.get() => {
                let cause = "another tracker watches it, or a part of the region that it is in; disarm it there, drop that tracker, or use it";
                Err(Error::new(Kind::Invalid, operation, object(range), cause))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn is(&self, id: Id) -> bool {
        self.0.load(Ordering::SeqCst) == id.0.get()
    }

    /// In a forked child: has them be nobody's, as their tracker may be a thread's that is not here. Whoever uses it here claims them again.
    pub(crate) fn forget(&self) {
        self.0.store(0, Ordering::SeqCst);
    }

    /// Has them be nobody's, if they are this tracker's.
    pub(super) fn release(&self, id: Id) {
        let _ = self.0.compare_exchange(id.0.get(), 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}
