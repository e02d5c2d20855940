//! Blocks of memory from the allocators that are compared.

use std::hint::black_box;
use std::ptr::{self, NonNull};

use selfpage::alloc;
use selfpage::alloc::batch::{self, Blocks, Item};

use super::PAGE_BYTES;

/// Where blocks come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The library's page allocator.
    Pages,
    /// `malloc` of the process, whichever that is.
    Malloc,
    /// A mapping for each block.
    Mmap(Filled),
}

/// When a mapping gets its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// One by one, as they are touched.
    AsTouched,
    /// When it is made.
    AtOnce,
    /// As they are touched, 2 MiB at a time.
    Huge,
}

/// A block, freed by [`Block::free`].
#[derive(Debug)]
pub struct Block {
    start: NonNull<u8>,
    len_bytes: usize,
    source: Source,
}

impl Source {
    /// A block; `None`: no memory.
    #[inline]
    pub fn allocate(self, len_bytes: usize) -> Option<Block> {
        let start = match self {
            Source::Pages => alloc::allocate(len_bytes, 1),
            // SAFETY: bench-block: a call without pointers.
            Source::Malloc => NonNull::new(unsafe { libc::malloc(len_bytes) }.cast()),
            Source::Mmap(filled) => map(len_bytes, filled),
        };
        // Opaque: the compiler may leave out a `malloc` and a `free` with nothing in between.
        Some(Block { start: black_box(start)?, len_bytes, source: self })
    }
}

fn map(len_bytes: usize, filled: Filled) -> Option<NonNull<u8>> {
    let populate = if filled == Filled::AtOnce { libc::MAP_POPULATE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | populate;
    // SAFETY: fresh-mapping: the kernel chooses the address, so nothing that exists is replaced.
    let start = unsafe { libc::mmap(ptr::null_mut(), len_bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return None;
    }
    if filled == Filled::Huge {
        // SAFETY: own-mapping: just made.
        unsafe { libc::madvise(start, len_bytes, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(start.cast())
}

impl Block {
    /// Writes a byte in each page from the byte `from` on.
    #[inline]
    pub fn touch(&self, from: usize) {
        for at in (from..self.len_bytes).step_by(PAGE_BYTES) {
            // SAFETY: bench-block: within the block.
            unsafe { self.start.add(at).write_volatile(1) };
        }
    }

    /// Fills the block with `byte`.
    pub fn fill(&self, byte: u8) {
        // SAFETY: bench-block: within the block.
        unsafe { self.start.write_bytes(byte, self.len_bytes) };
    }

    /// The byte at `at`.
    pub fn byte(&self, at: usize) -> u8 {
        assert!(at < self.len_bytes);
        // SAFETY: bench-block: within the block, and written before.
        unsafe { self.start.add(at).read_volatile() }
    }

    /// Makes it longer. `None`: no memory; then the block is lost to us.
    pub fn resize(self, len_bytes: usize) -> Option<Block> {
        let start = match self.source {
            // SAFETY: bench-block: ours, and replaced here.
            Source::Pages => unsafe { alloc::resize(self.start, len_bytes) },
            // SAFETY: bench-block: as above.
            Source::Malloc => NonNull::new(unsafe { libc::realloc(self.start.as_ptr().cast(), len_bytes) }.cast()),
            Source::Mmap(_) => {
                let start = self.start.as_ptr().cast();
                // SAFETY: own-mapping: made by `map`, and replaced here.
                let moved = unsafe { libc::mremap(start, self.len_bytes, len_bytes, libc::MREMAP_MAYMOVE) };
                if moved == libc::MAP_FAILED { None } else { NonNull::new(moved.cast()) }
            }
        };
        Some(Block { start: black_box(start)?, len_bytes, source: self.source })
    }

    /// Gives it back.
    #[inline]
    pub fn free(self) {
        // SAFETY: bench-block: ours, and gone here.
        unsafe {
            match self.source {
                Source::Pages => alloc::free(self.start),
                Source::Malloc => libc::free(self.start.as_ptr().cast()),
                Source::Mmap(_) => _ = libc::munmap(self.start.as_ptr().cast(), self.len_bytes),
            }
        }
    }

    /// Swaps what two blocks of one length hold, by frames. Only blocks of the library's can.
    pub fn exchange(&self, other: &Block) -> bool {
        assert!(self.source == Source::Pages && other.source == Source::Pages);
        // SAFETY: bench-block: both are ours.
        unsafe { alloc::exchange(self.start, other.start) }
    }

    /// The same by copying.
    pub fn copy_across(&self, other: &Block) {
        assert_eq!(self.len_bytes, other.len_bytes);
        // SAFETY: bench-block: two blocks of this length.
        unsafe { ptr::swap_nonoverlapping(self.start.as_ptr(), other.start.as_ptr(), self.len_bytes) };
    }
}

/// Fills in an item of `len_bytes` for each place: by one batch call, or each by `malloc`. How many it could.
pub fn allocate_items(source: Source, len_bytes: usize, items: &mut [Item]) -> usize {
    if source == Source::Pages {
        return batch::allocate(&Blocks, len_bytes, 16, items);
    }
    for item in items.iter_mut() {
        // SAFETY: bench-block: a call without pointers.
        *item = NonNull::new(unsafe { libc::malloc(len_bytes) }.cast());
    }
    black_box(&mut *items);
    items.iter().flatten().count()
}

/// As [`allocate_items`], with a word of each item written: after the batch call, and after each call of `malloc`, as programs do it.
pub fn allocate_written_items(source: Source, len_bytes: usize, items: &mut [Item]) -> usize {
    assert!(len_bytes >= size_of::<u64>());
    // SAFETY: bench-block: within an item of ours, which is aligned to 16.
    let write = |item: &NonNull<u8>| unsafe { item.cast::<u64>().write_volatile(1) };
    if source == Source::Pages {
        let allocated = batch::allocate(&Blocks, len_bytes, 16, items);
        items.iter().flatten().for_each(write);
        return allocated;
    }
    for item in items.iter_mut() {
        // SAFETY: bench-block: a call without pointers.
        *item = NonNull::new(unsafe { libc::malloc(len_bytes) }.cast());
        item.iter().for_each(write);
    }
    items.iter().flatten().count()
}

/// Frees what these two gave.
pub fn free_items(source: Source, items: &mut [Item]) {
    if source == Source::Pages {
        // SAFETY: bench-block: ours, and gone here.
        unsafe { batch::free(&Blocks, items) };
        return;
    }
    for item in items.iter_mut() {
        let item = item.take().map_or(ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: bench-block: as above.
        unsafe { libc::free(item.cast()) };
    }
}

/// The CPU's count of cycles (of its nominal frequency).
#[inline]
pub fn cycles() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: no-pointers: reads a register that every x86-64 CPU has.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    selfpage_core::linux::clock::monotonic_ns()
}
