//! Where there is no store: the pages that have a frame, or may come to have one. None can go for another, so no more of them are promised
//! than the frames hold, and who asks for memory is told in time.
//!
//! A page is promised when the program is given access to it, and an object's when the object is handed out; until its contents are
//! dropped and nobody has access. What the heap of objects itself touches, a page here and there, counts once it has its frame: the
//! reserve is there for that.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use selfpage::pager::Zero;
use selfpage_core::pager::{Context, FillPage, Pager, PagerError};

use crate::limits::{LARGE_BYTES, MAPS_BYTES, OBJECTS_BYTES};
use crate::managed;
use crate::ranges::Standing;
use crate::space::PAGE;

const WORDS: usize = (OBJECTS_BYTES + LARGE_BYTES + MAPS_BYTES) / PAGE / 64;

/// What is known of 64 pages, a bit for each.
struct Word {
    promised: AtomicU64,
    /// With a frame that nobody was promised.
    met: AtomicU64,
}

/// The pages of the regions, one region after the other.
static PAGES: [Word; WORDS] = [const { Word { promised: AtomicU64::new(0), met: AtomicU64::new(0) } }; WORDS];
/// How many pages are promised or met. Over a fork what another thread was about to be promised stays counted in the child.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// How many there may be; 0: there is a store, and nothing is counted.
static MOST: AtomicUsize = AtomicUsize::new(0);
/// How many frames there are beyond that.
static RESERVE: AtomicUsize = AtomicUsize::new(0);

/// From now on no more is promised than so many frames hold, but for a reserve. Beyond it the evictor would look for pages that can go.
pub fn keep_within(frames_bytes: usize) {
    let frames = frames_bytes / PAGE;
    let reserve = (frames / 16).clamp(32, 4096);
    RESERVE.store(reserve, Ordering::SeqCst);
    MOST.store(frames - reserve, Ordering::SeqCst);
}

/// Whether there is no store.
pub fn are_counted() -> bool {
    MOST.load(Ordering::Relaxed) != 0
}

/// Whether half of the reserve is used up.
pub fn are_overdrawn() -> bool {
    COUNT.load(Ordering::SeqCst) > MOST.load(Ordering::SeqCst) + RESERVE.load(Ordering::SeqCst) / 2
}

/// The numbers of the pages that a range touches, which lies in one region.
fn pages(range: &Range<usize>) -> Range<usize> {
    let mut before = 0;
    for region in managed::ranges() {
        if region.contains(&range.start) {
            let first = (range.start - region.start) / PAGE;
            let end = (range.end.min(region.end) - region.start).div_ceil(PAGE);
            return before + first..before + end;
        }
        before += region.len() / PAGE;
    }
    0..0
}

/// The words that pages lie in, each with their bits there.
fn words(pages: Range<usize>) -> impl Iterator<Item = (&'static Word, u64)> {
    let mut at = pages.start;
    std::iter::from_fn(move || {
        let (first, left) = (at % 64, pages.end.checked_sub(at)?);
        let count = left.min(64 - first);
        let word = PAGES.get(at / 64).filter(|_| count > 0)?;
        at += count;
        Some((word, (u64::MAX >> (64 - count)) << first))
    })
}

fn is_promised(page: usize) -> bool {
    words(page..page + 1).all(|(word, bit)| word.promised.load(Ordering::SeqCst) & bit != 0)
}

/// A page comes to have a frame. A fork waits for whoever brings it in.
fn meet(page: usize) {
    for (word, bit) in words(page..page + 1) {
        if word.promised.load(Ordering::SeqCst) & bit == 0 && word.met.fetch_or(bit, Ordering::SeqCst) & bit == 0 {
            COUNT.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Promises a range of a region. `false`: the frames do not hold it too. Where there is a store nothing is asked.
pub fn promise(range: &Range<usize>) -> bool {
    Offer::of(range).map(Offer::keep).is_some()
}

/// Frames for what is not promised yet of a range, which a call that may fail is to open. Unless it is kept, they are there for others again.
#[must_use]
pub struct Offer {
    pages: Range<usize>,
    /// How many pages it counts.
    more: usize,
}

impl Offer {
    /// For a range of a region. `None`: the frames do not hold it too. Where there is a store nothing is asked.
    pub fn of(range: &Range<usize>) -> Option<Offer> {
        if !are_counted() {
            return Some(Offer { pages: 0..0, more: 0 });
        }
        let pages = pages(range);
        let (mut new, mut more) = (false, 0);
        for (word, bits) in words(pages.clone()) {
            let missing = bits & !word.promised.load(Ordering::SeqCst);
            new |= missing != 0;
            more += (missing & !word.met.load(Ordering::SeqCst)).count_ones() as usize;
        }
        if !new {
            return Some(Offer { pages: 0..0, more: 0 });
        }
        let most = MOST.load(Ordering::SeqCst);
        let with_more = |count: usize| count.checked_add(more).filter(|count| *count <= most);
        COUNT.fetch_update(Ordering::SeqCst, Ordering::SeqCst, with_more).ok()?;
        Some(Offer { pages, more })
    }

    /// The range is promised from now on.
    pub fn keep(mut self) {
        let (mut promised, mut counted) = (0, std::mem::take(&mut self.more));
        for (word, bits) in words(self.pages.clone()) {
            // One that was met is counted already, and so is one that another thread was promised since.
            promised += (bits & !word.promised.fetch_or(bits, Ordering::SeqCst)).count_ones() as usize;
            counted += (word.met.fetch_and(!bits, Ordering::SeqCst) & bits).count_ones() as usize;
        }
        // At once: as long as it counted twice, others would be refused what there is. It wraps where it becomes less.
        COUNT.fetch_add(promised.wrapping_sub(counted), Ordering::SeqCst);
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        COUNT.fetch_sub(self.more, Ordering::SeqCst);
    }
}

/// The part of a range of a region that begins at its start and is one in which each page has a frame or may come to have one, or none does;
/// and which.
pub fn stretch(range: &Range<usize>) -> (usize, Standing) {
    if !are_counted() {
        return (range.end, Standing::In);
    }
    let (mut standing, mut at) = (None, range.start);
    for (word, bits) in words(pages(range)) {
        let counted = bits & (word.promised.load(Ordering::SeqCst) | word.met.load(Ordering::SeqCst));
        let first = if counted & (bits & bits.wrapping_neg()) != 0 { Standing::In } else { Standing::Out };
        let standing = *standing.get_or_insert(first);
        let others = if standing == Standing::In { bits & !counted } else { counted };
        if others != 0 {
            return (at + (others.trailing_zeros() - bits.trailing_zeros()) as usize * PAGE, standing);
        }
        at += bits.count_ones() as usize * PAGE;
    }
    (range.end, standing.unwrap_or(Standing::Out))
}

/// Ends the promise of a range. `drop` drops what is in it: the frames are there for others after that, and not before.
pub fn end(range: &Range<usize>, drop: impl FnOnce()) {
    if !are_counted() {
        return drop();
    }
    let mut ended = 0;
    for (word, bits) in words(pages(range)) {
        for bitmap in [&word.promised, &word.met] {
            // Most of a reservation was never promised: its words are not written.
            if bitmap.load(Ordering::SeqCst) & bits != 0 {
                ended += (bitmap.fetch_and(!bits, Ordering::SeqCst) & bits).count_ones() as usize;
            }
        }
    }
    drop();
    COUNT.fetch_sub(ended, Ordering::SeqCst);
}

/// Gives zeroed pages, which stay: there is nowhere to save them to.
pub struct Staying {
    /// How many pages the regions before have.
    first: usize,
}

impl Staying {
    /// For the region that comes after so many bytes of others.
    pub fn after(bytes: usize) -> Box<Staying> {
        Box::new(Staying { first: bytes / PAGE })
    }

    fn number(&self, index: u64) -> usize {
        self.first + index as usize
    }
}

impl Pager for Staying {
    fn fills_in(&self) -> Context {
        Context::Trap
    }

    fn saves(&self) -> bool {
        false
    }

    fn extent(&self, index: u64, want: u32) -> u32 {
        let from = self.number(index);
        1 + (1..want).take_while(|step| is_promised(from + *step as usize)).count() as u32
    }

    fn fill(&self, context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        match pages {
            [page] => meet(self.number(page.index)),
            _ if pages.iter().all(|page| is_promised(self.number(page.index))) => {}
            // The one that somebody waits for is then asked for alone.
            _ => return Err(PagerError::NoStore),
        }
        Zero.fill(context, pages)
    }

    /// All that there is of a page is in its frame.
    fn keeps_in(&self) -> Option<usize> {
        Some(0)
    }

    fn keeps_untouched(&self) -> bool {
        false
    }

    fn keeps(&self, _index: u64) -> bool {
        false
    }

    fn forget(&self, _index: u64, _count: u64) {}
}
