//! What `--stats` counts: every key that docs/run.md promises, memory that is not managed, and what a forked child holds.

mod run;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use run::{HugePages, Ran};
use serde_json::Value;

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
    let _allowed = HugePages::allow();
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
        "committed_in_parts",
        "given_up",
        "one_at_a_time",
        "grown",
        "moved_out_to_use",
        "reserved_moved",
        "reserved_grown",
        "refused",
        "refused_from_within",
        "shrunk",
        "executable_moved",
        "executable_moved_out",
        "executable_stays",
        "committed_over_a_region",
        "moved_over_counted",
        "huge",
    ] {
        let (bytes, ran) = unmanaged_bytes(name).unwrap();
        if ran.text().starts_with("none") {
            HugePages::skip();
            continue;
        }
        assert!(counted.contains(&bytes), "{name}: {bytes} bytes, {before} without");
    }
    for name in ["reserved", "moved_out_reserved", "reserved_over_a_region", "file"] {
        let (bytes, _) = unmanaged_bytes(name).unwrap();
        assert!(bytes < before + (2 << 20), "{name}: {bytes} bytes, {before} without");
    }
}

#[test]
fn what_moves_counts_although_others_use_its_place_meanwhile() {
    let Some((before, _)) = unmanaged_bytes("nothing") else { return };
    let (bytes, ran) = unmanaged_bytes("moved_as_its_place_is_used").unwrap();
    if ran.text().starts_with("none") {
        let why = "this user may answer no faults of the kernel's: sysctl vm.unprivileged_userfaultfd=1";
        return run::skip("userfaultfd", why);
    }
    let counted = before + COUNTED_BYTES - (1 << 20)..before + COUNTED_BYTES + (2 << 20);
    assert!(counted.contains(&bytes), "{bytes} bytes, {before} without");
}

/// A mapping of 16 GiB is managed, whatever of it is used; one that is larger is address space for later.
#[test]
fn larger_mappings_than_are_managed_are_counted() {
    let Some((managed, ran)) = unmanaged_bytes("most_managed") else { return };
    assert!(managed < 16 << 30 && ran.stats["evictions_total"].as_u64().unwrap() > 1000, "{}", ran.stats);
    let (beyond, ran) = unmanaged_bytes("beyond_managed").unwrap();
    assert!(beyond > 16 << 30 && ran.stats["evictions_total"] == 0, "{}", ran.stats);
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

#[test]
fn each_key_has_a_value_that_goes_with_the_others() {
    let Some(ran) = case("8M", "work") else { return };
    let whole = &ran.stats;
    let number = |key: &str| whole[key].as_u64().unwrap_or_else(|| panic!("no {key} in {whole}"));
    let page = 4096;
    // What the program has is three times its frames, and all of it is changed and looked at again.
    let (all, frames) = (24 << 20, 8 << 20);
    assert_eq!(number("frames_bytes"), frames);
    let resident = number("resident_bytes_max");
    assert!(resident > frames / 2 && resident <= frames, "{whole}");
    let unmanaged = number("unmanaged_bytes_max");
    assert!(unmanaged > 0 && unmanaged < all, "{whole}");
    let (faults, fills) = (number("faults_total"), number("fills_total"));
    assert!(faults > 0 && fills > 2 * all / page, "{whole}");
    let (evictions, saves) = (number("evictions_total"), number("saves_total"));
    assert!(evictions > (fills * page - frames) / page / 2 && evictions <= fills, "{whole}");
    assert!(saves > (all - frames) / page && saves <= evictions + all / page, "{whole}");
    // Of a page that is new nothing comes from the store; every other fill brings a page, and every save takes one.
    let (filled, saved) = (number("bytes_filled"), number("bytes_saved"));
    assert!(filled >= all - frames && filled <= (fills - all / page) * page, "{whole}");
    assert!(saved > all - frames && saved <= saves * page, "{whole}");
    let [median, slow] = ["fault_us_p50", "fault_us_p99"].map(|key| whole[key].as_f64().unwrap());
    assert!(0.0 < median && median <= slow, "{whole}");
    // There is one process: it has done all of it.
    let processes = whole["processes"].as_array().unwrap();
    assert!(processes.len() == 1 && whole["not_managed"].as_array().unwrap().is_empty(), "{whole}");
    let process = processes[0].as_object().unwrap();
    assert!(process["pid"].is_u64() && process["program"].as_str().unwrap().starts_with("pages-"), "{whole}");
    let counted = process.iter().filter(|(key, _)| !["pid", "program"].contains(&key.as_str()));
    assert_eq!(counted.clone().count(), 11, "{whole}");
    assert!(counted.clone().all(|(key, value)| whole[key].as_f64() == value.as_f64()), "{whole}");
}

#[test]
fn statistics_go_into_a_pipe_with_a_name() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let pipe = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = Command::new("cat").arg(&pipe).stdout(Stdio::piped()).spawn().unwrap();
    let mut run = Command::new("timeout");
    run.args(["--kill-after=1", "20"]).arg(run::tool()).args(["run", "--frames", "16M", "--stats"]).arg(&pipe);
    let status = run.args(["--", "/bin/true"]).status().unwrap();
    let read = reader.wait_with_output().unwrap().stdout;
    let stats: Value = serde_json::from_slice(&read).unwrap_or_default();
    assert!(status.success() && stats["processes"][0]["program"] == "true", "{status}: {stats}");
}

/// By a name for the output that the program has, too: neither what was in that file nor what the program wrote is lost.
#[test]
fn statistics_go_behind_the_programs_output_in_one_file() {
    if !run::possible() {
        return;
    }
    let (directory, both) = (run::directory(), "the program's output, longer than nothing\n");
    for (name, output) in [("/dev/stdout", ">"), ("/dev/stdout", ">>"), ("/dev/stderr", "2>>"), ("out", ">>")] {
        let path = directory.path().join("out");
        std::fs::write(&path, "before\n").unwrap();
        let program = if output == "2>>" { "printf %s \"$1\" >&2" } else { "printf %s \"$1\"" };
        let line = format!("\"$0\" run --frames 16M --stats {name} -- /bin/sh -c '{program}' sh \"$1\" {output}out");
        let mut shell = Command::new("sh");
        shell.current_dir(directory.path()).args(["-c", &line]).arg(run::tool()).arg(both);
        assert!(shell.status().unwrap().success(), "{line}");
        let text = std::fs::read_to_string(&path).unwrap();
        let kept = if output == ">" { "" } else { "before\n" };
        let stats = text.strip_prefix(&format!("{kept}{both}")).unwrap_or_else(|| panic!("{line}: {text}"));
        assert!(serde_json::from_str::<Value>(stats).unwrap()["frames_bytes"].is_u64(), "{line}: {text}");
    }
}

#[test]
fn frames_beyond_any_machine_cost_nothing_until_they_are_used() {
    if !run::possible() {
        return;
    }
    let ran = run::run("512G", "/bin/grep", &["VmHWM", "/proc/self/status"]).ok();
    let most_kib: u64 = ran.text().split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(most_kib < 128 << 10, "{most_kib} KiB before the program's first line");
}

/// Says where the records of the run are, to which processes append.
const RECORDS: &str = r#"
for file in /proc/$PPID/fd/*; do
    case $(readlink "$file") in *memfd:selfpage-records*) records=$file ;; esac
done
"#;

/// It is memory, and would be all of it after some days of a script that goes on.
#[test]
fn what_nobody_asked_for_takes_no_memory_however_many_processes_there_are() {
    if !run::possible() {
        return;
    }
    let Some(alone) = run::compile_static("alone", &[]) else { return };
    let script = format!(
        "{RECORDS}i=0\nwhile [ $i -lt 100 ]; do /bin/true; \"$0\" > /dev/null; i=$((i + 1)); done\nstat -Lc %s \"$records\""
    );
    let mut run = Command::new("timeout");
    run.args(["--kill-after=1", "100"])
        .arg(run::tool())
        .args(["run", "--frames", "8M", "--", "/bin/sh", "-c", &script]);
    let output = run.arg(&alone).output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let bytes: usize = text.trim().parse().unwrap_or_else(|_| panic!("{text}{errors}"));
    // The program that cannot be entered is named there, and at the end.
    assert!(bytes > 0 && bytes < 2048, "{bytes} bytes");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(errors.contains("linked statically"), "{errors}");
}

#[test]
fn records_beyond_what_is_kept_are_said_to_lack() {
    if !run::possible() {
        return;
    }
    // What stands there is no record; it is as long as they may be in all.
    let script = format!("{RECORDS}head -c 16M /dev/zero >> \"$records\"; /bin/true; exit 3");
    let ran = run::run("8M", "/bin/sh", &["-c", &script]);
    let errors = ran.errors();
    assert_eq!((ran.code(), errors.lines().count()), (3, 1), "{errors}");
    assert!(errors.contains("no room for more records (16 MiB): processes that ended later"), "{errors}");
    let of_programs = ["readlink", "head", "true"].map(|program| ran.largest(program, "frames_bytes") > 0);
    assert_eq!(of_programs, [true, false, false], "{}", ran.stats);
}
