//! Typed capabilities over physical memory, and the few rules by which programs build their own page tables safely.
//!
//! All memory begins as [`Type::Ram`]. A holder carves typed objects out of it ([`Kernel::retype`]), hands on copies with no
//! more rights than its own ([`Kernel::copy`]), and takes back all that came of a capability ([`Kernel::revoke`]). Memory of
//! one type never has another at the same time, so nobody can write into a page table or a CNode but through the rules.
//!
//! Everything that the mechanism has to remember lies in memory that its user retyped for it: capabilities in CNodes, and
//! beside each page table the origin of each of its entries. It allocates nothing, and no call fails for lack of memory but
//! that of the caller's own RAM.
//!
//! # Source
//! Cichlid §3.1 and §3.2, after seL4 and Barrelfish. Ours differ in this: copies are descendants of what they were made from, as
//! in seL4, so whoever lends a copy can take it back and not the reverse; RAM is carved from the front, as in seL4; what
//! a CNode holds is destroyed with it, and what came of that; a page table has a second page for the origins of its entries.
//!
//! # Context
//! Normal, and alone: the kernel is `&mut` in every call that changes something.

mod derivation;
mod kernel;
mod lookup;
mod rule;
mod slot;

pub use derivation::Derived;
pub use kernel::{Kernel, Object, Progress};
pub use lookup::{Handle, Space};
pub use rule::Rule;
pub use slot::Capability;
pub(crate) use slot::{Mapping, Slot};

use core::ops::{BitAnd, BitOr};

/// What memory is used for. One at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Type {
    /// Memory of no use yet: what the others are made from.
    Ram = 1,
    /// Memory that can be mapped.
    Frame,
    /// Registers of a device: mapped uncached, and never made into anything else.
    DevFrame,
    /// 63 places for capabilities.
    CNode,
    /// The root of a hierarchy of page tables.
    Pml4,
    /// Page directory pointer table: its entries span 1 GiB.
    Pdpt,
    /// Page directory: its entries span 2 MiB.
    Pd,
    /// Page table: its entries span 4 KiB.
    Pt,
}

impl Type {
    const ALL: [Type; 8] =
        [Type::Ram, Type::Frame, Type::DevFrame, Type::CNode, Type::Pml4, Type::Pdpt, Type::Pd, Type::Pt];

    fn from_code(code: u64) -> Option<Type> {
        Type::ALL.into_iter().find(|kind| *kind as u64 == code)
    }

    /// The level of a page table, 4 for the root; `None` for what is none.
    pub const fn level(self) -> Option<u8> {
        match self {
            Type::Pml4 => Some(4),
            Type::Pdpt => Some(3),
            Type::Pd => Some(2),
            Type::Pt => Some(1),
            _ => None,
        }
    }

    /// log2 of the size in bytes of every object of this type, where all have the same: a CNode fills a page, and a page
    /// table two, the second for the origins of its entries.
    pub const fn size_bits(self) -> Option<u8> {
        match self {
            Type::CNode => Some(12),
            Type::Pml4 | Type::Pdpt | Type::Pd | Type::Pt => Some(13),
            Type::Ram | Type::Frame | Type::DevFrame => None,
        }
    }

    /// Whether objects of type `to` may be made from this.
    pub const fn becomes(self, to: Type) -> bool {
        match self {
            Type::Ram => !matches!(to, Type::DevFrame),
            Type::Frame => matches!(to, Type::Frame),
            Type::DevFrame => matches!(to, Type::DevFrame),
            _ => false,
        }
    }
}

/// What the holder of a capability may do with the object. (A region's are [`region::Rights`](crate::region::Rights).)
///
/// Of a Frame: map it so that it can be read, written, executed. Of a CNode: look things up in it, put things into it. Of a
/// page table: map it to be read, change it. Of RAM: write is what retyping takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Rights(u8);

impl Rights {
    /// None.
    pub const NONE: Rights = Rights(0);
    /// To read.
    pub const READ: Rights = Rights(1);
    /// To write.
    pub const WRITE: Rights = Rights(2);
    /// To execute.
    pub const EXECUTE: Rights = Rights(4);
    /// All.
    pub const ALL: Rights = Rights(7);

    /// Whether these hold all of `others`.
    pub const fn contain(self, others: Rights) -> bool {
        self.0 & others.0 == others.0
    }

    /// Both together.
    pub const fn with(self, others: Rights) -> Rights {
        Rights(self.0 | others.0)
    }

    const fn from_code(code: u64) -> Rights {
        Rights(code as u8 & 7)
    }
}

impl BitOr for Rights {
    type Output = Rights;
    fn bitor(self, other: Rights) -> Rights {
        self.with(other)
    }
}

impl BitAnd for Rights {
    type Output = Rights;
    fn bitand(self, other: Rights) -> Rights {
        Rights(self.0 & other.0)
    }
}

/// Why a call was refused. Nothing has changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Error {
    /// The handle leads to no capability: an empty place, a guard that does not match, a number that names no place.
    NoCapability,
    /// The handle is longer or shorter than the way to a capability.
    DepthOverflow,
    /// A capability of another type is needed.
    WrongType,
    /// The capability does not have the right.
    NoRight,
    /// An object of this type has another size, or no object has this size.
    BadSize,
    /// Base and offset are no multiple of what the entry needs.
    Misaligned,
    /// There is no such place, entry, or part of an object.
    OutOfRange,
    /// The place holds a capability already.
    SlotTaken,
    /// The address is not canonical: its upper bits are no copies of bit 47.
    NotCanonical,
    /// An entry of the table is in use already.
    EntryTaken,
    /// The capability is mapped already: map a copy.
    AlreadyMapped,
    /// There is no mapping.
    NotMapped,
    /// x86-64 has no entry with these rights: what is mapped can be read.
    NoSuchEntry,
    /// The entries cut a mapping into parts.
    PartOfMapping,
    /// Something depends on it: copies, objects made from it, capabilities in the CNode, entries of the table.
    InUse,
    /// What it was derived from is being revoked, or the CNode that it would lie in.
    RevokeInProgress,
    /// The rest of the memory to be carved is too small.
    OutOfMemory,
}
