//! Runs: many items of one size in one block, with one header, freed as a whole or one by one.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::block::{PAGES, allocate_given, settle};
use super::culprit::Culprit;

/// What items are aligned to at least.
const GRANULE_BYTES: usize = 16;
const BITS: usize = 64;
/// In how many places at once a list of items is read.
const STREAMS: usize = 4;

/// The header, at the beginning of the block; a bit for each item that was freed follows, then the items.
#[repr(C)]
struct Header {
    item_bytes: usize,
    align_bytes: usize,
    count: usize,
    first: usize,
    /// Items that were not freed.
    live: AtomicUsize,
}

/// A run, alive as long as one of its items is.
#[derive(Clone, Copy)]
pub(super) struct Run(NonNull<Header>);

impl Run {
    /// The run that begins at `start`, which the page allocator says is one.
    pub(super) fn at(start: usize) -> Run {
        match NonNull::new(start as *mut Header) {
            Some(header) => Run(header),
            None => crate::die("a run of a batch at address zero"),
        }
    }

    /// Carves a run of as many items as `items` has places, and fills these in. `None`: no memory.
    pub(super) fn carve(len_bytes: usize, align_bytes: usize, items: &mut [Option<NonNull<u8>>]) -> Option<()> {
        let align_bytes = align_bytes.max(GRANULE_BYTES);
        let item_bytes = len_bytes.max(1).checked_next_multiple_of(align_bytes)?;
        let bits_bytes = items.len().div_ceil(BITS) * size_of::<AtomicU64>();
        let first = (size_of::<Header>() + bits_bytes).checked_next_multiple_of(align_bytes)?;
        let given = allocate_given(first.checked_add(item_bytes.checked_mul(items.len())?)?, align_bytes)?;
        let run = Run::at(given.addr);
        let dirty_bytes = given.dirty_bytes.min(first);
        // SAFETY: slot-held: a new block, longer than this, which nobody else knows of.
        unsafe {
            std::ptr::write_bytes(given.addr as *mut u8, 0, dirty_bytes);
            let live = AtomicUsize::new(items.len());
            run.0.write(Header { item_bytes, align_bytes, count: items.len(), first, live });
        }
        PAGES.take().make_run(given.addr);
        note(items, given.addr + first, item_bytes);
        Some(())
    }

    fn header(&self) -> &Header {
        // SAFETY: run-alive: an item is, so the header is in place; only `live` and the bits change.
        unsafe { self.0.as_ref() }
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        // SAFETY: run-alive: callers ask for the bit of an item that the header counts.
        unsafe { self.0.add(1).cast::<AtomicU64>().add(word).as_ref() }
    }

    /// How long each item is.
    pub(super) fn item_bytes(&self) -> usize {
        self.header().item_bytes
    }

    /// What each item is aligned to.
    pub(super) fn align_bytes(&self) -> usize {
        self.header().align_bytes
    }

    fn addr(&self) -> usize {
        self.0.as_ptr() as usize
    }

    /// Where the items lie.
    fn range(&self) -> std::ops::Range<usize> {
        let header = self.header();
        let first = self.addr() + header.first;
        first..first + header.count * header.item_bytes
    }

    /// What an address within the run is, if no item begins there that is live.
    pub(super) fn culprit(&self, addr: usize) -> Option<Culprit> {
        let (range, len_bytes) = (self.range(), self.item_bytes());
        if !range.contains(&addr) {
            return Some(Culprit::Item);
        }
        let index = (addr - range.start) / len_bytes;
        let block = range.start + index * len_bytes;
        if block != addr {
            return Some(Culprit::Inside { block, len_bytes });
        }
        let freed = self.word(index / BITS).load(Ordering::Acquire) >> (index % BITS) & 1 == 1;
        freed.then_some(Culprit::Freed)
    }

    /// How many of `items`, from the first on, lie in this run.
    pub(super) fn share(&self, items: &[Option<NonNull<u8>>]) -> usize {
        let range = self.range();
        let outside = |item: &Option<NonNull<u8>>| !range.contains(&item.map_or(0, |item| item.as_ptr() as usize));
        items.iter().position(outside).unwrap_or(items.len())
    }

    /// Whether these are all of the run's items, in order, and none was freed.
    pub(super) fn is_whole(&self, items: &[Option<NonNull<u8>>]) -> bool {
        let header = self.header();
        if items.len() < header.count || header.live.load(Ordering::Acquire) != header.count {
            return false;
        }
        // One pass without branches: the compiler makes vectors of it. At several places at once, since the processor fetches ahead
        // within a page of each.
        let stream = header.count / STREAMS;
        let step = stream * header.item_bytes;
        let differs = |item: &Option<NonNull<u8>>, addr| item.map_or(0, |item| item.as_ptr() as usize) ^ addr;
        let streams: [&[Option<NonNull<u8>>]; STREAMS] =
            std::array::from_fn(|at| &items[at * stream..(at + 1) * stream]);
        let mut differ = 0;
        let mut addr = self.range().start;
        for index in 0..stream {
            for (at, stream) in streams.iter().enumerate() {
                differ |= differs(&stream[index], addr + at * step);
            }
            addr += header.item_bytes;
        }
        addr += (STREAMS - 1) * step;
        for item in &items[STREAMS * stream..header.count] {
            differ |= differs(item, addr);
            addr += header.item_bytes;
        }
        differ == 0
    }

    /// How many items it had at first.
    pub(super) fn count(&self) -> usize {
        self.header().count
    }

    /// Frees all of it.
    pub(super) fn free_whole(self) {
        let mut pages = PAGES.take();
        pages.free_run(self.addr());
        settle(pages);
    }

    /// Frees these items, all of this run. One that is none, or was freed, ends the process.
    pub(super) fn free(self, items: &[Option<NonNull<u8>>]) {
        let header = self.header();
        let start = self.range().start;
        let (mut index, mut expected) = (0, 0);
        let (mut word, mut mask) = (0, 0u64);
        for addr in items.iter().flatten().map(|item| item.as_ptr() as usize) {
            // Mostly they come in order; a division costs more than all the rest.
            if addr != expected {
                index = addr.wrapping_sub(start) / header.item_bytes;
                if index >= header.count || start + index * header.item_bytes != addr {
                    self.culprit(addr).unwrap_or(Culprit::Item).die("free", addr);
                }
            }
            let bit = 1u64 << (index % BITS);
            if index / BITS != word || mask & bit != 0 {
                self.mark_freed(word, mask);
                (word, mask) = (index / BITS, 0);
            }
            mask |= bit;
            (index, expected) = (index + 1, addr + header.item_bytes);
        }
        self.mark_freed(word, mask);
        let freed = items.iter().flatten().count();
        if header.live.fetch_sub(freed, Ordering::AcqRel) == freed {
            self.free_whole();
        }
    }

    fn mark_freed(&self, word: usize, mask: u64) {
        if mask == 0 {
            return;
        }
        let again = self.word(word).fetch_or(mask, Ordering::AcqRel) & mask;
        if again != 0 {
            let index = word * BITS + again.trailing_zeros() as usize;
            Culprit::Freed.die("free", self.range().start + index * self.header().item_bytes);
        }
    }
}

/// Notes the addresses of items that follow each other.
fn note(items: &mut [Option<NonNull<u8>>], first: usize, item_bytes: usize) {
    let mut addr = first;
    for item in items {
        *item = NonNull::new(addr as *mut u8);
        addr += item_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_all_items_in_order_are_a_whole_run() {
        for count in 2..20 {
            let mut items = vec![None; count];
            Run::carve(6000, 1, &mut items).unwrap();
            let start = PAGES.take().run(items[0].unwrap().as_ptr() as usize);
            let run = Run::at(start.unwrap());
            for at in 1..count {
                items.swap(at - 1, at);
                assert!(!run.is_whole(&items), "{at} of {count} is where the one before belongs");
                items.swap(at - 1, at);
                let item = items[at].take();
                assert!(!run.is_whole(&items), "{at} of {count} is none");
                items[at] = item;
            }
            assert!(!run.is_whole(&items[1..]));
            items.push(None);
            assert!(run.is_whole(&items), "what comes behind is another's");
            run.free_whole();
        }
    }
}
