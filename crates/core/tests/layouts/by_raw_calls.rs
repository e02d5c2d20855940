//! Layouts of two roots whose tables are made, mapped and shared one by one.

use std::cell::Cell;
use std::collections::BTreeMap;

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Error, Handle, Object, Rights, Type};
use selfpage_core::physical::PhysAddr;
use selfpage_core::tables::walk::Translation;
use selfpage_core::tables::{Entries, PageSize, Range, index, span_bits};

use crate::chance::{Piece, Source, one_of, piece, rights};
use crate::dice::{below, next};
use crate::target::{Target, parts};
use crate::{Holder, ROOT, block, for_seeds, see};

/// Tables are made from this,
const TABLES: Handle = block(11);
/// and from this the CNodes, in places 20 and on of the root, in which everything lies.
const NODES: Handle = block(9);

/// A span of one root that leads where a span of a root leads, for a table there is in both.
#[derive(Clone, Copy)]
struct Window {
    at: u64,
    len_bytes: u64,
    root: usize,
    leads_to: u64,
    rights: Rights,
    table: Handle,
}

/// A root: its tables by level and the addresses that they span, and what shall be there.
struct Root {
    tables: BTreeMap<(u8, u64), Handle>,
    target: Target,
    windows: Vec<Window>,
}

struct Builder<'m> {
    holder: Holder<'m>,
    roots: [Root; 2],
    places: u64,
}

impl<'m> Builder<'m> {
    fn new(holder: Holder<'m>) -> Builder<'m> {
        let root = |_| Root { tables: BTreeMap::new(), target: Target::default(), windows: Vec::new() };
        let mut builder = Builder { holder, roots: [0, 1].map(root), places: 0 };
        for root in 0..2 {
            let pml4 = builder.make(Type::Pml4);
            builder.roots[root].tables.insert((4, 0), pml4);
        }
        builder
    }

    /// The next free place: its CNode, and which.
    fn place(&mut self) -> (Handle, u8) {
        let (node, at) = ((self.places / 63) as u8 + 20, (self.places % 63) as u8 + 1);
        let Holder { kernel, space, .. } = &mut self.holder;
        if at == 1 {
            kernel.retype(space, NODES, Object::of(Type::CNode), 1, ROOT, node).unwrap();
        }
        self.places += 1;
        (Handle::at_root(node), at)
    }

    fn make(&mut self, kind: Type) -> Handle {
        let (node, at) = self.place();
        let Holder { kernel, space, .. } = &mut self.holder;
        kernel.retype(space, TABLES, Object::of(kind), 1, node, at).unwrap();
        node.then(at)
    }

    fn copy(&mut self, from: Handle) -> Handle {
        let (node, at) = self.place();
        let Holder { kernel, space, .. } = &mut self.holder;
        kernel.copy(space, from, node, at, Rights::ALL).unwrap();
        node.then(at)
    }

    /// The table of a level that an address of a root goes through.
    fn table(&mut self, root: usize, level: u8, at: u64) -> Handle {
        let key = (level, if level < 4 { at >> span_bits(level + 1) } else { 0 });
        if let Some(table) = self.roots[root].tables.get(&key) {
            return *table;
        }
        let above = self.table(root, level + 1, at);
        let table = self.make([Type::Pt, Type::Pd, Type::Pdpt][usize::from(level) - 1]);
        let entries = Entries { table: above, first: index(VirtAddr(at as usize), level + 1), count: 1 };
        let Holder { kernel, space, .. } = &mut self.holder;
        kernel.map(space, entries, table, 0, Rights::ALL).unwrap();
        self.roots[root].tables.insert(key, table);
        table
    }

    fn is_taken(&self, root: usize, at: u64, len_bytes: u64) -> bool {
        let (root, last) = (&self.roots[root], at + (len_bytes - 1));
        root.target.is_taken(at, last)
            || root.windows.iter().any(|window| window.at <= last && at <= window.at + (window.len_bytes - 1))
    }

    fn map(&mut self, root: usize, piece: Piece) {
        let Range { at, len_bytes, pages } = piece.range;
        if self.is_taken(root, at.0 as u64, len_bytes) {
            return;
        }
        for (first, count) in parts(piece.range) {
            let table = self.table(root, pages.level(), first);
            let from = self.copy(piece.from.handle);
            let entries = Entries { table, first: index(VirtAddr(first as usize), pages.level()), count: count as u16 };
            let offset_bytes = piece.offset_bytes + (first - at.0 as u64);
            let Holder { kernel, space, .. } = &mut self.holder;
            kernel.map(space, entries, from, offset_bytes, piece.rights).unwrap();
        }
        self.roots[root].target.map(piece.range, piece.base(), piece.rights).unwrap();
    }

    /// Some table of a root, with its level and where what it spans begins.
    fn some_table(&self, root: usize, levels: std::ops::RangeInclusive<u8>) -> Option<(Handle, u8, u64)> {
        let tables = self.roots[root].tables.iter().filter(|((level, _), _)| levels.contains(level));
        let of = |((level, prefix), table): (&(u8, u64), &Handle)| {
            (*table, *level, if *level < 4 { prefix << span_bits(level + 1) } else { 0 })
        };
        let tables: Vec<_> = tables.map(of).collect();
        (!tables.is_empty()).then(|| one_of(&tables))
    }

    /// Puts a table of one root into another place, of the same root or the other.
    fn share(&mut self) {
        let (from, into) = (below(2) as usize, below(2) as usize);
        let Some((table, level, leads_to)) = self.some_table(from, 1..=3) else { return };
        let len_bytes = 1 << span_bits(level + 1);
        let at = one_of(&[0, 0xffff_8000_0000_0000]) + (below(1 << 47) & !(len_bytes - 1));
        // Anywhere, or near.
        let at = if below(2) == 0 { at } else { leads_to ^ (len_bytes * (1 + below(3))) };
        let is_canonical = selfpage_core::tables::is_canonical(VirtAddr(at as usize));
        let has_table = self.roots[into].tables.contains_key(&(level, at >> span_bits(level + 1)));
        if !is_canonical || has_table || self.is_taken(into, at, len_bytes) {
            return;
        }
        let rights = rights();
        let above = self.table(into, level + 1, at);
        let copy = self.copy(table);
        let entries = Entries { table: above, first: index(VirtAddr(at as usize), level + 1), count: 1 };
        let Holder { kernel, space, .. } = &mut self.holder;
        kernel.map(space, entries, copy, 0, rights).unwrap();
        self.roots[into].windows.push(Window { at, len_bytes, root: from, leads_to, rights, table });
    }

    /// Maps a table as a page, to be read.
    fn show(&mut self) {
        let (of, into) = (below(2) as usize, below(2) as usize);
        let Some((table, ..)) = self.some_table(of, 1..=4) else { return };
        let base = self.base(table);
        let at = VirtAddr((below(1 << 35) & !4095) as usize);
        let range = Range { at, len_bytes: 4096, pages: PageSize::Small4KiB };
        let from = Source { handle: table, base, len_bytes: 4096 };
        self.map(into, Piece { range, from, offset_bytes: 0, rights: Rights::READ });
        if self.is_taken(into, at.0 as u64 + 4096, 4096) {
            return;
        }
        let (beside, copy) = (self.table(into, 1, at.0 as u64 + 4096), self.copy(table));
        let entries = Entries { table: beside, first: index(VirtAddr(at.0 + 4096), 1), count: 1 };
        let Holder { kernel, space, .. } = &mut self.holder;
        let written = kernel.map(space, entries, copy, 0, Rights::READ | Rights::WRITE);
        assert_eq!(written, Err(Error::NoRight));
    }

    fn base(&self, of: Handle) -> PhysAddr {
        self.holder.kernel.identify(&self.holder.space, of).unwrap().base
    }

    /// Where an address shall lead.
    fn leads(&self, root: usize, at: u64) -> Option<Translation> {
        let inside = |window: &&Window| (window.at..=window.at + (window.len_bytes - 1)).contains(&at);
        let Some(window) = self.roots[root].windows.iter().find(inside) else {
            return self.roots[root].target.leads(VirtAddr(at as usize));
        };
        let found = self.leads(window.root, window.leads_to + (at - window.at))?;
        Some(Translation { rights: found.rights & window.rights, ..found })
    }

    fn walk(&self) {
        for root in 0..2 {
            let base = self.base(self.roots[root].tables[&(4, 0)]);
            let see = |at| see(self.holder.memory, base, at, self.leads(root, at));
            for (first, last) in self.roots[root].target.edges() {
                [first.wrapping_sub(1), first, first + below(last - first), last, last.wrapping_add(1)]
                    .into_iter()
                    .for_each(see);
            }
            for window in &self.roots[root].windows {
                let last = window.at + (window.len_bytes - 1);
                [window.at.wrapping_sub(1), window.at, last, last.wrapping_add(1)].into_iter().for_each(see);
                (0..20).for_each(|_| see(window.at + below(window.len_bytes)));
                // Where there is something behind it.
                for (first, last) in self.roots[window.root].target.edges() {
                    let there =
                        |at: u64| (at.wrapping_sub(window.leads_to) < window.len_bytes).then(|| at - window.leads_to);
                    [first, last].into_iter().filter_map(there).for_each(|offset| see(window.at + offset));
                }
            }
            (0..200).for_each(|_| see(((next() << 16) as i64 >> 16) as u64));
        }
    }

    /// Unmaps some of what was mapped together, and changes the rights of other pages.
    fn change(&mut self) {
        for root in 0..2 {
            for range in self.roots[root].target.mappings() {
                let Range { at, len_bytes, pages } = range;
                let table = self.table(root, pages.level(), at.0 as u64);
                let count = (len_bytes / pages.len_bytes()) as u16;
                let first = index(at, pages.level());
                let Holder { kernel, space, .. } = &mut self.holder;
                match below(4) {
                    0 => {
                        kernel.unmap(space, Entries { table, first, count }).unwrap();
                        self.roots[root].target.unmap(range).unwrap();
                    }
                    1 => {
                        let part = crate::chance::part_of(range);
                        let first = index(part.at, pages.level());
                        let count = (part.len_bytes / pages.len_bytes()) as u16;
                        let entries = Entries { table, first, count };
                        // A table that is shown can be read, and nothing else.
                        let asked = rights();
                        let rights = match kernel.modify_flags(space, entries, asked) {
                            Err(Error::NoRight) => continue,
                            result => result.map(|()| asked).unwrap(),
                        };
                        self.roots[root].target.protect(part, rights).unwrap();
                    }
                    _ => {}
                }
            }
        }
    }

    /// Takes back the copies of a table: it is left in its own place only.
    fn take_back(&mut self) {
        let Some((table, ..)) = self.some_table(below(2) as usize, 1..=4) else { return };
        let base = self.base(table);
        let Holder { kernel, space, .. } = &mut self.holder;
        kernel.revoke(space, table, u64::MAX).unwrap();
        for root in &mut self.roots {
            root.windows.retain(|window| window.table != table);
            root.target.forget(base);
        }
    }
}

#[test]
fn tables_are_shared_and_shown() {
    let (windows, mappings) = (Cell::new(0), Cell::new(0));
    for_seeds(2500, |memory| {
        let mut builder = Builder::new(Holder::new(memory));
        let sources = builder.holder.sources.clone();
        for _ in 0..1 + below(40) {
            match below(4) {
                0 => builder.share(),
                1 => builder.show(),
                _ => builder.map(below(2) as usize, piece(&sources)),
            }
        }
        builder.walk();
        for root in &builder.roots {
            windows.set(windows.get() + root.windows.len());
            mappings.set(mappings.get() + root.target.mappings().len());
        }
        builder.change();
        builder.walk();
        builder.take_back();
        builder.walk();
        let roots = [0, 1].map(|root: usize| builder.base(builder.roots[root].tables[&(4, 0)]));
        let Builder { mut holder, .. } = builder;
        holder.kernel.revoke(&holder.space, NODES, u64::MAX).unwrap();
        holder.end(TABLES, &roots);
    });
    println!("{} mappings, {} tables in a second place", mappings.get(), windows.get());
}
