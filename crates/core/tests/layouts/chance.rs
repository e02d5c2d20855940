//! Random ranges, and what to map there.

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Handle, Rights};
use selfpage_core::physical::PhysAddr;
use selfpage_core::tables::{PageSize, Range};

use crate::dice::{below, once_in};

/// Memory that can be mapped.
#[derive(Clone, Copy)]
pub struct Source {
    pub handle: Handle,
    pub base: PhysAddr,
    pub len_bytes: u64,
}

/// A range to be, and the memory for it.
#[derive(Clone, Copy)]
pub struct Piece {
    pub range: Range,
    pub from: Source,
    pub offset_bytes: u64,
    pub rights: Rights,
}

impl Piece {
    pub fn base(&self) -> PhysAddr {
        self.from.base.plus(self.offset_bytes)
    }
}

pub fn one_of<T: Copy>(of: &[T]) -> T {
    of[below(of.len() as u64) as usize]
}

/// What can be mapped can be read.
pub fn rights() -> Rights {
    let write = if once_in(2) { Rights::WRITE } else { Rights::NONE };
    let execute = if once_in(3) { Rights::EXECUTE } else { Rights::NONE };
    Rights::READ | write | execute
}

pub fn piece(sources: &[Source]) -> Piece {
    let pages = match below(8) {
        0 => PageSize::Huge1GiB,
        1 | 2 => PageSize::Large2MiB,
        _ => PageSize::Small4KiB,
    };
    let page_bytes = pages.len_bytes();
    let fit: Vec<Source> = sources.iter().copied().filter(|source| source.len_bytes >= page_bytes).collect();
    let from = one_of(&fit);
    let most = (from.len_bytes / page_bytes).min(1500);
    let count = 1 + below(if once_in(2) { most.min(8) } else { most });
    let len_bytes = count * page_bytes;
    let offset_bytes = below(from.len_bytes / page_bytes - count + 1) * page_bytes;
    let range = Range { at: address(page_bytes, len_bytes), len_bytes, pages };
    Piece { range, from, offset_bytes, rights: rights() }
}

/// Where so many bytes fit: at an end of a half, near others, or anywhere.
fn address(page_bytes: u64, len_bytes: u64) -> VirtAddr {
    let half = one_of(&[0, 0xffff_8000_0000_0000]);
    let room_bytes = (1 << 47) - len_bytes;
    let offset = match below(8) {
        0 => 0,
        1 => room_bytes,
        2 => below(room_bytes + 1),
        // Around where one table ends and the next begins.
        3 => (one_of(&[1u64 << 39, 3 << 39, 5 << 30, 1 << 21]).saturating_sub(below(len_bytes + 1))).min(room_bytes),
        _ => below(1 << 24) + (below(3) << 31),
    };
    VirtAddr((half + offset / page_bytes * page_bytes) as usize)
}

/// A part of a range, by whole pages.
pub fn part_of(range: Range) -> Range {
    let page_bytes = range.pages.len_bytes();
    let count = range.len_bytes / page_bytes;
    let skip = below(count);
    let at = VirtAddr(range.at.0 + (skip * page_bytes) as usize);
    Range { at, len_bytes: (1 + below(count - skip)) * page_bytes, pages: range.pages }
}
