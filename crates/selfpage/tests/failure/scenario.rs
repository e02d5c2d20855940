//! Scenarios that may end or hang their process run in a process of their own, with a time limit.

use std::fmt::Write as _;
use std::io::{PipeReader, PipeWriter, Read, Write as _};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use selfpage::Region;

pub const PAGE: usize = 4096;
const LIMIT: Duration = Duration::from_secs(60);
const NAME: &str = "SELFPAGE_SCENARIO";

/// The name of the test that this stands in.
macro_rules! here {
    () => {{
        fn here() {}
        let name = std::any::type_name_of_val(&here);
        name.trim_end_matches("::here").split_once("::").expect("a test in a module").1
    }};
}
pub(crate) use here;

/// How a scenario ended.
pub struct Ended {
    status: ExitStatus,
    said: String,
}

/// Runs the calling test once more, in a process of its own, and there `scenario` with `case`.
///
/// # Panics
/// It took too long: the message says what each of its threads was at.
pub fn in_child(test: &str, case: &str, scenario: impl FnOnce()) -> Ended {
    let name = format!("{test}/{case}");
    match std::env::var(NAME) {
        Ok(wanted) if wanted == name => {
            scenario();
            // What it printed comes out, and no destructor of the harness can hang.
            std::process::exit(0);
        }
        // Another case of the same test.
        Ok(_) => Ended { status: ExitStatus::from_raw(0), said: String::new() },
        Err(_) => spawn(test, &name),
    }
}

/// Whether this is the process of a scenario: what the parent asserts of its end is not known here.
pub fn inside() -> bool {
    std::env::var_os(NAME).is_some()
}

fn spawn(test: &str, name: &str) -> Ended {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(NAME, name);
    // One that a signal ends does not clear up after itself.
    let scratch = tempfile::tempdir().unwrap();
    command.env("TMPDIR", scratch.path());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null());
    let mut child = command.spawn().unwrap();
    let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let readers = [std::thread::spawn(move || all(out)), std::thread::spawn(move || all(err))];
    let began = Instant::now();
    let mut hung = None;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if began.elapsed() > LIMIT => {
                hung = Some(threads(&child));
                child.kill().unwrap();
                break child.wait().unwrap();
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let said = readers.map(|reader| reader.join().unwrap()).concat();
    for line in said.lines().filter_map(|line| Some(&line[line.find("SKIP(")?..])) {
        // Past the harness, which swallows what a passing test prints.
        let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
    }
    if let Some(threads) = hung {
        panic!("{name} hung for {LIMIT:?}; its threads:\n{threads}it said:\n{said}");
    }
    Ended { status, said }
}

fn all(mut from: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = from.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What the child's threads are at.
fn threads(child: &Child) -> String {
    let mut lines = String::new();
    for task in std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().flatten() {
        let read = |what| std::fs::read_to_string(task.path().join(what)).unwrap_or_default();
        let _ = writeln!(lines, "  {} at {} in {}", read("comm").trim(), read("wchan"), read("syscall").trim());
    }
    lines
}

impl Ended {
    /// It came to its end.
    #[track_caller]
    pub fn well(self) {
        self.and_said();
    }

    /// It came to its end, and said this. `None` in its own process.
    #[track_caller]
    pub fn and_said(self) -> Option<String> {
        assert!(self.status.success(), "{}:\n{}", self.status, self.said);
        (!inside()).then_some(self.said)
    }

    /// A signal ended it, after it had said all this.
    #[track_caller]
    pub fn by(self, signal: libc::c_int, words: &[&str]) {
        self.by_one_of(&[signal], words);
    }

    /// One of these signals did.
    #[track_caller]
    pub fn by_one_of(self, signals: &[libc::c_int], words: &[&str]) {
        if inside() {
            return;
        }
        let signal = self.status.signal().unwrap_or(0);
        assert!(signals.contains(&signal), "{signals:?} and not {}:\n{}", self.status, self.said);
        for word in words {
            assert!(self.said.contains(word), "{word:?} is missing from:\n{}", self.said);
        }
    }
}

/// Writes its number into each page, in two places.
pub fn number_pages(region: &mut Region) {
    for (index, page) in region.as_mut_slice::<[u64; 512]>().iter_mut().enumerate() {
        (page[0], page[511]) = (index as u64 + 1, !(index as u64));
    }
}

/// Checks what [`number_pages`] wrote, in `pages`.
#[track_caller]
pub fn check_pages(region: &Region, pages: impl IntoIterator<Item = usize>) {
    let all = region.as_slice::<[u64; 512]>();
    for index in pages {
        let page = &all[index];
        assert_eq!((page[0], page[511]), (index as u64 + 1, !(index as u64)), "page {index}");
    }
}

/// Numbers pages from the first on as long as there is room, asking before each, and says how many that are.
pub fn number_what_fits(region: &mut Region) -> usize {
    let mut written = 0;
    while region.pin(written * PAGE, PAGE).is_ok() {
        let page = &mut region.as_mut_slice::<[u64; 512]>()[written];
        (page[0], page[511]) = (written as u64 + 1, !(written as u64));
        region.unpin(written * PAGE, PAGE).unwrap();
        written += 1;
    }
    written
}

/// A pipe with a page of sevens in it.
pub fn sevens() -> (PipeReader, PipeWriter) {
    let (from, mut into) = std::io::pipe().unwrap();
    into.write_all(&[7; PAGE]).unwrap();
    (from, into)
}

/// How many pages a region has.
pub fn pages(region: &Region) -> usize {
    region.len_bytes() / PAGE
}

/// Waits until `holds`, and fails if that takes longer than any wait here should.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(20), "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The number of the calling thread.
pub fn own_number() -> i32 {
    // SAFETY: test: a number.
    unsafe { libc::gettid() }
}

/// Whether a thread of this process waits in the system call of this number; `None`: it has ended.
pub fn is_at(thread: i32, call: libc::c_long) -> Option<bool> {
    let said = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall")).ok()?;
    Some(said.split(' ').next() == Some(&call.to_string()))
}
