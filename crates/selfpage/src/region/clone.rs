//! Clones of regions: copy-on-write by the application.
#![allow(unsafe_code)]

use std::sync::Arc;

use selfpage_core::addr::PageNo;
use selfpage_core::fault::copy_first::{self, AtBusy};
use selfpage_core::fault::{Failure, inherit};
use selfpage_core::linux::memory::Access;
use selfpage_core::mmu::Refusal;
use selfpage_core::region::{self, Rights};

use super::{Bound, Builder, Region};
use crate::config::DescriptorTable;
use crate::domain::Inner;
use crate::error::{Error, Kind, Result};
use crate::handler::ONE_CLIENT;
use crate::store::BackingStore;
use crate::trap::thread;

impl Region {
    /// A region with the contents that this one has at one instant of the call, as fork gives them to a child: a page of either
    /// may be written to, and the other does not see it. What changes in the clone is paged to `store`.
    ///
    /// The clone has no frame at first. A page that is first read or written in the clone, or about to be written to in this
    /// region, gets one, with a copy; until then this region's is the only one. (One frame under two addresses is not to be had of
    /// private memory.) This region's pages are armed, as for a snapshot: the first write to each is a fault. It fails where no frame
    /// can be had for the clone's page.
    ///
    /// The clone has no name, no handler and priority 0, all its pages are [`Protection::ReadWrite`](crate::Protection), whatever this
    /// region has, and its faults arrive as this one's do.
    ///
    /// A region has one clone at a time that has not all its pages yet. Dropping this region gives the clone what it lacks;
    /// dropping the clone costs nothing more. A page that the program drops by `madvise`, or maps over, in this region before the clone
    /// has it is zero in the clone: [`Region::discard`](crate::Region::discard) gives it to the clone first.
    ///
    /// # Source
    /// AVM §2.1, where both regions map one frame until one of them is written to.
    ///
    /// # Errors
    /// The region is not anonymous memory, or is [tracked](Builder::tracked), or shares pages with a clone or as one already; its domain has a
    /// [table of descriptors of its own](DescriptorTable::Private); no address space, or too many regions; the thread's protection domain
    /// lacks the right `META` on the region, or its stack lies there; what a page held was given up; a pager, policy or store of the program's
    /// own asks for it.
    ///
    /// # Examples
    /// ```no_run
    /// # fn main() -> selfpage::Result<()> {
    /// use selfpage::{Domain, store::MemoryStore};
    /// let domain = Domain::with_frames(64 << 20).build()?;
    /// let mut table = domain.region(32 << 20).stored(MemoryStore::new(64 << 20)?)?;
    /// table.as_mut_slice::<u64>()[0] = 1;
    /// let before = table.cow_clone(MemoryStore::new(64 << 20)?)?;
    /// table.as_mut_slice::<u64>()[0] = 2;
    /// assert_eq!(before.as_slice::<u64>()[0], 1);
    /// # Ok(()) }
    /// ```
    pub fn cow_clone(&self, store: impl BackingStore + 'static) -> Result<Region> {
        thread::may_make(|| format!("a clone of region {}", self.bound.name))?;
        let refused = |kind, cause: &str| Err(Error::new(kind, "clone", format!("region {}", self.bound.name), cause));
        self.bound.may_change(&self.life.inner, "clone")?;
        // Where one is there may be no mapping for a clone either. One that is given up from here on is found at the cut.
        self.bound.has_all("clone", self.core().range)?;
        self.bound.has_no_stack_of_this_thread("clone")?;
        if self.core().rights != Rights::ReadWrite || !self.bound.is_anonymous() {
            let cause =
                "clones are of regions that are stored, restored or zero at first: copy its contents into one of these";
            return refused(Kind::Invalid, cause);
        }
        if self.core().trap.is_tracked() {
            return refused(Kind::Invalid, ONE_CLIENT);
        }
        let inner = &self.life.inner;
        if inner.config.descriptor_table == DescriptorTable::Private {
            let cause = "clones need a domain whose descriptors the program's threads have (DescriptorTable::Shared)";
            return refused(Kind::Invalid, cause);
        }
        let mut builder = Builder::new(&self.life, self.len_bytes()).trap(self.core().trap);
        builder.source = Some(self.core());
        // Before the clone has addresses: handlers of signals are let in while this waits. And before it is in the map: from then on whoever
        // asks for a page of its waits for the cut.
        let turn = inner.cutting.begin();
        if let Err((kind, cause)) = self.bound.part(inner) {
            drop(turn);
            return refused(kind, cause);
        }
        let joined = builder.over(Arc::new(store))?.join(&self.life, Access::ReadWrite)?;
        let clone = &joined.region;
        let given_up = self.cut_for(clone.core());
        if !matches!(given_up, Ok(None)) {
            // On a pager thread both go on others, and this region may be the first.
            inherit::give_up(clone.core());
        }
        let (state, heir) = (inner.state(), clone.core());
        inner.on_table(move |_| inherit::go_on(state, heir));
        drop(turn);
        let clone = joined.told();
        let failed = |why| Error::failure("clone", format!("region {}", self.bound.name), Failure::Machine(why));
        given_up.map_err(failed)?.map_or(Ok(clone), |page| Err(self.bound.lacks("clone", page)))
    }

    /// Has `heir` have what this region has at one instant of the call; not where a page was given up, which it returns.
    ///
    /// # Context
    /// Normal, in its turn to cut.
    fn cut_for(&self, heir: &region::Region) -> std::result::Result<Option<PageNo>, Refusal> {
        let (inner, source, bound) = (&self.life.inner, self.core(), &*self.bound);
        let state = inner.state();
        inner.undisturbed(move || copy_first::join(state, source));
        for _ in 0..2 {
            inner.on_table_or_pager(move || copy_first::arm(state, source, AtBusy::Skip))?;
        }
        inner.on_table_or_pager(move || {
            let mut given_up = None;
            copy_first::cut(state, &[source], || match bound.first_given_up() {
                // One that is given up from here on goes to the clone first.
                None => heir.link(),
                page => given_up = page,
            })?;
            Ok(given_up)
        })
    }
}

impl Bound {
    /// Ends what it is to a clone, or as one. `Err`: one of the two lacks pages.
    fn part(&self, inner: &Inner) -> std::result::Result<(), (Kind, &'static str)> {
        let _regions = inner.regions();
        let lacks =
            |region: Option<&region::Region>| region.is_some_and(|region| region.sets.inherited.next(0).is_some());
        if lacks(Some(&self.region)) && self.region.source().is_none() {
            let cause = "it lacks pages since what it is a clone of was dropped: discard those that cannot be pinned";
            return Err((Kind::Lost, cause));
        }
        if lacks(self.region.heir()) || lacks(Some(&self.region)) {
            let cause = "it shares pages with another region still, as a clone or with one: touch or pin all pages of the clone, \
                         which has them for itself then, or drop the clone";
            return Err((Kind::Held, cause));
        }
        self.region.part();
        Ok(())
    }
}
