//! A bench, and one job of it: a case for a system, done in a child process of its own.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::output;

use super::cgroup;
use super::error::Error;
use super::preload;
use super::raw::{self, Running};
use super::result::{Record, Sample, Unit};
use super::sizes::Sizes;
use super::system::Entry;

/// Where a bench works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nothing but memory.
    Memory,
    /// A data file on disk, in a memory cgroup, the page cache emptied before each case.
    Disk,
}

/// An experiment: cases, and systems that are compared in each. To add one, implement this and put it into
/// [`BENCHES`](super::BENCHES).
pub trait Bench: Sync {
    /// As on the command line.
    fn name(&self) -> &'static str;
    /// One line for `bench list`.
    fn about(&self) -> &'static str;
    /// About how long all of it takes with `--quick`, for `bench list`.
    fn quick_takes(&self) -> &'static str {
        "seconds"
    }
    /// Where it works.
    fn place(&self) -> Place {
        Place::Memory
    }
    /// In the order in which they run.
    fn cases(&self) -> Vec<String>;
    /// In the order in which they run within a case.
    fn systems(&self) -> Vec<&'static Entry>;
    /// False where the comparison makes no sense.
    fn takes_part(&self, _system: &Entry, _case: &str) -> bool {
        true
    }
    /// Of the values of `case`.
    fn unit(&self, case: &str) -> Unit;
    /// Memory that a job of `case` may take: the stage has the host supply it before each job. None: the bench does not measure it.
    fn memory_bytes(&self, _case: &str) -> usize {
        0
    }
    /// Disk space that its files take at most, all at once.
    fn disk_bytes(&self, _sizes: Sizes, _systems: &[&Entry]) -> u64 {
        0
    }
    /// What the figures of `systems` depend on beside the tool, each with what tells it from others of its name: for `machine.txt`.
    fn materials(&self, systems: &[&'static Entry]) -> Vec<(String, String)> {
        systems.iter().filter_map(|system| system.preload?.describe()).collect()
    }
    /// What follows from the records of all cases, kept and shown beside them.
    fn summary(&self, _records: &[Record]) -> Vec<Record> {
        Vec::new()
    }
    /// Measures once. Called in a fresh process, already in its cgroup.
    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error>;
}

/// What a child process is asked to measure.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// The case.
    pub case: &'a str,
    /// The system.
    pub system: &'static Entry,
    /// How much of everything.
    pub sizes: Sizes,
    /// The scratch directory of the run.
    pub directory: &'a Path,
}

impl Job<'_> {
    /// What its case stands for, as its bench has found it.
    pub fn known<T>(&self, found: Option<T>) -> Result<T, Error> {
        found.ok_or_else(|| Error::Failed(format!("no case {}", self.case)))
    }
}

/// The child's side: enters the cgroup, measures, and prints the sample or why there is none. Returns the exit status.
pub fn answer(bench: &dyn Bench, job: &Job<'_>, cgroup: Option<&Path>) -> i32 {
    let ready = || -> Result<(), Error> {
        raw::ignore_terminal();
        raw::die_with_parent().map_err(|error| Error::Failed(format!("PR_SET_PDEATHSIG: {error}")))?;
        cgroup.map_or(Ok(()), cgroup::enter)
    };
    let (answer, status) = match ready().and_then(|()| bench.measure(job)) {
        Ok(sample) => (sample.to_lines(), 0),
        Err(Error::Skip { name, reason }) => (format!("skip {name} {}", reason.replace('\n', " ")), 0),
        Err(error) => (format!("failed {error}"), 1),
    };
    // Where it cannot be written there is nobody who waits for it.
    output::write(&answer).map_or(1, |()| status)
}

/// The parent's side: runs this program again for one job and waits for the answer.
pub fn ask(bench: &dyn Bench, job: &Job<'_>, size_options: &[&str], cgroup: Option<&Path>) -> Result<Sample, Error> {
    let program = Path::new("/proc/self/exe");
    let mut command = Command::new(program);
    command.args(["bench", bench.name(), "--case", job.case, "--system", job.system.name]).args(size_options);
    command.arg("--child").arg(job.directory);
    if let Some(preload) = job.system.preload {
        preload::without_settings(&mut command);
        command.env("LD_PRELOAD", preload.path()?);
    }
    if let Some(cgroup) = cgroup {
        command.arg("--cgroup").arg(cgroup);
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // Who ends the job ends all that it has started, which may hold the answer's pipe open.
        .process_group(0)
        .spawn()
        .map_err(|error| Error::io("start a child of", program, error))?;
    raw::end_on_signal(Some(Running::Group(child.id())));
    let mut output = String::new();
    let read = child.stdout.take().map(|mut stdout| stdout.read_to_string(&mut output));
    // From here on the number of the child may become another process's.
    raw::end_on_signal(None);
    let status = child.wait().map_err(|error| Error::Failed(format!("wait for the child: {error}")))?;
    if raw::interrupted() {
        return Err(Error::Interrupted);
    }
    if let Some(Err(error)) = read {
        return Err(Error::Failed(format!("read the child's answer: {error}")));
    }
    if let Some(skip) = output.strip_prefix("skip ") {
        let (name, reason) = skip.split_once(' ').unwrap_or((skip, ""));
        // Names live as long as the program; a run meets a handful of them.
        return Err(Error::skip(String::from(name).leak(), reason));
    }
    let sample = if status.success() { Sample::from_lines(&output) } else { None };
    sample.ok_or_else(|| match (output.strip_prefix("failed "), cgroup) {
        (Some(reason), _) => Error::Failed(reason.to_string()),
        (None, None) => Error::Failed(format!("the child ended with {status} and no result")),
        (None, Some(_)) => Error::Failed(format!(
            "the child ended with {status} and no result; if it was killed, the memory limit of {} MiB may be too small for it",
            job.sizes.limit_bytes() >> 20
        )),
    })
}
