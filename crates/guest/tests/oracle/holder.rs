//! A holder of capabilities that does this and that with them, most of which makes page tables.

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Capability, Error, Handle, Kernel, Object, Rights, Space, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::{Entries, PageSize, Tlb};

use super::dice::Dice;
use super::physical::{HUGE, HUGE_BITS};
use super::recorder::{DEVICE, DEVICE_BITS, PAGES, ROOT_ENTRY};

const ROOT: Handle = Handle::at_root(1);
/// For the tables that map the recorder: one of each level below the root's.
const RECORDER_TABLES: [(Type, Handle); 3] =
    [(Type::Pdpt, Handle::at_root(16)), (Type::Pd, Handle::at_root(17)), (Type::Pt, Handle::at_root(18))];
/// CNodes full of places.
const SHELVES: [u8; 2] = [20, 21];
/// Entries that are used: few, so that ways meet, and those at edges.
pub const INDICES: [u16; 8] = [0, 1, 2, 255, 256, 300, 510, 511];
const SOME_RIGHTS: [Rights; 5] =
    [Rights::ALL, Rights::READ, Rights::READ.with(Rights::WRITE), Rights::READ.with(Rights::EXECUTE), Rights::WRITE];

/// No machine runs while tables change, and each begins without a memory of translations.
struct Forgotten;

impl Tlb for Forgotten {
    fn forget_all(&self) {}
    fn forget(&self, _: VirtAddr) {}
    fn leave(&self, _: PhysAddr) {}
}

pub struct Holder<'m> {
    kernel: Kernel<'m>,
    space: Space,
    dice: Dice,
    /// Blocks of RAM that it may do with as it likes.
    ram: Vec<Handle>,
    /// What pages of 1 GiB are made of, where the CPU has such.
    huge: Option<Handle>,
    /// How many operations were done, and how many refused.
    pub done: u64,
    pub refused: u64,
}

impl<'m> Holder<'m> {
    /// A holder of all of a memory, with some tables and frames to begin with.
    pub fn new(memory: &'m PhysMemory, dice: Dice, largest_page: PageSize) -> Holder<'m> {
        let devices = [(DEVICE, DEVICE_BITS), (HUGE, HUGE_BITS)];
        let (mut kernel, space) = Kernel::boot(memory, &Forgotten, &devices).unwrap();
        let mut blocks: Vec<_> = (2..16)
            .filter_map(|at| Some((kernel.identify(&space, Handle::at_root(at)).ok()?, Handle::at_root(at))))
            .collect();
        blocks.sort_by_key(|(block, _)| std::cmp::Reverse(block.size_bits));
        let block_at = |base| blocks.iter().find(|(block, _)| block.base == base).unwrap().1;
        let device = block_at(DEVICE);
        let huge = (largest_page == PageSize::Huge1GiB).then(|| block_at(HUGE));
        let mut ram: Vec<Handle> =
            blocks.iter().filter(|(block, _)| block.kind == Type::Ram).map(|(_, handle)| *handle).collect();
        // The fourth is for what must stay.
        let own = ram.remove(3);
        for (kind, handle) in RECORDER_TABLES {
            kernel.retype(&space, own, Object::of(kind), 1, ROOT, handle.bits as u8).unwrap();
        }
        for shelf in SHELVES {
            kernel.retype(&space, own, Object::of(Type::CNode), 1, ROOT, shelf).unwrap();
        }
        let [(_, pdpt), (_, pd), (_, pt)] = RECORDER_TABLES;
        for (table, count, from) in [(pdpt, 1, pd), (pd, 1, pt), (pt, PAGES, device)] {
            kernel.map(&space, Entries { table, first: 0, count }, from, 0, Rights::ALL).unwrap();
        }
        let mut holder = Holder { kernel, space, dice, ram, huge, done: 0, refused: 0 };
        let (large, tables, small) = (holder.ram[0], holder.ram[1], holder.ram[2]);
        let large_bits = 21 + holder.dice.below(2) as u8;
        let begin = [
            (large, Type::Frame, large_bits, 23 - large_bits),
            (tables, Type::Pml4, 13, 2),
            (tables, Type::Pdpt, 13, 3),
            (tables, Type::Pd, 13, 4),
            (tables, Type::Pt, 13, 6),
            (small, Type::Frame, 12, 4),
            (small, Type::Frame, 14, 3),
            (small, Type::Frame, 17, 2),
        ];
        let mut first = 22;
        for (source, kind, size_bits, count) in begin {
            holder.kernel.retype(&space, source, Object { kind, size_bits }, count, ROOT, first).unwrap();
            first += count;
        }
        holder
    }

    /// What it may reach with a page of a hierarchy: its frames, and to be read its tables.
    pub fn holdings(&self) -> Vec<Capability> {
        let held = self.places().filter_map(|place| self.kernel.identify(&self.space, Holder::name(place)).ok());
        let reachable = held.filter_map(|held| match held.kind {
            Type::Frame | Type::DevFrame => Some(held),
            // The second page of a table is nobody's to read.
            kind if kind.level().is_some() => {
                Some(Capability { rights: held.rights & Rights::READ, size_bits: 12, ..held })
            }
            _ => None,
        });
        reachable.collect()
    }

    /// Where the tables are that only the recorder uses.
    pub fn recorder_tables(&self) -> [PhysAddr; 3] {
        RECORDER_TABLES.map(|(_, handle)| self.kernel.identify(&self.space, handle).unwrap().base)
    }

    /// Does so many things, whatever they are.
    pub fn act(&mut self, times: u32) {
        for _ in 0..times {
            let done = match self.dice.below(100) {
                0..60 => self.map(),
                60..72 => self.modify(),
                72..80 => self.retype(),
                80..86 => self.copy_any(),
                86..91 => self.unmap(),
                91..95 => self.clear_dirty_bits(),
                95..98 => self.delete(),
                _ => self.revoke(),
            };
            match done {
                Some(Ok(())) => self.done += 1,
                Some(Err(_)) => self.refused += 1,
                None => {}
            }
        }
    }

    /// Makes one of its hierarchies one that the recorder can run in. The root of that.
    pub fn enter(&mut self) -> Option<PhysAddr> {
        let (_, pdpt) = RECORDER_TABLES[0];
        for pml4 in self.all(|kind| kind == Type::Pml4) {
            let entries = Entries { table: pml4, first: ROOT_ENTRY, count: 1 };
            if self.kernel.map(&self.space, entries, pdpt, 0, Rights::ALL).is_ok() {
                return self.kernel.root_table(&self.space, pml4).ok();
            }
        }
        None
    }

    /// Takes the recorder out again.
    pub fn leave(&mut self) {
        for pml4 in self.all(|kind| kind == Type::Pml4) {
            let _ = self.kernel.unmap(&self.space, Entries { table: pml4, first: ROOT_ENTRY, count: 1 });
        }
    }

    fn places(&self) -> impl Iterator<Item = (Handle, u8)> + use<> {
        let shelves = SHELVES.into_iter().flat_map(|shelf| (1..64).map(move |at| (Handle::at_root(shelf), at)));
        (22..64).map(|at| (ROOT, at)).chain(shelves)
    }

    /// A place's own name: the root is named by its first place.
    fn name((node, at): (Handle, u8)) -> Handle {
        if node == ROOT { Handle::at_root(at) } else { node.then(at) }
    }

    fn all(&self, wanted: impl Fn(Type) -> bool) -> Vec<Handle> {
        let is_wanted =
            |handle: &Handle| self.kernel.identify(&self.space, *handle).is_ok_and(|found| wanted(found.kind));
        let places = self.places().map(Holder::name);
        places.chain(self.ram.iter().copied()).filter(is_wanted).collect()
    }

    fn one(&mut self, wanted: impl Fn(Type) -> bool) -> Option<Handle> {
        let all = self.all(wanted);
        self.dice.of(&all)
    }

    fn empty(&mut self) -> Option<(Handle, u8)> {
        let is_empty = |place: &(Handle, u8)| self.kernel.identify(&self.space, Holder::name(*place)).is_err();
        let empty: Vec<_> = self.places().filter(is_empty).collect();
        self.dice.of(&empty)
    }

    fn rights(&mut self) -> Rights {
        if self.dice.below(4) > 0 { Rights::ALL } else { self.dice.of(&SOME_RIGHTS).unwrap_or(Rights::ALL) }
    }

    /// Maps a copy of something in some table.
    fn map(&mut self) -> Option<Result<(), Error>> {
        let table = self.one(|kind| kind.level().is_some())?;
        let level = self.kernel.identify(&self.space, table).ok()?.kind.level()?;
        // Mostly what makes ways longer; in the lowest tables now and then a table, to be read.
        let table_below = match level {
            1 => self.dice.below(8) == 0,
            2 => self.dice.below(3) != 0,
            3 if self.huge.is_some() => self.dice.below(8) != 0,
            _ => true,
        };
        let source = if table_below {
            self.one(|kind| kind.level().is_some_and(|below| level == 1 || below + 1 == level))?
        } else if level == 3 {
            self.huge?
        } else {
            self.one(|kind| kind == Type::Frame)?
        };
        let place = self.empty()?;
        let (copied, mapped) = (self.rights(), self.rights());
        if let Err(error) = self.kernel.copy(&self.space, source, place.0, place.1, copied) {
            return Some(Err(error));
        }
        let copy = Holder::name(place);
        let found = self.kernel.identify(&self.space, copy).ok()?;
        let page_bytes = if level == 2 { 1 << 21 } else { 4096 };
        let pages = if found.kind == Type::Frame { (found.len_bytes() / page_bytes).max(1) } else { 1 };
        let count = (1 + self.dice.below(pages.min(6))).min(pages);
        let mut offset_bytes = self.dice.below(pages - count + 1) * page_bytes;
        if self.dice.below(16) == 0 {
            // Often not aligned to pages of that size, or beyond the end.
            offset_bytes = self.dice.below(found.len_bytes() / 4096) * 4096;
        }
        let first = self.dice.of(&INDICES)?;
        let entries = Entries { table, first, count: count as u16 };
        let result = self.kernel.map(&self.space, entries, copy, offset_bytes, mapped & found.rights);
        if result.is_err() {
            self.kernel.delete(&self.space, copy).unwrap();
        }
        Some(result)
    }

    fn some_entries(&mut self) -> Option<Entries> {
        let table = self.one(|kind| kind.level().is_some())?;
        let first = self.dice.of(&INDICES)? + self.dice.below(2) as u16;
        Some(Entries { table, first, count: 1 + self.dice.below(3) as u16 })
    }

    fn modify(&mut self) -> Option<Result<(), Error>> {
        let entries = self.some_entries()?;
        let rights = self.rights();
        Some(self.kernel.modify_flags(&self.space, Entries { count: 1, ..entries }, rights))
    }

    fn retype(&mut self) -> Option<Result<(), Error>> {
        let kinds = [Type::Frame, Type::Frame, Type::Ram, Type::Pml4, Type::Pdpt, Type::Pd, Type::Pt];
        let kind = self.dice.of(&kinds)?;
        let source = self.one(|kind| matches!(kind, Type::Ram | Type::Frame))?;
        let size_bits = kind.size_bits().unwrap_or(12 + self.dice.below(6) as u8);
        let (node, at) = self.empty()?;
        Some(self.kernel.retype(&self.space, source, Object { kind, size_bits }, 1, node, at))
    }

    fn copy_any(&mut self) -> Option<Result<(), Error>> {
        let source = self.one(|_| true)?;
        let (node, at) = self.empty()?;
        let rights = self.rights();
        Some(self.kernel.copy(&self.space, source, node, at, rights))
    }

    fn unmap(&mut self) -> Option<Result<(), Error>> {
        let entries = self.some_entries()?;
        Some(self.kernel.unmap(&self.space, entries))
    }

    fn clear_dirty_bits(&mut self) -> Option<Result<(), Error>> {
        let entries = self.some_entries()?;
        Some(self.kernel.clear_dirty_bits(&self.space, entries).map(|_| ()))
    }

    fn delete(&mut self) -> Option<Result<(), Error>> {
        let handle = self.one(|_| true)?;
        // A block of RAM that is gone can never be had again.
        (!self.ram.contains(&handle)).then(|| self.kernel.delete(&self.space, handle))
    }

    fn revoke(&mut self) -> Option<Result<(), Error>> {
        let kinds = [Type::Frame, Type::Pt, Type::Pd, Type::Pdpt, Type::Pml4];
        let handle = self.one(|kind| kinds.contains(&kind))?;
        let most = self.dice.below(8);
        Some(self.kernel.revoke(&self.space, handle, most).map(|_| ()))
    }
}
