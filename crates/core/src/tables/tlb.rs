//! What the CPU may still remember of entries that were changed.
//!
//! # Source
//! Cichlid §4.1: full, selective, and adaptive invalidation.

use super::entry::span_bits;
use crate::addr::VirtAddr;
use crate::capability::{Kernel, Mapping, Rule, Slot};
use crate::physical::PhysAddr;

/// A CPU, and its memory of translations. The mechanism tells it what no longer holds, before a call returns.
pub trait Tlb {
    /// Forget all.
    fn forget_all(&self);

    /// Forget what was known of the page at an address.
    fn forget(&self, page: VirtAddr);

    /// Stop translating by this root: its memory becomes something else.
    fn leave(&self, root: PhysAddr);
}

/// How much a CPU is told to forget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Invalidation {
    /// Everything, whenever anything changed.
    Full,
    /// The pages that changed, where their addresses are known.
    Selective,
    /// The pages that changed while they are few, else everything.
    Adaptive,
}

/// More pages than this are more expensive to forget one by one than to walk to again: as in Linux.
const FEW: u32 = 33;

/// So many copies of a table are looked at for whether a CPU walks through them.
const FEW_COPIES: usize = 8;

/// What a CPU may remember wrongly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stale {
    Nothing,
    /// Neighbouring pages.
    Pages {
        first: VirtAddr,
        page_bytes: usize,
        count: u32,
    },
    Anything,
}

impl Kernel<'_> {
    /// How much the CPU is told to forget from now on.
    pub fn set_invalidation(&mut self, invalidation: Invalidation) {
        self.invalidation = invalidation;
    }

    /// Entries of the table whose origin this is change. Say so before they do.
    pub(crate) fn goes_stale(&mut self, table: Slot, level: u8, first: u16, count: u16) {
        let page_bytes = 1usize << span_bits(level);
        let more = u32::from(count);
        self.stale = match (self.stale, self.addresses_of(table, level, first, count)) {
            (stale, Reach::Nowhere) => stale,
            (Stale::Nothing, Reach::At(first)) => Stale::Pages { first, page_bytes, count: more },
            (Stale::Pages { first, page_bytes: same, count }, Reach::At(at))
                if same == page_bytes && at.0 == first.0.wrapping_add(page_bytes * count as usize) =>
            {
                Stale::Pages { first, page_bytes, count: count + more }
            }
            _ => Stale::Anything,
        };
    }

    /// Tells the CPU.
    pub(crate) fn invalidate(&mut self) {
        let stale = core::mem::replace(&mut self.stale, Stale::Nothing);
        if !self.keeps(Rule::StaleIsForgotten) {
            return;
        }
        match (stale, self.invalidation) {
            (Stale::Nothing, _) => {}
            (Stale::Pages { first, page_bytes, count }, Invalidation::Selective | Invalidation::Adaptive)
                if count <= FEW || self.invalidation == Invalidation::Selective =>
            {
                for step in 0..count as usize {
                    self.tlb.forget(VirtAddr(first.0.wrapping_add(step * page_bytes)));
                }
            }
            _ => self.tlb.forget_all(),
        }
    }

    /// Where the addresses begin that lead through entries of a table.
    fn addresses_of(&self, table: Slot, level: u8, first: u16, count: u16) -> Reach {
        let slots = self.slots();
        let Some(base) = slots.capability(table).map(|table| table.base) else { return Reach::Many };
        let is_table = |index| {
            let from = slots.origin_of_entry(base, index).and_then(|from| slots.capability(from));
            from.is_some_and(|from| from.kind.level().is_some())
        };
        // A table below spans many pages, of sizes that nobody knows here.
        if level > 1 && (first..first + count).any(is_table) {
            return Reach::Many;
        }
        let (mut at, mut table, mut level, mut index) = (0, table, level, first);
        loop {
            at |= usize::from(index) << span_bits(level);
            if self.has_walked_copy(table, level) {
                return Reach::Many;
            }
            if level == 4 {
                return Reach::At(VirtAddr(((at << 16) as isize >> 16) as usize));
            }
            let Some(mapping) = slots.mapping(table) else { return Reach::Nowhere };
            if !self.is_walked(mapping, level) {
                return Reach::Nowhere;
            }
            (table, level, index) = (mapping.table, level + 1, mapping.first);
        }
    }

    /// Whether a CPU walks through a table of this level where it is mapped: else it is there to be read.
    fn is_walked(&self, mapping: Mapping, level: u8) -> bool {
        self.slots().capability(mapping.table).and_then(|above| above.kind.level()) == Some(level + 1)
    }

    /// Whether it may walk through a copy of a table: of many nobody looks at all.
    fn has_walked_copy(&self, table: Slot, level: u8) -> bool {
        let slots = self.slots();
        let walked = |copy| slots.mapping(copy).is_some_and(|mapping| self.is_walked(mapping, level));
        let mut copies = slots.descendants(table);
        copies.by_ref().take(FEW_COPIES).any(walked) || copies.next().is_some()
    }
}

/// The addresses that lead through an entry.
enum Reach {
    Nowhere,
    /// From there on, one page after the other.
    At(VirtAddr),
    /// Nobody knows how many.
    Many,
}
