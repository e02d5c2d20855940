//! `apps`: real programs with selfpage's allocator and with others, against the C library's.
//!
//! One program does a fixed piece of work; the whole of it is timed, with the processes that it starts. The speed of a shared machine
//! wanders by a third within minutes, so a repetition is four runs, one right after the other: the C library's, the system's, the
//! system's, the C library's. Its value is the mean of the two ratios, which a steady drift does not change.

mod programs;

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::allocation;
use super::error::Error;
use super::host;
use super::job::{Bench, Job};
use super::preload::{self, Preload};
use super::raw::{self, Child};
use super::result::{Better, Confinement, Record, Sample, Unit};
use super::sizes::Sizes;
use super::system::{Entry, Group, Systems};
use programs::{Program, Work};

/// The bench.
pub struct Apps;

type Variables = &'static [(&'static str, &'static str)];

/// The `malloc` that a program gets, with variables set or without.
#[derive(Clone, Copy)]
struct Malloc {
    library: Preload,
    variables: Variables,
}

const GLIBC: Malloc = of(allocation::GLIBC);

const fn of(system: (Entry, raw::blocks::Source)) -> Malloc {
    Malloc { library: system.0.preload.expect("a library of its own"), variables: &[] }
}

const fn system(name: &'static str, malloc: Malloc) -> (Entry, Malloc) {
    (Entry::plain(name, Group::Malloc), malloc)
}

const fn with(name: &'static str, malloc: Malloc, variables: Variables) -> (Entry, Malloc) {
    system(name, Malloc { variables, ..malloc })
}

/// Debian's mimalloc, 2.0.9, knows the first name alone, later ones the second.
const LARGE_PAGES: Variables = &[("MIMALLOC_LARGE_OS_PAGES", "1"), ("MIMALLOC_ALLOW_LARGE_OS_PAGES", "1")];

/// `glibc` is compared with itself: what comes out is the noise.
static SYSTEMS: Systems<Malloc> = Systems(&[
    (Entry::plain("selfpage", Group::Ours), of(allocation::our_malloc("selfpage"))),
    system("glibc", GLIBC),
    with("glibc-thp", GLIBC, &[("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")]),
    system("jemalloc", of(allocation::JEMALLOC)),
    system("mimalloc", of(allocation::MIMALLOC)),
    with("mimalloc-large", of(allocation::MIMALLOC), LARGE_PAGES),
    system("tcmalloc", of(allocation::TCMALLOC)),
]);

const UNIT: Unit = Unit { name: "of glibc's time", better: Better::Lower };
/// The case of the summary.
const MEAN: &str = "geometric-mean";
const RATIOS: [&str; 2] = ["cpu_of_glibc", "peak_of_glibc"];

impl Bench for Apps {
    fn name(&self) -> &'static str {
        "apps"
    }

    fn about(&self) -> &'static str {
        "real programs with an allocator preloaded: time, CPU and memory, as parts of what the C library's takes"
    }

    fn quick_takes(&self) -> &'static str {
        "ten minutes"
    }

    fn disk_bytes(&self, sizes: Sizes, _: &[&Entry]) -> u64 {
        // Most of it is what `sort` reads and writes.
        if sizes == Sizes::QUICK { 16 << 20 } else { 128 << 20 }
    }

    fn cases(&self) -> Vec<String> {
        programs::ALL.iter().map(|program| program.name.to_string()).collect()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn unit(&self, _: &str) -> Unit {
        UNIT
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let program = job.known(programs::ALL.iter().find(|program| program.name == job.case))?;
        program.is_installed()?;
        let malloc = SYSTEMS.way(job.system);
        let workshop = Workshop::ready(program, job)?;
        let runs = [GLIBC, malloc, malloc, GLIBC].map(|malloc| workshop.run(malloc));
        let [first, second, third, fourth] = runs;
        let (first, second, third, fourth) = (first?, second?, third?, fourth?);
        let mean = |of: fn(&Taken) -> f64| (of(&second) + of(&third)) / 2.0;
        let ratio = |of: fn(&Taken) -> f64| (of(&second) / of(&first) * (of(&third) / of(&fourth))).sqrt();
        let [cpu, peak] = RATIOS;
        Ok(Sample::of(
            ratio(|taken| taken.wall_s),
            &[
                (cpu, ratio(|taken| taken.cpu_s)),
                (peak, ratio(|taken| taken.peak_bytes)),
                ("wall_s", mean(|taken| taken.wall_s)),
                ("cpu_s", mean(|taken| taken.cpu_s)),
                ("peak_bytes", mean(|taken| taken.peak_bytes)),
            ],
        ))
    }

    fn materials(&self, systems: &[&'static Entry]) -> Vec<(String, String)> {
        let libraries = systems.iter().filter_map(|system| SYSTEMS.way(system).library.describe());
        let source = programs::regex_syntax_version().map(|version| ("regex-syntax".into(), version));
        let all: BTreeSet<(String, String)> = libraries.chain(GLIBC.library.describe()).chain(source).collect();
        all.into_iter().collect()
    }

    /// For each system the geometric mean over the programs, repetition by repetition. Means over different programs cannot be compared: one
    /// that lacks any of what others have gets none.
    fn summary(&self, records: &[Record]) -> Vec<Record> {
        let cases: BTreeSet<&str> = records.iter().map(|record| record.case.as_str()).collect();
        let turns = records.iter().map(|record| record.samples.len()).max().unwrap_or(0);
        let of_system = |system: &Entry| -> Option<Record> {
            let records = records.iter().filter(|record| record.system == system.name && record.samples.len() == turns);
            let records: Vec<&Record> = records.collect();
            if cases.len() < 2 || records.len() < cases.len() {
                return None;
            }
            let mean = |turn: usize, of: &dyn Fn(&Sample) -> f64| {
                let logs = records.iter().map(|record| of(&record.samples[turn]).ln());
                (logs.sum::<f64>() / records.len() as f64).exp()
            };
            let sample = |turn| {
                let figure = |name| (name, mean(turn, &|sample| sample.figure(name).unwrap_or(f64::NAN)));
                let [cpu, peak] = RATIOS.map(figure);
                let programs = ("programs", records.len() as f64);
                Sample::of(mean(turn, &|sample| sample.value), &[cpu, peak, programs])
            };
            let samples = (0..turns).map(sample).collect();
            let (bench, system, confinement) = (self.name(), system.name, Confinement::NotNeeded);
            Some(Record { bench, case: MEAN.into(), system, unit: UNIT, confinement, samples })
        };
        self.systems().into_iter().filter_map(of_system).collect()
    }
}

/// What one run took.
struct Taken {
    wall_s: f64,
    cpu_s: f64,
    peak_bytes: f64,
}

/// The directory in which a program runs, with its input.
struct Workshop<'a> {
    program: &'a Program,
    directory: PathBuf,
    memory_bytes: usize,
}

impl<'a> Workshop<'a> {
    /// Makes the input where this is the first job of the run, with a run that does not count: it brings the program's files into
    /// memory, and says how much the program needs.
    fn ready(program: &'a Program, job: &Job<'_>) -> Result<Workshop<'a>, Error> {
        let directory = job.directory.join(program.name);
        let known = directory.join("memory_bytes");
        let mut workshop = Workshop { program, directory, memory_bytes: 0 };
        let read = || fs::read_to_string(&known).ok()?.parse().ok();
        workshop.memory_bytes = match read() {
            Some(bytes) => bytes,
            None => {
                let work = if job.sizes == Sizes::QUICK { Work::Little } else { Work::Whole };
                let made =
                    fs::create_dir_all(&workshop.directory).and_then(|()| (program.prepare)(&workshop.directory, work));
                made.map_err(|error| match error.kind() {
                    ErrorKind::NotFound => Error::skip(program.name, error.to_string()),
                    _ => Error::io("make the input in", &workshop.directory, error),
                })?;
                let bytes = 2 * workshop.run(GLIBC)?.peak_bytes as usize;
                fs::write(&known, bytes.to_string()).map_err(|error| Error::io("write", &known, error))?;
                bytes
            }
        };
        Ok(workshop)
    }

    fn run(&self, malloc: Malloc) -> Result<Taken, Error> {
        host::supply(self.memory_bytes)?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", self.program.script]).current_dir(&self.directory);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        preload::without_settings(&mut command);
        command
            .env_remove("LD_PRELOAD")
            .env("ALLOCATOR", malloc.library.path()?)
            .envs(malloc.variables.iter().copied());
        let failed = |why: String| Error::Failed(format!("{}: {why}", self.program.name));
        let began = Instant::now();
        // Not spawned: until it is the shell, such a child shares our memory, and the most that we ever had would count as its own. A fork has
        // what we have now.
        let ended = Child::fork(|| Err(command.exec())).and_then(Child::wait_with_usage);
        let usage = ended.map_err(|error| failed(error.to_string()))?;
        if !usage.well {
            return Err(failed("it failed".into()));
        }
        let wall_s = began.elapsed().as_secs_f64();
        Ok(Taken { wall_s, cpu_s: usage.cpu_s, peak_bytes: usage.peak_bytes as f64 })
    }
}

#[cfg(test)]
mod tests {
    use crate::skip;

    use super::*;

    #[test]
    fn mimalloc_is_told_of_large_pages_by_a_name_that_it_knows() {
        let system = SYSTEMS.entries().into_iter().find(|system| system.name == "mimalloc-large").unwrap();
        let malloc = SYSTEMS.way(system);
        let library = match malloc.library.path() {
            Ok(library) => library,
            Err(why) => return skip::skip("mimalloc", &why.to_string()),
        };
        let mut program = Command::new("true");
        program.env("LD_PRELOAD", library).env("MIMALLOC_VERBOSE", "1").envs(malloc.variables.iter().copied());
        let said = String::from_utf8(program.output().unwrap().stderr).unwrap();
        assert!(said.contains("large_os_pages': 1"), "{said}");
    }

    #[test]
    fn the_peak_of_a_program_is_its_own() {
        let program = programs::ALL.iter().find(|program| program.name == "sort").unwrap();
        let directory = std::env::temp_dir().join(format!("selfpage-peak-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        (program.prepare)(&directory, Work::Little).unwrap();
        // This process had as much, and has it no more.
        drop(std::hint::black_box(vec![1u8; 512 << 20]));
        let taken = Workshop { program, directory: directory.clone(), memory_bytes: 0 }.run(GLIBC).unwrap();
        fs::remove_dir_all(&directory).unwrap();
        assert!(taken.peak_bytes < f64::from(128 << 20), "{}", taken.peak_bytes);
    }

    #[test]
    fn the_mean_over_programs_is_geometric_and_of_each_repetition() {
        let record = |case: &str, system: &'static str, values: [f64; 2]| {
            let sample = |value: f64| Sample::of(value, &[(RATIOS[0], value), (RATIOS[1], 1.0)]);
            let samples = values.map(sample).to_vec();
            Record {
                bench: "apps",
                case: case.into(),
                system,
                unit: UNIT,
                confinement: Confinement::NotNeeded,
                samples,
            }
        };
        let mut unfinished = record("redis", "tcmalloc", [1.0, 1.0]);
        unfinished.samples.pop();
        let records = [
            record("sort", "selfpage", [0.5, 0.8]),
            record("sort", "jemalloc", [1.0, 1.0]),
            record("sort", "tcmalloc", [1.0, 1.0]),
            record("redis", "selfpage", [2.0, 0.8]),
            unfinished,
        ];
        assert_eq!(Apps.summary(&records[..3]).len(), 0, "one program alone has no mean");
        let means = Apps.summary(&records);
        assert_eq!(means.len(), 1, "a mean over fewer programs, or fewer repetitions, is another one");
        let values: Vec<f64> = means[0].samples.iter().map(|sample| sample.value).collect();
        assert!((values[0] - 1.0).abs() < 1e-9 && (values[1] - 0.8).abs() < 1e-9, "{values:?}");
        assert_eq!((means[0].case.as_str(), means[0].figure(RATIOS[1])), (MEAN, Some(1.0)));
    }
}
