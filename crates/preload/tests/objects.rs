//! The program's objects: the patterns that break allocators, in frames fewer than they touch, and what becomes of free pages.

mod run;

use std::path::PathBuf;
use std::sync::OnceLock;

use run::Ran;

/// One case of the tortures that the allocator without frames is tested with.
fn comes_through(arguments: &[&str]) -> Option<Ran> {
    static TORTURE: OnceLock<PathBuf> = OnceLock::new();
    if !run::possible() {
        return None;
    }
    let torture = TORTURE.get_or_init(|| run::compile("torture", &["-Wno-free-nonheap-object", "-Wno-use-after-free"]));
    let ran = run::run("4M", torture, arguments).ok();
    assert!(ran.text().contains("done"), "{arguments:?}: {}", ran.text());
    Some(ran)
}

#[test]
fn storm() {
    let seed = std::process::id().to_string();
    println!("seed {seed}");
    let Some(ran) = comes_through(&["storm", "4", &seed]) else { return };
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

#[test]
fn before_main_and_after_exit() {
    let Some(ran) = comes_through(&["ends"]) else { return };
    assert_eq!(ran.text(), "done\nended\n");
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
