//! What lies in memory, read by other code than that under test.

use selfpage_core::capability::{Rights, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};

/// Entries of each table that are looked at: those that steps name, and one more.
pub const ENTRIES: usize = 3;

/// A capability in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    pub at: u64,
    pub kind: Type,
    pub rights: Rights,
    pub size_bits: u8,
    pub is_copy: bool,
    pub is_being_revoked: bool,
    pub serial: u64,
    pub base: u64,
    pub mapping: Option<Mapping>,
    pub parent: u64,
    pub child: u64,
    pub next: u64,
    pub previous: u64,
    pub carved: u64,
}

/// Where a capability says that it is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    pub table: u64,
    pub first: usize,
    pub count: usize,
}

impl Place {
    fn read(memory: &PhysMemory, at: PhysAddr) -> Option<Place> {
        let word = |index: u64| memory.load(at.plus(index * 8));
        let head = word(0);
        let kind = match head & 15 {
            0 => return None,
            1 => Type::Ram,
            2 => Type::Frame,
            3 => Type::DevFrame,
            4 => Type::CNode,
            5 => Type::Pml4,
            6 => Type::Pdpt,
            7 => Type::Pd,
            _ => Type::Pt,
        };
        let right = |bit: u64, right| if head >> 4 & bit != 0 { right } else { Rights::NONE };
        let extra = if kind == Type::CNode { 0 } else { word(2) };
        let mapping = Mapping {
            table: (extra >> 18) * 64,
            first: (extra >> 9 & 511) as usize,
            count: (extra & 511) as usize + 1,
        };
        Some(Place {
            at: at.0,
            kind,
            rights: right(1, Rights::READ) | right(2, Rights::WRITE) | right(4, Rights::EXECUTE),
            size_bits: (head >> 8) as u8,
            is_copy: head >> 24 & 1 != 0,
            is_being_revoked: head >> 25 & 1 != 0,
            serial: (word(1) & 4095) << 37 | head >> 27,
            base: word(1) & !4095,
            mapping: (extra != 0).then_some(mapping),
            parent: word(3),
            child: word(4),
            next: word(5),
            previous: word(6),
            carved: word(7),
        })
    }

    pub const fn end(&self) -> u64 {
        self.base + (1 << self.size_bits)
    }

    pub const fn overlaps(&self, base: u64, end: u64) -> bool {
        self.base < end && base < self.end()
    }
}

/// Memory that is or may become a table: its first entries, and where each says that it came from.
#[derive(Clone, Copy, Default)]
pub struct Table {
    pub base: u64,
    pub entries: [u64; ENTRIES],
    pub origins: [u64; ENTRIES],
}

/// Two CNodes, the lender's and the holder's, and the tables.
pub struct Seen {
    pub nodes: [u64; 2],
    pub taken: [u64; 2],
    /// Where capabilities are or may be.
    addresses: Vec<u64>,
    places: Vec<Option<Place>>,
    pub tables: Vec<Table>,
}

impl Seen {
    pub fn new(nodes: [PhysAddr; 2], places: &[PhysAddr], tables: &[PhysAddr]) -> Seen {
        let table = |base: &PhysAddr| Table { base: base.0, ..Table::default() };
        Seen {
            nodes: nodes.map(|node| node.0),
            taken: [0; 2],
            addresses: places.iter().map(|at| at.0).collect(),
            places: vec![None; places.len()],
            tables: tables.iter().map(table).collect(),
        }
    }

    /// Looks again.
    pub fn look(&mut self, memory: &PhysMemory) {
        for (place, at) in self.places.iter_mut().zip(&self.addresses) {
            *place = Place::read(memory, PhysAddr(*at));
        }
        self.taken = self.nodes.map(|node| memory.load(PhysAddr(node)));
        for table in &mut self.tables {
            let word = |at: usize| memory.load(PhysAddr(table.base + at as u64 * 8));
            table.entries = std::array::from_fn(word);
            table.origins = std::array::from_fn(|entry| word(512 + entry));
        }
    }

    /// The capability at an address.
    pub fn at(&self, at: u64) -> Option<&Place> {
        self.places[self.addresses.iter().position(|address| *address == at)?].as_ref()
    }

    pub fn live(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().flatten()
    }

    /// What came of a capability directly, the youngest first.
    pub fn children(&self, of: &Place) -> impl Iterator<Item = &Place> {
        std::iter::successors(self.at(of.child), |child| self.at(child.next))
    }

    /// The table that a capability with this address came to be with.
    pub fn table_of(&self, origin: u64) -> Option<(usize, &Table)> {
        let base = self.at(origin).filter(|place| place.kind.level().is_some() && !place.is_copy)?.base;
        self.tables.iter().enumerate().find(|(_, table)| table.base == base)
    }

    /// The capability with which the table in this memory came to be, if it is a table now.
    pub fn origin_of(&self, table: &Table) -> Option<&Place> {
        self.live().find(|place| place.base == table.base && place.kind.level().is_some() && !place.is_copy)
    }
}
