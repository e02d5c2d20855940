//! x86-64 page tables, built by their owners under the rules of capabilities: 4 KiB, 2 MiB and 1 GiB pages, tables shared between
//! hierarchies, tables that can be read like any page.
//!
//! A capability is mapped in one place at most: in consecutive entries of one table. For another place the holder makes a copy.
//! So the mechanism finds every entry that came of a capability, and takes it out when the capability goes; and each table
//! knows of which capability each of its entries came, so that no holder can change one to more than that allows.
//!
//! # Source
//! Cichlid §3.2 (the rules, and that all three operations take several consecutive entries) and §3.3 (tables mapped
//! to be read; `clear_dirty_bits`).

mod entry;
mod mmu;
mod space;
mod tlb;
pub mod walk;

pub use entry::{ENTRIES, Entry, index, is_canonical, span_bits};
pub use mmu::TableMmu;
pub use space::{AddressSpace, PageSize, Range, Unfinished};
pub(crate) use tlb::Stale;
pub use tlb::{Invalidation, Tlb};

use crate::capability::{Capability, Error, Handle, Kernel, Mapping, Rights, Rule, Slot, Space, Type};
use crate::physical::PhysAddr;
use crate::sync::Ordering;

/// Consecutive entries of one table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entries {
    /// The table.
    pub table: Handle,
    /// The first entry.
    pub first: u16,
    /// How many.
    pub count: u16,
}

/// A table that a holder may change.
struct Open {
    /// The capability with which it came to be.
    origin: Slot,
    base: PhysAddr,
    level: u8,
}

/// Where an entry of a table is.
const fn place(table: PhysAddr, index: u16) -> PhysAddr {
    table.plus(index as u64 * 8)
}

impl Kernel<'_> {
    /// Maps what `from` is a capability of, from `offset_bytes` on, in entries that are all empty: of a Frame as many pages as there
    /// are entries, of the size that the table's level has; of a table one level below, or of any table to be read in a PT,
    /// itself in one entry. What can be done there is `rights`; for a table the most that its own entries can allow.
    ///
    /// # Errors
    /// [`Error::WrongType`]: nothing of this type goes into a table of that level. [`Error::NoRight`]: the table may not be
    /// changed, or the capability has fewer rights. [`Error::NoSuchEntry`], [`Error::Misaligned`], [`Error::OutOfRange`],
    /// [`Error::EntryTaken`], [`Error::AlreadyMapped`], [`Error::RevokeInProgress`].
    pub fn map(
        &mut self,
        space: &Space,
        entries: Entries,
        from: Handle,
        offset_bytes: u64,
        rights: Rights,
    ) -> Result<(), Error> {
        let table = self.open(space, entries)?;
        let slot = self.find(space, from)?;
        let capability = self.held(slot)?;
        let slots = self.slots();
        let (entry, step_bytes) = self.entry_for(&table, entries.count, capability, offset_bytes, rights)?;
        self.demand(Rule::MappedOnce, slots.mapping(slot).is_none())?;
        let all = entries.first..entries.first + entries.count;
        let taken = all.clone().any(|index| slots.origin_of_entry(table.base, index).is_some());
        self.demand(Rule::EntryIsFree, !taken)?;
        self.demand(Rule::NotCondemned, !slots.is_condemned(slot) && !slots.is_condemned(table.origin))?;
        let mut value = entry.0;
        for index in all {
            slots.set_origin_of_entry(table.base, index, Some(slot));
            self.memory().store(place(table.base, index), value);
            value += step_bytes;
        }
        let mapping = Mapping { table: table.origin, first: entries.first, count: entries.count };
        slots.set_mapping(slot, (entries.count > 0).then_some(mapping));
        Ok(())
    }

    /// Empties entries. Those that were mapped together go together.
    ///
    /// # Errors
    /// [`Error::NotMapped`]: one of them is empty. [`Error::PartOfMapping`], [`Error::NoRight`], [`Error::OutOfRange`].
    pub fn unmap(&mut self, space: &Space, entries: Entries) -> Result<(), Error> {
        let table = self.open(space, entries)?;
        let end = entries.first + entries.count;
        let mut at = entries.first;
        while at < end {
            let mapping = self.mapping_at(&table, at)?;
            self.demand(Rule::WholeMappings, mapping.first == at && at + mapping.count <= end)?;
            at += mapping.count;
        }
        let mut at = entries.first;
        while at < end
            && let Some(slot) = self.slots().origin_of_entry(table.base, at)
            && let Some(mapping) = self.slots().mapping(slot)
        {
            self.take_entries_of(slot);
            at += mapping.count;
        }
        self.invalidate();
        Ok(())
    }

    /// Changes what can be done with what is mapped in some entries, never to more than the capabilities allow that they came of.
    ///
    /// # Errors
    /// [`Error::NotMapped`], [`Error::NoRight`], [`Error::NoSuchEntry`], [`Error::OutOfRange`].
    pub fn modify_flags(&mut self, space: &Space, entries: Entries, rights: Rights) -> Result<(), Error> {
        let table = self.open(space, entries)?;
        let all = entries.first..entries.first + entries.count;
        for index in all.clone() {
            let from = self.slots().origin_of_entry(table.base, index).ok_or(Error::NotMapped)?;
            self.permit(table.level, self.held(from)?, rights)?;
        }
        for index in all {
            if let Some(word) = self.memory().word(place(table.base, index)) {
                // The CPU may set its bits meanwhile.
                let update = |value| Some(Entry(value).with(rights).0);
                let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update);
            }
        }
        self.goes_stale(table.origin, table.level, entries.first, entries.count);
        self.invalidate();
        Ok(())
    }

    /// Clears the dirty bits of entries, so that the next write to each page sets its bit again. How many were set.
    ///
    /// # Errors
    /// [`Error::NoRight`], [`Error::WrongType`], [`Error::OutOfRange`].
    pub fn clear_dirty_bits(&mut self, space: &Space, entries: Entries) -> Result<u32, Error> {
        let table = self.open(space, entries)?;
        let mut dirty = 0;
        for index in entries.first..entries.first + entries.count {
            let Some(word) = self.memory().word(place(table.base, index)) else { continue };
            if word.fetch_and(!entry::DIRTY, Ordering::Relaxed) & entry::DIRTY != 0 {
                dirty += 1;
                self.goes_stale(table.origin, table.level, index, 1);
            }
        }
        self.invalidate();
        Ok(dirty)
    }

    /// The physical address of the root of a hierarchy: what a CPU is given to translate by.
    ///
    /// # Errors
    /// [`Error::WrongType`]: it is no PML4.
    pub fn root_table(&self, space: &Space, pml4: Handle) -> Result<PhysAddr, Error> {
        let capability = self.identify(space, pml4)?;
        if capability.kind == Type::Pml4 { Ok(capability.base) } else { Err(Error::WrongType) }
    }

    fn open(&self, space: &Space, entries: Entries) -> Result<Open, Error> {
        let slot = self.find(space, entries.table)?;
        let capability = self.held(slot)?;
        let level = capability.kind.level().ok_or(Error::WrongType)?;
        self.demand(Rule::ChangingTakesWrite, capability.rights.contain(Rights::WRITE))?;
        let end = entries.first.saturating_add(entries.count);
        self.demand(Rule::WithinTable, end <= ENTRIES)?;
        Ok(Open { origin: self.slots().origin(slot), base: capability.base, level })
    }

    /// The first entry for `count` of them, and what the address in each is beyond that of the one before.
    fn entry_for(
        &self,
        table: &Open,
        count: u16,
        from: Capability,
        offset_bytes: u64,
        rights: Rights,
    ) -> Result<(Entry, u64), Error> {
        self.permit(table.level, from, rights)?;
        let page_bytes = 1 << span_bits(table.level);
        match from.kind {
            Type::Frame | Type::DevFrame if table.level < 4 => {
                let base = from.base.plus(offset_bytes);
                self.demand(Rule::PagesAreAligned, base.is_aligned(span_bits(table.level)))?;
                let end = offset_bytes.saturating_add(u64::from(count) * page_bytes);
                self.demand(Rule::MappedWithin, end <= from.len_bytes())?;
                Ok((Entry::page(base, table.level, from.kind, rights), page_bytes))
            }
            _ if offset_bytes != 0 || count > 1 => Err(Error::OutOfRange),
            _ if table.level == 1 => Ok((Entry::page(from.base, 1, from.kind, rights), 0)),
            _ => Ok((Entry::table(from.base, rights), 0)),
        }
    }

    fn mapping_at(&self, table: &Open, index: u16) -> Result<Mapping, Error> {
        let slots = self.slots();
        slots.origin_of_entry(table.base, index).and_then(|from| slots.mapping(from)).ok_or(Error::NotMapped)
    }

    pub(crate) fn has_entries(&self, table: PhysAddr) -> bool {
        (0..ENTRIES).any(|index| self.slots().origin_of_entry(table, index).is_some())
    }

    /// Empties the entries in which a capability is mapped.
    pub(crate) fn take_entries_of(&mut self, slot: Slot) {
        let slots = self.slots();
        let Some(Mapping { table, first, count }) = slots.mapping(slot) else { return };
        slots.set_mapping(slot, None);
        let Some(Capability { base, kind, .. }) = slots.capability(table) else { return };
        self.goes_stale(table, kind.level().unwrap_or(1), first, count);
        for index in first..first + count {
            self.memory().store(place(base, index), Entry::EMPTY.0);
            slots.set_origin_of_entry(base, index, None);
        }
    }

    /// Empties a table that goes.
    pub(crate) fn take_entries_in(&mut self, origin: Slot, table: PhysAddr) {
        for index in 0..ENTRIES {
            if let Some(from) = self.slots().origin_of_entry(table, index) {
                debug_assert_eq!(self.slots().mapping(from).map(|mapping| mapping.table), Some(origin));
                self.take_entries_of(from);
            }
        }
    }

    /// Refuses an entry that a table of this level must not have for a capability.
    fn permit(&self, level: u8, from: Capability, rights: Rights) -> Result<(), Error> {
        let below = from.kind.level();
        let fits = match from.kind {
            Type::Frame | Type::DevFrame => level < 4,
            _ => below.is_some_and(|below| below + 1 == level || level == 1),
        };
        self.demand(Rule::EntriesFit, fits)?;
        self.demand(Rule::EntriesAreReadable, rights.contain(Rights::READ))?;
        // A table that is mapped as a page is to be read: only the rules write it.
        let most = if level == 1 && below.is_some() { from.rights & Rights::READ } else { from.rights };
        self.demand(Rule::EntriesHaveLess, most.contain(rights))
    }
}
