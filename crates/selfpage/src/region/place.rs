//! Where a region lies: its addresses are taken as long as it is in its domain, and somebody is asked about it.
#![allow(unsafe_code)]

use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use selfpage_core::linux::memory;

use super::Bound;
use crate::fork::lineage::Process;
use crate::patience::Patience;
use crate::placement::taken;

/// The region is about to leave its domain.
const LEAVES: u32 = 1 << 31;
/// How often it looks whether handlers are asked about it still.
const LOOKS_EVERY: Duration = Duration::from_millis(1);

/// The addresses of a region. They are given back when it has left its domain and no handler is asked about it: what that does is done by
/// address. Whoever keeps the region for what it was (snapshots, samples) does not keep them: the program may map there what it likes.
pub(super) struct Place {
    addresses: Range<usize>,
    /// One while the region is in its domain or on its way there, and one for each [`InPlace`] of this process; and [`LEAVES`].
    holds: AtomicU32,
    left: OnceLock<Left>,
}

/// What was still a region's own when it left its domain.
struct Left {
    parts: Vec<Range<usize>>,
    /// Whose they are: a child that is forked later does not get them, and may have other memory there. Nobody's, where that cannot be told.
    process: Option<Process>,
}

impl Place {
    pub(super) fn new(addresses: Range<usize>) -> Place {
        Place { addresses, holds: AtomicU32::new(1), left: OnceLock::new() }
    }

    /// The region is about to leave its domain. A handler on a thread of its own may still be asked about it: where several are asked about one
    /// page, the first answer has all its accesses go on. It finds what it had until then, and so does a handler that its own faults ask; no
    /// other is asked from here on. Waits for them, and not for ever: they may wait for a lock of the caller's, or have been killed.
    pub(super) fn await_handlers(&self) {
        self.holds.fetch_or(LEAVES, Ordering::AcqRel);
        let mut patience = Patience::with_handlers();
        while self.is_asked() && patience.lasts() {
            std::thread::sleep(LOOKS_EVERY);
        }
    }

    fn is_asked(&self) -> bool {
        self.holds.load(Ordering::Acquire) & !LEAVES > 1
    }

    /// The region has left its domain, and of its mapping these parts are its own still: nobody else's memory was registered in others.
    pub(super) fn leave(&self, parts: Vec<Range<usize>>) {
        taken::remove(&self.addresses);
        if self.is_asked() {
            // Nobody answers for a fault there any more: an access by a handler would be tried for ever.
            parts.iter().for_each(refuse);
        }
        let _ = self.left.set(Left { parts, process: Process::this().ok() });
        self.let_go();
    }

    fn let_go(&self) {
        if self.holds.fetch_sub(1, Ordering::AcqRel) & !LEAVES == 1
            && let Some(left) = self.left.get()
            && left.process.is_some_and(Process::is_this)
        {
            left.parts.iter().for_each(unmap);
        }
    }
}

impl Bound {
    /// In a forked child whose thread is in no handler: who was asked about the region is not here, and does not let it go.
    pub(crate) fn forget_asked(&self) {
        self.place.holds.store(1, Ordering::Relaxed);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.left.get().is_none() {
            taken::remove(&self.addresses);
            unmap(&self.addresses);
        }
    }
}

fn refuse(part: &Range<usize>) {
    // SAFETY: owned-range: the region is in no map, and what it had is gone.
    let _ = unsafe { memory::protect(part.start, part.len(), memory::Access::None) };
}

fn unmap(part: &Range<usize>) {
    // SAFETY: owned-range: the region is in no map, and nobody holds a reference into it.
    let _ = unsafe { memory::unmap(part.start, part.len()) };
}

/// A region that is kept with its addresses.
pub(crate) struct InPlace(Arc<Bound>);

impl InPlace {
    /// Keeps a region that is in its domain until this returns. `None`: it is about to leave, and nobody is asked about it any more.
    ///
    /// # Context
    /// Trap.
    pub(crate) fn keep(bound: Arc<Bound>) -> Option<InPlace> {
        let one_more = |holds| (holds != LEAVES | 1).then_some(holds + 1);
        bound.place.holds.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more).ok()?;
        Some(InPlace(bound))
    }
}

impl Deref for InPlace {
    type Target = Bound;
    fn deref(&self) -> &Bound {
        &self.0
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        self.0.place.let_go();
    }
}
