//! `selfpage run`: an unmodified program, with its heap and its anonymous mappings in regions of a domain of its own.

pub mod blocked;
mod bond;
mod cause;
#[path = "../../preload/src/elf.rs"]
mod elf;
#[path = "../../preload/src/filters/count.rs"]
mod filters;
mod group;
#[path = "../../preload/src/holes.rs"]
mod holes;
pub mod ignored;
mod inherited;
#[path = "../../preload/src/limits.rs"]
mod limits;
mod program;
mod record;
mod signals;
mod stops;
pub mod traces;

use std::ffi::{OsStr, OsString};
use std::fs::{File, FileType};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;

use rustix::process::WaitOptions;
use selfpage::store::{FileStore, StoreError};
use selfpage::trace::RECORD_BYTES;
use selfpage::{DescriptorTable, Domain, PAGE_BYTES, POLICIES};
use selfpage_core::linux::limit::{self, Resource};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;

use crate::{identity, loader, output};
use inherited::Inherited;
use limits::{Limits, Stored};
use record::Records;
use signals::{PASSED_ON, listen};
use traces::Traces;

/// Fewer frames, and a program with a few threads makes no progress.
const LEAST_BYTES: usize = 1 << 20;
/// With this status the library ends a program that it cannot enter.
const NOT_ENTERED: i32 = 125;
/// What the preloaded library reads its wishes from.
const VARIABLE: &str = "SELFPAGE_RUN";
/// The place of pages that stay.
const NO_STORE: &str = "none";

const EXAMPLES: &str = "\
Examples:
  selfpage run --frames 64M -- python3 script.py
  selfpage run --frames 64M --store none -- python3 script.py
  selfpage run --frames 64M --trace t -- sort lines && selfpage heatmap t -o t.svg
  selfpage run -- g++ -O2 -c large.cc

Exit status: the program's own; where a signal ended it, the same signal ends the tool (a shell says 128 and its number); 1 where its faults may not be served (`selfpage doctor` says
why), or when it has ended and --stats could not be written, 2 for bad usage, 125 where it has too few addresses (`ulimit -v`), or too little memory (`ulimit -d`).
Without --frames the tool becomes the program, which ends as it does by itself; 2 where it cannot be started.";

/// Run a program in a fixed number of frames, or with selfpage's allocator alone.
///
/// With --frames its heap and its anonymous mappings are paged by a domain of its own, to a store on disk. So are those of the
/// programs that it executes and of the children that it forks, each in as many frames. With `--store none` nothing is paged out: what
/// does not fit is refused (ENOMEM), in time, and the program goes on. Without --frames, it has selfpage's allocator in place
/// of the C library's, and is otherwise as it is; SELFPAGE_SHOW_STATS=1 shows what that did.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// How much memory it gets: bytes, or a number with K, M, G or T (KiB to TiB, the same). Without: as much as it likes, from selfpage's allocator.
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    frames: Option<String>,
    /// Which page makes room for another: fifo, lru, mru, clock, random, priority; lru unless stated otherwise.
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// Where pages go: a file, a block device, a directory (a file without a name there), `memory`, or `none`: they stay, and the
    /// program gets no more memory than the frames hold. /var/tmp unless stated otherwise.
    #[arg(long, value_name = "PATH")]
    store: Option<OsString>,
    /// Write what the domains counted to this file, as one JSON object, when the program has ended.
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Write what happens to each page to this file; `selfpage heatmap` draws it. Other processes that the program starts write
    /// to FILE.PID, and so does each program that takes a process over: to FILE.PID.2 and so on where there is one.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// With --trace: estimate the working set once in so many milliseconds, by a sample of 256 pages; 0: never. 1000 unless
    /// stated otherwise.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32), allow_negative_numbers = true)]
    sample_ms: Option<u32>,
    /// The program, and what it is told.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Why nothing was started, and the status to end with.
struct Refused {
    why: String,
    status: i32,
}

/// Bad input.
fn bad(why: String) -> Refused {
    Refused { why, status: 2 }
}

/// Runs the program. The status to end with: the program's own. Where a signal ended the program it ends this process, too: a shell's loop
/// ends by Ctrl-C, and who started us sees what became of the program.
pub fn run(args: Args) -> i32 {
    let ended = match &args.frames {
        Some(frames) => begin(&args, frames).and_then(|begun| follow(begun, &args)),
        // Nothing would be left to do at its end. In our place it hears once what is sent to our group, and is who its caller started.
        None => without_frames(&args).and_then(|mut command| {
            ignored::pass_on(&mut command);
            let cause = command.exec();
            Err(not_started(&command, &cause))
        }),
    };
    match ended {
        Ok(status) => status.code().unwrap_or_else(|| blocked::end_by(status.signal().unwrap_or(0))),
        Err(Refused { why, status }) => {
            output::tell(format_args!("selfpage run: {why}"));
            status
        }
    }
}

/// A program that runs in frames, and what its run needs.
struct Begun {
    child: Child,
    signals: SignalsInfo<WithOrigin>,
    records: Records,
    /// Where statistics go, open from the beginning: the place is found wanting before the program has run for an hour, and a pipe's reader
    /// has not seen its end meanwhile.
    stats: Option<Stats>,
    traces: Option<Traces>,
}

/// A file for statistics. One that was made for them goes if no program is entered.
struct Stats {
    file: File,
    made: Option<PathBuf>,
    /// Whether others write to it, so that they come behind what is there.
    is_shared: bool,
}

impl Drop for Stats {
    fn drop(&mut self) {
        if let Some(made) = &self.made {
            let _ = std::fs::remove_file(made);
        }
    }
}

/// The program with our allocator, and nothing of ours beside it.
fn without_frames(args: &Args) -> Result<Command, Refused> {
    let said = [
        ("--policy", args.policy.is_some()),
        ("--store", args.store.is_some()),
        ("--stats", args.stats.is_some()),
        ("--trace", args.trace.is_some()),
        ("--sample-ms", args.sample_ms.is_some()),
    ];
    if let Some((option, _)) = said.into_iter().find(|(_, is_there)| *is_there) {
        return Err(bad(format!("{option} says how frames are used: name their size too, --frames SIZE")));
    }
    let program = program::find(&args.program[0]).map_err(bad)?;
    let library = loader::find("libselfpage_malloc.so", "selfpage-malloc").map_err(bad)?;
    let preload = preload(args, &program, &library).map_err(bad)?;
    let mut command = Command::new(program);
    command.arg0(&args.program[0]).args(&args.program[1..]).env("LD_PRELOAD", preload).env_remove(VARIABLE);
    Ok(command)
}

fn begin(args: &Args, frames: &str) -> Result<Begun, Refused> {
    let inherited = Inherited::look();
    let frames_bytes = frames_bytes(frames).map_err(bad)?;
    let policy = args.policy.as_deref().unwrap_or("lru");
    if !POLICIES.contains(&policy) {
        return Err(bad(format!("there is no policy {policy}; there are {}", POLICIES.join(", "))));
    }
    if args.policy.is_some() && args.store.as_deref() == Some(OsStr::new(NO_STORE)) {
        return Err(bad(format!("--policy {policy} with --store none: no page makes room for another then")));
    }
    if args.sample_ms.is_some() && args.trace.is_none() {
        return Err(bad("--sample-ms says how a trace is made: name its file too, --trace FILE".into()));
    }
    let written = [("--stats", args.stats.as_deref()), ("--trace", args.trace.as_deref())];
    let written = written.into_iter().chain([("--store", args.store.as_deref().map(Path::new))]);
    if let Some((option, _)) = written.into_iter().find(|(_, path)| *path == Some(Path::new("-"))) {
        return Err(bad(format!("{option} -: standard output cannot be that; name a file (./- if that is its name)")));
    }
    are_apart(args).map_err(bad)?;
    let signals = listen()?;
    let program = program::find(&args.program[0]).map_err(bad)?;
    let store = args.store.as_deref().map(place).transpose().map_err(bad)?;
    let place = store.as_deref().unwrap_or(OsStr::new("/var/tmp"));
    // Before the loader is asked: it says less of a limit, or nothing.
    if let Some(lack) = own_limits().lack(frames_bytes as u64, Stored::at(place.as_encoded_bytes())) {
        return Err(Refused { why: lack.to_string(), status: NOT_ENTERED });
    }
    let library = loader::find("libselfpage_frames.so", "selfpage-preload").map_err(bad)?;
    let preload = preload(args, &program, &library).map_err(bad)?;
    let trace = args.trace.as_deref().map(replaceable).transpose().map_err(bad)?;
    can_page_to(Path::new(place))?;
    let records = Records::new().map_err(bad)?;
    let user = rustix::process::geteuid().as_raw();
    let record =
        records.name().map_err(|cause| bad(format!("cannot tell where records are: {}", cause::told(&cause))))?;
    // There may be no /dev/null.
    let (nothing, _) = std::io::pipe().map_err(|cause| bad(format!("cannot make a pipe: {}", cause::told(&cause))))?;
    // Last, when nothing else is refused: what earlier runs left is still whole then.
    let stats = args.stats.as_deref().map(Stats::open).transpose().map_err(bad)?;
    trace.as_deref().map_or(Ok(()), make_way).map_err(bad)?;
    let traces = trace.as_deref().map(Traces::of);
    let mut wishes = OsString::from(format!("frames={frames_bytes};policy={policy};user={user};record={record}"));
    // Under more of them the library cannot be asked to do what it was seen to do here.
    if let Some(filters) = filters::count() {
        wishes.push(format!(";filters={filters}"));
    }
    if stats.is_some() {
        wishes.push(";stats=asked");
    }
    if let Some(trace) = trace {
        wishes.push(";trace=");
        wishes.push(trace);
        wishes.push(format!(";sample={}", args.sample_ms.unwrap_or(1000)));
    }
    if let Some(store) = store {
        wishes.push(";store=");
        wishes.push(store);
    }
    let mut command = Command::new(&program);
    command.arg0(&args.program[0]).args(&args.program[1..]).env(VARIABLE, wishes).env("LD_PRELOAD", preload);
    let begun = start(command, signals, records, stats, traces)?;
    inherited.let_go(nothing);
    Ok(begun)
}

/// From here on signals are the program's. What is ignored stays so, and the program ignores it as well: nohup(1) counts on that.
fn start(
    mut command: Command,
    signals: SignalsInfo<WithOrigin>,
    records: Records,
    stats: Option<Stats>,
    traces: Option<Traces>,
) -> Result<Begun, Refused> {
    let cannot = |cause: std::io::Error| bad(format!("cannot listen for signals: {cause}"));
    let heard: Vec<_> = PASSED_ON.into_iter().filter(|signal| !ignored::is(*signal)).collect();
    // What comes to the program before it is executed is its own, and not for a handler of ours that it still has.
    blocked::hold_back(&mut command, &heard);
    for signal in heard {
        signals.handle().add_signal(signal).map_err(cannot)?;
    }
    ignored::pass_on(&mut command);
    bond::tie(&mut command);
    let child = command.spawn().map_err(|cause| not_started(&command, &cause))?;
    // Not before: the program begins with what our caller has blocked, as it would without us.
    blocked::let_come(PASSED_ON.into_iter().chain([SIGCHLD]));
    Ok(Begun { child, signals, records, stats, traces })
}

fn not_started(command: &Command, cause: &std::io::Error) -> Refused {
    bad(format!("cannot start {}: {}", command.get_program().display(), cause::told(cause)))
}

/// Passes signals on until the program has ended, and then writes what was counted.
fn follow(begun: Begun, args: &Args) -> Result<ExitStatus, Refused> {
    let Begun { child, mut signals, records, stats, traces } = begun;
    let failed = |why: String| Refused { why, status: 1 };
    let status = loop {
        stops::follow(&child, &mut signals);
        // After that, which may have heard of its end.
        if let Some(status) = reap(&child).map_err(|cause| failed(format!("cannot wait: {cause}")))? {
            break status;
        }
        signals::hear(&child, signals.wait());
    };
    let told = records.read().map_err(|cause| failed(format!("cannot read the records: {cause}")))?;
    told.complaints().for_each(|line| output::tell(format_args!("selfpage run: {line}")));
    if let Some(line) = traces.and_then(|traces| traces.line()) {
        output::tell(format_args!("selfpage run: {line}"));
    }
    // Without a record it is not the program's own status: the library said why it could not enter it.
    let is_refused = status.code() == Some(NOT_ENTERED) && told.is_empty();
    if let (false, Some(mut stats), Some(name)) = (is_refused, stats, &args.stats) {
        stats.write(&told.json()).map_err(|cause| failed(format!("--stats {}: {cause}", name.display())))?;
    }
    Ok(status)
}

/// Hears of all children that have ended, until the program has. As process 1 of a container, or executed by who had children, we have others.
fn reap(program: &Child) -> std::io::Result<Option<ExitStatus>> {
    while let Some((pid, status)) = rustix::process::wait(WaitOptions::NOHANG)? {
        if pid.as_raw_pid().cast_unsigned() == program.id() {
            return Ok(Some(ExitStatus::from_raw(status.as_raw())));
        }
    }
    Ok(None)
}

impl Stats {
    /// What is in it stays until there is something to put in its place.
    fn open(path: &Path) -> Result<Stats, String> {
        let is_new = !path.exists();
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let failed = |cause: std::io::Error| cause::of_file("--stats", path, &cause);
        let file = file.map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        // By a name like /dev/stderr, where the program's output goes: it is not to be written over.
        if let Some(output) = about.is_file().then(|| open_output(&about)).flatten() {
            return Ok(Stats { file: output, made: None, is_shared: true });
        }
        // Of a link to nothing, what it names.
        Ok(Stats { file, made: path.canonicalize().ok().filter(|_| is_new), is_shared: !about.is_file() })
    }

    fn write(&mut self, text: &str) -> std::io::Result<()> {
        self.made = None;
        if self.is_shared {
            return self.file.write_all(text.as_bytes());
        }
        let len = text.len() as u64;
        // Where there is no room what was there stays. Some file systems cannot tell before.
        match rustix::fs::fallocate(&self.file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, len) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
            Err(cause) => return Err(cause.into()),
        }
        self.file.write_all(text.as_bytes())?;
        self.file.set_len(len)
    }
}

/// The standard output, or that for errors, if it is the file that this is said of.
fn open_output(about: &std::fs::Metadata) -> Option<File> {
    let outputs = [std::io::stdout().as_fd().try_clone_to_owned(), std::io::stderr().as_fd().try_clone_to_owned()];
    let is_same = |file: &File| file.metadata().is_ok_and(|own| identity::of(&own) == identity::of(about));
    outputs.into_iter().flatten().map(File::from).find(is_same)
}

fn frames_bytes(said: &str) -> Result<usize, String> {
    let (number, unit) = said.split_at(said.find(|char: char| !char.is_ascii_digit()).unwrap_or(said.len()));
    let shift = match unit.to_ascii_uppercase().as_str() {
        "" => Some(0),
        "K" | "KIB" => Some(10),
        "M" | "MIB" => Some(20),
        "G" | "GIB" => Some(30),
        "T" | "TIB" => Some(40),
        _ => None,
    };
    let Some(shift) = shift.filter(|_| !number.is_empty()) else {
        return Err(format!(
            "--frames {said}: a size is a number, with K, M, G or T (or KiB to TiB) behind it if you like: 64M"
        ));
    };
    // Digits alone: what cannot be read is too large.
    let bytes = number.parse::<usize>().ok().and_then(|number| number.checked_mul(1 << shift));
    match bytes.filter(|bytes| bytes / 4096 < u32::MAX as usize / 2) {
        None => Err(format!("--frames {said}: too large; 8191G of frames at most")),
        Some(..LEAST_BYTES) => {
            Err(format!("--frames {said}: a program needs {}M of frames at least", LEAST_BYTES >> 20))
        }
        Some(bytes) => Ok(bytes),
    }
}

/// The store's place as the library is told it: absolute, for programs that go elsewhere.
fn place(said: &OsStr) -> Result<OsString, String> {
    let shown = Path::new(said).display();
    if said == "memory" || said == NO_STORE {
        return Ok(said.to_owned());
    }
    if said.as_encoded_bytes().contains(&b';') {
        return Err(format!("--store {shown}: a name without a semicolon, please"));
    }
    if said.is_empty() {
        return Err("--store: its name is empty; name a file, a block device, a directory, `memory`, or `none`".into());
    }
    if let Some(meant) = ["memory", NO_STORE].into_iter().find(|word| said.eq_ignore_ascii_case(word)) {
        return Err(format!("--store {shown}: did you mean `{meant}`? A file of that name is ./{shown}"));
    }
    let path = std::path::absolute(said).map_err(|cause| format!("--store {shown}: {cause}"))?;
    let can_hold = |kind: FileType| kind.is_file() || kind.is_dir() || kind.is_block_device();
    if std::fs::metadata(&path).is_ok_and(|about| !can_hold(about.file_type())) {
        return Err(format!(
            "--store {shown}: neither a file nor a block device; name a file, a block device, a directory, `memory`, or `none`"
        ));
    }
    let directory = if path.is_dir() { &path } else { path.parent().unwrap_or(&path) };
    match directory.is_dir() {
        true => Ok(path.into_os_string()),
        false => Err(format!("--store {shown}: there is no directory {}", directory.display())),
    }
}

/// Makes a small store where the library will make a large one: a place that cannot have it is refused before anything runs.
/// `None`: pages go to no file, or another program has it.
fn small_store(place: &Path) -> Result<Option<FileStore>, StoreError> {
    const LEN_BYTES: u64 = 1 << 20;
    if place == "memory" || place == NO_STORE {
        return Ok(None);
    }
    holes::check(place)?;
    let is_new = place.symlink_metadata().is_err();
    let made = match place {
        directory if directory.is_dir() => FileStore::unnamed_in(directory, LEN_BYTES),
        file => FileStore::try_create(file, LEN_BYTES),
    };
    let refused = made.as_ref().err().map(|error| error.cause.kind());
    // What is refused, now or later, leaves none. While it is locked nobody else has begun to use it.
    if is_new && !matches!(refused, Some(ErrorKind::ResourceBusy | ErrorKind::AlreadyExists)) {
        let _ = std::fs::remove_file(place);
    }
    match refused {
        // It belongs to another program that runs: ours gets one without a name beside it.
        Some(ErrorKind::ResourceBusy) => Ok(None),
        _ => made.map(Some),
    }
}

/// Looks whether statistics, trace and store are to be one file, by whatever names. Each would destroy the other.
fn are_apart(args: &Args) -> Result<(), String> {
    let store = args.store.as_deref().filter(|said| *said != "memory" && *said != NO_STORE).map(Path::new);
    let named = [("--stats", args.stats.as_deref()), ("--trace", args.trace.as_deref()), ("--store", store)];
    let named: Vec<(&str, &Path)> = named.into_iter().filter_map(|(option, path)| Some((option, path?))).collect();
    for (at, (option, path)) in named.iter().enumerate() {
        if let Some((other, also)) = named[at + 1..].iter().find(|(_, also)| is_one_file(path, also)) {
            let by_another_name = if path.as_os_str() == also.as_os_str() {
                String::new()
            } else {
                format!(", that is {}", also.display())
            };
            return Err(format!("{option} and {other} are both {}{by_another_name}: name two files", path.display()));
        }
    }
    Ok(())
}

fn is_one_file(one: &Path, other: &Path) -> bool {
    // Of what is not there yet, the name where it will be.
    let place = |path: &Path| {
        let path = std::path::absolute(path).ok()?;
        Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?))
    };
    one == other
        || place(one).is_some_and(|place_of_one| place(other) == Some(place_of_one))
        || identity::at(one).is_some_and(|file| identity::at(other) == Some(file))
}

/// The trace's file as the library is told it, absolute. One that is there may be replaced.
fn replaceable(said: &Path) -> Result<OsString, String> {
    let wrong = |cause: std::io::Error| cause::of_file("--trace", said, &cause);
    if said.as_os_str().as_encoded_bytes().contains(&b';') {
        return Err(format!("--trace {}: a name without a semicolon, please", said.display()));
    }
    let path = std::path::absolute(said).map_err(wrong)?;
    match path.symlink_metadata() {
        Ok(about) if about.is_file() => {}
        // What is there goes: a link to a file, as /dev/stdout may be one, is not the file.
        Ok(_) => {
            return Err(format!("--trace {}: it is no file of its own; name one that may be replaced", said.display()));
        }
        // The place is found wanting before the program has run for an hour.
        Err(_) => {
            let mut file = File::create_new(&path).map_err(wrong)?;
            // As much as a trace begins with.
            let written = file.write_all(&[0; RECORD_BYTES]);
            std::fs::remove_file(&path).and(written).map_err(wrong)?;
        }
    }
    Ok(path.into_os_string())
}

/// The library makes the trace's file anew.
fn make_way(trace: &OsStr) -> Result<(), String> {
    match std::fs::remove_file(trace) {
        Err(cause) if cause.kind() != ErrorKind::NotFound => Err(format!("--trace {}: {cause}", trace.display())),
        _ => Ok(()),
    }
}

/// Ours first, then what was to be preloaded already. The loader goes on without a library that it cannot load: it is asked first.
fn preload(args: &Args, program: &Path, library: &Path) -> Result<OsString, String> {
    loader::can_preload(library)?;
    let mut list = library.as_os_str().to_owned();
    if let Some(before) = std::env::var_os("LD_PRELOAD").filter(|before| !before.is_empty()) {
        list.push(":");
        list.push(before);
    }
    // With this variable the loader lists what it loads, and the program does not begin.
    let cannot = |cause: std::io::Error| format!("cannot start {}: {}", program.display(), cause::told(&cause));
    // There may be no /dev/null for its input.
    let (nothing, _) = std::io::pipe().map_err(cannot)?;
    // One pipe for its output and its errors: `Command::output` has two, and panics where a filter refuses `ioctl`.
    let (mut said, saying) = std::io::pipe().map_err(cannot)?;
    let mut asked = Command::new(program);
    // Nobody reads its arguments then: that there are too many of them is found here.
    asked.args(&args.program[1..]).env("LD_PRELOAD", &list).env("LD_TRACE_LOADED_OBJECTS", "1");
    asked.stdin(nothing).stdout(saying.try_clone().map_err(cannot)?).stderr(saying);
    let mut loader = asked.spawn().map_err(cannot)?;
    // Its ends of the pipe, without which what it says has no end.
    drop(asked);
    let mut text = Vec::new();
    said.read_to_end(&mut text).map_err(cannot)?;
    // There is none where our caller ignores the ends of children.
    let status = loader.wait().map_or_else(|_| "with no status".into(), |status| status.to_string());
    // In the list each name has a tab before it; in a complaint it has not.
    let listed = [b"\t", library.as_os_str().as_encoded_bytes()].concat();
    if text.windows(listed.len()).any(|part| part == listed) {
        return Ok(list);
    }
    let text = String::from_utf8_lossy(&text);
    let why = text.lines().find(|line| line.contains(&*library.to_string_lossy())).map(str::to_owned);
    let why = why.unwrap_or_else(|| format!("it does not say why ({status})"));
    Err(format!("the loader of {} does not load {}: {why}", program.display(), library.display()))
}

/// Makes a small domain as the library will make a large one, whose threads have the store's file: what the kernel refuses, it refuses before
/// anything runs.
fn can_page_to(place: &Path) -> Result<(), Refused> {
    let refused = |error: selfpage::Error| Refused { why: error.to_string(), status: 1 };
    let no_store = |StoreError { cause, remedy, .. }| match (cause.raw_os_error(), cause.kind()) {
        // The place can hold a store, as was looked at: it is what the environment asks of I/O.
        (None, ErrorKind::InvalidInput) => bad(format!("{cause}; {remedy}")),
        _ => bad(format!("--store {}: {cause}; {remedy}", place.display())),
    };
    let wanted = Domain::with_frames(LEAST_BYTES).descriptor_table(DescriptorTable::Private).needs_system_calls();
    let domain = wanted.build().map_err(refused)?;
    match small_store(place).map_err(no_store)? {
        Some(store) => domain.region(PAGE_BYTES).stored_in(Arc::new(store)).map(drop).map_err(refused),
        None => Ok(()),
    }
}

/// What we may have, and so the program. Where that is not told it finds out itself.
fn own_limits() -> Limits {
    let limit = |resource| limit::of_this_process(resource).ok().flatten().unwrap_or(u64::MAX);
    Limits { addresses_bytes: limit(Resource::Addresses), data_bytes: limit(Resource::Data) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(frames_bytes("64M"), Ok(64 << 20));
        assert_eq!(frames_bytes("1g"), Ok(1 << 30));
        assert_eq!(frames_bytes("2048K"), Ok(2 << 20));
        assert_eq!(frames_bytes("4194304"), Ok(4 << 20));
        assert_eq!(frames_bytes("1T"), Ok(1 << 40));
        assert_eq!(frames_bytes("64MiB"), Ok(64 << 20));
        for wrong in ["", "M", "-1M", "64MB", "10%", "1.5G", "+5M", "iB", "64iB"] {
            assert!(frames_bytes(wrong).unwrap_err().contains("K, M, G or T"), "{wrong}");
        }
        for large in ["99999999999999999999", "18446744073709551616", "17179869184G", "8192G", "8T"] {
            assert!(frames_bytes(large).unwrap_err().ends_with("too large; 8191G of frames at most"), "{large}");
        }
        for small in ["0", "64K"] {
            assert!(frames_bytes(small).unwrap_err().ends_with("1M of frames at least"), "{small}");
        }
    }
}
