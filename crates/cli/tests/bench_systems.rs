//! Every system of `bench paging`, `bench faults` and the benches of blocks, ours before all: each gives a row. The figures of the first two
//! are of pages that came and went.

use std::process::Command;

use serde_json::Value;

#[path = "../../../tests/programs.rs"]
mod programs;
#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use tool::{Place, figure, rows, text};

/// What a bench gave, and what it said.
struct Given {
    rows: Vec<Value>,
    errors: String,
}

/// Runs a bench on the disk of /var/tmp. `None`, and said so, where faults cannot be served, or `paging` has no
/// disk.
fn bench(arguments: &[&str]) -> Option<Given> {
    let place = Place::new(arguments[0]);
    if let ("paging", Err(why)) = (arguments[0], place.has_device()) {
        skip::skip("disk", why);
        return None;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    command.arg("bench").args(arguments).args(["--quick", "--reps", "1", "--json", "--dir"]).arg(&place.0);
    let output = command.output().unwrap();
    assert!(place.is_empty(), "files were left");
    let errors = text(&output.stderr);
    if let Some(why) = errors.lines().find_map(|line| line.split("SKIP(uffd: ").nth(1)) {
        skip::skip("uffd", why.trim_end_matches(')'));
        return None;
    }
    assert_eq!(output.status.code(), Some(0), "{errors}");
    Some(Given { rows: rows(&output), errors })
}

impl Given {
    /// The row of a system in a case. `None`, and said so, where the bench says that `need` is missing.
    #[track_caller]
    fn row(&self, case: &str, system: &str, need: Option<&str>) -> Option<&Value> {
        let row = self.rows.iter().find(|row| row["case"] == case && row["system"] == system);
        if let (None, Some(need)) = (row, need)
            && let Some(why) = self.errors.split(&format!("SKIP({need}: ")).nth(1)
        {
            skip::skip(need, why.lines().next().unwrap_or_default().trim_end_matches(')'));
            return None;
        }
        let row = row.unwrap_or_else(|| panic!("no row of {system} in {case}: {}", self.errors));
        assert!(row["value"].as_f64().unwrap() > 0.0 && row["counts"] == true, "{row}");
        Some(row)
    }
}

/// The systems of a case, and what they need that not every machine or user has.
type Systems<'a> = &'a [(&'a str, Option<&'a str>)];

/// `None` as for a bench.
fn paging(case: &str, systems: Systems<'_>) -> Option<Given> {
    let named = systems.iter().flat_map(|(system, _)| ["--system", system]);
    let given = bench(&["paging", "--case", case].into_iter().chain(named).collect::<Vec<_>>())?;
    for (system, need) in systems {
        given.row(case, system, *need);
    }
    Some(given)
}

#[test]
fn each_system_of_paging_gives_a_row() {
    // A stream takes a second or so, but for those that never read ahead.
    paging("rnd-write-1t", &[("mmap-random", None), ("raw-4k", None)]);
    let ours = ["selfpage-upcall", "selfpage-worker", "selfpage-file-upcall", "selfpage-file-worker"];
    let peers = [("mmap-ra128k", Some("readahead")), ("mmap-default", None), ("raw-2m", None), ("swap", Some("swap"))];
    let case = "seq-write-1t";
    let Some(given) = paging(case, &[&ours.map(|system| (system, None)), &peers[..]].concat()) else { return };
    for system in ours {
        let row = given.row(case, system, None).unwrap();
        // 256 MiB, of which 64 are in core at most. What came ahead of its use is held against the device too.
        assert!(figure(row, "misses") > 0.0 && figure(row, "missed_bytes") > f64::from(200 << 20), "{row}");
        assert!(figure(row, "saves") > 40_000.0 && figure(row, "evictions") > 40_000.0, "{row}");
    }
}

#[test]
fn each_system_of_faults_gives_a_row() {
    let Some(given) = bench(&["faults"]) else { return };
    for case in ["first-touch-4k", "first-touch-4k-scattered"] {
        given.row(case, "kernel", None);
        given.row(case, "userfaultfd-alone", None);
        for system in ["selfpage-upcall-physical", "selfpage-upcall-zero", "selfpage-worker-zero"] {
            let row = given.row(case, system, None).unwrap();
            // Each page of 64 MiB once, and none of them went.
            assert!(figure(row, "fills") >= 16_384.0 && figure(row, "evictions") == 0.0, "{row}");
        }
    }
}

#[test]
fn each_system_of_the_benches_of_blocks_gives_a_row() {
    programs::build(&["selfpage-malloc"]);
    let peers = ["jemalloc", "mimalloc", "tcmalloc"].map(|peer| (peer, Some(peer)));
    let [glibc, ours, preloaded, mmap] = ["glibc", "selfpage", "selfpage-malloc", "mmap"].map(|name| (name, None));
    let benches = [
        ("realloc", "128k-256k", &[ours, preloaded, glibc, mmap][..], &peers[..]),
        ("exchange", "2m", &[ours, glibc], &[]),
        ("batch", "free-4m-48b", &[ours, glibc], &peers),
        ("batch", "allocate-4m-48b-written", &[ours, glibc], &peers),
        ("batch", "free-4m-48b-shuffled", &[ours, glibc], &peers),
    ];
    for (name, case, systems, peers) in benches {
        let Some(given) = bench(&[name, "--case", case]) else { return };
        for (system, need) in systems.iter().chain(peers) {
            given.row(case, system, *need);
        }
    }
}

#[test]
fn a_library_is_found_where_it_is_installed() {
    let built = programs::build(&["selfpage-malloc"]);
    let installed = Place::new("installed");
    ["bin", "lib"].iter().for_each(|name| std::fs::create_dir(installed.0.join(name)).unwrap());
    let tool = installed.copy_of_tool("bin/selfpage");
    let library = installed.0.join("lib/libselfpage_malloc.so");
    std::fs::copy(built.join("libselfpage_malloc.so"), &library).unwrap();
    let bench = ["bench", "page-alloc", "--quick", "--reps", "1", "--case", "fresh-64m", "--system", "selfpage-malloc"];
    let run = || Command::new(&tool).args(bench).output().unwrap();
    let (with, _) = (run(), std::fs::remove_file(&library).unwrap());
    let without = run();
    assert!(String::from_utf8_lossy(&with.stdout).contains("selfpage-malloc"), "{with:?}");
    let errors = String::from_utf8_lossy(&without.stderr);
    assert!(errors.contains("nor in ../lib; build it with `cargo build"), "{errors}");
}
