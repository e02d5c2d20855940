//! `selfpage bench guest`: what it counts is exact, and it gives no times that say nothing.
#![cfg(feature = "guest")]

#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use std::process::{Command, Output};

use serde_json::Value;
use tool::{figure, rows, selfpage, text};

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    // Whether a skip is a failure is for the test to say.
    command.env_remove("SELFPAGE_REQUIRE").args(["bench", "guest", "--quick", "--reps", "1", "--json"]);
    command.args(arguments).output().unwrap()
}

/// The records of some cases; `None`: there is no KVM.
fn records(cases: &[&str]) -> Option<Vec<Value>> {
    let arguments: Vec<&str> = cases.iter().flat_map(|case| ["--case", case]).collect();
    let output = bench(&arguments);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    if let Some((_, why)) = errors.split_once("SKIP(kvm: ") {
        assert!(output.stdout.is_empty());
        assert_eq!(errors.matches("SKIP(").count(), 1, "{errors}");
        skip::skip("kvm", why.lines().next().unwrap_or_default().trim_end_matches(')'));
        return None;
    }
    Some(rows(&output))
}

fn count(record: &Value, key: &str) -> u64 {
    let value = figure(record, key);
    assert_eq!(value.fract(), 0.0, "{key} in {record}");
    value as u64
}

fn counts(record: &Value) -> [u64; 4] {
    ["operations", "faults", "calls", "entries_written"].map(|key| count(record, key))
}

#[test]
fn it_is_listed_and_its_host_has_no_page_tables() {
    let listed = text(&selfpage(&["bench", "list"]).stdout);
    assert!(["guest: ", "appel1", "gups-256m-2m"].iter().all(|name| listed.contains(name)), "{listed}");
    let output = bench(&["--system", "host", "--case", "trap"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("takes part"));
}

/// Instructions to the handler and back.
const RING0: u64 = 17;

#[test]
fn each_operation_takes_the_faults_calls_and_entries_that_it_must() {
    let expected = [
        ("dirty", [65_536, 0, 0, 0]),
        ("prot1", [4096, 0, 4096, 4096]),
        ("prot100", [40, 0, 40, 4000]),
        ("unprot100", [40, 0, 40, 4000]),
        // The handler does something about every fiftieth.
        ("trap", [2000, 2000, 0, 40]),
        ("appel1", [2000, 2000, 0, 4000]),
        ("appel2", [2000, 2000, 20, 4000]),
    ];
    let Some(records) = records(&expected.map(|(case, _)| case)) else { return };
    assert_eq!(records.len(), expected.len());
    for (record, (case, expected)) in records.iter().zip(expected) {
        assert_eq!((record["case"].as_str(), counts(record)), (Some(case), expected), "{record}");
        let [operations, faults, calls, _] = expected;
        let instructions = count(record, "ring0_instructions");
        assert_eq!(instructions, (faults + calls) * RING0, "{record}");
        let value = record["value"].as_f64().unwrap();
        assert!((value - instructions as f64 / operations as f64).abs() < 0.001, "{record}");
        // None of it leaves the machine. A signal may come.
        assert!(count(record, "exits") <= 3, "{record}");
        // A look at a page is no more than a few instructions, and no question.
        let stepped = |key| count(record, key) as f64 / count(record, "stepped_operations") as f64;
        assert!((1.0..400.0).contains(&stepped("ring3_closure_instructions")) || case == "trap", "{record}");
        let has_handler = faults + calls > 0;
        assert_eq!(stepped("ring3_handler_instructions") > 50.0, has_handler, "{record}");
        // Where KVM carries ring 0 out itself it counts the same, and what the marks take, and what it had to do twice: fewer than
        // one more for each fault would be.
        let is_emulated = record["why_no_timings"].as_str().is_some_and(|why| why.contains("so it is emulated"));
        if let (true, Some(emulated)) = (is_emulated, record["kvm_emulated_instructions"].as_f64()) {
            let like_ours = instructions..=instructions + instructions / 20 + 64;
            assert!(like_ours.contains(&(emulated as u64)), "{record}");
        }
    }
}

#[test]
fn the_rules_tell_the_cpu_to_forget_as_much_as_they_were_told_to() {
    // A hundred pages protected in a call, twenty times, and given back one by one.
    let expected = [("appel2-full", [2020, 0]), ("appel2-selective", [0, 4000]), ("appel2", [20, 2000])];
    let Some(records) = records(&expected.map(|(case, _)| case)) else { return };
    assert_eq!(records.len(), expected.len());
    for (case, expected) in expected {
        let record = records.iter().find(|record| record["case"] == case).unwrap();
        assert_eq!(["forgotten_whole", "forgotten_pages"].map(|key| count(record, key)), expected, "{record}");
    }
}

#[test]
fn dirty_bits_are_those_of_the_pages_that_were_written() {
    let Some(records) = records(&["collect-10", "collect-100"]) else { return };
    assert_eq!(records.len(), 2);
    for record in &records {
        let written = count(record, "pages_written");
        assert_eq!(counts(record), [4 * 4096, 0, 4, written], "{record}");
        assert_eq!(count(record, "pages_found"), written, "{record}");
    }
    assert_eq!(count(&records[1], "pages_written"), 4 * 4096);
}

#[test]
fn guest_and_host_leave_the_same_table() {
    let Some(records) = records(&["gups-2m-4k", "gups-2m-2m"]) else { return };
    let systems: Vec<_> = records.iter().map(|record| record["system"].as_str().unwrap()).collect();
    assert_eq!(systems, ["selfpage-guest", "host", "selfpage-guest", "host"]);
    let checksums: Vec<u64> = records.iter().map(|record| count(record, "checksum")).collect();
    assert!(checksums[0] != 0 && checksums.iter().all(|sum| *sum == checksums[0]), "{checksums:?}");
    // A fault for each page of the table: 512 of 4 KiB, or one of 2 MiB.
    assert_eq!(counts(&records[0]), [1_000_000, 512, 0, 512]);
    assert_eq!(counts(&records[2]), [1_000_000, 1, 0, 1]);
    assert!(records[1]["value"].is_null() && records[1].get("faults").is_none(), "{}", records[1]);
}

#[test]
fn there_are_times_or_a_reason_why_not() {
    let Some(records) = records(&["trap", "gups-2m-2m"]) else { return };
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let is_virtual = cpuinfo.split_ascii_whitespace().any(|flag| flag == "hypervisor");
    for record in &records {
        let timings = record.get("timings").unwrap();
        match record.get("why_no_timings") {
            Some(why) => {
                assert!(timings.is_null() && why.as_str().is_some_and(|why| why.len() > 20), "{record}");
                let names = record.as_object().unwrap().keys();
                assert!(names.into_iter().all(|name| !name.contains("ns_") && !name.ends_with("_us")), "{record}");
            }
            None => {
                assert!(!is_virtual, "a virtual CPU's times were given: {record}");
                assert!(timings["ns_per_operation"].as_f64().unwrap() > 0.0, "{record}");
            }
        }
    }
}
