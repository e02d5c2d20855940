//! Names the source that is built: a kept run of a bench says what it measured.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A directory that somebody unpacked may lie in another project's repository.
    let commit = if Path::new("../../.git").exists() { commit() } else { None };
    println!("cargo::rustc-env=SELFPAGE_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

fn commit() -> Option<String> {
    // What makes another commit of it: HEAD, what HEAD was, and the sources, since a library that a bench preloads may have changed alone.
    let moved = ["HEAD", "logs/HEAD"].into_iter().filter_map(|name| git(&["rev-parse", "--git-path", name]));
    for path in moved.filter(|path| Path::new(path).exists()).chain(["..".into(), "../../Cargo.lock".into()]) {
        println!("cargo::rerun-if-changed={path}");
    }
    git(&["describe", "--always", "--dirty", "--abbrev=12"])
}

fn git(arguments: &[&str]) -> Option<String> {
    // Without locks that it can do without: the index stays as it is.
    let output = Command::new("git").arg("--no-optional-locks").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}
