//! Which pages are used, and how large the working set is: learned from a sample of the pages in core.
//!
//! # Source
//! Denning's working set (CACM 1968), estimated as Waldspurger's "Memory Resource Management in VMware ESX Server" (§5.3) does.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use selfpage_core::addr::{Frame, PAGE_BYTES, PageNo, PageRange, VirtAddr};
use selfpage_core::fault::sample::{self, STRETCH, Stretch};

use crate::domain::{Domain, Inner, Life};
use crate::error::{Error, Kind, Result};
use crate::region::{Bound, Region};
use crate::trap::thread;
use crate::turn::Turn;

/// How long a sample waits for pages that others are at: the end of a fault takes microseconds, or a busy machine's turn of its threads.
const SETTLING_NS: u64 = 100_000_000;

/// How many of the pages in core are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sampling {
    /// All of them: an exact answer, for a fault each time that one is used first.
    Whole,
    /// So many, drawn by lot: an estimate, for so many faults at most and memory for so many. To draw them each frame is looked at that was ever
    /// in use.
    Pages(u32),
}

/// Pages that were unmapped, with their contents left in their frames, to see which of them are used. Whoever uses one takes a
/// fault without I/O, once. Those that are not used stay unmapped until they are; to sample them again costs nothing.
///
/// While the program has one, a trace of the domain draws none for its working set.
///
/// # Examples
/// ```no_run
/// # fn main() -> selfpage::Result<()> {
/// use selfpage::{Domain, Sampling};
/// let domain = Domain::with_frames(16 << 20).build()?;
/// let region = domain.region(8 << 20).zero()?;
/// let sample = region.sample(Sampling::Whole)?;
/// std::hint::black_box(region.as_slice::<u8>()[5000]);
/// assert_eq!(sample.is_referenced(1)?, Some(true));
/// println!("{} bytes are in use", sample.usage()?.working_set().bytes);
/// # Ok(()) }
/// ```
pub struct Sample {
    life: Arc<Life>,
    drawn: Drawn,
}

/// What one look at a sample found. Counts are pages.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Usage {
    /// In core when the sample began.
    pub in_core: u64,
    /// Of these, sampled.
    pub sampled: u64,
    /// Of these, used since.
    pub referenced: u64,
    /// Of the sampled, those that went (evicted, discarded) before anybody used them.
    pub gone: u64,
    /// Pages of the region, or the domain, that were fetched since because somebody used them.
    pub fetched: u64,
}

/// A number of bytes that was estimated.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Estimate {
    /// The likeliest number.
    pub bytes: u64,
    /// The number is no less, in 95 of 100 cases.
    pub least_bytes: u64,
    /// The number is no more, in 95 of 100 cases.
    pub most_bytes: u64,
}

impl Domain {
    /// Begins to sample the pages of all regions.
    ///
    /// A domain has one sample at a time: a later one ends the one before.
    ///
    /// # Errors
    /// The thread's protection domain lacks the right `META` on one of the regions. A pager, policy or store of the program's own asks for it.
    /// This is a forked child that did not get the domain.
    pub fn sample(&self, sampling: Sampling) -> Result<Sample> {
        may_begin()?;
        let inner = &self.life().inner;
        let regions: Vec<_> = inner.regions().values().cloned().collect();
        regions.iter().try_for_each(|bound| bound.may_change(inner, "sample"))?;
        Ok(Sample::begin(self.life(), None, sampling))
    }
}

impl Region {
    /// Begins to sample the pages of the region, as [`Domain::sample`] does of all.
    ///
    /// # Errors
    /// The thread's protection domain lacks the right `META` on the region. A pager, policy or store of the program's own asks for it. This is
    /// a forked child that did not get the region.
    pub fn sample(&self, sampling: Sampling) -> Result<Sample> {
        may_begin()?;
        self.bound.may_change(self.inner(), "sample")?;
        Ok(Sample::begin(self.life(), Some(&self.bound), sampling))
    }
}

/// Refuses to begin a sample before anything is waited for: a fork holds the domains' regions while it waits for a pager.
///
/// # Errors
/// The caller may be a pager, policy or store of the program's own.
fn may_begin() -> Result<()> {
    if !thread::may_be_inside() {
        return Ok(());
    }
    let cause = "a pager, policy or store of the program's own would wait for a page that it is just called for: have a thread of \
                 the program's begin it";
    Err(Error::new(Kind::Invalid, "begin", "a sample of pages", cause))
}

impl fmt::Debug for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sample({} of {} pages)", self.drawn.pages.len(), self.drawn.in_core)
    }
}

impl Sample {
    fn begin(life: &Arc<Life>, region: Option<&Arc<Bound>>, sampling: Sampling) -> Sample {
        let inner = &life.inner;
        let state = inner.state();
        let deadline_ns = state.mmu.now_ns() + SETTLING_NS;
        let unmap = |pages: &[(PageNo, Frame)]| {
            inner.undisturbed(move || sample::await_settled(state, pages, deadline_ns));
            inner.on_pager_thread(move || sample::begin(state, pages))
        };
        let turn = inner.drawing.begin();
        let drawn = Drawn::draw(inner, &turn, region, sampling, unmap);
        inner.own_sample.store(drawn.number, Ordering::SeqCst);
        drop(turn);
        Sample { life: life.clone(), drawn }
    }

    /// Whether a page was used since the sample began, by its number in the region; in the sample of a domain, by its address
    /// divided by the size of a page. `None`: it is not in the sample.
    ///
    /// # Errors
    /// Another sample of the domain has begun since, or a fork has ended this one.
    pub fn is_referenced(&self, page: u64) -> Result<Option<bool>> {
        self.is_going_on()?;
        let page = self.drawn.range().first.plus(page);
        let at = self.drawn.pages.binary_search_by_key(&page, |entry| entry.0);
        Ok(at.ok().and_then(|at| self.drawn.pages.get(at)).map(|entry| self.was_used(entry.1)))
    }

    /// The address of each page that was used since the sample began.
    ///
    /// # Errors
    /// As for [`Sample::is_referenced`].
    pub fn referenced(&self) -> Result<impl Iterator<Item = VirtAddr>> {
        self.is_going_on()?;
        Ok(self.drawn.pages.iter().filter(|entry| self.was_used(entry.1)).map(|entry| entry.0.addr()))
    }

    /// What was used since the sample began. It can be asked again and again.
    ///
    /// # Errors
    /// As for [`Sample::is_referenced`].
    pub fn usage(&self) -> Result<Usage> {
        self.is_going_on()?;
        let inner = &self.life.inner;
        Ok(self.drawn.usage(inner, |pages| inner.undisturbed(|| sample::unused(inner.state(), pages))))
    }

    fn was_used(&self, frame: Frame) -> bool {
        self.life.inner.state().frames.used(frame)
    }

    fn is_going_on(&self) -> Result<()> {
        if self.drawn.is_going_on(&self.life.inner) {
            return Ok(());
        }
        let cause = "another sample of the domain, or a fork, has ended it; begin a new one";
        Err(Error::new(Kind::Invalid, "look at", "a sample of pages", cause))
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        // A later one may be in its place.
        let own = &self.life.inner.own_sample;
        let _ = own.compare_exchange(self.drawn.number, 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// The pages of a sample.
pub(crate) struct Drawn {
    number: u64,
    /// None: all of the domain's.
    region: Option<Arc<Bound>>,
    in_core: u64,
    fetched_before: u64,
    /// By page.
    pages: Vec<(PageNo, Frame)>,
}

impl Drawn {
    /// Draws pages of the region, or of all, and has `unmap` unmap them, up to [`STRETCH`] at a time.
    ///
    /// In the turn of `inner.drawing`: an earlier draw that went on beside a later one would forget uses that are the later one's to see.
    pub(crate) fn draw(
        inner: &Inner,
        _turn: &Turn<'_>,
        region: Option<&Arc<Bound>>,
        sampling: Sampling,
        unmap: impl Fn(&[(PageNo, Frame)]) -> Stretch,
    ) -> Drawn {
        let number = inner.samples.fetch_add(1, Ordering::SeqCst) + 1;
        let region = region.cloned();
        let range = range_of(region.as_deref());
        let state = inner.state();
        let frames = state.stack.begun();
        let mut lots = Lots::of(sampling, state.mmu.now_ns());
        for first in (0..frames).step_by(STRETCH) {
            let stretch = inner.undisturbed(|| sample::in_core(state, first..frames, range));
            stretch.pages().iter().for_each(|page| lots.add(*page));
        }
        let Lots { mut pages, seen: mut in_core, .. } = lots;
        pages.sort_unstable_by_key(|entry| entry.0);
        let mut taken = Vec::with_capacity(pages.len());
        for some in pages.chunks(STRETCH) {
            taken.extend_from_slice(unmap(some).pages());
        }
        if taken.len() == pages.len() || sampling == Sampling::Whole {
            in_core -= (pages.len() - taken.len()) as u64;
        }
        taken.sort_unstable_by_key(|entry| entry.0);
        let fetched_before = fetched(inner, region.as_deref());
        Drawn { number, region, in_core, fetched_before, pages: taken }
    }

    /// Its first page is page 0 of the sample.
    fn range(&self) -> PageRange {
        range_of(self.region.as_deref())
    }

    /// Whether no later sample has begun, and nobody has forked.
    pub(crate) fn is_going_on(&self, inner: &Inner) -> bool {
        inner.samples.load(Ordering::SeqCst) == self.number
    }

    /// What was used since; `unused` says how many of some pages are still unmapped.
    pub(crate) fn usage(&self, inner: &Inner, unused: impl Fn(&[(PageNo, Frame)]) -> usize) -> Usage {
        let used = |entry: &&(PageNo, Frame)| inner.state().frames.used(entry.1);
        // In this order: what is used in between counts as used, not as gone.
        let waiting: usize = self.pages.chunks(STRETCH).map(unused).sum();
        let referenced = self.pages.iter().filter(used).count();
        Usage {
            in_core: self.in_core,
            sampled: self.pages.len() as u64,
            referenced: referenced as u64,
            gone: self.pages.len().saturating_sub(waiting + referenced) as u64,
            fetched: fetched(inner, self.region.as_deref()).saturating_sub(self.fetched_before),
        }
    }
}

fn range_of(region: Option<&Bound>) -> PageRange {
    region.map_or(PageRange { first: PageNo(0), count: u64::MAX }, |bound| bound.core().range)
}

fn fetched(inner: &Inner, region: Option<&Bound>) -> u64 {
    if let Some(bound) = region {
        return bound.core().fetched.load(Ordering::Relaxed);
    }
    let counts = inner.state().counters.read();
    counts.fills_total.saturating_sub(counts.fills_ahead_total)
}

/// Of pages that come one by one, those that are kept, each as likely as any other, in memory for those alone.
///
/// # Source
/// Algorithm R in Vitter's "Random Sampling with a Reservoir" (TOMS 1985).
struct Lots {
    most: usize,
    dice: u64,
    /// How many have come.
    seen: u64,
    pages: Vec<(PageNo, Frame)>,
}

impl Lots {
    fn of(sampling: Sampling, seed: u64) -> Lots {
        let most = match sampling {
            Sampling::Whole => usize::MAX,
            Sampling::Pages(count) => count as usize,
        };
        Lots { most, dice: seed | 1, seen: 0, pages: Vec::new() }
    }

    fn add(&mut self, page: (PageNo, Frame)) {
        self.seen += 1;
        if self.pages.len() < self.most {
            return self.pages.push(page);
        }
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        if let Some(place) = self.pages.get_mut((self.dice % self.seen) as usize) {
            *place = page;
        }
    }
}

impl Usage {
    /// The working set: the bytes that were used since the sample began. Pages that were in core then count in proportion to the
    /// sample, and those that had to be fetched count each time that they were.
    ///
    /// The bounds are Wilson's for a share at 95 %, narrowed by how much of the whole the sample is; a page that went without
    /// having been seen used may have been used or not.
    pub fn working_set(&self) -> Estimate {
        let (n, whole) = (self.sampled as f64, self.in_core as f64);
        let bytes = |pages: f64| (pages.max(0.0).round() as u64 + self.fetched) * PAGE_BYTES as u64;
        if self.sampled == 0 {
            return Estimate { bytes: bytes(0.0), least_bytes: bytes(0.0), most_bytes: bytes(whole) };
        }
        let least = bound(self.referenced as f64 / n, n, whole, -1.0) * whole;
        let most = bound((self.referenced + self.gone) as f64 / n, n, whole, 1.0) * whole;
        Estimate {
            bytes: bytes(self.referenced as f64 / n * whole),
            least_bytes: bytes(least),
            most_bytes: bytes(most),
        }
    }
}

/// Wilson's bound of a share that `n` of `whole` showed; below (`side` -1) or above (1).
fn bound(share: f64, n: f64, whole: f64, side: f64) -> f64 {
    if n >= whole {
        return share;
    }
    const Z: f64 = 1.96;
    // Drawn without putting back: as if more had been drawn from a whole without end.
    let n = n * (whole - 1.0) / (whole - n);
    let (middle, half) = (share + Z * Z / (2.0 * n), Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt());
    ((middle + side * half) / (1.0 + Z * Z / n)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_sample_is_exact_and_a_small_one_has_wide_bounds() {
        let whole = Usage { in_core: 1000, sampled: 1000, referenced: 250, gone: 0, fetched: 3 };
        let exact = 253 * PAGE_BYTES as u64;
        assert_eq!(whole.working_set(), Estimate { bytes: exact, least_bytes: exact, most_bytes: exact });
        let some = Usage { in_core: 1000, sampled: 100, referenced: 25, ..whole }.working_set();
        assert_eq!(some.bytes, exact);
        // By hand: 25 of 100 is 17.5 % to 34.3 %; a tenth of the whole narrows that a little.
        assert!((175..190).contains(&(some.least_bytes / 4096 - 3)), "{some:?}");
        assert!((320..344).contains(&(some.most_bytes / 4096 - 3)), "{some:?}");
        let none = Usage { in_core: 1000, sampled: 100, ..Usage::default() }.working_set();
        assert!(none.bytes == 0 && none.least_bytes == 0 && none.most_bytes > 0, "{none:?}");
        let gone = Usage { gone: 10, in_core: 1000, sampled: 100, ..Usage::default() }.working_set();
        assert!(gone.most_bytes > none.most_bytes && gone.bytes == 0);
    }

    #[test]
    fn lots_fall_on_different_pages_everywhere() {
        let drawn = |sampling, seed| {
            let mut lots = Lots::of(sampling, seed);
            (0..1000).for_each(|at| lots.add((PageNo(at), Frame(at as u32))));
            assert_eq!(lots.seen, 1000);
            lots.pages
        };
        let mut times = [0; 1000];
        for seed in 1..500 {
            let mut pages = drawn(Sampling::Pages(200), seed * 0x9e37_79b9_7f4a);
            assert!(pages.capacity() <= 256, "room for more than are kept: {}", pages.capacity());
            pages.iter().for_each(|page| times[page.0.0 as usize] += 1);
            pages.sort_unstable();
            pages.dedup();
            assert_eq!(pages.len(), 200);
        }
        // 100 each, give or take 9 in two of three cases.
        assert!(times.iter().all(|times| (55..145).contains(times)), "{times:?}");
        assert_eq!(drawn(Sampling::Whole, 7).len(), 1000);
        assert_eq!(drawn(Sampling::Pages(0), 7), []);
        assert_eq!(drawn(Sampling::Pages(2000), 7), drawn(Sampling::Whole, 7));
    }
}
