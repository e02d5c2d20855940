//! Entries of x86-64 page tables, as the CPU reads them.
//!
//! # Source
//! AMD64 Architecture Programmer's Manual, volume 2, §5.3.

use crate::addr::VirtAddr;
use crate::capability::{Rights, Type};
use crate::physical::PhysAddr;

/// How many entries a table has.
pub const ENTRIES: u16 = 512;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
/// Ring 3 may use it.
const USER: u64 = 1 << 2;
const WRITE_THROUGH: u64 = 1 << 3;
const UNCACHED: u64 = 1 << 4;
pub(super) const ACCESSED: u64 = 1 << 5;
pub(super) const DIRTY: u64 = 1 << 6;
/// A page, where there could be a table.
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// An entry of a page table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Entry(pub u64);

impl Entry {
    /// Nothing is mapped.
    pub const EMPTY: Entry = Entry(0);

    /// A page at `base`, mapped by a table of this level.
    pub(super) const fn page(base: PhysAddr, level: u8, kind: Type, rights: Rights) -> Entry {
        let large = if level > 1 { LARGE } else { 0 };
        let caching = if matches!(kind, Type::DevFrame) { UNCACHED | WRITE_THROUGH } else { 0 };
        Entry(base.0 & ADDRESS | PRESENT | USER | large | caching).with(rights)
    }

    /// The table at `base`: what its entries allow, cut down to `rights`.
    pub(super) const fn table(base: PhysAddr, rights: Rights) -> Entry {
        Entry(base.0 & ADDRESS | PRESENT | USER).with(rights)
    }

    /// The same with other rights.
    pub(super) const fn with(self, rights: Rights) -> Entry {
        let writable = if rights.contain(Rights::WRITE) { WRITABLE } else { 0 };
        let execute = if rights.contain(Rights::EXECUTE) { 0 } else { NO_EXECUTE };
        Entry(self.0 & !(WRITABLE | NO_EXECUTE) | writable | execute)
    }

    /// Whether the CPU uses it at all.
    pub const fn is_present(self) -> bool {
        self.0 & PRESENT != 0
    }

    /// Whether it maps a page, in a table of this level.
    pub const fn is_page(self, level: u8) -> bool {
        level == 1 || (level < 4 && self.0 & LARGE != 0)
    }

    /// Where the page or the table is.
    pub const fn base(self) -> PhysAddr {
        PhysAddr(self.0 & ADDRESS)
    }

    /// What it lets ring 3 do; a page that can be used can be read.
    pub const fn rights(self) -> Rights {
        if self.0 & (PRESENT | USER) != PRESENT | USER {
            return Rights::NONE;
        }
        let write = if self.0 & WRITABLE != 0 { Rights::WRITE } else { Rights::NONE };
        let execute = if self.0 & NO_EXECUTE == 0 { Rights::EXECUTE } else { Rights::NONE };
        Rights::READ.with(write).with(execute)
    }

    /// Whether the CPU has used it since the bit was last cleared.
    pub const fn is_accessed(self) -> bool {
        self.0 & ACCESSED != 0
    }

    /// Whether the CPU has written to the page since the bit was last cleared.
    pub const fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }
}

/// log2 of the bytes that an entry of a table of this level spans.
pub const fn span_bits(level: u8) -> u8 {
    12 + 9 * (level - 1)
}

/// Which entry of a table of this level an address goes through.
pub const fn index(at: VirtAddr, level: u8) -> u16 {
    (at.0 >> span_bits(level)) as u16 & (ENTRIES - 1)
}

/// Whether the upper bits of an address are copies of bit 47, as the CPU demands.
pub const fn is_canonical(at: VirtAddr) -> bool {
    let upper = (at.0 as i64) >> 47;
    upper == 0 || upper == -1
}
