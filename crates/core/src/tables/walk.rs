//! What the CPU does with page tables: a walk in software, which sets the bits that the CPU would set. It knows no reserved bits: the
//! rules make no entry that has one.
//!
//! # Source
//! AMD64 Architecture Programmer's Manual, volume 2, §5.3 and §8.4.2 (the error code of a page fault).

use super::entry::{ACCESSED, DIRTY, Entry, index, is_canonical, span_bits};
use crate::addr::VirtAddr;
use crate::capability::Rights;
use crate::physical::{PhysAddr, PhysMemory};
use crate::sync::Ordering;

/// What an instruction at ring 3 does to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reads it.
    Read,
    /// Writes it.
    Write,
    /// Executes it.
    Execute,
}

impl Access {
    const fn needs(self) -> Rights {
        match self {
            Access::Read => Rights::READ,
            Access::Write => Rights::WRITE,
            Access::Execute => Rights::EXECUTE,
        }
    }
}

/// Where an address leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// The physical address.
    pub at: PhysAddr,
    /// log2 of the size of the page that it is in.
    pub size_bits: u8,
    /// What all entries on the way allow.
    pub rights: Rights,
}

/// Why the CPU would fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WalkFault {
    /// A general protection fault: the address is not canonical.
    NotCanonical,
    /// A page fault, with this error code.
    Page(u32),
}

/// Bits of the error code of a page fault.
const CODE_PRESENT: u32 = 1;
const CODE_WRITE: u32 = 1 << 1;
const CODE_USER: u32 = 1 << 2;
const CODE_EXECUTE: u32 = 1 << 4;

/// The entries on the way to an address, at most one a level.
struct Way {
    at: [PhysAddr; 4],
    len: usize,
    end: Result<Translation, ()>,
}

/// Where an address leads, without touching anything.
pub fn translate(memory: &PhysMemory, root: PhysAddr, at: VirtAddr) -> Option<Translation> {
    if !is_canonical(at) {
        return None;
    }
    way(memory, root, at).end.ok()
}

/// An access at ring 3: the physical address, or the fault. As the CPU does, it marks each entry that it came through as
/// accessed, and the page's as dirty for a write.
///
/// # Errors
/// The fault that the CPU would raise.
pub fn access(memory: &PhysMemory, root: PhysAddr, at: VirtAddr, access: Access) -> Result<PhysAddr, WalkFault> {
    if !is_canonical(at) {
        return Err(WalkFault::NotCanonical);
    }
    let way = way(memory, root, at);
    let code = CODE_USER
        | match access {
            Access::Read => 0,
            Access::Write => CODE_WRITE,
            Access::Execute => CODE_EXECUTE,
        };
    let Ok(translation) = way.end else { return Err(WalkFault::Page(code)) };
    if !translation.rights.contain(access.needs()) {
        return Err(WalkFault::Page(code | CODE_PRESENT));
    }
    for (step, entry) in way.at.iter().take(way.len).enumerate() {
        let dirty = if access == Access::Write && step + 1 == way.len { DIRTY } else { 0 };
        if let Some(word) = memory.word(*entry) {
            word.fetch_or(ACCESSED | dirty, Ordering::Relaxed);
        }
    }
    Ok(translation.at)
}

fn way(memory: &PhysMemory, root: PhysAddr, at: VirtAddr) -> Way {
    let mut way = Way { at: [PhysAddr(0); 4], len: 0, end: Err(()) };
    let mut table = root;
    let mut rights = Rights::ALL;
    for level in (1..=4).rev() {
        let place = table.plus(u64::from(index(at, level)) * 8);
        let entry = Entry(memory.load(place));
        if let Some(step) = way.at.get_mut(way.len) {
            *step = place;
            way.len += 1;
        }
        if !entry.is_present() {
            return way;
        }
        rights = rights & entry.rights();
        if entry.is_page(level) {
            let size_bits = span_bits(level);
            let offset = at.0 as u64 & ((1 << size_bits) - 1);
            let base = entry.base().0 & !((1 << size_bits) - 1);
            way.end = Ok(Translation { at: PhysAddr(base + offset), size_bits, rights });
            return way;
        }
        table = entry.base();
    }
    way
}
