//! Running programs under `selfpage run`: builds the tool, the libraries and small C programs, and reads what was counted.
#![allow(dead_code, unused_imports)]

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};
use std::sync::OnceLock;

use serde_json::Value;

#[path = "../../../../tests/programs.rs"]
mod programs;
#[path = "../../../../tests/skip.rs"]
mod skip;

pub use skip::{has, skip};

fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| programs::build(&["selfpage-cli", "selfpage-preload", "selfpage-malloc"]))
}

pub fn tool() -> PathBuf {
    built().join("selfpage")
}

/// Whether programs can be run here at all; says why not.
pub fn possible() -> bool {
    let probe = Command::new(tool()).args(["run", "--frames", "16M", "--", "/bin/true"]).output().unwrap();
    if !probe.status.success() {
        skip("uffd", &String::from_utf8_lossy(&probe.stderr));
    }
    probe.status.success()
}

/// Whether this process may become another user and leave its groups.
pub fn is_root() -> bool {
    // SAFETY: test: a call without arguments.
    unsafe { libc::geteuid() == 0 }
}

/// A directory of a test's own, gone with it.
pub fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("selfpage-test").tempdir_in("/var/tmp").unwrap()
}

/// Compiles `tests/c/NAME.c`.
pub fn compile(name: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    programs::compile(&built().join("selfpage-test-programs"), &source, &[&["-Wall", "-Werror"], flags].concat())
}

/// The same, linked statically, for which the C library's archive must be there.
pub fn compile_static(name: &str, flags: &[&str]) -> Option<PathBuf> {
    let found = Command::new("gcc").arg("-print-file-name=libc.a").output().unwrap();
    // Where there is none it says the name alone.
    if !found.stdout.starts_with(b"/") {
        skip("libc.a", "nothing can be linked statically: the C library's archive is in libc6-dev, or glibc-static");
        return None;
    }
    Some(compile(name, &[&["-static"], flags].concat()))
}

/// As a shell has it: 128 and the signal that ended a run.
pub fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap())
}

/// What became of a run.
pub struct Ran {
    pub output: Output,
    pub stats: Value,
}

impl Ran {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    pub fn code(&self) -> i32 {
        code(self.output.status)
    }

    /// The sum over processes of that name.
    pub fn count(&self, program: &str, key: &str) -> u64 {
        let processes = self.stats["processes"].as_array().unwrap();
        let of_name = processes.iter().filter(|process| process["program"] == program);
        of_name.filter_map(|process| process[key].as_u64()).sum()
    }

    /// The largest of any process of that name.
    pub fn largest(&self, program: &str, key: &str) -> u64 {
        let processes = self.stats["processes"].as_array().unwrap();
        let of_name = processes.iter().filter(|process| process["program"] == program);
        of_name.filter_map(|process| process[key].as_u64()).max().unwrap_or(0)
    }

    #[track_caller]
    pub fn ok(self) -> Ran {
        assert_eq!(self.code(), 0, "{}{}", self.text(), self.errors());
        assert_eq!(self.errors(), "", "{}", self.text());
        self
    }
}

/// How long a storm lasts.
pub fn storm_seconds() -> u64 {
    std::env::var("SELFPAGE_STORM_SECONDS")
        .map_or(4, |seconds| seconds.parse().expect("SELFPAGE_STORM_SECONDS: a number"))
}

/// Runs `program` in `frames`, for a minute or two at most.
pub fn run(frames: &str, program: impl AsRef<Path>, arguments: &[&str]) -> Ran {
    run_in(Path::new("/"), frames, program, arguments)
}

/// The same in a directory.
pub fn run_in(directory: &Path, frames: &str, program: impl AsRef<Path>, arguments: &[&str]) -> Ran {
    run_with(directory, &["--frames", frames], program, arguments)
}

/// The same with these options.
pub fn run_with(directory: &Path, options: &[&str], program: impl AsRef<Path>, arguments: &[&str]) -> Ran {
    run_under(&[], directory, options, program, arguments)
}

/// The same, with `selfpage run` started by another command.
pub fn run_under(
    command: &[&str],
    directory: &Path,
    options: &[&str],
    program: impl AsRef<Path>,
    arguments: &[&str],
) -> Ran {
    let stats = tempfile::NamedTempFile::new().unwrap();
    let output = Command::new("timeout")
        .args(["--kill-after=1", &(150 + storm_seconds()).to_string()])
        .args(command)
        .arg(tool())
        .arg("run")
        .args(options)
        .arg("--stats")
        .arg(stats.path())
        .arg("--")
        .arg(program.as_ref())
        .args(arguments)
        .current_dir(directory)
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let text = std::fs::read_to_string(stats.path()).unwrap();
    Ran { output, stats: serde_json::from_str(&text).unwrap_or(Value::Null) }
}

const HUGE_PAGES: &str = "/proc/sys/vm/nr_overcommit_hugepages";

/// Programs may have huge pages that nobody has set aside, as long as this lives: where root runs the tests.
pub struct HugePages {
    before: Option<String>,
}

impl HugePages {
    pub fn allow() -> HugePages {
        let before = std::fs::read_to_string(HUGE_PAGES).ok().filter(|allowed| allowed.trim() == "0");
        HugePages { before: before.filter(|_| std::fs::write(HUGE_PAGES, "8").is_ok()) }
    }

    pub fn skip() {
        skip("hugetlb", "the machine has no huge pages for programs: sysctl vm.nr_overcommit_hugepages=8");
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = std::fs::write(HUGE_PAGES, before);
        }
    }
}
