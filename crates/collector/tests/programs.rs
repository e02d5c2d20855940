//! C programs that use the collector, with writes noted by selfpage alone: no object is lost. Where some of those writes are kept from
//! the collector, the same programs find that objects are.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use selfpage::dirty::{DirtyTracker, Mechanism};

#[path = "../../../tests/programs.rs"]
mod programs;
#[path = "../../../tests/skip.rs"]
mod skip;

use skip::skip;

/// How the programs end where `selfpage_collector_prepare` fails.
const NO_BITS: i32 = 3;
/// How `graph.c` ends where the collector does not run incrementally.
const NOT_INCREMENTAL: i32 = 4;
/// The ways in which `graph.c` collects: with everybody stopped, and beside the program.
const WAYS: [&[&str]; 2] = [&["300000"], &["300000", "0"]];

/// The directory of what is built, the shared object among it.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| programs::build(&["selfpage-collector"]))
}

/// False, and said so, where the collector, gcc, or a way to note writes is missing.
fn possible() -> bool {
    if let Err(error) = selfpage_collector::Library::load() {
        skip("libgc", &error.to_string());
        return false;
    }
    if let Err(error) = DirtyTracker::with(Mechanism::WriteProtection) {
        skip("uffd", &error.to_string());
        return false;
    }
    if Command::new("gcc").arg("--version").output().is_err() {
        skip("gcc", "no gcc to compile a program with; install it");
        return false;
    }
    true
}

/// The directory of what is compiled.
fn made() -> PathBuf {
    built().join("selfpage-test-programs")
}

/// Compiles `source` against the collector and us.
fn compile(source: &Path, flags: &[&str]) -> PathBuf {
    let rpath = format!("-Wl,-rpath,{}", built().display());
    let libraries = ["-L", built().to_str().unwrap(), "-lselfpage_collector", "-l:libgc.so.1", &rpath];
    programs::compile(&made(), source, &[flags, &libraries].concat())
}

fn own(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name)
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// One in so many of the pages that were written is kept from the collector. With one in 64 its own test lost no object in two runs
/// of a hundred.
const LIE: u32 = 8;

/// Keeps some of the pages that were written from the collector: that is noticed. The library that is preloaded for it is nothing else
/// to notice.
fn lies_are_noticed(program: &Path, arguments: &[&str]) {
    let lies = programs::compile(&made(), &own("lies.c"), &["-Wall", "-Werror", "-shared", "-fPIC", "-ldl"]);
    let run = |untold: u32| {
        // An object that was lost may have become part of a list without an end.
        let mut command = Command::new("timeout");
        command.arg("120").arg(program).args(arguments);
        command.env("LD_PRELOAD", &lies).env("SELFPAGE_LIE", untold.to_string()).output().unwrap()
    };
    let output = run(u32::MAX);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {} {}", output.status, text(&output));
    let output = run(LIE);
    let never_began = matches!(output.status.code(), Some(NO_BITS | NOT_INCREMENTAL | 125..=127));
    assert!(!output.status.success() && !never_began, "{arguments:?}: {} {}", output.status, text(&output));
    std::fs::remove_file(lies).unwrap();
}

/// `N collections`.
fn collections(output: &Output) -> u32 {
    let said = String::from_utf8_lossy(&output.stdout);
    said.split_ascii_whitespace().next().and_then(|count| count.parse().ok()).unwrap_or(0)
}

#[test]
fn no_object_is_lost_while_threads_change_graphs() {
    if !possible() {
        return;
    }
    let program = compile(&own("graph.c"), &["-Wall", "-Werror"]);
    for arguments in WAYS {
        let output = Command::new(&program).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {} {}", output.status, text(&output));
        assert!(collections(&output) >= 5, "{arguments:?}: {}", text(&output));
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn no_object_is_lost_where_the_program_has_the_collectors_words() {
    if !possible() {
        return;
    }
    let bounds = own("bounds.c").display().to_string();
    let program = compile(&own("graph.c"), &["-Wall", "-Werror", "-fno-pie", "-no-pie", &bounds]);
    let output = Command::new("timeout").arg("120").arg(&program).args(WAYS[0]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{} {}", output.status, text(&output));
    std::fs::remove_file(program).unwrap();
}

#[test]
fn a_forked_child_begins_anew_before_its_threads_are_stopped() {
    if !possible() {
        return;
    }
    let program = compile(&own("forked.c"), &["-Wall", "-Werror"]);
    let output = Command::new(&program).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{} {}", output.status, text(&output));
    std::fs::remove_file(program).unwrap();
}

#[test]
fn graphs_notice_pages_that_the_collector_is_not_told_of() {
    if !possible() {
        return;
    }
    let program = compile(&own("graph.c"), &[]);
    WAYS.iter().for_each(|arguments| lies_are_noticed(&program, arguments));
    std::fs::remove_file(program).unwrap();
}

/// The source is not ours: `SELFPAGE_GC_SOURCE` names where that of the collector, release 8.2, was unpacked.
fn gctest() -> Option<PathBuf> {
    if !possible() {
        return None;
    }
    let Some(source) = std::env::var_os("SELFPAGE_GC_SOURCE") else {
        skip("gctest", "name the collector's unpacked source in SELFPAGE_GC_SOURCE (Debian: apt-get source libgc)");
        return None;
    };
    let source = PathBuf::from(source);
    let headers = format!("-I{}", source.join("include").display());
    let alone = own("alone.h").display().to_string();
    let flags = [&headers, "-DGC_THREADS", "-DGC_BUILTIN_ATOMIC", "-include", &alone];
    Some(compile(&source.join("tests/test.c"), &flags))
}

#[test]
fn the_collectors_own_test_passes_on_our_bits() {
    let Some(program) = gctest() else { return };
    let output = Command::new("timeout").arg("600").arg(&program).output().unwrap();
    assert!(output.status.success(), "{} {}", output.status, text(&output));
    std::fs::remove_file(program).unwrap();
}

#[test]
fn the_collectors_own_test_notices_pages_that_it_is_not_told_of() {
    let Some(program) = gctest() else { return };
    lies_are_noticed(&program, &[]);
    std::fs::remove_file(program).unwrap();
}
