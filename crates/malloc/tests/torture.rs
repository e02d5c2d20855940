//! The usual patterns that break allocators, in C programs with the library preloaded.

mod preloaded;

use std::os::unix::process::ExitStatusExt;
use std::process::Output;

use preloaded::{compile, errors, preloaded, text};

fn torture(arguments: &[&str]) -> Output {
    preloaded(compile("torture.c", &["-ldl"])).args(arguments).output().unwrap()
}

fn comes_through(arguments: &[&str]) {
    let output = torture(arguments);
    assert!(output.status.success(), "{arguments:?}: {:?} {}", output.status, errors(&output));
    assert!(text(&output).contains("done"), "{arguments:?}: {}", text(&output));
    assert_eq!(errors(&output), "");
}

/// Seconds of the storm: ten minutes with `SELFPAGE_STORM_SECONDS=600`.
#[test]
fn storm() {
    let seconds = std::env::var("SELFPAGE_STORM_SECONDS").unwrap_or_else(|_| "4".into());
    let seed = std::process::id().to_string();
    println!("seed {seed}");
    comes_through(&["storm", &seconds, &seed]);
}

#[test]
fn forks_while_threads_free_each_others_blocks() {
    comes_through(&["forks", "60"]);
}

#[test]
fn threads_that_come_and_go() {
    comes_through(&["threads"]);
}

#[test]
fn before_main_and_after_exit() {
    let output = torture(&["ends"]);
    assert!(output.status.success(), "{}", errors(&output));
    assert_eq!(text(&output), "done\nended\n");
}

#[test]
fn libraries_that_come_and_go() {
    let library = compile("library.c", &["-shared", "-fPIC"]);
    comes_through(&["library", library.to_str().unwrap()]);
}

#[test]
fn sizes_and_alignments_as_c_says() {
    comes_through(&["limits"]);
}

#[test]
fn pieces_that_a_program_maps() {
    comes_through(&["maps"]);
}

#[test]
fn new_and_delete() {
    let output = preloaded(compile("objects.cc", &["-std=c++17"])).output().unwrap();
    assert!(output.status.success() && text(&output) == "done\n", "{}", errors(&output));
}

#[test]
fn a_pointer_that_is_no_block_is_named() {
    for (program, what) in [
        ("large-freed-twice", "freed already"),
        ("foreign", "no block"),
        ("within", "inside of the block"),
        ("askew", "no block"),
    ] {
        let output = torture(&[program]);
        let (said, pointer) = (errors(&output), text(&output));
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{program}: {said}");
        assert!(said.contains(pointer.trim()) && said.contains(what), "{program} {pointer}: {said}");
        assert_eq!(said.lines().count(), 1, "{program}: {said}");
    }
}

#[test]
fn a_larger_block_that_is_used_after_it_was_freed_ends_the_checked_program() {
    let program = compile("torture.c", &["-ldl"]);
    for size in ["1048576", "2097152", "50000000"] {
        let used = |checked: &str| {
            let mut command = preloaded(&program);
            command.args(["used-after-free", size]).env("SELFPAGE_CHECKED", checked).output().unwrap()
        };
        let stopped = used("1");
        assert_eq!(stopped.status.signal(), Some(libc::SIGSEGV), "{size}: {}", errors(&stopped));
        let unnoticed = used("0");
        assert!(unnoticed.status.success(), "{size}: {:?} {}", unnoticed.status, errors(&unnoticed));
    }
}

#[test]
fn all_goes_on_in_a_checked_program() {
    let program = compile("torture.c", &["-ldl"]);
    let seed = std::process::id().to_string();
    println!("seed {seed}");
    for arguments in [&["storm", "2", &seed][..], &["forks", "20"], &["limits"]] {
        let output = preloaded(&program).args(arguments).env("SELFPAGE_CHECKED", "1").output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {:?} {}", output.status, errors(&output));
        assert!(text(&output).contains("done"), "{arguments:?}: {}", text(&output));
    }
    let twice = preloaded(&program).arg("large-freed-twice").env("SELFPAGE_CHECKED", "1").output().unwrap();
    assert!(errors(&twice).contains("freed already"), "{}", errors(&twice));
}
