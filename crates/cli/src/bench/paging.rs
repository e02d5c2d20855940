//! `paging`: data four times larger than its frames, on disk.

use std::time::{Duration, Instant};

use selfpage::Trap;

use super::access::{Run, Subject};
use super::case::{Access, Case, Pattern};
use super::content::{self, Versions};
use super::data;
use super::device::{Traffic, Witness};
use super::error::Error;
use super::job::{Bench, Job, Place};
use super::raw::{self, PAGE_BYTES, Usage};
use super::result::{Better, Sample, Unit};
use super::sizes::Sizes;
use super::system::{Condition, Contents, Entry, Group, Setup, System, Systems};
use super::systems::anonymous::Anonymous;
use super::systems::bare::Bare;
use super::systems::mmap::{Advice, Mmap};
use super::systems::requests::Requests;
use super::systems::selfpage::{Backing, Selfpage};
use crate::process::{InCore, status_bytes};

/// The bench.
pub struct Paging;

/// How a system is driven.
#[derive(Clone, Copy)]
enum Way {
    /// By loops over its memory.
    Memory(fn() -> Box<dyn System>),
    /// By loops that read its memory at random.
    ReadOnly(fn() -> Box<dyn System>),
    /// By O_DIRECT requests of one size, one at a time on each thread.
    Requests { len_bytes: usize },
}

static SYSTEMS: Systems<Way> = Systems(&[
    (Entry::plain("selfpage-upcall", Group::Ours), Way::Memory(|| Selfpage::over(Trap::Upcall, Backing::Store))),
    (Entry::plain("selfpage-worker", Group::Ours), Way::Memory(|| Selfpage::over(Trap::Worker, Backing::Store))),
    (Entry::plain("selfpage-file-upcall", Group::Ours), Way::Memory(|| Selfpage::over(Trap::Upcall, Backing::File))),
    (Entry::plain("selfpage-file-worker", Group::Ours), Way::Memory(|| Selfpage::over(Trap::Worker, Backing::File))),
    (
        Entry { condition: Condition::Readahead { size_kib: 128 }, ..Entry::plain("mmap-ra128k", Group::Mmap) },
        Way::Memory(|| Mmap::with(Advice::Normal)),
    ),
    (Entry::plain("mmap-random", Group::Mmap), Way::Memory(|| Mmap::with(Advice::Random))),
    (Entry::plain("mmap-default", Group::Mmap), Way::Memory(|| Mmap::with(Advice::Normal))),
    (Entry::plain("userfaultfd-alone", Group::Bare), Way::ReadOnly(|| Bare::with(Contents::File))),
    (Entry::plain("raw-4k", Group::Raw), Way::Requests { len_bytes: PAGE_BYTES }),
    (Entry::plain("raw-2m", Group::Raw), Way::Requests { len_bytes: 2 << 20 }),
    (Entry { condition: Condition::SwapFile, ..Entry::plain("swap", Group::Swap) }, Way::Memory(Anonymous::unmapped)),
]);

/// Seeds of the random accesses: the same for all systems.
const WARM_SEED: u64 = 0x5eed_0001;
const SEED: u64 = 0x5eed_0002;
const SAMPLE_SEED: u64 = 0x5eed_0003;

/// The longest that a random case is brought to its steady state, and a round of it, after which it is looked whether it is there.
const WARM_LIMIT: Duration = Duration::from_secs(60);
const WARM_ROUND: Duration = Duration::from_secs(1);
const NOT_REACHED: &str = "misses did not reach the device";
const NOT_FULL: &str = "frames were not full when the measurement began";
const NOT_EVICTED: &str = "nothing was evicted: frames were not full";

impl Bench for Paging {
    fn name(&self) -> &'static str {
        "paging"
    }

    fn about(&self) -> &'static str {
        "memory four times larger than its frames, from disk: selfpage, mmap, swap and the disk's own limit"
    }

    fn quick_takes(&self) -> &'static str {
        "minutes"
    }

    fn place(&self) -> Place {
        Place::Disk
    }

    fn disk_bytes(&self, sizes: Sizes, systems: &[&Entry]) -> u64 {
        // Beside the file ours has a store, of twice the data and a few MiB; after all others comes the swap file, which root alone can have.
        let has_store = systems.iter().any(|system| system.group == Group::Ours);
        let has_swap = raw::user() == 0 && systems.iter().any(|system| system.condition == Condition::SwapFile);
        let store_bytes = if has_store { 2 * sizes.data_bytes + (8 << 20) } else { 0 };
        let swap_bytes = if has_swap { sizes.swap_bytes() } else { 0 };
        sizes.file_bytes + store_bytes.max(swap_bytes)
    }

    fn cases(&self) -> Vec<String> {
        Case::all().iter().map(Case::to_string).collect()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn takes_part(&self, system: &Entry, case: &str) -> bool {
        let Ok(case) = case.parse::<Case>() else { return false };
        match SYSTEMS.way(system) {
            Way::Memory(_) => true,
            Way::ReadOnly(_) => case.pattern == Pattern::Random && case.access == Access::Read,
            Way::Requests { len_bytes: PAGE_BYTES } => case.pattern == Pattern::Random,
            Way::Requests { .. } => case.pattern == Pattern::Sequential,
        }
    }

    fn unit(&self, case: &str) -> Unit {
        match case.parse::<Case>().map(|case| case.pattern) {
            Ok(Pattern::Sequential) => Unit { name: "MiB/s", better: Better::Higher },
            Ok(Pattern::Random) => Unit { name: "accesses/s", better: Better::Higher },
            _ => Unit { name: "% re-read a pass", better: Better::Lower },
        }
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let case: Case = job.case.parse().map_err(Error::Failed)?;
        let trial = Trial { case, job: Job { sizes: job.sizes.for_pattern(case.pattern), ..*job } };
        match SYSTEMS.way(job.system) {
            Way::Memory(make) | Way::ReadOnly(make) => trial.mapped(&mut *make()),
            Way::Requests { len_bytes } => trial.requests(len_bytes),
        }
    }
}

/// One case of one system, in its own process.
struct Trial<'a> {
    case: Case,
    job: Job<'a>,
}

impl Trial<'_> {
    fn mapped(&self, system: &mut dyn System) -> Result<Sample, Error> {
        let Job { sizes, directory, .. } = self.job;
        let witness = Witness::below(directory)?;
        let setup = Setup {
            case: self.case,
            data_path: &data::path_in(directory),
            directory,
            data_bytes: sizes.data_bytes as usize,
            frames_bytes: sizes.frames_bytes as usize,
        };
        let versions_path = data::versions_path_in(directory);
        let versions = match system.contents() {
            Contents::File => Versions::load(&versions_path)?,
            Contents::Undefined => Versions::zero(setup.data_bytes / PAGE_BYTES),
        };
        let in_core = InCore::since_now().map_err(not_counted)?;
        let memory = system.map(&setup)?;
        if system.contents() == Contents::Undefined {
            content::fill_memory(memory);
            system.put_out()?;
        }
        let subject = Subject { memory, versions: &versions, access: self.case.access };
        let warm = self.warm(subject, || witness.traffic().process_read_bytes)?;

        let before = Moment::now(witness.traffic(), system);
        let run = match self.case.pattern {
            Pattern::Sequential => subject.in_order(self.case.threads, 1)?,
            Pattern::Random => subject.at_random(self.case.threads, sizes.accesses, sizes.limit, SEED)?,
            Pattern::CyclicLru | Pattern::CyclicMru => subject.in_order(self.case.threads, sizes.passes)?,
        };
        let after = Moment::now(witness.traffic(), system);
        let mut counters: Vec<_> =
            system.counters().into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        if self.case.access == Access::Write {
            // Writes that were lost in an eviction show here even if no access came by again.
            let check = Subject { access: Access::Read, ..subject };
            check.at_random(1, sizes.accesses / 10, sizes.limit, SAMPLE_SEED)?;
        }
        counters.push(("core_max_bytes".into(), in_core.most_bytes().map_err(not_counted)? as f64));
        counters.push(("swapped_bytes".into(), status_bytes("VmSwap").map_err(not_counted)? as f64));
        let flush = std::time::Instant::now();
        system.finish()?;
        counters.push(("flush_s".into(), flush.elapsed().as_secs_f64()));
        if system.contents() == Contents::File {
            versions.save(&versions_path)?;
        }
        let mut sample = self.sample(&run, &before, &after);
        sample.flaw = sample.flaw.or(warm.map(String::from));
        sample.figures.append(&mut counters);
        Ok(sample)
    }

    /// Brings random and cyclic cases to their steady state: frames full of pages that were accessed in the same way. Why not, if it could
    /// not.
    fn warm(&self, subject: Subject<'_>, read_bytes: impl Fn() -> u64) -> Result<Option<&'static str>, Error> {
        let Job { sizes, .. } = self.job;
        let threads = self.case.threads;
        match self.case.pattern {
            Pattern::Sequential => Ok(None),
            Pattern::Random => {
                let frames = sizes.frames_bytes / PAGE_BYTES as u64;
                let (began, before) = (Instant::now(), read_bytes());
                let (mut accesses, mut seed) = (0, WARM_SEED);
                loop {
                    let run = subject.at_random(threads, (frames / 8) as usize / threads, WARM_ROUND, seed)?;
                    accesses += run.latency.total();
                    // Over four times as many pages, frames are full after 1.15 accesses a frame. Who reads megabytes for each has them full
                    // long before.
                    let read = read_bytes() - before;
                    let is_done = accesses >= 2 * frames || read >= 4 * sizes.limit_bytes();
                    if is_done || began.elapsed() > WARM_LIMIT {
                        // What was read beyond the limit has no room beside the rest.
                        return Ok((read < sizes.limit_bytes()).then_some(NOT_FULL));
                    }
                    seed += 1 << 32;
                }
            }
            Pattern::CyclicLru | Pattern::CyclicMru => subject.in_order(threads, 1).map(|_| None),
        }
    }

    fn requests(&self, len_bytes: usize) -> Result<Sample, Error> {
        let Job { sizes, directory, .. } = self.job;
        let witness = Witness::below(directory)?;
        let file = data::open_direct(&data::path_in(directory))?;
        let versions_path = data::versions_path_in(directory);
        let versions = Versions::load(&versions_path)?;
        let access = self.case.access;
        let requests = Requests { file: &file, data_bytes: sizes.data_bytes, len_bytes, versions: &versions, access };
        let before = Moment::of_process(witness.traffic());
        let run = match self.case.pattern {
            Pattern::Random => requests.at_random(self.case.threads, sizes.accesses, sizes.limit, SEED)?,
            _ => requests.in_order(self.case.threads)?,
        };
        let mut after = Moment::of_process(witness.traffic());
        after.misses = before.misses + run.latency.total() * (len_bytes / PAGE_BYTES) as u64;
        after.missed_bytes = before.missed_bytes + run.latency.total() * len_bytes as u64;
        if access == Access::Write {
            file.sync_data().map_err(|error| Error::Failed(format!("sync the data file: {error}")))?;
            versions.save(&versions_path)?;
        }
        let mut sample = self.sample(&run, &before, &after);
        if access == Access::Write {
            let moved = after.traffic.since(before.traffic).written_bytes();
            let is_reached = reached(after.missed_bytes - before.missed_bytes, moved);
            sample.flaw = (!is_reached).then(|| NOT_REACHED.into());
        }
        Ok(sample)
    }

    /// Of what the case touches in order, the bytes that no frame can have held: each pass reads them, whatever counts as a fault.
    fn never_in_core(&self) -> u64 {
        let sizes = self.job.sizes;
        let passes = match self.case.pattern {
            Pattern::Random => 0,
            Pattern::Sequential => 1,
            Pattern::CyclicLru | Pattern::CyclicMru => sizes.passes as u64,
        };
        passes * sizes.data_bytes.saturating_sub(sizes.frames_bytes)
    }

    fn sample(&self, run: &Run, before: &Moment, after: &Moment) -> Sample {
        let sizes = self.job.sizes;
        let traffic = after.traffic.since(before.traffic);
        let misses = after.misses - before.misses;
        let missed_bytes = after.missed_bytes - before.missed_bytes;
        let pages_touched = match self.case.pattern {
            Pattern::Random => run.latency.total(),
            Pattern::Sequential => sizes.data_bytes / PAGE_BYTES as u64,
            Pattern::CyclicLru | Pattern::CyclicMru => sizes.data_bytes / PAGE_BYTES as u64 * sizes.passes as u64,
        };
        let passes = sizes.passes as f64;
        let value = match self.case.pattern {
            Pattern::Sequential => sizes.data_bytes as f64 / run.elapsed_s / f64::from(1 << 20),
            Pattern::Random => run.latency.total() as f64 / run.elapsed_s,
            // What other programs read is not ours to re-read: the process's own bytes.
            _ => traffic.process_read_bytes as f64 / sizes.data_bytes as f64 / passes * 100.0,
        };
        let mut figures = vec![
            ("p50_us", run.latency.quantile_us(0.5)),
            ("p99_us", run.latency.quantile_us(0.99)),
            ("p99_9_us", run.latency.quantile_us(0.999)),
            ("max_us", run.latency.max_us()),
            ("elapsed_s", run.elapsed_s),
            ("misses", misses as f64),
            ("miss_rate", misses as f64 / pages_touched as f64),
            ("missed_bytes", missed_bytes as f64),
            ("device_bytes_read", traffic.device_read_bytes as f64),
            ("device_bytes_written", traffic.device_written_bytes as f64),
            ("process_bytes_read", traffic.process_read_bytes as f64),
            ("process_bytes_written", traffic.process_written_bytes as f64),
        ];
        if self.case.pattern.is_cyclic() {
            figures.push(("pass_s", run.elapsed_s / passes));
        }
        // A page that comes ahead of its use, as in a stream, costs no fault.
        if self.case.pattern == Pattern::Random {
            figures.push(("cpu_s_per_million_faults", (after.usage.cpu_s - before.usage.cpu_s) / misses as f64 * 1e6));
        }
        let moved_at_least = missed_bytes.max(self.never_in_core());
        let evicted = after.evictions.zip(before.evictions).map(|(after, before)| after - before);
        let stood_still = self.case.pattern == Pattern::Random && evicted == Some(0);
        let flaw = match reached(moved_at_least, traffic.read_bytes()) {
            false => Some(NOT_REACHED),
            true => stood_still.then_some(NOT_EVICTED),
        };
        Sample { flaw: flaw.map(String::from), ..Sample::of(value, &figures) }
    }
}

fn not_counted(error: std::io::Error) -> Error {
    Error::Failed(format!("count the memory in core: {error}"))
}

/// True if something was missed and the device moved about as much: else a cache answered, and the case says nothing.
fn reached(missed_bytes: u64, moved_bytes: u64) -> bool {
    missed_bytes > 0 && moved_bytes as f64 >= 0.8 * missed_bytes as f64
}

/// The counters at one moment.
struct Moment {
    usage: Usage,
    traffic: Traffic,
    misses: u64,
    /// What the device is held against. A stream of ours misses a few pages, and all others come ahead of their use.
    missed_bytes: u64,
    evictions: Option<u64>,
}

impl Moment {
    fn of_process(traffic: Traffic) -> Moment {
        let usage = raw::usage();
        let misses = usage.major_faults;
        Moment { usage, traffic, misses, missed_bytes: misses * PAGE_BYTES as u64, evictions: None }
    }

    fn now(traffic: Traffic, system: &dyn System) -> Moment {
        let moment = Moment::of_process(traffic);
        Moment {
            misses: system.misses().unwrap_or(moment.misses),
            missed_bytes: system.filled_bytes().unwrap_or(moment.missed_bytes),
            evictions: system.evictions(),
            ..moment
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::histogram::Histogram;
    use super::*;

    #[test]
    fn a_cache_in_between_does_not_count() {
        assert!(reached(1000, 1000));
        assert!(reached(1000, 900));
        assert!(!reached(1000, 700));
        assert!(!reached(0, 0));
    }

    /// 7 pages that were waited for, and so many in all.
    struct Stream(u64);

    impl System for Stream {
        fn contents(&self) -> Contents {
            Contents::File
        }

        fn map(&mut self, _: &Setup<'_>) -> Result<raw::Memory, Error> {
            Err(Error::Failed("there is no memory".into()))
        }

        fn misses(&self) -> Option<u64> {
            Some(7)
        }

        fn filled_bytes(&self) -> Option<u64> {
            Some(self.0 * PAGE_BYTES as u64)
        }

        fn finish(&mut self) -> Result<(), Error> {
            Ok(())
        }
    }

    #[test]
    fn a_stream_is_held_against_all_that_it_read() {
        let before = Moment { misses: 0, missed_bytes: 0, ..Moment::of_process(Traffic::default()) };
        let (case, system, directory) = ("seq-read-1t", SYSTEMS.entries()[0], Path::new("/"));
        let trial = Trial { case: case.parse().unwrap(), job: Job { case, system, sizes: Sizes::QUICK, directory } };
        let run = Run { elapsed_s: 1.0, latency: Histogram::new() };
        let counts = |filled: u64, moved: u64| {
            let moved_bytes = moved * PAGE_BYTES as u64;
            let traffic =
                Traffic { process_read_bytes: moved_bytes, device_read_bytes: moved_bytes, ..Traffic::default() };
            let after = Moment::now(traffic, &Stream(filled));
            trial.sample(&run, &before, &after).flaw.is_none()
        };
        let all = Sizes::QUICK.data_bytes / PAGE_BYTES as u64;
        let beyond_frames = all - Sizes::QUICK.frames_bytes / PAGE_BYTES as u64;
        assert!(counts(all, all) && counts(all, all * 9 / 10) && counts(7, beyond_frames));
        assert!(!counts(all, all * 7 / 10) && !counts(7, 7), "a cache answered");
    }

    #[test]
    fn a_random_case_begins_with_full_frames_or_says_so() {
        let (case, system, directory) = ("rnd-write-2t", SYSTEMS.entries()[0], Path::new("/"));
        let sizes = Sizes { data_bytes: 4 << 20, frames_bytes: 1 << 20, ..Sizes::QUICK };
        let trial = Trial { case: case.parse().unwrap(), job: Job { case, system, sizes, directory } };
        let mapping = raw::Mapping::anonymous(4 << 20).unwrap();
        content::fill_memory(mapping.memory());
        let warm = |read: &dyn Fn() -> u64| {
            let versions = Versions::zero(1024);
            let subject = Subject { memory: mapping.memory(), versions: &versions, access: Access::Write };
            (0..1024).for_each(|page| mapping.memory().write(page, 0, content::first_word(page, 0)));
            let flaw = trial.warm(subject, read).unwrap();
            (flaw, (0..1024).filter(|page| versions.get(*page) > 0).count())
        };
        // Nothing is read: all is in core. The pages are many more than the 256 frames all the same.
        let (flaw, touched) = warm(&|| 0);
        assert!(flaw == Some(NOT_FULL) && touched > 256 * 5 / 4, "{flaw:?} {touched}");
        // Four times as much as fits at the first look: the rest would take long.
        let looks = std::cell::Cell::new(0);
        let (flaw, touched) = warm(&|| 4 * sizes.limit_bytes() * looks.replace(1));
        assert!(flaw.is_none() && touched <= 32, "{flaw:?} {touched}");
    }

    #[test]
    fn a_random_case_of_ours_that_evicts_nothing_does_not_count() {
        let (case, system, directory) = ("rnd-read-1t", SYSTEMS.entries()[0], Path::new("/"));
        let trial = Trial { case: case.parse().unwrap(), job: Job { case, system, sizes: Sizes::QUICK, directory } };
        let run = Run { elapsed_s: 1.0, latency: Histogram::new() };
        let traffic = Traffic { process_read_bytes: 4096, device_read_bytes: 4096, ..Traffic::default() };
        let moment = |traffic, misses: u64, evictions| {
            let missed_bytes = misses * PAGE_BYTES as u64;
            Moment { misses, missed_bytes, evictions, ..Moment::of_process(traffic) }
        };
        let flaw =
            |before, after| trial.sample(&run, &moment(Traffic::default(), 0, before), &moment(traffic, 1, after)).flaw;
        assert_eq!(flaw(Some(5), Some(5)).as_deref(), Some(NOT_EVICTED));
        assert_eq!((flaw(Some(5), Some(6)), flaw(None, None)), (None, None));
    }

    #[test]
    fn a_store_has_room_for_twice_the_data() {
        let sizes = Sizes::FULL;
        let entry = |name: &str| SYSTEMS.entries().into_iter().find(|system| system.name == name).unwrap();
        let beside_the_file = |name: &str| Paging.disk_bytes(sizes, &[entry(name)]) - sizes.file_bytes;
        assert!(beside_the_file("selfpage-upcall") > 2 * sizes.data_bytes);
        assert_eq!(beside_the_file("mmap-random"), 0);
    }

    #[test]
    fn each_limit_runs_where_it_is_one() {
        let takes = |name: &str, case: &str| {
            let system = SYSTEMS.entries().into_iter().find(|system| system.name == name).unwrap();
            Paging.takes_part(system, case)
        };
        assert!(takes("raw-4k", "rnd-write-2t") && !takes("raw-4k", "seq-read-1t"));
        assert!(takes("raw-2m", "seq-read-1t") && !takes("raw-2m", "cyclic-lru-read-1t"));
        assert!(takes("swap", "cyclic-mru-read-1t") && !takes("swap", "nonsense"));
    }
}
