//! `snapshot`: one instant of memory into a file, while a thread writes to it: ours, and a forked child that writes its copy.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use selfpage::snapshot::{Snapshots, Taken};
use selfpage::{Domain, Trap};

use super::error::Error;
use super::histogram::Histogram;
use super::job::{Bench, Job};
use super::raw::{self, Child, Mapping, Memory, PAGE_BYTES, WORDS};
use super::result::{Better, Sample, Unit};
use super::sizes::Sizes;
use super::system::{Entry, Group, Systems};

/// The bench.
pub struct Snapshot;

/// How a snapshot is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taker {
    /// By the library, of a region whose faults arrive like this.
    Selfpage(Trap),
    /// By a child that is forked, writes all, and ends.
    Fork,
    /// By nobody: a thread writes all to a file while it changes, and the file has no instant. What the load alone costs the writer.
    NoSnapshot,
}

/// Writes a second, to pages at random; none: as many as can be.
const CASES: [(&str, Option<u32>); 4] =
    [("write-1k", Some(1_000)), ("write-10k", Some(10_000)), ("write-100k", Some(100_000)), ("write-all", None)];

static SYSTEMS: Systems<Taker> = Systems(&[
    (Entry::plain("selfpage-worker", Group::Ours), Taker::Selfpage(Trap::Worker)),
    (Entry::plain("selfpage-upcall", Group::Ours), Taker::Selfpage(Trap::Upcall)),
    (Entry::plain("fork", Group::Kernel), Taker::Fork),
    (Entry::plain("no-snapshot", Group::Raw), Taker::NoSnapshot),
]);

impl Bench for Snapshot {
    fn name(&self) -> &'static str {
        "snapshot"
    }

    fn about(&self) -> &'static str {
        "one instant of memory into a file under random writes: the pause, the worst write, the second one; and fork"
    }

    fn disk_bytes(&self, sizes: Sizes, systems: &[&Entry]) -> u64 {
        // Ours keeps two images of the memory in its file, and writes another job's beside it; the others write one.
        let of_ours = if systems.iter().any(|system| system.group == Group::Ours) { 3 } else { 0 };
        let of_others = if systems.iter().any(|system| system.group != Group::Ours) { 1 } else { 0 };
        let image_bytes = 2 * sizes.frames_bytes;
        (of_ours + of_others) * (image_bytes + image_bytes / 64)
    }

    fn cases(&self) -> Vec<String> {
        CASES.map(|(name, _)| name.into()).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn unit(&self, _case: &str) -> Unit {
        Unit { name: "us of pause", better: Better::Lower }
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let (_, rate) = job.known(CASES.iter().find(|(name, _)| *name == job.case))?;
        let len_bytes = 2 * job.sizes.frames_bytes as usize;
        match SYSTEMS.way(job.system) {
            Taker::Selfpage(trap) => ours(trap, len_bytes, *rate, job.directory),
            Taker::Fork => by_kernel(len_bytes, *rate, job.directory, fork),
            Taker::NoSnapshot => by_kernel(len_bytes, *rate, job.directory, copy_as_it_is),
        }
    }
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Failed(format!("take a snapshot: {error}"))
}

fn ours(trap: Trap, len_bytes: usize, rate: Option<u32>, directory: &Path) -> Result<Sample, Error> {
    // All is in core, and a copy before each first write has a frame, too.
    let domain = Domain::with_frames(2 * len_bytes).build()?;
    let region = domain.region(len_bytes).trap(trap).zero()?;
    let memory = Memory::of_region(&region);
    touch(memory);
    let mut snapshots = Snapshots::of(&[&region], directory.join("bench.snap")).map_err(failed)?;
    let writer = Writer::new(memory, rate);
    std::thread::scope(|scope| {
        scope.spawn(|| writer.run());
        let _end = EndOnDrop(&writer);
        writer.settle();
        let first = snapshots.take().map_err(failed)?;
        let (seen, written) = writer.since();
        writer.settle();
        let before = writer.count();
        let second = snapshots.take().map_err(failed)?;
        check(memory, directory, before..=writer.count() + u64::from(BURST))?;
        let extra = f64::from(first.most_copies) * PAGE_BYTES as f64 + first.buffer_bytes as f64;
        let mut sample = sample(first.pause, first.total, extra, written, &seen);
        sample.figures.extend(figures("", &first, memory));
        sample.figures.extend(figures("second_", &second, memory));
        Ok(sample)
    })
}

/// What only ours can tell.
fn figures(which: &str, taken: &Taken, memory: Memory) -> Vec<(String, f64)> {
    let share = |pages: u64| pages as f64 / memory.size_pages() as f64;
    let all = [
        ("armed_in_cut_share", share(taken.armed_in_cut)),
        ("armed_anew_share", share(taken.armed_ahead.saturating_sub(memory.size_pages() as u64))),
        ("copies", taken.copies as f64),
        ("pages", taken.pages as f64),
        ("file_bytes", taken.bytes as f64),
        ("buffer_bytes", taken.buffer_bytes as f64),
        ("cut_us", taken.pause.as_secs_f64() * 1e6),
        ("total_ms", taken.total.as_secs_f64() * 1e3),
    ];
    // The first one's pause and time stand there for every system.
    let own = |name: &&(&str, f64)| !(which.is_empty() && matches!(name.0, "cut_us" | "total_ms"));
    all.iter().filter(own).map(|(name, value)| (format!("{which}{name}"), *value)).collect()
}

/// The file has what memory had at one instant, of which so many writes were before: every page has its number in its first word, which
/// nobody writes to, and the other words have those writes and no more.
fn check(memory: Memory, directory: &Path, before: RangeInclusive<u64>) -> Result<(), Error> {
    let snapshot = selfpage::snapshot::Snapshot::open(directory.join("bench.snap")).map_err(failed)?;
    let mut image = HashMap::new();
    let mut bytes = [0; PAGE_BYTES];
    for page in 0..memory.size_pages() {
        snapshot.read_page(0, page as u64, &mut bytes).map_err(failed)?;
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).enumerate();
        for (word, number) in words.filter(|(_, number)| *number != 0) {
            if word > 0 {
                image.insert((page, word), number);
            } else if number != page as u64 + 1 {
                return Err(Error::Failed(format!("page {page} of the snapshot has number {number}")));
            }
        }
    }
    let last = of_one_instant(&image, memory.size_pages()).map_err(Error::Failed)?;
    if !before.contains(&last) {
        return Err(Error::Failed(format!("the snapshot has {last} writes, where there were {before:?}")));
    }
    Ok(())
}

/// How many of the writer's writes were before the instant that these words are of; why there was none such.
fn of_one_instant(image: &HashMap<(usize, usize), u64>, size_pages: usize) -> Result<u64, String> {
    let last = image.values().copied().max().unwrap_or(0);
    let mut found = 0;
    for (number, place) in (1..=last).zip(Places::of(size_pages)) {
        match image.get(&place) {
            Some(newest) if *newest >= number => found += usize::from(*newest == number),
            other => {
                return Err(format!("the snapshot has write {last}, and of write {number} at {place:?} {other:?}"));
            }
        }
    }
    // A word that has the number of a write to another place was not found.
    if found < image.len() {
        Err(format!("{} words of the snapshot were never written so", image.len() - found))
    } else {
        Ok(last)
    }
}

/// Where the writer writes, page and word, write by write: at random, and the same each time.
struct Places {
    dice: u64,
    size_pages: usize,
}

impl Places {
    fn of(size_pages: usize) -> Places {
        Places { dice: 1, size_pages }
    }
}

impl Iterator for Places {
    type Item = (usize, usize);

    #[inline(always)]
    fn next(&mut self) -> Option<(usize, usize)> {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some(((self.dice >> 33) as usize % self.size_pages, 1 + (self.dice >> 20) as usize % (WORDS - 1)))
    }
}

/// Memory of the kernel's own, saved by `save`, which returns how long the writer was stopped on purpose.
fn by_kernel(
    len_bytes: usize,
    rate: Option<u32>,
    directory: &Path,
    save: fn(&Mapping, &File) -> io::Result<Duration>,
) -> Result<Sample, Error> {
    let mapping = Mapping::anonymous(len_bytes).map_err(failed)?;
    let memory = mapping.memory();
    touch(memory);
    let file = File::create(directory.join("bench.fork")).map_err(failed)?;
    let writer = Writer::new(memory, rate);
    std::thread::scope(|scope| {
        scope.spawn(|| writer.run());
        let _end = EndOnDrop(&writer);
        writer.settle();
        let began = Instant::now();
        let faults = raw::usage().minor_faults;
        let pause = save(&mapping, &file).map_err(failed)?;
        let total = began.elapsed();
        let copied = (raw::usage().minor_faults - faults) as f64 * PAGE_BYTES as f64;
        let (seen, written) = writer.since();
        Ok(sample(pause, total, copied, written, &seen))
    })
}

fn fork(mapping: &Mapping, file: &File) -> io::Result<Duration> {
    let began = Instant::now();
    let child = Child::fork(|| mapping.save(file))?;
    let pause = began.elapsed();
    child.wait()?;
    Ok(pause)
}

fn copy_as_it_is(mapping: &Mapping, file: &File) -> io::Result<Duration> {
    mapping.save(file)?;
    Ok(Duration::ZERO)
}

fn sample(pause: Duration, total: Duration, extra_bytes: f64, written: u64, seen: &Seen) -> Sample {
    let us = pause.as_secs_f64() * 1e6;
    let Seen { writes, kept } = seen;
    let figures = [
        ("p50_us", writes.quantile_us(0.5)),
        ("p99_us", writes.quantile_us(0.99)),
        ("p99_9_us", writes.quantile_us(0.999)),
        ("max_us", writes.max_us()),
        ("kept_p99_9_us", kept.quantile_us(0.999)),
        ("kept_max_us", kept.max_us()),
        ("total_ms", total.as_secs_f64() * 1e3),
        ("extra_bytes_max", extra_bytes),
        ("pages_written", written as f64),
    ];
    Sample::of(us, &figures)
}

/// Gives every page a number, in its first word.
fn touch(memory: Memory) {
    (0..memory.size_pages()).for_each(|page| memory.write(page, 0, page as u64 + 1));
}

/// Writes to [`Places`], so many times a second, the number of the write each time, and notes how long each takes.
struct Writer {
    memory: Memory,
    rate: Option<u32>,
    stop: AtomicBool,
    noted: std::sync::Mutex<Noted>,
}

/// How long things took.
struct Seen {
    /// Each write, as the writer sees it.
    writes: Histogram,
    /// From the end of a write to the end of the next: what the writer neither slept by itself nor was ready for and had no CPU. That
    /// is what others keep it waiting for, wherever it meets it: after fork(2) that is seldom in the write.
    kept: Histogram,
}

impl Seen {
    fn new() -> Seen {
        Seen { writes: Histogram::new(), kept: Histogram::new() }
    }
}

/// What was noted since last asked.
struct Noted {
    seen: Seen,
    /// Writes since the begin.
    count: u64,
    /// Pages written to, a flag each.
    pages: Vec<bool>,
}

/// What one visit of the lock notes, at most.
const BURST: u32 = 64;
/// How long the writer sleeps where nothing is due.
const NAP: Duration = Duration::from_micros(200);
/// Of a shorter time nobody asks whether there was a CPU.
const LONG: Duration = Duration::from_micros(20);

impl Writer {
    fn new(memory: Memory, rate: Option<u32>) -> Writer {
        let noted = Noted { seen: Seen::new(), count: 0, pages: vec![false; memory.size_pages()] };
        Writer { memory, rate, stop: false.into(), noted: noted.into() }
    }

    fn noted(&self) -> std::sync::MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn run(&self) {
        let began = Instant::now();
        let mut ready = ReadyTime::of_this_thread();
        let (mut last, mut napped) = (began, Duration::ZERO);
        let mut places = Places::of(self.memory.size_pages());
        let mut count = 0u64;
        while !self.stop.load(Ordering::Relaxed) {
            let due = self.rate.map_or(u64::MAX, |rate| (began.elapsed().as_secs_f64() * f64::from(rate)) as u64);
            let burst = due.saturating_sub(count).min(BURST.into());
            if burst == 0 {
                std::thread::sleep(NAP);
                napped += NAP;
                continue;
            }
            let mut took = [(0, 0, 0); BURST as usize];
            for (entry, (page, word)) in took.iter_mut().take(burst as usize).zip(&mut places) {
                count += 1;
                let before = Instant::now();
                self.memory.write(page, word, count);
                let after = Instant::now();
                let mut kept = (after - last).saturating_sub(napped);
                if kept > LONG {
                    kept = kept.saturating_sub(ready.since_last());
                }
                (last, napped) = (after, Duration::ZERO);
                *entry = (page, (after - before).as_nanos() as u64, kept.as_nanos() as u64);
            }
            let mut noted = self.noted();
            for (page, write_ns, kept_ns) in took.into_iter().take(burst as usize) {
                noted.seen.writes.record(write_ns);
                noted.seen.kept.record(kept_ns);
                noted.pages[page] = true;
            }
            noted.count = count;
        }
    }

    /// How many writes there were, at least; at most [`BURST`] more.
    fn count(&self) -> u64 {
        self.noted().count
    }

    /// Lets it get going, and forgets what it noted before.
    fn settle(&self) {
        std::thread::sleep(Duration::from_millis(100));
        let _ = self.since();
    }

    /// The times of the writes since the last call, and how many pages they were to.
    fn since(&self) -> (Seen, u64) {
        let mut noted = self.noted();
        let seen = std::mem::replace(&mut noted.seen, Seen::new());
        let pages = noted.pages.iter().filter(|page| **page).count() as u64;
        noted.pages.fill(false);
        (seen, pages)
    }
}

/// How long a thread was ready to run, and others had the CPUs, as the kernel counts it. Zero where it does not.
struct ReadyTime {
    file: Option<File>,
    last_ns: u64,
}

impl ReadyTime {
    fn of_this_thread() -> ReadyTime {
        let mut ready = ReadyTime { file: File::open("/proc/thread-self/schedstat").ok(), last_ns: 0 };
        ready.since_last();
        ready
    }

    fn since_last(&mut self) -> Duration {
        let mut text = [0; 64];
        let len = self.file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        // Nanoseconds with a CPU, and without.
        let fields = std::str::from_utf8(&text[..len]).ok().and_then(|text| text.split(' ').nth(1));
        let now_ns = fields.and_then(|field| field.parse().ok()).unwrap_or(self.last_ns);
        Duration::from_nanos(now_ns - std::mem::replace(&mut self.last_ns, now_ns))
    }
}

/// Ends the writer, whatever becomes of the measurement.
struct EndOnDrop<'a>(&'a Writer);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is in memory after so many writes.
    fn after(writes: u64) -> HashMap<(usize, usize), u64> {
        Places::of(4).zip(1..=writes).collect()
    }

    #[test]
    fn a_state_that_there_was_is_known_by_its_writes() {
        for writes in [0, 1, 5000] {
            assert_eq!(of_one_instant(&after(writes), 4), Ok(writes));
        }
    }

    #[test]
    fn a_page_of_another_instant_is_found() {
        // Page 2 is of an earlier one, or of a later one.
        for other in [4900, 5100] {
            let mut image = after(5000);
            image.retain(|(page, _), _| *page != 2);
            image.extend(after(other).into_iter().filter(|((page, _), _)| *page == 2));
            assert!(of_one_instant(&image, 4).is_err(), "{other}");
        }
        let mut image = after(5000);
        let (place, number) =
            image.iter().min_by_key(|(_, number)| **number).map(|(place, number)| (*place, *number)).unwrap();
        image.insert(place, number + 1);
        assert!(of_one_instant(&image, 4).is_err(), "{place:?} was never {}", number + 1);
    }

    #[test]
    fn a_thread_that_shares_its_cpu_is_seen_to_be_ready() {
        // Where the kernel counts nothing, nothing is seen.
        let counts = std::fs::read_to_string("/proc/thread-self/schedstat").is_ok_and(|text| text.trim() != "0 0 0");
        let mut ready = ReadyTime::of_this_thread();
        let stop = AtomicBool::new(false);
        // More threads than CPUs: somebody waits for one, and it is this one in its turn.
        let busy = std::thread::available_parallelism().map_or(1, usize::from) * 2;
        std::thread::scope(|scope| {
            for _ in 0..busy {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let (began, mut waited) = (Instant::now(), Duration::ZERO);
            while counts && waited.is_zero() && began.elapsed() < Duration::from_secs(60) {
                waited += ready.since_last();
            }
            stop.store(true, Ordering::Relaxed);
            assert_eq!(waited.is_zero(), !counts);
        });
    }
}
