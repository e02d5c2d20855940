//! What an address space shall look like: a plain list of pages.

use std::collections::{BTreeMap, BTreeSet};

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Error, Rights};
use selfpage_core::physical::PhysAddr;
use selfpage_core::tables::walk::Translation;
use selfpage_core::tables::{PageSize, Range, Unfinished, span_bits};

/// A page that is there.
#[derive(Clone, Copy)]
struct Page {
    base: u64,
    size: PageSize,
    rights: Rights,
    /// The pages that were mapped with it, in one table, in one call: the addresses of the first and the last.
    together: (u64, u64),
}

/// Pages by their addresses.
#[derive(Clone, Default)]
pub struct Target {
    pages: BTreeMap<u64, Page>,
}

/// The parts of a range that lie in one table each: the address of the first page, and how many there are.
pub fn parts(range: Range) -> impl Iterator<Item = (u64, u64)> {
    let page_bytes = range.pages.len_bytes();
    let (first, count) = (range.at.0 as u64 / page_bytes, range.len_bytes / page_bytes);
    let mut at = first;
    std::iter::from_fn(move || {
        let here = (512 - at % 512).min(first + count - at);
        let part = (at * page_bytes, here);
        at += here;
        (here > 0).then_some(part)
    })
}

impl Target {
    fn page_at(&self, at: u64) -> Option<(u64, Page)> {
        let (first, page) = self.pages.range(..=at).next_back()?;
        (at - first < page.size.len_bytes()).then_some((*first, *page))
    }

    /// Where an address shall lead.
    pub fn leads(&self, at: VirtAddr) -> Option<Translation> {
        let (first, page) = self.page_at(at.0 as u64)?;
        let at = PhysAddr(page.base + (at.0 as u64 - first));
        Some(Translation { at, size_bits: span_bits(page.size.level()), rights: page.rights })
    }

    /// Whether there is anything between two addresses, both included.
    pub fn is_taken(&self, first: u64, last: u64) -> bool {
        self.page_at(first).is_some() || self.pages.range(first..=last).next().is_some()
    }

    /// Whether there is anything in a range.
    pub fn overlaps(&self, range: Range) -> bool {
        let first = range.at.0 as u64;
        self.is_taken(first, first + (range.len_bytes - 1))
    }

    /// The first and the last byte of each page.
    pub fn edges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.pages.iter().map(|(first, page)| (*first, first + (page.size.len_bytes() - 1)))
    }

    /// Ranges that can be unmapped by themselves.
    pub fn mappings(&self) -> Vec<Range> {
        let firsts = self.pages.iter().filter(|(at, page)| **at == page.together.0);
        let range = |(at, page): (&u64, &Page)| Range {
            at: VirtAddr(*at as usize),
            len_bytes: page.together.1 - at + page.size.len_bytes(),
            pages: page.size,
        };
        firsts.map(range).collect()
    }

    /// Maps memory from `base` on, as far as nothing is in the way.
    pub fn map(&mut self, range: Range, base: PhysAddr, rights: Rights) -> Result<(), Unfinished> {
        let page_bytes = range.pages.len_bytes();
        for (first, count) in parts(range) {
            let done_bytes = first - range.at.0 as u64;
            let last = first + (count - 1) * page_bytes;
            if self.is_taken(first, last + (page_bytes - 1)) {
                return Err(Unfinished { done_bytes, why: Error::EntryTaken });
            }
            for step in 0..count {
                let base = base.0 + done_bytes + step * page_bytes;
                let page = Page { base, size: range.pages, rights, together: (first, last) };
                self.pages.insert(first + step * page_bytes, page);
            }
        }
        Ok(())
    }

    /// Unmaps what was mapped together.
    pub fn unmap(&mut self, range: Range) -> Result<(), Unfinished> {
        let page_bytes = range.pages.len_bytes();
        for (first, count) in parts(range) {
            let stopped = |why| Err(Unfinished { done_bytes: first - range.at.0 as u64, why });
            let mut left = (0..count).map(|step| first + step * page_bytes).peekable();
            while let Some(at) = left.peek().copied() {
                let page = self.pages.get(&at).filter(|page| page.size == range.pages);
                let Some((begin, end)) = page.map(|page| page.together) else { return stopped(Error::NotMapped) };
                if begin != at || end > first + (count - 1) * page_bytes {
                    return stopped(Error::PartOfMapping);
                }
                while left.next_if(|at| *at <= end).is_some() {}
            }
            for step in 0..count {
                self.pages.remove(&(first + step * page_bytes));
            }
        }
        Ok(())
    }

    /// The page at a physical address is nowhere any more.
    pub fn forget(&mut self, base: PhysAddr) {
        self.pages.retain(|_, page| page.base != base.0);
    }

    /// Changes the rights of pages.
    pub fn protect(&mut self, range: Range, rights: Rights) -> Result<(), Unfinished> {
        let page_bytes = range.pages.len_bytes();
        for (first, count) in parts(range) {
            let pages = (0..count).map(|step| first + step * page_bytes);
            if !pages.clone().all(|at| self.pages.get(&at).is_some_and(|page| page.size == range.pages)) {
                return Err(Unfinished { done_bytes: first - range.at.0 as u64, why: Error::NotMapped });
            }
            for at in pages {
                self.pages.get_mut(&at).unwrap().rights = rights;
            }
        }
        Ok(())
    }

    /// Pages of RAM that the tables take: at least, and at most, for a table begins at an even page.
    pub fn need(&self) -> (usize, usize) {
        let (mut tables, mut rows) = (BTreeSet::new(), BTreeSet::new());
        for (at, page) in self.pages.iter().filter(|(at, page)| **at == page.together.0) {
            for level in page.size.level()..=4 {
                rows.insert((level, at >> (span_bits(level) + 4)));
                if level < 4 {
                    tables.insert((level, at >> span_bits(level + 1)));
                }
            }
        }
        (3 + 3 * tables.len() + rows.len(), 3 + 4 * tables.len() + rows.len())
    }
}
