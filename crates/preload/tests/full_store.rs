//! `realloc` and `mremap` while the store is full, or has lost pages: each works, or is `ENOMEM` and has changed nothing.

mod run;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const FRAMES: [&str; 2] = ["--frames", "8M"];

fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM.get_or_init(|| run::possible().then(|| run::compile("full_store", &["-pthread"]))).as_deref()
}

/// Runs a case with its store on a disk of its own, too small for it.
fn on_a_small_disk(name: &str) {
    let Some(program) = program() else { return };
    let directory = run::directory();
    let at = directory.path().to_str().unwrap();
    let mount = format!("mount -t tmpfs -o size=6m tmpfs {at} && exec \"$@\"");
    let alone = ["unshare", "--mount", "sh", "-c", &mount, "sh"];
    let tried = Command::new(alone[0]).args(&alone[1..]).arg("true").output();
    if !tried.is_ok_and(|output| output.status.success()) {
        return run::skip("mount", "a disk for this test alone cannot be mounted: it takes root");
    }
    let store = format!("{at}/store");
    let options = [&FRAMES[..], &["--store", &store]].concat();
    let ran = run::run_under(&alone, Path::new("/"), &options, program, &[name]);
    if ran.text() == "no guards\n" {
        return run::skip("guards", "the kernel is older than 6.13");
    }
    assert_eq!((ran.code(), ran.text().as_str()), (0, "ok\n"), "{}", ran.errors());
    assert!(ran.errors().contains("the store is full (ENOSPC)"), "{}", ran.errors());
}

macro_rules! cases {
    ($($name:ident,)*) => { $(#[test] fn $name() { on_a_small_disk(stringify!($name)); })* };
}

cases! {
    larger, smaller, fixed, read_only, no_access, stays_empty, a_part, executable, guarded, copied_outside, read_only_outside,
    no_access_outside, block, block_that_cannot_move,
}

#[test]
fn cut() {
    let Some(program) = program() else { return };
    let directory = run::directory();
    let store = directory.path().join("store");
    let store = store.to_str().unwrap();
    let options = [&FRAMES[..], &["--store", store]].concat();
    let ran = run::run_with(Path::new("/"), &options, program, &["cut", store]);
    assert_eq!((ran.code(), ran.text().as_str()), (0, "ok\n"), "{}", ran.errors());
    let lost = ["the file ends before this page", "the store gave back other bytes than were saved"];
    assert!(lost.iter().any(|why| ran.errors().contains(why)), "{}", ran.errors());
}
