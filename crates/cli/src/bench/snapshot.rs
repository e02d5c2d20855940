//! `snapshot`: one instant of memory into a file, while a thread writes to it: ours, and a forked child that writes its copy.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use selfpage::snapshot::{Snapshots, Taken};
use selfpage::{Domain, Region, Trap};

use super::error::Error;
use super::histogram::Histogram;
use super::job::{Bench, Job};
use super::raw::{self, Child, Mapping, Memory, PAGE_BYTES, WORDS};
use super::result::{Better, Sample, Unit};
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
        let known = CASES.iter().find(|(name, _)| *name == job.case);
        let (_, rate) = known.ok_or_else(|| Error::Failed(format!("no case {}", job.case)))?;
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
    let domain = Domain::with_frames(2 * len_bytes).build().map_err(failed)?;
    let region = domain.region(len_bytes).trap(trap).zero().map_err(failed)?;
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
        let second = snapshots.take().map_err(failed)?;
        check(&region, directory)?;
        let extra = f64::from(first.most_copies) * PAGE_BYTES as f64;
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
        ("cut_us", taken.pause.as_secs_f64() * 1e6),
        ("total_ms", taken.total.as_secs_f64() * 1e3),
    ];
    // The first one's pause and time stand there for every system.
    let own = |name: &&(&str, f64)| !(which.is_empty() && matches!(name.0, "cut_us" | "total_ms"));
    all.iter().filter(own).map(|(name, value)| (format!("{which}{name}"), *value)).collect()
}

/// The file has what memory had: every page has its number in its first word, which nobody writes to.
fn check(region: &Region, directory: &Path) -> Result<(), Error> {
    let snapshot = selfpage::snapshot::Snapshot::open(directory.join("bench.snap")).map_err(failed)?;
    let pages = (region.len_bytes() / PAGE_BYTES) as u64;
    let mut bytes = [0; PAGE_BYTES];
    for page in 0..pages {
        snapshot.read_page(0, page, &mut bytes).map_err(failed)?;
        let number = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
        if number != page + 1 {
            return Err(Error::Failed(format!("page {page} of the snapshot has number {number}")));
        }
    }
    Ok(())
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
    let figures = figures.map(|(name, value)| (name.to_string(), value)).to_vec();
    Sample { value: us, counts: true, timing: None, figures }
}

/// Gives every page a number, in its first word.
fn touch(memory: Memory) {
    (0..memory.size_pages()).for_each(|page| memory.write(page, 0, page as u64 + 1));
}

/// Writes to pages at random, so many times a second, and notes how long each write takes.
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
        let noted = Noted { seen: Seen::new(), pages: vec![false; memory.size_pages()] };
        Writer { memory, rate, stop: false.into(), noted: noted.into() }
    }

    fn noted(&self) -> std::sync::MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn run(&self) {
        let began = Instant::now();
        let mut ready = ReadyTime::of_this_thread();
        let (mut last, mut napped) = (began, Duration::ZERO);
        let mut number = 1u64;
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
            for entry in took.iter_mut().take(burst as usize) {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let page = (number >> 33) as usize % self.memory.size_pages();
                let before = Instant::now();
                self.memory.write(page, 1 + (number >> 20) as usize % (WORDS - 1), number);
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
            count += burst;
        }
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
