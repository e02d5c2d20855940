//! Sets of address ranges: sorted, disjoint, in memory of their own, so that a signal handler may change them.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::maps::Maps;
use crate::space::Space;
use crate::sys;

/// Room for this many ranges; the kernel allows no more mappings by default.
const MOST: usize = 1 << 17;
/// How many of these nobody may count on: what is freed leaves its sets, and cannot be refused.
pub const SPARE: usize = 1 << 12;
const BYTES: usize = MOST * size_of::<Range<usize>>();
/// How many sets there are in this library.
const SETS: usize = Maps::SETS + Space::COUNT * Space::SETS;

/// Where the tables are, side by side; 0: nowhere yet.
static TABLES: AtomicUsize = AtomicUsize::new(0);
/// How many of them are some set's.
static GIVEN: AtomicUsize = AtomicUsize::new(0);

/// Has memory for all tables, of which only what is used is touched: later the kernel may have no room for one more mapping. `None`: it
/// has none now.
pub fn tables() -> Option<usize> {
    let there = TABLES.load(Ordering::Acquire);
    if there != 0 {
        return Some(there);
    }
    let new = sys::reserve(SETS * BYTES)?;
    // SAFETY: owned-range: just reserved.
    let opened = unsafe { sys::protect(new, SETS * BYTES, libc::PROT_READ | libc::PROT_WRITE) };
    let there = match opened {
        0.. => match TABLES.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(new),
            Err(first) => Some(first),
        },
        _ => None,
    };
    // SAFETY: owned-range: just reserved, and nobody was told of it.
    unsafe { sys::call(libc::SYS_munmap, [new, SETS * BYTES, 0, 0, 0, 0]) };
    there
}

/// A set of addresses, as few ranges as they make.
pub struct Ranges {
    /// `MOST` entries; null before the first is put in.
    table: *mut Range<usize>,
    len: usize,
}

// SAFETY: own-table: the table is reached through this value alone.
unsafe impl Send for Ranges {}

impl Ranges {
    /// None.
    pub const fn new() -> Ranges {
        Ranges { table: std::ptr::null_mut(), len: 0 }
    }

    /// The ranges, ascending.
    pub fn all(&self) -> &[Range<usize>] {
        if self.table.is_null() {
            return &[];
        }
        // SAFETY: own-table: `len` entries have been written.
        unsafe { std::slice::from_raw_parts(self.table, self.len) }
    }

    /// Where the last one ends, not before `least`.
    pub fn end(&self, least: usize) -> usize {
        self.all().last().map_or(least, |last| last.end.max(least))
    }

    /// How many bytes they have in all.
    pub fn bytes(&self) -> usize {
        self.all().iter().map(ExactSizeIterator::len).sum()
    }

    /// Whether so many more may be put in.
    pub fn has_room(&self, more: usize) -> bool {
        self.len + more <= MOST - SPARE && tables().is_some()
    }

    /// Whether a range may be taken out: from within another it leaves one more.
    pub fn may_lose(&self, range: &Range<usize>) -> bool {
        self.has_room(1)
            || !self.all().get(self.at(range.start)).is_some_and(|one| one.start < range.start && range.end < one.end)
    }

    /// How many ranges lie in `range`, at least in part.
    pub fn count_within(&self, range: &Range<usize>) -> usize {
        let from = self.at(range.start);
        self.all()[from..].partition_point(|one| one.start < range.end)
    }

    /// The number of the first range that ends after `address`.
    fn at(&self, address: usize) -> usize {
        self.all().partition_point(|range| range.end <= address)
    }

    /// Replaces the ranges `[from, to)` by `with`.
    fn splice(&mut self, from: usize, to: usize, with: &[Range<usize>]) {
        if self.table.is_null() {
            let Some(tables) = tables() else { sys::abort("no room for tables of mappings") };
            let number = GIVEN.fetch_add(1, Ordering::Relaxed);
            assert!(number < SETS);
            self.table = (tables + number * BYTES) as *mut Range<usize>;
        }
        let new_len = self.len - (to - from) + with.len();
        if new_len > MOST {
            sys::abort("more mappings than there is room for");
        }
        // SAFETY: own-table: both runs are within the table's `MOST` entries, and ranges are plain numbers.
        unsafe {
            std::ptr::copy(self.table.add(to), self.table.add(from + with.len()), self.len - to);
            for (index, range) in with.iter().enumerate() {
                self.table.add(from + index).write(range.clone());
            }
        }
        self.len = new_len;
    }

    /// Puts a range in.
    pub fn add(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        // What touches it becomes part of it.
        let from = self.all().partition_point(|one| one.end < range.start);
        let to = from + self.all()[from..].partition_point(|one| one.start <= range.end);
        let mut whole = range;
        if let [first, ..] = &self.all()[from..to] {
            whole.start = whole.start.min(first.start);
            whole.end = whole.end.max(self.all()[to - 1].end);
        }
        self.splice(from, to, &[whole]);
    }

    /// Takes a range out. How many bytes of it were in.
    pub fn remove(&mut self, range: Range<usize>) -> usize {
        if range.is_empty() {
            return 0;
        }
        let from = self.at(range.start);
        let to = from + self.all()[from..].partition_point(|one| one.start < range.end);
        if from == to {
            return 0;
        }
        let before = self.all()[from].start..range.start;
        let after = range.end..self.all()[to - 1].end;
        let held: usize = self.all()[from..to].iter().map(ExactSizeIterator::len).sum();
        match (before.is_empty(), after.is_empty()) {
            (true, true) => self.splice(from, to, &[]),
            (false, true) => self.splice(from, to, std::slice::from_ref(&before)),
            (true, false) => self.splice(from, to, std::slice::from_ref(&after)),
            (false, false) => self.splice(from, to, &[before.clone(), after.clone()]),
        }
        held - before.len() - after.len()
    }

    /// Has what is in `from` be at `to` instead of what is there: in one go, however many ranges that are. The two have nothing in common.
    pub fn carry(&mut self, from: &Range<usize>, to: usize) {
        if from.is_empty() {
            return;
        }
        self.remove(to..to + from.len());
        self.cut(from.start);
        self.cut(from.end);
        let (first, count) = (self.at(from.start), self.count_within(from));
        if count == 0 {
            return;
        }
        let (behind, there) = (first + count, self.at(to));
        // SAFETY: own-table: `len` entries have been written.
        let all = unsafe { std::slice::from_raw_parts_mut(self.table, self.len) };
        let carried = if there <= first {
            all[there..behind].rotate_right(count);
            there..there + count
        } else {
            all[first..there].rotate_left(count);
            there - count..there
        };
        for one in &mut all[carried.clone()] {
            *one = to + (one.start - from.start)..to + (one.end - from.start);
        }
        self.join(carried.end);
        self.join(carried.start);
    }

    /// Makes two of a range that goes on over an address.
    fn cut(&mut self, address: usize) {
        let index = self.at(address);
        if let Some(one) = self.all().get(index).filter(|one| one.start < address).cloned() {
            self.splice(index, index + 1, &[one.start..address, address..one.end]);
        }
    }

    /// Makes one of a range and the one before, if they touch.
    fn join(&mut self, index: usize) {
        if let Some([before, one]) = index.checked_sub(1).and_then(|before| self.all().get(before..=index))
            && before.end == one.start
        {
            let whole = before.start..one.end;
            self.splice(index - 1, index + 1, &[whole]);
        }
    }

    /// Whether every byte of the range is in.
    pub fn covers(&self, range: &Range<usize>) -> bool {
        self.all().get(self.at(range.start)).is_some_and(|one| one.start <= range.start && range.end <= one.end)
    }

    /// The part of `range` that begins at its start and is wholly in or wholly out, and which.
    pub fn stretch(&self, range: &Range<usize>) -> (usize, Standing) {
        match self.all().get(self.at(range.start)) {
            Some(one) if one.start <= range.start => (one.end.min(range.end), Standing::In),
            Some(one) => (one.start.min(range.end), Standing::Out),
            None => (range.end, Standing::Out),
        }
    }

    /// The first part of `range` that is in.
    pub fn first_within(&self, range: &Range<usize>) -> Option<Range<usize>> {
        let one = self.all().get(self.at(range.start))?;
        let part = one.start.max(range.start)..one.end.min(range.end);
        (!part.is_empty()).then_some(part)
    }

    /// The lowest gap of `len` bytes within `limits` that begins at a multiple of `align`.
    pub fn gap(&self, limits: Range<usize>, len: usize, align: usize) -> Option<usize> {
        let mut start = limits.start.next_multiple_of(align);
        for one in &self.all()[self.at(limits.start)..] {
            if one.start >= start && one.start - start >= len {
                break;
            }
            start = start.max(one.end.next_multiple_of(align));
        }
        (start < limits.end && limits.end - start >= len).then_some(start)
    }

    /// Calls `visit` for each part of `range` that is in.
    pub fn within(&self, range: Range<usize>, mut visit: impl FnMut(Range<usize>)) {
        let mut at = range.start;
        while at < range.end {
            let (end, standing) = self.stretch(&(at..range.end));
            if standing == Standing::In {
                visit(at..end);
            }
            at = end;
        }
    }
}

/// Whether addresses are in a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// They are.
    In,
    /// They are not.
    Out,
}
