//! The program's objects: the patterns that break allocators, in frames fewer than they touch, and what becomes of free pages.

mod run;
#[path = "../../../tests/torture.rs"]
mod torture;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use run::Ran;

/// One case of the tortures that the allocator without frames is tested with.
fn torture(frames: &str, arguments: &[&str]) -> Option<Ran> {
    torture_with(&["--frames", frames], arguments)
}

fn torture_with(options: &[&str], arguments: &[&str]) -> Option<Ran> {
    static TORTURE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let flags = ["-fno-builtin", "-Wno-free-nonheap-object", "-Wno-use-after-free", "-Wno-alloc-size-larger-than"];
    let program = TORTURE.get_or_init(|| run::possible().then(|| run::compile("torture", &flags)));
    Some(run::run_with(Path::new("/"), options, program.as_ref()?, arguments))
}

fn comes_through(arguments: &[&str]) -> Option<Ran> {
    let ran = torture("4M", arguments)?.ok();
    assert!(ran.text().contains("done"), "{arguments:?}: {}", ran.text());
    Some(ran)
}

/// Ten minutes of it with `SELFPAGE_STORM_SECONDS=600`.
#[test]
fn storm() {
    let (seconds, seed) = (run::storm_seconds().to_string(), std::process::id().to_string());
    println!("seed {seed}");
    let Some(ran) = comes_through(&["storm", &seconds, &seed]) else { return };
    println!("{}{}", ran.text(), ran.stats);
    assert!(ran.stats["evictions_total"].as_u64().unwrap() > 1000, "{}", ran.stats);
}

#[test]
fn forks_while_threads_free_each_others_objects() {
    comes_through(&["forks", "8"]);
}

#[test]
fn threads_that_come_and_go() {
    let Some(ran) = comes_through(&["threads"]) else { return };
    // What is known of six hundred threads is kept for those that come, and counted.
    let unmanaged = ran.stats["unmanaged_bytes_max"].as_u64().unwrap();
    assert!((1 << 20..8 << 20).contains(&unmanaged), "{}", ran.stats);
}

/// Each has a part of the objects' addresses for itself.
#[test]
fn more_than_a_thousand_threads_at_once() {
    if run::possible() {
        let ran = run::run("64M", run::compile("many_threads", &[]), &["1200"]).ok();
        assert_eq!(ran.text(), "0 without, 0 wrong\n");
    }
}

#[test]
fn before_main_and_after_exit() {
    let Some(ran) = comes_through(&["ends"]) else { return };
    assert_eq!(ran.text(), "done\nended\n");
}

/// What the loader does for threads' variables may ask for memory: with Ubuntu 24.04's C library, a program that had loaded forty libraries overflowed
/// its stack.
#[test]
fn no_block_is_made_or_freed_by_way_of_the_loaders_threads_variables() {
    if !run::possible() {
        return;
    }
    let program = run::compile("thread_local", &["-rdynamic"]);
    for (arguments, seen) in [(&[][..], "0\n"), (&["one"], "1\n")] {
        let ran = run::run("8M", &program, arguments).ok();
        assert_eq!(ran.text(), seen);
        assert!(ran.stats["evictions_total"].as_u64().unwrap() > 100, "{}", ran.stats);
    }
}

#[test]
fn forks_while_a_thread_gives_memory_back() {
    // Frames go back to the domain: what is resident does not tell.
    comes_through(&["purges", "6", "contents"]);
}

#[test]
fn sizes_and_alignments_as_c_says() {
    comes_through(&["limits"]);
}

#[test]
fn alignments_that_there_are_not() {
    for options in [&["--frames", "4M"][..], &["--frames", "16M", "--store", "none"]] {
        let Some(ran) = torture_with(options, &["alignments"]) else { return };
        assert_eq!(ran.ok().text(), "done\n");
    }
}

#[test]
fn libraries_that_come_and_go() {
    if run::possible() {
        let library = run::compile("../../../malloc/tests/c/library", &["-shared", "-fPIC"]);
        comes_through(&["library", library.to_str().unwrap()]);
    }
}

fn ends_naming(arguments: &[&str], what: &str) {
    let Some(ran) = torture("64M", arguments) else { return };
    assert_eq!(ran.code(), 128 + libc::SIGABRT, "{arguments:?}: {}", ran.errors());
    torture::names_what_it_is(arguments, &ran.text(), &ran.errors(), what);
}

#[test]
fn a_pointer_that_is_no_block_is_named() {
    for (program, what) in torture::NO_BLOCKS {
        ends_naming(&[program], what);
    }
}

#[test]
fn an_object_that_is_freed_twice_is_named() {
    for way in torture::WAYS_TO_FREE_TWICE {
        for size in ["24", "20000"] {
            ends_naming(&["object-freed-twice", way, size], "freed already");
        }
    }
}

#[test]
fn pages_of_free_objects_are_dropped_and_locked_ones_stay() {
    if !run::possible() {
        return;
    }
    let ran = run::run("64M", run::compile("objects", &[]), &[]).ok();
    let said: Vec<u32> = ran.text().split_whitespace().map(|number| number.parse().unwrap()).collect();
    let [before, after, locked] = said[..] else { panic!("{said:?}") };
    assert!(before == 2000 && after < 200 && locked == 1, "{said:?}");
    assert_eq!(ran.stats["saves_total"], 0);
}
