//! What `--stats` counts: memory that is not managed, and what a forked child holds.

mod run;

use std::path::PathBuf;
use std::sync::OnceLock;

use run::Ran;

/// What each case of tests/c/pages.c maps.
const COUNTED_BYTES: u64 = 16 << 20;

fn case(frames: &str, name: &str) -> Option<Ran> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| run::possible().then(|| run::compile("pages", &[])));
    Some(run::run(frames, program.as_ref()?, &[name]).ok())
}

fn unmanaged_bytes(name: &str) -> Option<(u64, Ran)> {
    let ran = case("8M", name)?;
    Some((ran.stats["unmanaged_bytes_max"].as_u64().unwrap(), ran))
}

#[test]
fn memory_that_is_not_managed_is_counted() {
    let Some((before, _)) = unmanaged_bytes("nothing") else { return };
    assert!(before < COUNTED_BYTES / 2, "{before} bytes of a program that has managed memory alone");
    // It may come to a little more or less from run to run: the C library maps as well.
    let counted = before + COUNTED_BYTES - (1 << 20)..before + COUNTED_BYTES + (2 << 20);
    for name in [
        "shared",
        "stack",
        "low",
        "executable",
        "made_executable",
        "fixed",
        "over_a_region",
        "committed",
        "one_at_a_time",
        "grown",
        "huge",
    ] {
        let (bytes, ran) = unmanaged_bytes(name).unwrap();
        if ran.text().starts_with("none") {
            run::skip("hugetlb", "the machine sets no huge pages aside: sysctl vm.nr_overcommit_hugepages=8");
            continue;
        }
        assert!(counted.contains(&bytes), "{name}: {bytes} bytes, {before} without");
    }
    for name in ["reserved", "file"] {
        let (bytes, _) = unmanaged_bytes(name).unwrap();
        assert!(bytes < before + (2 << 20), "{name}: {bytes} bytes, {before} without");
    }
}

#[test]
fn a_child_that_touches_little_holds_little() {
    let Some(ran) = case("64M", "small_child") else { return };
    let text = ran.text();
    let numbers: Vec<u64> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
    let [child, private_kib] = numbers[..] else { panic!("{text}") };
    let processes = ran.stats["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 2, "{}", ran.stats);
    let held_bytes = |is_child: bool| {
        let process = processes.iter().find(|process| (process["pid"] == child) == is_child).unwrap();
        process["resident_bytes_max"].as_u64().unwrap()
    };
    // It begins with the pages that its parent has in core, and takes frames only for what is new.
    assert!(held_bytes(false) >= 32 << 20, "{}", ran.stats);
    assert!(held_bytes(true) <= held_bytes(false) + (1 << 20), "{}", ran.stats);
    // What neither writes to has the same memory in both; frames that nobody asked for have none.
    assert!(private_kib < 8 << 10, "{private_kib} KiB");
}
