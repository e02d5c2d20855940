//! Programs that tests start: ours, and compiled ones. Include it where tests need it:
//! `#[path = "../../../tests/programs.rs"] mod programs;`

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Builds `packages` the way the calling test was built. Returns the directory of what is built, which the test lies in too.
pub fn build(packages: &[&str]) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let profile = own.parent().and_then(Path::parent).unwrap().to_owned();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--target-dir"]).arg(profile.parent().unwrap());
    build.args(packages.iter().flat_map(|package| ["-p", package])).current_dir(env!("CARGO_MANIFEST_DIR"));
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "{packages:?} do not build");
    profile
}

/// Compiles `source`, C or C++ by its ending, into a program of this call's own in `made`.
#[allow(dead_code)]
pub fn compile(made: &Path, source: &Path, flags: &[&str]) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    std::fs::create_dir_all(made).unwrap();
    let name = source.file_stem().unwrap().display();
    let program = made.join(format!("{name}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    let compiler = if source.extension().is_some_and(|ending| ending == "cc") { "g++" } else { "gcc" };
    let mut compile = Command::new(compiler);
    compile.args(["-O1", "-g", "-pthread", "-o"]).args([&program, source]).args(flags);
    let compiled = compile.output().expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    program
}
