//! `selfpage bench`: the frame in which every experiment runs, and what selfpage is compared with.
//!
//! A bench has cases and systems. Each repetition of a system in a case runs in a fresh process, in a memory cgroup of its own
//! with the same limit for all, after the page cache was emptied ([`stage`]). The loops that touch memory are shared
//! ([`access`]); what they read is checked word by word against what must be there ([`content`]). To add a bench, implement
//! [`Bench`](job::Bench); to add a system, implement [`System`](system::System) and give the bench an entry.

mod access;
mod allocation;
mod appel;
mod apps;
mod case;
mod cgroup;
mod content;
mod data;
mod device;
mod dirty;
mod error;
mod faults;
mod gcbench;
#[cfg(feature = "guest")]
mod guest;
mod histogram;
mod host;
mod job;
mod paging;
mod preload;
mod progress;
mod raw;
mod result;
mod save;
mod scratch;
mod sizes;
mod snapshot;
mod stage;
mod swapfile;
mod system;
mod systems;
mod table;
mod tables;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::PathBuf;

use crate::run::blocked;
use crate::{disk, output};

use device::Witness;
use error::Error;
use job::{Bench, Job, Place};
use progress::Progress;
use result::{Confinement, Record, Sample};
use save::Archive;
use sizes::Sizes;
use stage::Stage;
use system::{Condition, Entry};

/// All benches.
static BENCHES: &[&dyn Bench] = &[
    &paging::Paging,
    &faults::Faults,
    &tables::Tables,
    &dirty::Tracking,
    &appel::AppelLi,
    &snapshot::Snapshot,
    &gcbench::Gcbench,
    #[cfg(feature = "guest")]
    &guest::Guest,
    &allocation::page_alloc::PageAlloc,
    &allocation::resize::Resize,
    &allocation::exchange::Exchange,
    &allocation::batch::Batch,
    &allocation::objects::Objects,
    &apps::Apps,
];

const EXAMPLES: &str = "\
Examples:
  selfpage bench list                                     what there is
  selfpage bench faults --quick                           a first look, in some seconds
  selfpage bench tables                                   page tables of our own and the kernel's; needs no disk
  selfpage bench dirty                                    finding written pages: ours, mprotect, fork; needs 1 GiB
  selfpage bench appel-li                                 protecting pages and trapping: ours, mprotect, libsigsegv
  selfpage bench gcbench --quick                          the Boehm collector on our dirty bits, if it is installed
  selfpage bench guest --quick                            a closure on page tables of its own; needs /dev/kvm
  selfpage bench snapshot                                 one instant of memory into a file, and fork; needs 3 GiB
  selfpage bench page-alloc                               what blocks of memory cost; also realloc, exchange, batch
  selfpage bench objects                                  malloc and free of small objects, and of sizes mixed
  selfpage bench paging --quick                           all of paging, small; root sets up cgroup, readahead and swap
  selfpage bench paging --case rnd-read-1t --system mmap-random --system raw-4k
  selfpage bench paging --json --dir /mnt/disk            one JSON object a line; files on another disk
  selfpage bench apps --reps 5                            real programs with our allocator, each run paired with glibc's
  selfpage bench paging --save papers/osdi99-selfpaging/runs/2025-01-31-box

Exit status: 0 done, 1 something failed, 2 bad usage. A signal that stops it ends it, when everything is cleaned up.";

/// Measure, against the kernel's own ways and the disk's limit, all in one run.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The bench, or `list`.
    name: String,
    /// Small sizes, once: a look instead of figures to quote. In seconds, or some minutes for the benches with many cases; `list` says
    /// which. The benches of blocks (page-alloc, realloc, exchange, batch) keep their sizes: realloc wants 2 GiB.
    #[arg(long)]
    quick: bool,
    /// One JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
    /// Only this case; may be repeated.
    #[arg(long = "case", value_name = "CASE")]
    cases: Vec<String>,
    /// Only this system; may be repeated.
    #[arg(long = "system", value_name = "SYSTEM")]
    systems: Vec<String>,
    /// Repetitions; the median is reported. 3 unless stated otherwise, and 1 with --quick.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    reps: Option<u32>,
    /// Where the data file goes: a directory on a local disk. /var/tmp unless stated otherwise.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Keep the run: raw.jsonl and machine.txt in this directory.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Measure one job and print it for the parent; the scratch directory of the run.
    #[arg(long, hide = true)]
    child: Option<PathBuf>,
    /// The cgroup that the child enters.
    #[arg(long, hide = true)]
    cgroup: Option<PathBuf>,
}

/// Runs the subcommand and returns the exit status.
pub fn run(args: Args) -> i32 {
    if args.name == "list" {
        return list(&args);
    }
    let chosen = match Choice::of(&args) {
        Ok(chosen) => chosen,
        Err(reason) => {
            output::tell(format_args!("selfpage bench: {reason}"));
            return 2;
        }
    };
    if let Some(directory) = &args.child {
        return chosen.answer(directory, args.cgroup.as_deref());
    }
    let mut outcome = Outcome { records: Vec::new(), failures: 0, skips: BTreeSet::new() };
    let result = chosen.perform(&args, &mut outcome);
    let printed = if !args.json && !outcome.records.is_empty() {
        output::print("bench", &table::render(&outcome.records, &chosen.bench.systems(), chosen.reps))
    } else {
        0
    };
    match result {
        Ok(()) | Err(Error::Unread) if outcome.failures > 0 => 1,
        Ok(()) | Err(Error::Unread) => printed,
        Err(error) => {
            output::tell(format_args!("selfpage bench: {error}"));
            match error {
                Error::Interrupted => blocked::end_by(raw::interrupted_by()),
                Error::Unusable(_) => 2,
                _ => 1,
            }
        }
    }
}

/// Says what there is. The status to end with.
fn list(args: &Args) -> i32 {
    let said = [
        ("--quick", args.quick),
        ("--case", !args.cases.is_empty()),
        ("--system", !args.systems.is_empty()),
        ("--reps", args.reps.is_some()),
        ("--dir", args.dir.is_some()),
        ("--save", args.save.is_some()),
    ];
    if let Some((option, _)) = said.into_iter().find(|(_, is_there)| *is_there) {
        output::tell(format_args!("selfpage bench: {option}: `list` measures nothing; leave it out, or name a bench"));
        return 2;
    }
    let lines = BENCHES.iter().map(|bench| {
        let (name, about, quick) = (bench.name(), bench.about(), bench.quick_takes());
        if args.json {
            return format!("{}\n", serde_json::json!({ "bench": name, "about": about, "quick_takes": quick }));
        }
        let (cases, systems) = (bench.cases().join(" "), names(&bench.systems()).join(" "));
        format!("{name}: {about}\n  --quick: {quick}\n  cases:   {cases}\n  systems: {systems}\n")
    });
    output::print("bench", &lines.collect::<String>())
}

fn names(systems: &[&'static Entry]) -> Vec<&'static str> {
    systems.iter().map(|system| system.name).collect()
}

/// What the command line asks for, checked.
struct Choice {
    bench: &'static dyn Bench,
    cases: Vec<String>,
    systems: Vec<&'static Entry>,
    sizes: Sizes,
    size_options: &'static [&'static str],
    reps: u32,
    /// Where files go.
    dir: PathBuf,
}

/// What came out so far.
struct Outcome {
    records: Vec<Record>,
    failures: u32,
    /// Those that were told.
    skips: BTreeSet<String>,
}

impl Outcome {
    /// Writes down all of them, whatever becomes of one; then the first error.
    fn keep_all(
        &mut self,
        records: Vec<Record>,
        args: &Args,
        archive: Option<&Archive>,
        progress: &Progress,
    ) -> Result<(), Error> {
        let kept: Vec<_> = records.into_iter().map(|record| self.keep(record, args, archive, progress)).collect();
        kept.into_iter().collect()
    }

    /// Writes down a record where the options want it. One that cannot be saved is shown all the same.
    fn keep(
        &mut self,
        record: Record,
        args: &Args,
        archive: Option<&Archive>,
        progress: &Progress,
    ) -> Result<(), Error> {
        let saved = archive.map_or(Ok(()), |archive| archive.append(&record));
        let printed = if args.json { progress.print(&(record.to_json() + "\n")) } else { Ok(()) };
        self.records.push(record);
        saved?;
        match printed {
            // A reader that has gone away wanted no more of it; who keeps the run wants all of it.
            Err(why) if why.kind() == ErrorKind::BrokenPipe => archive.map(|_| ()).ok_or(Error::Unread),
            printed => printed.map_err(|why| Error::Failed(format!("standard output: {why}"))),
        }
    }
}

impl Choice {
    fn of(args: &Args) -> Result<Choice, String> {
        let all: Vec<&str> = BENCHES.iter().map(|bench| bench.name()).collect();
        let bench = BENCHES.iter().find(|bench| bench.name() == args.name);
        let bench = *bench.ok_or_else(|| format!("unknown bench '{}': there are {}", args.name, all.join(", ")))?;
        let cases = bench.cases();
        if let Some(bad) = args.cases.iter().find(|case| !cases.contains(case)) {
            return Err(format!("unknown case '{bad}' of {}: there are {}", bench.name(), cases.join(", ")));
        }
        let all = names(&bench.systems());
        if let Some(bad) = args.systems.iter().find(|system| !all.contains(&system.as_str())) {
            return Err(format!("unknown system '{bad}' of {}: there are {}", bench.name(), all.join(", ")));
        }
        let dir = args.dir.clone().unwrap_or_else(|| "/var/tmp".into());
        // A job works in the scratch directory, which is there.
        if args.child.is_none() && !dir.is_dir() {
            return Err(format!("--dir {} is no directory; make it, or name another", dir.display()));
        }
        let wanted = |list: &[String], name: &str| list.is_empty() || list.iter().any(|item| item == name);
        let (sizes, size_options): (_, &[&str]) =
            if args.quick { (Sizes::QUICK, &["--quick"]) } else { (Sizes::FULL, &[]) };
        let choice = Choice {
            bench,
            cases: cases.into_iter().filter(|case| wanted(&args.cases, case)).collect(),
            systems: bench.systems().into_iter().filter(|system| wanted(&args.systems, system.name)).collect(),
            sizes,
            size_options,
            reps: args.reps.unwrap_or(if args.quick { 1 } else { 3 }),
            dir,
        };
        if choice.pairs(|_| true).is_empty() {
            return Err("none of these systems takes part in these cases".into());
        }
        Ok(choice)
    }

    /// The child's side: exactly one case and one system were named.
    fn answer(&self, directory: &std::path::Path, cgroup: Option<&std::path::Path>) -> i32 {
        let ([case], [system]) = (&self.cases[..], &self.systems[..]) else {
            output::tell(format_args!("selfpage bench: --child wants one --case and one --system"));
            return 2;
        };
        job::answer(self.bench, &Job { case, system, sizes: self.sizes, directory }, cgroup)
    }

    /// Cases with their systems, those under `condition` only.
    fn pairs(&self, condition: impl Fn(Condition) -> bool) -> Vec<(&str, Vec<&'static Entry>)> {
        let systems_of = |case: &str| -> Vec<&'static Entry> {
            let takes = |system: &&&'static Entry| condition(system.condition) && self.bench.takes_part(system, case);
            self.systems.iter().filter(takes).copied().collect()
        };
        let pairs = self.cases.iter().map(|case| (case.as_str(), systems_of(case)));
        pairs.filter(|pair| !pair.1.is_empty()).collect()
    }

    fn perform(&self, args: &Args, outcome: &mut Outcome) -> Result<(), Error> {
        raw::catch_interrupts().map_err(|error| Error::Failed(format!("catch signals: {error}")))?;
        // The swap file changes the machine for everyone: last.
        let mut pairs = self.pairs(|condition| condition != Condition::SwapFile);
        pairs.extend(self.pairs(|condition| condition == Condition::SwapFile));
        let mut stage = Stage::new(self.bench, self.sizes, self.size_options, &self.dir)?;
        self.check_disk()?;
        let archive = Archive::open_if(args.save.as_deref())?;
        let jobs: usize = pairs.iter().map(|pair| pair.1.len()).sum();
        let mut progress = Progress::new(jobs as u64 * u64::from(self.reps));
        if let Some(archive) = &archive {
            archive.describe(&self.described(), &self.dir, &self.bench.materials(&self.systems))?;
        }
        for note in host::findings().iter().filter_map(|finding| host::note(finding, self.bench.place())) {
            progress.say(&note);
        }
        for (case, systems) in pairs {
            let records = self.compare(&mut stage, &mut progress, case, &systems, outcome)?;
            outcome.keep_all(records, args, archive.as_ref(), &progress)?;
        }
        outcome.keep_all(self.bench.summary(&outcome.records), args, archive.as_ref(), &progress)?;
        progress.clear();
        Ok(())
    }

    /// A disk that is too small, or that counts nothing, is said once, before the first job.
    fn check_disk(&self) -> Result<(), Error> {
        let len_bytes = self.bench.disk_bytes(self.sizes, &self.systems);
        disk::check_room(&self.dir, len_bytes, "the bench", "name another directory with --dir")
            .map_err(Error::Failed)?;
        if self.bench.place() == Place::Disk {
            Witness::below(&self.dir)?;
        }
        Ok(())
    }

    /// All repetitions of one case. Systems take turns, so that a drift of the disk meets all of them.
    fn compare(
        &self,
        stage: &mut Stage<'_>,
        progress: &mut Progress,
        case: &str,
        systems: &[&'static Entry],
        outcome: &mut Outcome,
    ) -> Result<Vec<Record>, Error> {
        let mut samples: Vec<Vec<(Sample, Confinement)>> = systems.iter().map(|_| Vec::new()).collect();
        for turn in 1..=self.reps {
            for (system, samples) in systems.iter().zip(&mut samples) {
                let job = format!("{case} {} {turn}/{}", system.name, self.reps);
                progress.begin(job.clone());
                match stage.play(case, system, progress) {
                    Ok(done) => {
                        let value = done.0.value;
                        let told = if value.is_finite() {
                            format!("{value:.1} {}", self.bench.unit(case).name)
                        } else {
                            "done".into()
                        };
                        progress.end(&format!("{job}: {told}"));
                        samples.push(done);
                    }
                    Err(Error::Interrupted) => return Err(Error::Interrupted),
                    Err(error) => {
                        let fatal = !matches!(&error, Error::Skip { name, .. } if !error::required(name));
                        outcome.failures += u32::from(fatal);
                        let error = error.to_string();
                        // What the whole machine lacks is said once.
                        if !error.starts_with("SKIP(") || outcome.skips.insert(error.clone()) {
                            progress.say(&format!("{job}: {error}"));
                        }
                        progress.end(&format!("{job}: no result"));
                    }
                }
            }
        }
        let records = systems.iter().zip(samples).filter(|(_, samples)| !samples.is_empty());
        Ok(records.map(|(system, samples)| self.record(case, system, samples)).collect())
    }

    fn record(&self, case: &str, system: &Entry, samples: Vec<(Sample, Confinement)>) -> Record {
        // One that ran without a limit is enough.
        let confinement = samples.iter().map(|sample| sample.1).max().unwrap_or(Confinement::NotNeeded);
        Record {
            bench: self.bench.name(),
            case: case.to_string(),
            system: system.name,
            unit: self.bench.unit(case),
            confinement,
            samples: samples.into_iter().map(|sample| sample.0).collect(),
        }
    }

    /// The options that shape the figures, without paths.
    fn described(&self) -> String {
        let mut words = vec![self.bench.name().to_string()];
        words.extend(self.size_options.iter().map(ToString::to_string));
        words.push(format!("--reps {}", self.reps));
        if self.cases.len() < self.bench.cases().len() {
            words.extend(self.cases.iter().map(|case| format!("--case {case}")));
        }
        if self.systems.len() < self.bench.systems().len() {
            words.extend(self.systems.iter().map(|system| format!("--system {}", system.name)));
        }
        words.join(" ")
    }
}
