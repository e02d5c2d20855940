//! Frames without a store: a program has what they hold, is told in time that there is no more, and goes on.

mod run;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use run::Ran;

const OPTIONS: [&str; 4] = ["--frames", "16M", "--store", "none"];

/// Everything is right, and no page went anywhere.
#[track_caller]
fn right(ran: Ran, said: &str) {
    let ran = ran.ok();
    assert_eq!(ran.text(), said);
    for nothing in ["saves_total", "evictions_total", "bytes_saved"] {
        assert_eq!(ran.stats[nothing], 0, "{nothing}: {}", ran.stats);
    }
    let (most, frames) = (ran.stats["resident_bytes_max"].as_u64(), ran.stats["frames_bytes"].as_u64());
    assert!(most > Some(0) && most <= frames, "{}", ran.stats);
}

fn case(name: &str) {
    if let Some(ran) = run_case(name) {
        right(ran, "ok\n");
    }
}

fn run_case(name: &str) -> Option<Ran> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| run::possible().then(|| run::compile("no_store", &["-fno-builtin"])));
    Some(run::run_with(Path::new("/"), &OPTIONS, program.as_ref()?, &[name]))
}

macro_rules! cases {
    ($($name:ident,)*) => { $(#[test] fn $name() { case(stringify!($name)); })* };
}

cases! { blocks, kinds, growth, maps, failures, moves, holes, forks, threads, shrinking, }

#[test]
fn beyond() {
    let Some(ran) = run_case("beyond") else { return };
    assert!(ran.stats["unmanaged_bytes_max"].as_u64() >= Some(32 << 20), "{}", ran.stats);
    right(ran, "ok\n");
}

#[test]
fn what_programs_do_under_a_limit_on_data() {
    if !run::possible() {
        return;
    }
    let program = run::compile("../../../malloc/tests/c/short", &["-Wno-alloc-size-larger-than"]);
    for size in ["16777216", "1048576", "300000", "5000", "100"] {
        right(run::run_with(Path::new("/"), &["--frames", "64M", "--store", "none"], &program, &[size]), "done\n");
    }
}

#[test]
fn python_is_told() {
    let python = "/usr/bin/python3";
    if !run::possible() || !run::has(python) {
        return;
    }
    let script = "
numbers = list(range(50000))
try:
    much = [bytearray(1 << 20) for _ in range(100)]
except MemoryError:
    much = None
print(sum(numbers), much, len(bytearray(4 << 20)))";
    let ran = run::run_with(Path::new("/"), &OPTIONS, python, &["-S", "-c", script]);
    right(ran, "1249975000 None 4194304\n");
}

#[test]
fn what_makes_no_sense_is_one_line() {
    for (arguments, names) in [
        (&["--store", "none"][..], ["--store", "--frames"]),
        (&["--store", "none", "--frames", "16M", "--policy", "mru"], ["--policy mru", "--store none"]),
        (&["--store", "nowhere/store", "--frames", "16M"], ["--store", "nowhere"]),
    ] {
        let output = Command::new(run::tool()).arg("run").args(arguments).args(["--", "echo", "ran"]).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
        assert!(errors.lines().count() == 1 && errors.starts_with("selfpage run: "), "{errors}");
        assert!(names.iter().all(|name| errors.contains(name)) && output.stdout.is_empty(), "{errors}");
    }
    let help = Command::new(run::tool()).args(["run", "--help"]).output().unwrap();
    assert!(String::from_utf8_lossy(&help.stdout).contains("`none`: they stay"));
}
