//! Addresses and units as types: a virtual page cannot be passed where a frame is meant.

use core::num::NonZeroU32;

/// log2 of [`PAGE_BYTES`].
pub const PAGE_SHIFT: u32 = 12;
/// The page size of every region and frame, in bytes.
pub const PAGE_BYTES: usize = 1 << PAGE_SHIFT;
/// The contents of one page.
pub type PageBytes = [u8; PAGE_BYTES];

/// A virtual address of this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct VirtAddr(pub usize);

impl VirtAddr {
    /// The virtual page that holds this address.
    pub const fn page(self) -> PageNo {
        PageNo((self.0 >> PAGE_SHIFT) as u64)
    }
}

/// A virtual page of this process: its address divided by [`PAGE_BYTES`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PageNo(pub u64);

impl PageNo {
    /// The address of the page's first byte.
    pub const fn addr(self) -> VirtAddr {
        VirtAddr((self.0 as usize) << PAGE_SHIFT)
    }
    /// The page `count` pages further on.
    pub const fn plus(self, count: u64) -> PageNo {
        PageNo(self.0.wrapping_add(count))
    }
}

/// `count` virtual pages from `first` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRange {
    /// The first page.
    pub first: PageNo,
    /// How many.
    pub count: u64,
}

impl PageRange {
    /// The page after the last.
    pub const fn end(self) -> PageNo {
        self.first.plus(self.count)
    }
    /// Whether `page` is in the range.
    pub const fn contains(self, page: PageNo) -> bool {
        page.0 >= self.first.0 && page.0 < self.end().0
    }
    /// The pages of the range, in order.
    pub fn pages(self) -> impl Iterator<Item = PageNo> {
        (self.first.0..self.end().0).map(PageNo)
    }
    /// The range in pieces of at most `most` pages, in order.
    pub fn pieces(self, most: u64) -> impl Iterator<Item = PageRange> {
        let mut rest = self;
        core::iter::from_fn(move || {
            let piece = PageRange { count: rest.count.min(most), ..rest };
            rest = PageRange { first: piece.end(), count: rest.count - piece.count };
            (piece.count > 0).then_some(piece)
        })
    }
}

/// A frame of the domain's pool, by its number in the pool: the physical page that the domain holds, wherever it is
/// mapped. Its *slot* is the pool address where it lives while no page has it.
///
/// # Source
/// Nemesis §6.2 (physical frame numbers), Cichlid §3.1 (frame capabilities). Stock Linux does not show a process its
/// physical addresses, so a frame is named by its slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Frame(pub u32);

impl Frame {
    /// The frame `count` slots further on.
    pub const fn plus(self, count: u32) -> Frame {
        Frame(self.0.wrapping_add(count))
    }
}

/// `count` frames with neighbouring slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameRun {
    /// The first frame.
    pub first: Frame,
    /// How many; never zero.
    pub count: NonZeroU32,
}
