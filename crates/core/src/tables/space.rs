//! A virtual address space over the rules: any physical range at any address, with pages of a size that the caller chose, and
//! tables made when they are needed.
//!
//! The capabilities of the tables, and the copies that their entries are made from, lie in CNodes that mirror the tables: from
//! an address follow the handles of all tables on its way, and nothing else has to be remembered.
//!
//! # Source
//! Cichlid §3.4, the first layers of the runtime library.

use super::entry::{ENTRIES, Entry, index, is_canonical, span_bits};
use super::{Entries, Kernel, place};
use crate::addr::VirtAddr;
use crate::capability::{Error, Handle, Object, Rights, Space, Type};

/// Entries whose capabilities share a row of a shelf: each takes two of its 63 places.
const IN_A_ROW: u16 = 16;

/// How much longer than that of its home the longest handle is: a place there, then a row and a place in it for each of four levels.
const BELOW_HOME_BITS: u8 = 9 * 6;

/// A size of page that x86-64 has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PageSize {
    /// Mapped by a PT.
    Small4KiB,
    /// Mapped by a PD.
    Large2MiB,
    /// Mapped by a PDPT.
    Huge1GiB,
}

impl PageSize {
    /// The level of the tables that map such pages.
    pub const fn level(self) -> u8 {
        match self {
            PageSize::Small4KiB => 1,
            PageSize::Large2MiB => 2,
            PageSize::Huge1GiB => 3,
        }
    }

    /// How long such a page is, in bytes.
    pub const fn len_bytes(self) -> u64 {
        1 << span_bits(self.level())
    }
}

/// A call that stopped early: what it did before stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unfinished {
    /// How far it came, in bytes.
    pub done_bytes: u64,
    /// What stopped it.
    pub why: Error,
}

/// A hierarchy of page tables that grows as it is used.
#[derive(Clone, Copy, Debug)]
pub struct AddressSpace {
    space: Space,
    /// What tables and CNodes are made from.
    ram: Handle,
    root: Table,
}

/// A table, and where the capabilities are kept that its entries are made from.
#[derive(Clone, Copy, Debug)]
struct Table {
    table: Handle,
    shelf: Handle,
}

/// A row of a shelf, and the place in it of what one entry is made from; the next place is for that one's shelf.
#[derive(Clone, Copy)]
struct Kept {
    row: Handle,
    at: u8,
}

impl Kept {
    const fn new(shelf: Handle, entry: u16) -> Kept {
        let row = shelf.then((entry / IN_A_ROW) as u8 + 1);
        Kept { row, at: (entry % IN_A_ROW) as u8 * 2 + 1 }
    }

    const fn capability(self) -> Handle {
        self.row.then(self.at)
    }

    const fn table(self) -> Table {
        Table { table: self.capability(), shelf: self.row.then(self.at + 1) }
    }
}

/// A part of a range that lies in one table.
#[derive(Clone, Copy)]
struct Run {
    at: VirtAddr,
    first: u16,
    count: u16,
}

impl AddressSpace {
    /// An empty one. Its root goes into places `first` and `first + 1` of the CNode `home`, which stands at most one CNode below the
    /// root of the holder's space and has no guard; all else is made from `ram`.
    ///
    /// # Errors
    /// [`Error::DepthOverflow`]: `home` lies deeper, or has a guard. Those of [`Kernel::retype`].
    pub fn new(
        kernel: &mut Kernel<'_>,
        space: Space,
        ram: Handle,
        home: Handle,
        first: u8,
    ) -> Result<AddressSpace, Error> {
        let is_too_deep = u32::from(home.len.saturating_add(BELOW_HOME_BITS)) > u64::BITS;
        if is_too_deep || kernel.identify(&space, home)?.guard_bits > 0 {
            return Err(Error::DepthOverflow);
        }
        kernel.retype(&space, ram, Object::of(Type::Pml4), 1, home, first)?;
        let root = Table { table: home.then(first), shelf: home.then(first + 1) };
        if let Err(error) = kernel.retype(&space, ram, Object::of(Type::CNode), 1, home, first + 1) {
            kernel.delete(&space, root.table)?;
            return Err(error);
        }
        Ok(AddressSpace { space, ram, root })
    }

    /// The root, for a CPU.
    pub const fn pml4(&self) -> Handle {
        self.root.table
    }

    /// Maps the Frame `from`, from `offset_bytes` on, at `[at, at + len_bytes)`, in pages of one size. Where smaller pages were,
    /// the empty tables go.
    ///
    /// # Errors
    /// [`Error::NotCanonical`]; [`Error::Misaligned`]: `at` or the length is no multiple of the page; [`Error::EntryTaken`];
    /// [`Error::OutOfMemory`]: the RAM for tables is used up; and those of [`Kernel::map`].
    pub fn map(
        &self,
        kernel: &mut Kernel<'_>,
        range: Range,
        from: Handle,
        offset_bytes: u64,
        rights: Rights,
    ) -> Result<(), Unfinished> {
        self.each_run(range, |run, done_bytes| {
            let table = self.table_for(kernel, run.at, range.pages.level())?;
            if range.pages.level() > 1 {
                for entry in run.first..run.first + run.count {
                    self.drop_table(kernel, Kept::new(table.shelf, entry))?;
                }
            }
            let kept = self.row_for(kernel, table.shelf, run.first)?;
            kernel.copy(&self.space, from, kept.row, kept.at, Rights::ALL).map_err(entry_taken)?;
            let entries = Entries { table: table.table, first: run.first, count: run.count };
            let offset_bytes = offset_bytes.saturating_add(done_bytes);
            kernel.map(&self.space, entries, kept.capability(), offset_bytes, rights).or_else(|error| {
                kernel.delete(&self.space, kept.capability())?;
                Err(error)
            })
        })
    }

    /// Unmaps a range. What was mapped by one call, within one table, goes in one call.
    ///
    /// # Errors
    /// [`Error::NotMapped`], [`Error::PartOfMapping`], [`Error::NotCanonical`], [`Error::Misaligned`].
    pub fn unmap(&self, kernel: &mut Kernel<'_>, range: Range) -> Result<(), Unfinished> {
        self.each_run(range, |run, _| {
            let table = self.find(kernel, run.at, range.pages.level())?;
            self.demand_pages(kernel, table, range.pages, run)?;
            let entries = Entries { table: table.table, first: run.first, count: run.count };
            kernel.unmap(&self.space, entries)?;
            let mut entry = run.first;
            while entry < run.first + run.count {
                let kept = Kept::new(table.shelf, entry);
                // A call that maps many pages keeps one capability, with the first: most rows are not there.
                if kernel.identify(&self.space, kept.row) == Err(Error::NoCapability) {
                    entry = entry - entry % IN_A_ROW + IN_A_ROW;
                    continue;
                }
                match kernel.delete(&self.space, kept.capability()) {
                    Ok(()) | Err(Error::NoCapability | Error::DepthOverflow) => entry += 1,
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
    }

    /// Changes what can be done in a range.
    ///
    /// # Errors
    /// [`Error::NotMapped`], [`Error::NoRight`], [`Error::NotCanonical`], [`Error::Misaligned`].
    pub fn protect(&self, kernel: &mut Kernel<'_>, range: Range, rights: Rights) -> Result<(), Unfinished> {
        self.each_run(range, |run, _| {
            let table = self.find(kernel, run.at, range.pages.level())?;
            self.demand_pages(kernel, table, range.pages, run)?;
            kernel.modify_flags(&self.space, Entries { table: table.table, first: run.first, count: run.count }, rights)
        })
    }

    /// The table of a level through which an address is translated.
    ///
    /// # Errors
    /// [`Error::NotMapped`]: there is none.
    pub fn table(&self, kernel: &Kernel<'_>, at: VirtAddr, level: u8) -> Result<Handle, Error> {
        self.find(kernel, at, level).map(|table| table.table)
    }

    fn each_run(&self, range: Range, mut work: impl FnMut(Run, u64) -> Result<(), Error>) -> Result<(), Unfinished> {
        let stopped = |why| Unfinished { done_bytes: 0, why };
        range.check().map_err(stopped)?;
        let page_bytes = range.pages.len_bytes();
        let mut done_bytes = 0;
        while done_bytes < range.len_bytes {
            let at = VirtAddr(range.at.0.wrapping_add(done_bytes as usize));
            let first = index(at, range.pages.level());
            let left = (range.len_bytes - done_bytes) / page_bytes;
            let count = u64::from(ENTRIES - first).min(left) as u16;
            work(Run { at, first, count }, done_bytes).map_err(|why| Unfinished { done_bytes, why })?;
            done_bytes += u64::from(count) * page_bytes;
        }
        Ok(())
    }

    /// Refuses a run that has tables in it, for pages of a smaller size: they are not what the caller named.
    fn demand_pages(&self, kernel: &Kernel<'_>, table: Table, pages: PageSize, run: Run) -> Result<(), Error> {
        let mut entries = run.first..run.first + run.count;
        let has_tables =
            pages.level() > 1 && entries.any(|entry| self.has_table(kernel, Kept::new(table.shelf, entry)));
        if has_tables { Err(Error::NotMapped) } else { Ok(()) }
    }

    /// Whether a table was made for an entry: then it has a shelf.
    fn has_table(&self, kernel: &Kernel<'_>, kept: Kept) -> bool {
        kernel.identify(&self.space, kept.table().shelf).is_ok()
    }

    /// The table of a level that an address goes through, as far as there are tables.
    fn find(&self, kernel: &Kernel<'_>, at: VirtAddr, level: u8) -> Result<Table, Error> {
        let mut table = self.root;
        for above in (level + 1..=4).rev() {
            table = Kept::new(table.shelf, index(at, above)).table();
            match kernel.identify(&self.space, table.table) {
                Ok(found) if found.kind.level() == Some(above - 1) => {}
                _ => return Err(Error::NotMapped),
            }
        }
        Ok(table)
    }

    /// The same; tables that are missing are made.
    fn table_for(&self, kernel: &mut Kernel<'_>, at: VirtAddr, level: u8) -> Result<Table, Error> {
        let mut table = self.root;
        for above in (level + 1..=4).rev() {
            let entry = index(at, above);
            let kept = self.row_for(kernel, table.shelf, entry)?;
            let below = kept.table();
            match kernel.identify(&self.space, below.table) {
                Ok(found) if found.kind.level() == Some(above - 1) => {}
                Ok(_) => return Err(Error::EntryTaken),
                Err(_) => self.make_table(kernel, table, entry, kept, above - 1)?,
            }
            table = below;
        }
        Ok(table)
    }

    fn make_table(
        &self,
        kernel: &mut Kernel<'_>,
        above: Table,
        entry: u16,
        kept: Kept,
        level: u8,
    ) -> Result<(), Error> {
        let kind = match level {
            3 => Type::Pdpt,
            2 => Type::Pd,
            _ => Type::Pt,
        };
        // One that is made in vain takes RAM with it. Whoever has a table may read it.
        let base = kernel.identify(&self.space, above.table)?.base;
        if Entry(kernel.memory().load(place(base, entry))).is_present() {
            return Err(Error::EntryTaken);
        }
        let below = kept.table();
        kernel.retype(&self.space, self.ram, Object::of(kind), 1, kept.row, kept.at)?;
        let rest =
            kernel.retype(&self.space, self.ram, Object::of(Type::CNode), 1, kept.row, kept.at + 1).and_then(|()| {
                let entries = Entries { table: above.table, first: entry, count: 1 };
                // A table has the rights of the RAM that it is made from.
                let rights = kernel.identify(&self.space, below.table)?.rights;
                kernel.map(&self.space, entries, below.table, 0, rights)
            });
        if rest.is_err() {
            // Half of one would look like a whole one.
            kernel.delete(&self.space, below.table)?;
            let _ = kernel.delete(&self.space, below.shelf);
        }
        rest
    }

    /// Takes a table out that smaller pages once needed, so that a large one can lie there, with the empty tables below it.
    fn drop_table(&self, kernel: &mut Kernel<'_>, kept: Kept) -> Result<(), Error> {
        if !self.has_table(kernel, kept) {
            return Ok(());
        }
        let Table { table, shelf } = kept.table();
        let rows = (0..ENTRIES).step_by(IN_A_ROW.into()).map(|first| (first, Kept::new(shelf, first).row));
        for (first, row) in rows.clone() {
            if kernel.identify(&self.space, row).is_ok() {
                for entry in first..first + IN_A_ROW {
                    self.drop_table(kernel, Kept::new(shelf, entry))?;
                }
            }
        }
        // It goes first: if it has entries, or is mapped elsewhere, it stays.
        for gone in [table].into_iter().chain(rows.map(|(_, row)| row)).chain([shelf]) {
            match kernel.delete(&self.space, gone) {
                Ok(()) | Err(Error::NoCapability) => {}
                Err(Error::InUse) => return Err(Error::EntryTaken),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn row_for(&self, kernel: &mut Kernel<'_>, shelf: Handle, entry: u16) -> Result<Kept, Error> {
        let kept = Kept::new(shelf, entry);
        if kernel.identify(&self.space, kept.row).is_err() {
            let at = (entry / IN_A_ROW) as u8 + 1;
            kernel.retype(&self.space, self.ram, Object::of(Type::CNode), 1, shelf, at)?;
        }
        Ok(kept)
    }
}

/// The place for what an entry is made from is taken where the entry is.
fn entry_taken(error: Error) -> Error {
    if error == Error::SlotTaken { Error::EntryTaken } else { error }
}

/// A range of virtual addresses, in pages of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// Where it begins.
    pub at: VirtAddr,
    /// How long it is.
    pub len_bytes: u64,
    /// The size of its pages.
    pub pages: PageSize,
}

impl Range {
    fn check(&self) -> Result<(), Error> {
        let page_bytes = self.pages.len_bytes();
        if !(self.at.0 as u64).is_multiple_of(page_bytes) || !self.len_bytes.is_multiple_of(page_bytes) {
            return Err(Error::Misaligned);
        }
        let last = (self.at.0 as u64).checked_add(self.len_bytes.saturating_sub(1)).ok_or(Error::NotCanonical)?;
        let crosses = (self.at.0 as u64 ^ last) >> 63 != 0;
        if crosses || !is_canonical(self.at) || !is_canonical(VirtAddr(last as usize)) {
            return Err(Error::NotCanonical);
        }
        Ok(())
    }
}
