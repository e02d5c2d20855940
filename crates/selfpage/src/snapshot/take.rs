//! Taking snapshots while the program goes on.

use std::fmt;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use selfpage_core::addr::{PAGE_BYTES, PageNo};
use selfpage_core::fault::Failure;
use selfpage_core::fault::copy_first::{self, AtBusy};
use selfpage_core::fault::image::{self, Image};
use selfpage_core::linux::signal;
use selfpage_core::page::State;
use selfpage_core::region::{self, Rights};
use selfpage_core::stack;

use super::file::named;
use super::format::{Run, SavedRegion};
use super::writing::{Target, Writing, Written};
use crate::config::DescriptorTable;
use crate::domain::Life;
use crate::error::{Error, Kind, Result, pages};
use crate::fork::lineage::Process;
use crate::handler::ONE_CLIENT;
use crate::region::{Bound, Region};

const OPERATION: &str = "take a snapshot of";
/// Pages read for the image at a time.
const BATCH: usize = 64;
/// Frames that are to be ready for copies: more than are made while a batch is read and written.
const FOR_COPIES: NonZeroU32 = NonZeroU32::new(256).expect("it is not zero");
/// Pages armed before the cut are armed anew, as often, while there are more than so many to be armed in the cut.
const MOST_ROUNDS: u32 = 8;
const FEW_PAGES: u64 = 32;
/// Runs of pages in core that a snapshot notes, at most: where there are more, small gaps are taken along.
pub(crate) const MOST_RUNS: usize = 4096;
/// A file that has grown to so many times its first snapshot is made anew, where the disk has room for both.
const MOST_GROWTH: u64 = 3;
/// So is one with so many snapshots: whoever opens it reads a table and a trailer of each, one after the other, however little they say. In
/// a large file of small ones, length would tell only after millions. The tests' own files come to it soon.
pub(super) const MOST_IN_A_FILE: u64 = if cfg!(test) { 16 } else { 10_000 };

/// Takes snapshots of some regions of one domain into one file, each building on the one before, while the program writes on.
///
/// A snapshot is of one instant: all that any thread wrote before it is there, and nothing of what came after. No process is
/// forked, and no thread is stopped but those that write, during the cut, to a page that they have not written to lately.
///
/// # Examples
/// ```no_run
/// # fn main() -> selfpage::Result<()> {
/// use selfpage::{Domain, snapshot::Snapshots, store::FileStore};
/// let domain = Domain::with_frames(64 << 20).build()?;
/// let store = FileStore::unnamed_in("/var/tmp", 1 << 30)?;
/// let mut table = domain.region(256 << 20).name("table").stored(store)?;
/// let mut snapshots = Snapshots::of(&[&table], "/var/lib/table.snap")?;
/// table.as_mut_slice::<u64>()[7] = 7;
/// let first = snapshots.take()?;
/// table.as_mut_slice::<u64>()[7] = 8;
/// // One page changed, and one page is written.
/// let second = snapshots.take()?;
/// println!("{first:?} {second:?}");
/// # Ok(()) }
/// ```
pub struct Snapshots {
    subject: Subject,
    target: Target,
    /// Whether the next snapshot begins a new file, with all pages.
    anew: bool,
    /// How long the file was with its first snapshot.
    first_bytes: u64,
    read: PagesRead,
}

impl fmt::Debug for Snapshots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Snapshots({} regions into {:?})", self.subject.regions.len(), self.subject.path)
    }
}

/// What became of one call of [`Snapshots::take`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Taken {
    /// How long the cut took: who wrote to an armed page meanwhile waited at most so long.
    pub pause: Duration,
    /// The whole call, until the snapshot would survive a crash of the machine.
    pub total: Duration,
    /// Pages armed before the cut, those armed several times counted as often.
    pub armed_ahead: u64,
    /// Pages armed in the cut: written to since they were armed.
    pub armed_in_cut: u64,
    /// Pages that the image has of its own.
    pub pages: u64,
    /// Those of them that were copied before their first write.
    pub copies: u64,
    /// The most such copies at a time, each in a frame of the domain's.
    pub most_copies: u32,
    /// What the file grew by.
    pub bytes: u64,
    /// The memory that it went through on its way to the file, beside frames: as much for a large snapshot as for a small one.
    pub buffer_bytes: u64,
}

impl Snapshots {
    /// Snapshots of `regions`, into the file at `path`. What is there already must be a snapshot file; it is replaced when the
    /// first snapshot is whole.
    ///
    /// # Errors
    /// A path that names no file, or a directory; no region, or one that has no right to be written, or regions of several domains, or one that is not anonymous memory, or that is
    /// [tracked](crate::RegionBuilder::tracked);
    /// a domain that has a `Snapshots` already, or private descriptors; a file that holds something else, or that somebody writes to;
    /// a thread whose protection domain lacks the right `META` on a region.
    pub fn of(regions: &[&Region], path: impl AsRef<Path>) -> Result<Snapshots> {
        // The program may change its directory.
        let path = std::path::absolute(&path).unwrap_or_else(|_| path.as_ref().into());
        let invalid = |cause: &str| Error::new(Kind::Invalid, "make", named(&path), cause);
        let Some(first) = regions.first() else { return Err(invalid("a snapshot needs a region: name one")) };
        if regions.iter().any(|region| !Arc::ptr_eq(region.life(), first.life())) {
            return Err(invalid(
                "its regions are of several domains, which stop for nothing together: make a `Snapshots` for each",
            ));
        }
        let again = |(at, region): &(usize, &&Region)| {
            regions.iter().take(*at).any(|other| Arc::ptr_eq(&other.bound, &region.bound))
        };
        if let Some((_, region)) = regions.iter().enumerate().find(again) {
            return Err(invalid(&format!("region {} is named twice: name it once", region.bound.name)));
        }
        let anonymous = |region: &&Region| region.core().rights == Rights::ReadWrite && region.bound.is_anonymous();
        if !regions.iter().all(anonymous) {
            return Err(invalid(
                "snapshots are of regions that are stored, restored or zero at first: leave out all others",
            ));
        }
        if regions.iter().any(|region| region.core().trap.is_tracked()) {
            return Err(invalid(ONE_CLIENT));
        }
        let inner = &first.life().inner;
        if inner.config.descriptor_table == DescriptorTable::Private {
            return Err(invalid(
                "they need a domain whose descriptors the program's threads have (DescriptorTable::Shared)",
            ));
        }
        regions.iter().try_for_each(|region| region.bound.may_change(inner, "take snapshots of"))?;
        let subject = Subject {
            life: first.life().clone(),
            regions: regions.iter().map(|region| region.bound.clone()).collect(),
            path: path.clone(),
            process: Process::this()?,
        };
        let target = Target::at(&path, subject.saved_regions())?;
        if inner.snapshots.swap(true, Ordering::AcqRel) {
            let cause = "the domain has a `Snapshots` already: drop that one first";
            return Err(Error::new(Kind::Held, "make", named(&path), cause));
        }
        for bound in &subject.regions {
            let _turn = inner.cutting.begin();
            inner.undisturbed(|| copy_first::join(inner.state(), bound.core()));
        }
        let read = PagesRead::none_of(&subject);
        Ok(Snapshots { subject, target, anew: true, first_bytes: 0, read })
    }

    /// Has every page tell of its next write, so that the cut has little left to do. [`Snapshots::take`] does it too; a program
    /// that does it some time before, on a thread of its own, has the snapshot sooner. Returns how many pages it armed, those armed several times
    /// counted as often.
    ///
    /// # Errors
    /// A region is gone, or the stack of this thread lies in one, or the kernel would not protect a page.
    pub fn arm(&mut self) -> Result<u64> {
        self.subject.arm()
    }

    /// Takes a snapshot, and returns when it would survive a crash of the machine. From the cut until all pages are read no handler of a
    /// signal is let in on this thread.
    ///
    /// # Errors
    /// A region is gone, or the stack of this thread lies in one; a page cannot be had, or was given up ([`Kind::Lost`]); the file cannot be written. Then the newest
    /// snapshot of the file is the one before, or this one where only the disk's last word is missing that it would survive; the program
    /// has gone on. The next one is taken anew, with all pages; but where the disk had no room for what was to be added to the file, it has that, and
    /// what has changed since.
    pub fn take(&mut self) -> Result<Taken> {
        let began = Instant::now();
        self.subject.alive()?;
        let taken = self.take_from(began);
        if taken.is_err() {
            self.anew = self.anew || !self.goes_on();
            self.target.give_up();
        }
        self.read.clear();
        taken
    }

    /// After a failure: whether the next snapshot builds on the newest all the same. Then what the image of this one has got counts as
    /// changed again; what it had not got does already, and what was written to since the cut.
    fn goes_on(&mut self) -> bool {
        let lacks = self.subject.life.inner.state().cut.lacks();
        let goes_on = self.target.lacked_room() && !lacks;
        if goes_on {
            self.read.put_back(&self.subject.cores());
        }
        goes_on
    }

    fn take_from(&mut self, began: Instant) -> Result<Taken> {
        let Snapshots { subject, target, read, .. } = self;
        let cores = subject.cores();
        let is_long = target.sequence() >= MOST_IN_A_FILE || target.len_bytes() > MOST_GROWTH * self.first_bytes;
        // A snapshot in a file that has lost its name would be nobody's. One in a long file is as good as any.
        if self.anew || !target.is_in_place() || is_long && target.has_room(subject.most_pages()) {
            self.anew = true;
            target.begin_file()?;
            cores.iter().for_each(|region| region.sets.changed.fill(region.range.count));
        }
        let armed_ahead = subject.arm()?;
        let inner = &subject.life.inner;
        let (state, cut_cores) = (inner.state(), &cores[..]);
        inner.undisturbed(move || stack::claim_ahead(state, FOR_COPIES));
        state.cut.most_copies();
        state.cut.lacks();
        // A handler that wrote to a page of the image could wait for this thread, which alone makes room for copies.
        let quiet = signal::Quiet::begin();
        let turn = inner.cutting.begin();
        let cut = Instant::now();
        let bounds = &subject.regions[..];
        let cut_now = move || {
            let mut given_up = None;
            let armed = copy_first::cut(state, cut_cores, || match first_given_up(bounds) {
                // One that is given up from here on waits until the image has it.
                None => copy_first::note_image(cut_cores),
                lacking => given_up = lacking,
            })?;
            Ok((armed, given_up))
        };
        let done = inner.on_table_or_pager(cut_now);
        let pause = cut.elapsed();
        drop(turn);
        let (armed_in_cut, given_up) =
            done.map_err(|why| Error::failure("take", named(&subject.path), Failure::Machine(why)))?;
        let image = Reading { subject, cores, _quiet: quiet };
        // One that was being dropped at the cut had lost pages already, or all.
        image.subject.all_there()?;
        if let Some((bound, page)) = given_up {
            return Err(bound.lacks(OPERATION, page));
        }
        let mut writing = target.begin();
        let (pages, copies) = image.write(&mut writing, read)?;
        let in_core = image.in_core();
        drop(image);
        let Written { bytes, buffer_bytes } = writing.finish(&in_core)?;
        let buffer_bytes = buffer_bytes + (BATCH * size_of::<Image>()) as u64;
        let most_copies = inner.state().cut.most_copies();
        if self.anew {
            self.first_bytes = target.len_bytes();
        }
        self.anew = false;
        let total = began.elapsed();
        Ok(Taken { pause, total, armed_ahead, armed_in_cut, pages, copies, most_copies, bytes, buffer_bytes })
    }
}

/// The first page that was given up, and whose it is.
fn first_given_up(regions: &[Arc<Bound>]) -> Option<(&Bound, PageNo)> {
    regions.iter().find_map(|bound| Some((&**bound, bound.first_given_up()?)))
}

/// What snapshots are of.
struct Subject {
    life: Arc<Life>,
    regions: Vec<Arc<Bound>>,
    path: PathBuf,
    /// The process that may take snapshots: a forked child may not.
    process: Process,
}

impl Subject {
    fn arm(&self) -> Result<u64> {
        self.alive()?;
        self.regions.iter().try_for_each(|bound| bound.has_no_stack_of_this_thread(OPERATION))?;
        let state = self.life.inner.state();
        let _turn = self.life.inner.cutting.begin();
        let (mut armed, mut left) = (0, u64::MAX);
        for _ in 0..MOST_ROUNDS {
            for bound in &self.regions {
                let region = bound.core();
                let done = self.life.inner.on_table_or_pager(move || copy_first::arm(state, region, AtBusy::Skip));
                armed += done.map_err(|why| self.failed(bound, None, Failure::Machine(why)))?;
            }
            let now: u64 = self.cores().iter().map(|region| region.sets.unarmed.count()).sum();
            if now <= FEW_PAGES || now >= left {
                break;
            }
            left = now;
        }
        Ok(armed)
    }

    /// Whether the regions are all there, the thread may protect their pages, and this is the process that they are of.
    fn alive(&self) -> Result<()> {
        if !self.process.is_this() {
            let cause = "a forked child takes snapshots of its own: make a `Snapshots` anew";
            return Err(Error::new(Kind::Invalid, "take", named(&self.path), cause));
        }
        self.all_there()?;
        self.regions.iter().try_for_each(|bound| bound.may_change(&self.life.inner, OPERATION))
    }

    /// Whether no region was dropped yet. After a cut: whether the image has all of them, since whoever drops one later waits for it.
    fn all_there(&self) -> Result<()> {
        let Some(bound) = self.regions.iter().find(|bound| bound.is_leaving(&self.life.inner)) else { return Ok(()) };
        let cause = format!("region {} is gone", bound.name);
        Err(Error::new(Kind::Invalid, "take", named(&self.path), cause))
    }

    fn cores(&self) -> Vec<&region::Region> {
        self.regions.iter().map(|bound| bound.core()).collect()
    }

    /// How many pages are not known to be zero, about: an image has no more.
    fn most_pages(&self) -> u64 {
        let may_have = |region: &region::Region, page: PageNo| {
            let index = region.index(page);
            let is_absent = region.word(page).is_some_and(|word| word.load().state() == State::Absent);
            let is_kept = region.pager().is_some_and(|pager| pager.keeps(index));
            !is_absent || is_kept || region.sets.inherited.contains(index)
        };
        let count = |region: &region::Region| region.range.pages().filter(|page| may_have(region, *page)).count();
        self.cores().into_iter().map(|region| count(region) as u64).sum()
    }

    fn saved_regions(&self) -> Vec<SavedRegion> {
        let saved =
            |bound: &Arc<Bound>| SavedRegion { name: bound.given_name().into(), size_pages: bound.core().range.count };
        self.regions.iter().map(saved).collect()
    }

    fn failed(&self, bound: &Bound, page: Option<PageNo>, failure: Failure) -> Error {
        let object = match page {
            Some(page) => pages(&bound.name, bound.core().index(page), 1),
            None => format!("region {}", bound.name),
        };
        Error::failure(OPERATION, object, failure)
    }
}

impl Drop for Snapshots {
    fn drop(&mut self) {
        // Pages stay armed: the next write to each takes that off. In a forked child nothing is held.
        if self.subject.process.is_this() {
            self.subject.life.inner.snapshots.store(false, Ordering::Release);
        }
    }
}

/// The pages that an image was read of, a bit each, by their numbers in the snapshot.
struct PagesRead(Vec<u64>);

impl PagesRead {
    fn none_of(subject: &Subject) -> PagesRead {
        let pages: u64 = subject.cores().iter().map(|region| region.range.count).sum();
        PagesRead(vec![0; pages.div_ceil(64) as usize])
    }

    fn note(&mut self, first: u64, count: u64) {
        for page in first..first + count {
            if let Some(word) = self.0.get_mut((page / 64) as usize) {
                *word |= 1 << (page % 64);
            }
        }
    }

    fn has(&self, page: u64) -> bool {
        self.0.get((page / 64) as usize).is_some_and(|word| word >> (page % 64) & 1 != 0)
    }

    /// They count as changed again.
    fn put_back(&self, regions: &[&region::Region]) {
        let mut before = 0;
        for region in regions {
            let count = region.range.count;
            (0..count).filter(|index| self.has(before + index)).for_each(|index| region.sets.changed.insert(index));
            before += count;
        }
    }

    fn clear(&mut self) {
        // Memory of words without pages is not touched, most of it never.
        self.0.iter_mut().filter(|word| **word != 0).for_each(|word| *word = 0);
    }
}

/// An image after its cut. When it is dropped nobody waits any more, whether all of it was read or not; what was not counts as changed.
struct Reading<'a> {
    subject: &'a Subject,
    cores: Vec<&'a region::Region>,
    _quiet: signal::Quiet,
}

impl Reading<'_> {
    /// Writes all pages of the image. How many, and how many of them were copied before a write.
    fn write(&self, writing: &mut Writing<'_>, pages_read: &mut PagesRead) -> Result<(u64, u64)> {
        let mut images: Vec<Image> = vec![(PageNo(0), [0; PAGE_BYTES]); BATCH];
        let (mut pages, mut copies) = (0, 0);
        let inner = &self.subject.life.inner;
        let state = inner.state();
        for (bound, &region) in self.subject.regions.iter().zip(&self.cores) {
            let mut from = Some(0);
            while let Some(at) = from {
                stack::claim_ahead(state, FOR_COPIES);
                copies += self.write_copies(writing, &mut images)?;
                let hurried = state.cut.hurried().filter(|page| region.range.contains(*page));
                let first = hurried.map_or(at, |page| region.index(page));
                let batch = &mut images[..];
                let (zeros, read) = inner.on_pager_thread(move || {
                    let zeros = image::pass_over(state, region, first);
                    let read = image::read(state, region, zeros.end, batch);
                    (zeros, read)
                });
                let (count, next) = read.map_err(|(page, why)| self.subject.failed(bound, Some(page), why))?;
                let passed = zeros.end - zeros.start;
                let zeros = self.number(region.range.first.plus(zeros.start)).filter(|_| passed > 0);
                // Before any of it is written, after which an error forgets the rest. A copy's page has changed since.
                zeros.into_iter().for_each(|first| pages_read.note(first, passed));
                let numbers = images[..count].iter().filter_map(|(page, _)| self.number(*page));
                numbers.for_each(|number| pages_read.note(number, 1));
                if let Some(first) = zeros {
                    writing.zero(first, passed)?;
                }
                self.add(writing, &images[..count])?;
                pages += passed + count as u64;
                // What was passed over for somebody in a hurry comes in its turn.
                from = if hurried.is_some() { Some(at) } else { next };
            }
        }
        copies += self.write_copies(writing, &mut images)?;
        if state.cut.lacks() {
            let cause = "a page that the program wrote to could not be copied before, most likely because there was no frame for \
                         the copy: give the domain more frames";
            return Err(Error::new(Kind::OutOfSpace, "take", named(&self.subject.path), cause));
        }
        Ok((pages + copies, copies))
    }

    fn write_copies(&self, writing: &mut Writing<'_>, images: &mut [Image]) -> Result<u64> {
        let inner = &self.subject.life.inner;
        let mut copies = 0;
        loop {
            let (state, batch) = (inner.state(), &mut *images);
            let count = inner.on_table(move |_| image::take_copies(state, batch));
            if count == 0 {
                return Ok(copies);
            }
            self.add(writing, &images[..count])?;
            copies += count as u64;
        }
    }

    fn add(&self, writing: &mut Writing<'_>, images: &[Image]) -> Result<()> {
        for (page, bytes) in images {
            if let Some(number) = self.number(*page) {
                writing.page(number, bytes)?;
            }
        }
        Ok(())
    }

    /// Which page of the snapshot a page is: its regions' come one after the other.
    fn number(&self, page: PageNo) -> Option<u64> {
        let mut before = 0;
        for region in &self.cores {
            if region.range.contains(page) {
                return Some(before + region.index(page));
            }
            before += region.range.count;
        }
        None
    }

    /// Which pages are in core, about.
    fn in_core(&self) -> Vec<Run> {
        let mut gap = 0;
        loop {
            let runs = self.runs(gap);
            if runs.len() <= MOST_RUNS {
                return runs;
            }
            gap = 2 * gap + 1;
        }
    }

    /// The runs of pages in core that have more than `gap` other pages between them.
    fn runs(&self, gap: u64) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let bytes = self.cores.iter().flat_map(|region| region.residency().iter());
        for (page, _) in (0..).zip(bytes).filter(|(_, byte)| byte.load(Ordering::Relaxed) != 0) {
            match runs.last_mut() {
                Some(run) if page - (run.first + run.count) <= gap => run.count = page + 1 - run.first,
                _ => runs.push(Run { first: page, count: 1 }),
            }
        }
        runs
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        for region in &self.cores {
            let mut next = region.sets.pending.next(0);
            while let Some(index) = next {
                region.sets.changed.insert(index);
                next = region.sets.pending.next(index + 1);
            }
        }
        let inner = &self.subject.life.inner;
        let _turn = inner.cutting.begin();
        let (state, cores) = (inner.state(), &self.cores[..]);
        inner.on_table(move |_| copy_first::end(state, cores));
    }
}
