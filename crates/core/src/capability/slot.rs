//! Capabilities as they lie in memory: eight words in a place of a CNode.

use super::{Rights, Type};
use crate::physical::{PhysAddr, PhysMemory};

/// Bytes of a place.
const SLOT_BYTES: u64 = 64;
/// Bytes of a CNode.
pub(super) const CNODE_BYTES: u64 = 4096;
/// log2 of the number of places in a CNode. The first is none: see [`Header`].
pub(super) const RADIX_BITS: u32 = 6;

/// A place for a capability in a CNode, by its physical address. Only the mechanism makes one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) struct Slot(u64);

impl Slot {
    /// Place `index` of the CNode at `node`; never the first.
    pub(super) fn in_node(node: PhysAddr, index: u64) -> Option<Slot> {
        (1..1 << RADIX_BITS).contains(&index).then(|| Slot(node.0 + index * SLOT_BYTES))
    }

    /// The CNode that it is in.
    pub(super) fn node(self) -> PhysAddr {
        PhysAddr(self.0 & !(CNODE_BYTES - 1))
    }

    fn word(self, word: Word) -> PhysAddr {
        PhysAddr(self.0 + word as u64 * 8)
    }
}

/// The words of a place, in order.
#[derive(Clone, Copy)]
enum Word {
    /// Type, rights, size, guard length, flags, the serial number's low bits. 0: empty.
    Head,
    /// Where the memory begins, which is a multiple of a page, and below that the serial number's high bits.
    Base,
    /// Of a CNode its guard, of what can be mapped its mapping.
    Extra,
    Parent,
    Child,
    Next,
    Previous,
    /// Of the origin of what can be retyped: pages carved so far, and how many objects made of them live.
    Carved,
}

/// The words of the first place of a CNode, which is none.
#[derive(Clone, Copy)]
enum Header {
    /// How many of the others are taken.
    Taken,
    /// Of a CNode whose contents are being destroyed: the capability by which it was reached, and how many steps down lead there.
    From,
    Steps,
    /// Of the first CNode of all: how many capabilities are marked, wherever they are.
    Marked,
}

const RIGHTS_SHIFT: u32 = 4;
const SIZE_SHIFT: u32 = 8;
const GUARD_SHIFT: u32 = 16;
const COPY: u64 = 1 << 24;
const REVOKING: u64 = 1 << 25;
const GOING: u64 = 1 << 26;
const SERIAL_SHIFT: u32 = 27;
/// The serial number's bits in the head; with those beside the base there are 49, which do not come round in a working life.
const SERIAL_LOW_BITS: u32 = u64::BITS - SERIAL_SHIFT;
const BELOW_BASE: u64 = 4095;

/// What a capability says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capability {
    /// What the memory is.
    pub kind: Type,
    /// What may be done with it.
    pub rights: Rights,
    /// Where it begins.
    pub base: PhysAddr,
    /// log2 of its length in bytes.
    pub size_bits: u8,
    /// Of a CNode: how many bits of a handle are compared before one of its places is chosen, and with what.
    pub guard_bits: u8,
    /// See `guard_bits`.
    pub guard: u64,
}

impl Capability {
    /// How long the memory is, in bytes.
    pub const fn len_bytes(&self) -> u64 {
        1 << self.size_bits
    }
}

/// Where a capability is mapped: consecutive entries of one table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapping {
    /// The capability with which the table came to be.
    pub(crate) table: Slot,
    pub(crate) first: u16,
    pub(crate) count: u16,
}

impl Mapping {
    /// A place is aligned to 64 bytes below 2^52, an index takes 9 bits, and so does a count that is never 0: 64 in all.
    fn encode(self) -> u64 {
        (self.table.0 / SLOT_BYTES) << 18 | u64::from(self.first) << 9 | u64::from(self.count.wrapping_sub(1) & 511)
    }

    /// No place begins at physical address 0: the first of a CNode is none.
    fn decode(word: u64) -> Option<Mapping> {
        let table = Slot((word >> 18) * SLOT_BYTES);
        (word != 0).then_some(Mapping { table, first: (word >> 9 & 511) as u16, count: (word & 511) as u16 + 1 })
    }
}

/// How much of an object has been made into others.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Carved {
    /// Pages of 4,096 bytes, from the front.
    pub(super) pages: u64,
    /// Objects made of them that are not destroyed yet.
    pub(super) objects: u64,
}

/// All places, in one memory.
#[derive(Clone, Copy)]
pub(crate) struct Slots<'m>(pub(crate) &'m PhysMemory);

impl Slots<'_> {
    fn get(self, slot: Slot, word: Word) -> u64 {
        self.0.load(slot.word(word))
    }

    fn set(self, slot: Slot, word: Word, value: u64) {
        self.0.store(slot.word(word), value);
    }

    /// The capability in a place.
    pub(crate) fn capability(self, slot: Slot) -> Option<Capability> {
        let head = self.get(slot, Word::Head);
        let kind = Type::from_code(head & 15)?;
        let is_node = kind == Type::CNode;
        Some(Capability {
            kind,
            rights: Rights::from_code(head >> RIGHTS_SHIFT),
            base: PhysAddr(self.get(slot, Word::Base) & !BELOW_BASE),
            size_bits: (head >> SIZE_SHIFT) as u8,
            guard_bits: (head >> GUARD_SHIFT) as u8,
            guard: if is_node { self.get(slot, Word::Extra) } else { 0 },
        })
    }

    /// Puts a capability into an empty place; it has no relations yet. `serial` is never given twice.
    pub(super) fn put(self, slot: Slot, capability: Capability, copy: Copied, serial: u64) {
        let head = capability.kind as u64
            | u64::from(capability.rights.0) << RIGHTS_SHIFT
            | u64::from(capability.size_bits) << SIZE_SHIFT
            | u64::from(capability.guard_bits) << GUARD_SHIFT
            | if copy == Copied::Yes { COPY } else { 0 }
            | serial << SERIAL_SHIFT;
        self.set(slot, Word::Base, capability.base.0 | serial >> SERIAL_LOW_BITS & BELOW_BASE);
        self.set(slot, Word::Extra, if capability.kind == Type::CNode { capability.guard } else { 0 });
        self.set(slot, Word::Parent, 0);
        self.set(slot, Word::Child, 0);
        self.set(slot, Word::Next, 0);
        self.set(slot, Word::Previous, 0);
        self.set(slot, Word::Carved, 0);
        self.set(slot, Word::Head, head);
        self.count(slot.node(), 1);
    }

    /// Empties a place.
    pub(super) fn empty(self, slot: Slot) {
        if self.is_marked(slot) {
            self.mark(slot, 0);
        }
        self.set(slot, Word::Head, 0);
        self.count(slot.node(), u64::MAX);
    }

    fn header(self, node: PhysAddr, word: Header) -> u64 {
        self.0.load(node.plus(word as u64 * 8))
    }

    fn set_header(self, node: PhysAddr, word: Header, value: u64) {
        self.0.store(node.plus(word as u64 * 8), value);
    }

    fn count(self, node: PhysAddr, more: u64) {
        self.set_header(node, Header::Taken, self.taken(node).wrapping_add(more));
    }

    /// How many places of a CNode are taken.
    pub(super) fn taken(self, node: PhysAddr) -> u64 {
        self.header(node, Header::Taken)
    }

    /// Notes how a CNode was reached whose contents are being destroyed.
    pub(super) fn set_way_back(self, node: PhysAddr, from: Slot, steps: u64) {
        self.set_header(node, Header::From, from.0);
        self.set_header(node, Header::Steps, steps);
    }

    /// How it was reached.
    pub(super) fn way_back(self, node: PhysAddr) -> (Slot, u64) {
        (Slot(self.header(node, Header::From)), self.header(node, Header::Steps))
    }

    /// A number that no other capability has had in this place.
    pub(crate) fn serial(self, slot: Slot) -> u64 {
        let high = self.get(slot, Word::Base) & BELOW_BASE;
        high << SERIAL_LOW_BITS | self.get(slot, Word::Head) >> SERIAL_SHIFT
    }

    /// Whether it is a copy of what it was derived from.
    pub(super) fn is_copy(self, slot: Slot) -> bool {
        self.get(slot, Word::Head) & COPY != 0
    }

    /// Whether it is being revoked, or a revocation has come to it.
    pub(super) fn is_marked(self, slot: Slot) -> bool {
        self.marks(slot) != 0
    }

    pub(super) fn mark_revocation(self, slot: Slot, stage: Stage) {
        let marks = self.marks(slot) & !REVOKING;
        self.mark(slot, if stage == Stage::Begun { marks | REVOKING } else { marks });
    }

    /// A revocation has come to a capability in a CNode that goes: it goes too, whatever it was derived from.
    pub(super) fn mark_going(self, slot: Slot) {
        self.mark(slot, self.marks(slot) | GOING);
    }

    /// Whether any capability is marked.
    pub(super) fn any_marked(self) -> bool {
        self.header(self.0.first(), Header::Marked) != 0
    }

    fn marks(self, slot: Slot) -> u64 {
        self.get(slot, Word::Head) & (REVOKING | GOING)
    }

    fn mark(self, slot: Slot, marks: u64) {
        let (was, is) = (u64::from(self.is_marked(slot)), u64::from(marks != 0));
        let marked = self.header(self.0.first(), Header::Marked);
        self.set_header(self.0.first(), Header::Marked, (marked + is).saturating_sub(was));
        self.set(slot, Word::Head, self.get(slot, Word::Head) & !(REVOKING | GOING) | marks);
    }

    pub(super) fn carved(self, slot: Slot) -> Carved {
        let word = self.get(slot, Word::Carved);
        Carved { pages: word >> 24, objects: word & 0xff_ffff }
    }

    pub(super) fn set_carved(self, slot: Slot, carved: Carved) {
        self.set(slot, Word::Carved, carved.pages << 24 | carved.objects & 0xff_ffff);
    }

    /// Where the capability is mapped.
    pub(crate) fn mapping(self, slot: Slot) -> Option<Mapping> {
        Mapping::decode(self.get(slot, Word::Extra))
    }

    /// Notes where the capability, which is no CNode's, is mapped.
    pub(crate) fn set_mapping(self, slot: Slot, mapping: Option<Mapping>) {
        self.set(slot, Word::Extra, mapping.map_or(0, Mapping::encode));
    }

    pub(super) fn relation(self, slot: Slot, to: Relation) -> Option<Slot> {
        let at = self.get(slot, to.word());
        (at != 0).then_some(Slot(at))
    }

    pub(super) fn relate(self, slot: Slot, to: Relation, other: Option<Slot>) {
        self.set(slot, to.word(), other.map_or(0, |other| other.0));
    }

    /// The capability from which an entry of the table at `table` was made, if the entry is in use.
    pub(crate) fn origin_of_entry(self, table: PhysAddr, index: u16) -> Option<Slot> {
        let at = self.0.load(origin(table, index));
        (at != 0).then_some(Slot(at))
    }

    /// Notes it.
    pub(crate) fn set_origin_of_entry(self, table: PhysAddr, index: u16, from: Option<Slot>) {
        self.0.store(origin(table, index), from.map_or(0, |from| from.0));
    }
}

/// The second page of a table says for each entry which capability it was made from.
const fn origin(table: PhysAddr, index: u16) -> PhysAddr {
    table.plus(4096 + (index as u64 & 511) * 8)
}

/// Whether a capability is a copy of its parent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Copied {
    Yes,
    No,
}

/// How far a revocation is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Begun,
    Ended,
}

/// The links of the derivation tree.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Relation {
    Parent,
    /// The youngest.
    Child,
    /// The next older child of the same parent.
    Next,
    Previous,
}

impl Relation {
    const fn word(self) -> Word {
        match self {
            Relation::Parent => Word::Parent,
            Relation::Child => Word::Child,
            Relation::Next => Word::Next,
            Relation::Previous => Word::Previous,
        }
    }
}
