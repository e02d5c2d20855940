//! C programs that use the collector, with writes noted by selfpage alone: no object is lost.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use selfpage::dirty::{DirtyTracker, Mechanism};

#[path = "../../../tests/programs.rs"]
mod programs;
#[path = "../../../tests/skip.rs"]
mod skip;

use skip::skip;

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

/// Compiles `source` against the collector and us.
fn compile(source: &Path, flags: &[&str]) -> PathBuf {
    let (made, rpath) = (built().join("selfpage-test-programs"), format!("-Wl,-rpath,{}", built().display()));
    let libraries = ["-L", built().to_str().unwrap(), "-lselfpage_collector", "-l:libgc.so.1", &rpath];
    programs::compile(&made, source, &[flags, &libraries].concat())
}

fn own(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name)
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
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
    // Collections with everybody stopped, and such as go on beside the program.
    for arguments in [&["300000"][..], &["300000", "0"]] {
        let output = Command::new(&program).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {} {}", output.status, text(&output));
        assert!(collections(&output) >= 5, "{arguments:?}: {}", text(&output));
    }
    std::fs::remove_file(program).unwrap();
}

/// The source is not ours: `SELFPAGE_GC_SOURCE` names where that of the collector, release 8.2, was unpacked.
#[test]
fn the_collectors_own_test_passes_on_our_bits() {
    if !possible() {
        return;
    }
    let Some(source) = std::env::var_os("SELFPAGE_GC_SOURCE") else {
        skip("gctest", "name the collector's unpacked source in SELFPAGE_GC_SOURCE (Debian: apt-get source libgc)");
        return;
    };
    let source = PathBuf::from(source);
    let headers = format!("-I{}", source.join("include").display());
    let alone = own("alone.h").display().to_string();
    let program =
        compile(&source.join("tests/test.c"), &[&headers, "-DGC_THREADS", "-DGC_BUILTIN_ATOMIC", "-include", &alone]);
    let output = Command::new("timeout").arg("600").arg(&program).output().unwrap();
    assert!(output.status.success(), "{} {}", output.status, text(&output));
    std::fs::remove_file(program).unwrap();
}
