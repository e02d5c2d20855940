//! Programs with the library preloaded: builds it and the small programs.
#![allow(dead_code, unused_imports)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, OnceLock};

#[path = "../../../../tests/programs.rs"]
mod programs;
#[path = "../../../../tests/skip.rs"]
mod skip;

pub use skip::{has, skip};

fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| programs::build(&["selfpage-cli", "selfpage-malloc"]))
}

pub fn tool() -> PathBuf {
    built().join("selfpage")
}

pub fn library() -> PathBuf {
    built().join("libselfpage_malloc.so")
}

/// A library of a program's own, in Rust, which has the heap by its line, and stays when it is closed.
pub fn plugin() -> PathBuf {
    // What it has reserved would stay without it.
    plugin_linked("kept_plugin.so", "nodelete")
}

/// The same, linked like any other.
pub fn plain_plugin() -> PathBuf {
    plugin_linked("plain_plugin.so", "now")
}

fn plugin_linked(name: &str, how: &str) -> PathBuf {
    // Both are built in one place.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap();
    let target = built().parent().unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["rustc", "--quiet", "-p", "selfpage-malloc", "--example", "plugin", "--target-dir"]).arg(target);
    if built().ends_with("release") {
        build.arg("--release");
    }
    build.args(["--", &format!("-Clink-arg=-Wl,-z,{how}")]);
    assert!(build.status().unwrap().success(), "the plugin does not build");
    let linked = built().join("selfpage-test-programs").join(name);
    std::fs::create_dir_all(linked.parent().unwrap()).unwrap();
    std::fs::copy(built().join("examples/libplugin.so"), &linked).unwrap();
    linked
}

pub fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("selfpage-test").tempdir_in("/var/tmp").unwrap()
}

/// Compiles `tests/c/FILE`; the same flags give the same program.
pub fn compile(file: &str, flags: &[&str]) -> PathBuf {
    let made = built().join("selfpage-test-programs");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(file);
    let fresh =
        programs::compile(&made, &source, &[&["-Wall", "-Wno-alloc-size-larger-than", "-fno-builtin"], flags].concat());
    let names: Vec<&str> = flags.iter().filter_map(|flag| flag.rsplit('/').next()).collect();
    let kept = made.join(format!("malloc-{file}{}", names.concat()));
    std::fs::rename(fresh, &kept).unwrap();
    kept
}

/// The program with the library preloaded.
pub fn preloaded(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    command.env("LD_PRELOAD", library()).stdin(Stdio::null());
    command
}

/// Runs CPython's own tests with the library preloaded and Python's allocator of that name: "malloc" takes every object from `malloc`.
/// False, and said so, where they are not installed.
pub fn cpython(tests: &[&str], allocator: &str) -> bool {
    let python = "/usr/bin/python3";
    let have = Command::new(python).args(["-c", "import test.test_list"]).output();
    if !have.is_ok_and(|output| output.status.success()) {
        skip("cpython", "Python's own tests are not installed: apt-get install libpython3-testsuite");
        return false;
    }
    let directory = directory();
    let ran = |mut command: Command| {
        command.args(["-m", "test", "-q"]).args(tests).stdin(Stdio::null()).current_dir(directory.path());
        command.output().unwrap()
    };
    let mut with = preloaded(python);
    with.env("PYTHONMALLOC", allocator);
    let with = ran(with);
    if !with.status.success() {
        assert!(!ran(Command::new(python)).status.success(), "{tests:?}: {}{}", text(&with), errors(&with));
        skip("cpython", &format!("{} fails without us as well", tests[0]));
    }
    true
}

/// What it wrote to standard error.
pub fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What it wrote to standard output.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
