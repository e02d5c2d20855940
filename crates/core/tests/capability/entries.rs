//! The page tables of the model: what an entry must say, and where an address leads.

use selfpage_core::capability::{Error, Rights, Type};
use selfpage_core::tables::Entries;
use selfpage_core::tables::walk::Access;

use crate::model::{CapId, Model, ObjectId, level};
use crate::operations::Outcome;

/// An entry that is in use.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The capability that it was made from.
    pub from: CapId,
    pub to: u64,
    pub rights: Rights,
    pub accessed: bool,
    pub dirty: bool,
}

/// Where an address leads.
#[derive(Default)]
pub struct Way {
    /// Table and entry, from the root.
    pub steps: Vec<(ObjectId, u16)>,
    /// The physical address, and what all entries allow together.
    pub end: Option<(u64, Rights)>,
}

/// What an entry of a table of this level spans.
pub fn page_bytes(level: u8) -> u64 {
    [4 << 10, 2 << 20, 1 << 30, 512 << 30][usize::from(level) - 1]
}

pub fn needs(access: Access) -> Rights {
    match access {
        Access::Read => Rights::READ,
        Access::Write => Rights::WRITE,
        Access::Execute => Rights::EXECUTE,
    }
}

impl Model {
    /// A table that a holder may change, and its level.
    fn open(&self, who: usize, entries: Entries) -> Result<(ObjectId, u8), Error> {
        let cap = self.named(who, entries.table)?;
        let level = level(self.kind(cap)).ok_or(Error::WrongType)?;
        if !self.cap(cap).rights.contain(Rights::WRITE) {
            return Err(Error::NoRight);
        }
        if u32::from(entries.first) + u32::from(entries.count) > 512 {
            return Err(Error::OutOfRange);
        }
        Ok((self.cap(cap).object, level))
    }

    /// Whether a table of this level may have an entry with these rights for a capability.
    fn permit(&self, table_level: u8, from: CapId, rights: Rights) -> Result<(), Error> {
        let own = self.cap(from).rights;
        let most = match self.kind(from) {
            Type::Frame | Type::DevFrame if table_level < 4 => own,
            kind => match level(kind) {
                // To be read, like any page.
                Some(_) if table_level == 1 => own & Rights::READ,
                Some(below) if below + 1 == table_level => own,
                _ => return Err(Error::WrongType),
            },
        };
        if !rights.contain(Rights::READ) {
            return Err(Error::NoSuchEntry);
        }
        if most.contain(rights) { Ok(()) } else { Err(Error::NoRight) }
    }

    pub(crate) fn map(
        &mut self,
        who: usize,
        entries: Entries,
        from: selfpage_core::capability::Handle,
        offset_bytes: u64,
        rights: Rights,
    ) -> Result<Outcome, Error> {
        let (table, table_level) = self.open(who, entries)?;
        let from = self.named(who, from)?;
        self.permit(table_level, from, rights)?;
        let object = self.of(from);
        let to = object.base.wrapping_add(offset_bytes);
        let step_bytes = page_bytes(table_level);
        if level(object.kind).is_none() {
            if !to.is_multiple_of(step_bytes) {
                return Err(Error::Misaligned);
            }
            let end = u128::from(offset_bytes) + u128::from(entries.count) * u128::from(step_bytes);
            if end > u128::from(object.len_bytes()) {
                return Err(Error::OutOfRange);
            }
        } else if offset_bytes != 0 || entries.count > 1 {
            return Err(Error::OutOfRange);
        }
        if self.cap(from).mapped.is_some() {
            return Err(Error::AlreadyMapped);
        }
        let all = entries.first..entries.first + entries.count;
        if self.object(table).entries.range(all.clone()).next().is_some() {
            return Err(Error::EntryTaken);
        }
        if self.is_condemned(from) || self.is_condemned(self.object(table).first) {
            return Err(Error::RevokeInProgress);
        }
        for (index, step) in all.zip(0..) {
            let entry = Entry { from, to: to + step * step_bytes, rights, accessed: false, dirty: false };
            self.object_mut(table).entries.insert(index, entry);
        }
        if entries.count > 0 {
            self.cap_mut(from).mapped = Some((table, entries.first, entries.count));
        }
        Ok(Outcome::Done)
    }

    pub(crate) fn unmap(&mut self, who: usize, entries: Entries) -> Result<Outcome, Error> {
        let (table, _) = self.open(who, entries)?;
        let end = entries.first + entries.count;
        let mut whole = Vec::new();
        let mut at = entries.first;
        while at < end {
            let entry = self.object(table).entries.get(&at).ok_or(Error::NotMapped)?;
            let (_, first, count) = self.cap(entry.from).mapped.expect("an entry comes of a mapped capability");
            if first != at || at + count > end {
                return Err(Error::PartOfMapping);
            }
            whole.push(entry.from);
            at += count;
        }
        whole.into_iter().for_each(|from| self.take_entries_of(from));
        Ok(Outcome::Done)
    }

    pub(crate) fn take_entries_of(&mut self, cap: CapId) {
        if let Some((table, first, count)) = self.cap_mut(cap).mapped.take() {
            (first..first + count).for_each(|index| {
                self.object_mut(table).entries.remove(&index);
            });
        }
    }

    pub(crate) fn modify_flags(&mut self, who: usize, entries: Entries, rights: Rights) -> Result<Outcome, Error> {
        let (table, table_level) = self.open(who, entries)?;
        let all = entries.first..entries.first + entries.count;
        for index in all.clone() {
            let entry = self.object(table).entries.get(&index).ok_or(Error::NotMapped)?;
            self.permit(table_level, entry.from, rights)?;
        }
        for (_, entry) in self.object_mut(table).entries.range_mut(all) {
            entry.rights = rights;
        }
        Ok(Outcome::Done)
    }

    pub(crate) fn clear_dirty_bits(&mut self, who: usize, entries: Entries) -> Result<Outcome, Error> {
        let (table, _) = self.open(who, entries)?;
        let all = entries.first..entries.first + entries.count;
        let mut dirty = 0;
        for (_, entry) in self.object_mut(table).entries.range_mut(all) {
            dirty += u32::from(std::mem::take(&mut entry.dirty));
        }
        Ok(Outcome::Dirty(dirty))
    }

    /// The word that an entry must be, by the manual.
    pub fn word(&self, table_level: u8, entry: &Entry) -> u64 {
        let kind = self.kind(entry.from);
        let is_page = level(kind).is_none();
        let mut word = entry.to;
        word |= 1 << 0 | 1 << 2;
        word |= u64::from(entry.rights.contain(Rights::WRITE)) << 1;
        word |= u64::from(kind == Type::DevFrame) << 3 | u64::from(kind == Type::DevFrame) << 4;
        word |= u64::from(entry.accessed) << 5 | u64::from(entry.dirty) << 6;
        word |= u64::from(is_page && table_level > 1) << 7;
        word | u64::from(!entry.rights.contain(Rights::EXECUTE)) << 63
    }

    /// Where an address leads from a root.
    pub fn way(&self, root: ObjectId, at: u64) -> Way {
        let mut way = Way::default();
        let mut table = root;
        let mut rights = Rights::ALL;
        for table_level in (1..=4).rev() {
            let index = (at / page_bytes(table_level) % 512) as u16;
            let Some(entry) = self.object(table).entries.get(&index) else { break };
            way.steps.push((table, index));
            rights = rights & entry.rights;
            if level(self.kind(entry.from)).is_none() || table_level == 1 {
                way.end = Some((entry.to + at % page_bytes(table_level), rights));
                break;
            }
            table = self.cap(entry.from).object;
        }
        way
    }

    /// The CPU has walked there.
    pub fn mark(&mut self, way: &Way, access: Access) {
        for (step, (table, index)) in way.steps.iter().enumerate() {
            let entry = self.object_mut(*table).entries.get_mut(index).expect("an entry that was walked through");
            entry.accessed = true;
            entry.dirty |= access == Access::Write && step + 1 == way.steps.len();
        }
    }
}
