//! Locks of a domain's memory: on pool and regions alike, or on none, since the kernel moves a page between equals only.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use selfpage_core::linux::{Errno, memory};

use super::Inner;
use super::child::Part;
use crate::region::Bound;

impl Inner {
    /// Locks the addresses of a region that is to join `regions`, if the frames are locked. Where the kernel locks no more for this
    /// process, nothing of the domain is locked from here on: why.
    pub(crate) fn lock_or_give_up(
        self: &Arc<Inner>,
        regions: &BTreeMap<u64, Arc<Bound>>,
        new: &Range<usize>,
    ) -> Option<Errno> {
        let why = self.pool.lock_alike(new).err().filter(|_| self.pool.is_locked())?;
        let parts = self.on_pager_thread(move || self.own_parts(regions));
        let new = new.clone();
        self.undisturbed(move || {
            self.close_gate();
            self.unlock(parts.iter().map(|(_, part)| part).chain([&new]));
            self.state.gate.open(self.state.mmu);
        });
        Some(why)
    }

    /// In a forked child, which inherits no lock and perhaps has other rights: locks what it has of the domain, or nothing.
    pub(super) fn lock_in_child(&self, parts: &[Part]) {
        self.pool.lock(self.config.locking);
        if !parts.iter().all(|(_, part)| self.pool.lock_alike(part).is_ok()) {
            self.unlock(parts.iter().map(|(_, part)| part));
        }
    }

    /// With nobody inside the gate, who could be about to move a page.
    fn unlock<'a>(&self, parts: impl Iterator<Item = &'a Range<usize>>) {
        self.pool.unlock();
        for part in parts {
            let _ = memory::unlock(part.start, part.len());
        }
    }
}
