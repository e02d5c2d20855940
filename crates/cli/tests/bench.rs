//! `selfpage bench` as its user meets it.

use std::os::unix::process::CommandExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

#[path = "../../../tests/programs.rs"]
mod programs;
#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tool::{Place, figure, rows, selfpage, text};

fn bench(arguments: &[&str]) -> Output {
    selfpage(&[&["bench"], arguments].concat())
}

#[test]
fn bad_names_are_one_line_and_exit_2() {
    let bad: [(&[&str], &str); 8] = [
        (&["pagin"], "paging, faults, tables, dirty, appel-li, snapshot, gcbench"),
        (&["paging", "--case", "rnd-read-3t"], "rnd-read-2t"),
        (&["paging", "--system", "mmap"], "mmap-ra128k"),
        (&["paging", "--system", "raw-2m", "--case", "rnd-read-1t"], "takes part"),
        (&["tables", "--system", "mmap-populate", "--case", "map-1g"], "takes part"),
        (&["paging", "--reps", "0"], "--reps"),
        (&["paging", "--dir", "/nonexistent"], "/nonexistent"),
        // Memory: no device tells what was read.
        (
            &["paging", "--quick", "--case", "rnd-read-1t", "--system", "raw-4k", "--dir", "/dev/shm"],
            "/dev/shm has no block device of its own",
        ),
    ];
    for (arguments, names) in bad {
        let output = bench(arguments);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(errors.lines().count() == 1 && errors.contains(names), "{errors}");
        assert!(output.stdout.is_empty());
    }
}

/// The loader would take the path for two, and go on with the C library's `malloc`.
#[test]
fn a_library_that_cannot_be_preloaded_is_not_measured() {
    let directory = Place::new("preload");
    let there = directory.0.join("a space");
    std::fs::create_dir(&there).unwrap();
    directory.copy_of_tool("a space/selfpage");
    std::fs::write(there.join("libselfpage_malloc.so"), "").unwrap();
    for (bench, case) in [("objects", "larson-1t"), ("apps", "sort")] {
        let mut tool = Command::new(there.join("selfpage"));
        tool.args(["bench", bench, "--quick", "--reps", "1", "--case", case, "--system", "selfpage"]);
        let output = tool.output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(
            errors.contains("in LD_PRELOAD a name ends at a space") && errors.contains("move selfpage"),
            "{errors}"
        );
        assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    }
}

#[test]
fn list_names_what_run_takes() {
    let listed = text(&bench(&["list"]).stdout);
    for name in ["paging", "faults", "tables", "cyclic-mru-write-2t", "mmap-random", "raw-2m", "swap", "kernel"] {
        assert!(listed.contains(name), "{listed}");
    }
}

#[test]
fn json_is_one_object_a_line_with_the_promised_keys() {
    let output = bench(&["faults", "--quick", "--json", "--case", "first-touch-4k", "--system", "kernel"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let lines = text(&output.stdout);
    assert_eq!(lines.lines().count(), 1);
    assert!(lines.starts_with(r#"{"bench":"faults","case":"first-touch-4k","system":"kernel","value":"#), "{lines}");
    for key in ["unit", "n", "min", "max", "p50_us", "p99_us", "p99_9_us", "max_us", "cpu_s_per_million_pages"] {
        assert!(lines.contains(&format!(r#""{key}":"#)), "{key} is missing in {lines}");
    }
    assert_eq!(figure(&rows(&output)[0], "n"), 1.0, "{lines}");
    // Each page of 64 MiB faulted once: fewer, and huge pages or a warm mapping were measured.
    assert!((16_384.0..17_000.0).contains(&figure(&rows(&output)[0], "kernel_faults")), "{lines}");
}

#[test]
fn objects_compares_ours_with_the_kept_library_and_glibc() {
    programs::build(&["selfpage-malloc", "selfpage-mimalloc"]);
    let mut arguments = vec!["objects", "--quick", "--json", "--reps", "1"];
    for system in ["selfpage", "mimalloc-2.3", "glibc"] {
        arguments.extend(["--system", system]);
    }
    let output = bench(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = rows(&output);
    for case in ["producer-consumer", "larson", "sh6", "alloc-test", "mixed", "mixed-large"] {
        for threads in ["1t", "2t"] {
            for system in ["selfpage", "mimalloc-2.3", "glibc"] {
                let row = row(&rows, &format!("{case}-{threads}"), system);
                // Less than a nanosecond, and nothing was allocated.
                assert!(figure(row, "value") > 1.0 && row["unit"] == "ns/pair", "{row}");
            }
        }
    }
}

#[test]
fn dirty_gives_figures_of_each_way() {
    let output =
        bench(&["dirty", "--quick", "--json", "--reps", "1", "--case", "scan-and-rearm", "--case", "first-write"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = rows(&output);
    for (case, system) in [("scan-and-rearm", "selfpage"), ("scan-and-rearm", "mprotect"), ("first-write", "fork")] {
        figure(row(&rows, case, system), "round_8");
    }
}

#[test]
fn snapshot_gives_figures_of_ours_and_of_fork() {
    let output = bench(&["snapshot", "--quick", "--json", "--reps", "1", "--case", "write-1k"]);
    let errors = text(&output.stderr);
    if let Some(why) = errors.lines().find_map(|line| line.split("SKIP(uffd: ").nth(1)) {
        return skip::skip("uffd", why.trim_end_matches(')'));
    }
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let rows = rows(&output);
    for system in ["selfpage-worker", "selfpage-upcall", "fork", "no-snapshot"] {
        let row = row(&rows, "write-1k", system);
        assert!(figure(row, "total_ms") > 0.0 && figure(row, "pages_written") > 0.0, "{row}");
        if system.starts_with("selfpage") {
            // 128 MiB, all of it the first time; then what a writer of 1,000 pages a second got to.
            let (first, second) = (figure(row, "pages"), figure(row, "second_pages"));
            assert!(first == 32768.0 && second > 0.0 && second < first, "{row}");
            assert!(figure(row, "second_file_bytes") < figure(row, "file_bytes"), "{row}");
        }
    }
}

#[test]
fn appel_li_gives_figures_of_each_operation() {
    // The scattered cases take minutes by protection domain where each switch is hundreds of calls of mprotect.
    let cases = ["dirty", "prot1", "prot100", "unprot100", "trap", "appel1", "appel2"];
    let mut arguments = vec!["appel-li", "--quick", "--json", "--reps", "1"];
    arguments.extend(cases.iter().flat_map(|case| ["--case", case]));
    let output = bench(&arguments);
    let errors = text(&output.stderr);
    if let Some(why) = errors.lines().find_map(|line| line.split("SKIP(uffd: ").nth(1)) {
        return skip::skip("uffd", why.trim_end_matches(')'));
    }
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let rows = rows(&output);
    let traps = ["trap", "appel1", "appel2"];
    let protections = ["prot1", "prot100", "unprot100"];
    let systems = |case: &str| -> Vec<&str> {
        rows.iter().filter(|row| row["case"] == case).filter_map(|row| row["system"].as_str()).collect()
    };
    for case in traps {
        let mut expected = vec!["selfpage-upcall", "selfpage-worker", "userfaultfd-alone", "mprotect"];
        // It says so where it is not installed.
        if !errors.contains("SKIP(libsigsegv:") {
            expected.push("libsigsegv");
        }
        assert_eq!(systems(case), expected, "{case}: {errors}");
    }
    for case in protections {
        let expected = ["selfpage-upcall", "selfpage-worker", "selfpage-domain", "userfaultfd-alone", "mprotect"];
        assert_eq!(systems(case), expected, "{errors}");
    }
    // What holds with a wide margin on any machine, busy or not: one page is less than a hundred, and no call is less than one.
    let least = |case: &str, system: &str| figure(row(&rows, case, system), "round_least");
    if systems("dirty").contains(&"selfpage-dirty") {
        assert!(least("dirty", "selfpage-dirty") < least("dirty", "pagemap"), "{rows:?}");
    }
    for system in ["selfpage-upcall", "mprotect"] {
        assert!(least("prot1", system) < least("prot100", system), "{rows:?}");
    }
    for row in &rows {
        assert!(row["unit"].as_str().unwrap().starts_with("ns") && row["round_least"].is_number(), "{row}");
        // Whoever reads a figure of a domain can tell how it came about.
        assert_eq!(row["system"] == "selfpage-domain", row["protection_keys"].is_number(), "{row}");
    }
}

#[test]
fn tables_gives_figures_of_ours_and_of_the_kernels_calls() {
    let cases = ["map-4k", "map-4k-each", "map-4k-range", "unmap-2m", "retype-table", "copy", "revoke-100"];
    let mut arguments = vec!["tables", "--quick", "--json", "--reps", "1"];
    arguments.extend(cases.iter().flat_map(|case| ["--case", case]));
    let output = bench(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = rows(&output);
    // The kernel's two ways take part in what they can do: pages of 4 KiB, all in one call.
    assert_eq!(rows.len(), cases.len() + 4, "{rows:?}");
    for row in &rows {
        assert!(row["bench"] == "tables" && row["unit"].as_str().unwrap().starts_with("ns/"), "{row}");
        // Every case changes something, and the checks of what it left have passed.
        assert!(figure(row, "value") > 0.0 && figure(row, "ns_per_call") >= figure(row, "value"), "{row}");
    }
    // 64 MiB: a call for each table of 512 entries, for each of four tables' entries, and for all of it.
    let calls = |case: &str, system: &str| figure(row(&rows, case, system), "calls");
    assert_eq!(calls("map-4k", "selfpage-rules"), 32.0);
    assert_eq!(calls("map-4k-each", "selfpage-rules"), 2048.0);
    assert_eq!(calls("map-4k", "mmap-populate"), 1.0);
}

#[test]
fn gcbench_ends_with_the_same_live_objects_under_every_collector() {
    let output = bench(&["gcbench", "--quick", "--json", "--reps", "1", "--case", "c1", "--case", "c3"]);
    if without_what_is_skipped(&["libgc", "uffd"], &output).len() < 2 {
        return;
    }
    let rows = rows(&output);
    assert_eq!(rows.len(), 12, "{rows:?}");
    // The nodes of a tree of depth 10, or 12, and an array.
    for (case, live) in [("c1", 2048.0), ("c3", 8192.0)] {
        let of_case = || rows.iter().filter(|row| row["case"] == case);
        assert_eq!(of_case().count(), 6, "{rows:?}");
        assert!(
            of_case().all(|row| figure(row, "live_objects") == live && figure(row, "collections") > 0.0),
            "{rows:?}"
        );
    }
}

/// The collector is told of no page that was written, by a library that is preloaded: the bench is to find other objects than it made.
#[test]
fn gcbench_notices_that_the_collector_is_told_nothing() {
    if !skip::has("gcc") {
        return;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../collector/tests/c/lies.c");
    let lies = programs::compile(Path::new(env!("CARGO_TARGET_TMPDIR")), &source, &["-shared", "-fPIC", "-ldl"]);
    let run = |untold: u32| {
        let mut bench = Command::new(env!("CARGO_BIN_EXE_selfpage"));
        bench.args(["bench", "gcbench", "--quick", "--json", "--reps", "1", "--case", "c3", "--case", "c5"]);
        bench.args(["--system", "selfpage-dirty", "--system", "selfpage-dirty-malloc"]);
        bench.env("LD_PRELOAD", &lies).env("SELFPAGE_LIE", untold.to_string()).output().unwrap()
    };
    // The library by itself is nothing to notice.
    let output = run(u32::MAX);
    if without_what_is_skipped(&["libgc", "uffd"], &output).len() < 2 {
        return;
    }
    let output = run(1);
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains("objects were lost"), "{errors}");
    std::fs::remove_file(lies).unwrap();
}

/// What a system gave in a case.
#[track_caller]
fn row<'a>(rows: &'a [Value], case: &str, system: &str) -> &'a Value {
    let row = rows.iter().find(|row| row["case"] == case && row["system"] == system);
    row.unwrap_or_else(|| panic!("no {case} of {system} in {rows:?}"))
}

/// What is not installed is skipped, here as in the bench, which fails where it is required.
fn without_what_is_skipped<'a>(names: &[&'a str], output: &Output) -> Vec<&'a str> {
    let errors = text(&output.stderr);
    let is_there = |name: &&&str| {
        let why = errors.split(&format!("SKIP({name}: ")).nth(1).and_then(|rest| rest.lines().next());
        why.map(|why| skip::skip(name, why.trim_end_matches(')'))).is_none()
    };
    let there = names.iter().filter(is_there).copied().collect();
    assert_eq!(output.status.code(), Some(0), "{errors}");
    there
}

#[test]
fn blocks_that_are_not_touched_cost_something_all_the_same() {
    programs::build(&["selfpage-malloc"]);
    let cases = ["untouched-4k", "untouched-64k", "fresh-64k", "fresh-1m"];
    let mut arguments = vec!["page-alloc", "--json", "--reps", "1"];
    arguments.extend(cases.iter().flat_map(|case| ["--case", case]));
    let output = bench(&arguments);
    let peers = without_what_is_skipped(&["jemalloc", "mimalloc", "tcmalloc"], &output);
    let rows = rows(&output);
    for case in cases {
        for system in ["selfpage", "selfpage-malloc", "glibc", "mmap"].iter().chain(&peers) {
            // A call and a return: less, and the compiler has left out both `malloc` and `free`.
            assert!(figure(row(&rows, case, system), "value") >= 4.0, "{case} {system}: {rows:?}");
        }
    }
}

#[test]
fn apps_compares_each_system_with_the_c_library_and_keeps_the_run() {
    programs::build(&["selfpage-malloc"]);
    let scratch = Place::new("apps");
    let kept = scratch.0.join("kept");
    let apps = |options: &[&str]| {
        let common = ["apps", "--quick", "--json", "--reps", "1", "--dir", scratch.0.to_str().unwrap()];
        bench(&[&common, options].concat())
    };
    let save = kept.to_str().unwrap();
    let output =
        apps(&["--case", "sort", "--case", "sqlite3", "--system", "selfpage", "--system", "mimalloc", "--save", save]);
    let systems = without_what_is_skipped(&["mimalloc"], &output);
    let cases = without_what_is_skipped(&["sort", "sqlite3"], &output);
    let given = rows(&output);
    for system in systems.iter().chain(&["selfpage"]) {
        let values: Vec<f64> = cases.iter().map(|case| figure(row(&given, case, system), "value")).collect();
        assert!(values.iter().all(|value| *value > 0.0), "{given:?}");
        if let [sort, sqlite3] = values[..] {
            let mean = figure(row(&given, "geometric-mean", system), "value");
            assert!((mean - (sort * sqlite3).sqrt()).abs() < 0.001, "{given:?}");
        }
    }
    assert!(given.iter().all(|row| row["cpu_of_glibc"].is_number() && row["peak_of_glibc"].is_number()), "{given:?}");
    assert_eq!(std::fs::read_to_string(kept.join("raw.jsonl")).unwrap(), text(&output.stdout));
    let machine = std::fs::read_to_string(kept.join("machine.txt")).unwrap();
    assert!(machine.contains("free page reporting: o"), "{machine}");
    // What the tool's own commit says nothing of.
    for library in systems.iter().chain(&["selfpage", "glibc"]) {
        let told = machine.lines().find(|line| line.starts_with(&format!("library {library}: lib")));
        assert!(told.is_some_and(|line| line.contains(" bytes, cksum ")), "{machine}");
    }
    let output = apps(&["--case", "redis", "--system", "selfpage"]);
    if without_what_is_skipped(&["redis-server", "redis-benchmark"], &output).len() == 2 {
        assert!(figure(row(&rows(&output), "redis", "selfpage"), "value") > 0.0);
    }
}

#[test]
fn glibc_is_what_a_program_gets_that_is_linked_with_another_malloc() {
    let scratch = Place::new("bindings");
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.args(["bench", "apps", "--quick", "--reps", "1", "--case", "redis", "--system", "glibc", "--dir"]);
    // The loader writes a file for each process: which library each function was taken from.
    let loader = [("LD_DEBUG", "bindings".into()), ("LD_DEBUG_OUTPUT", scratch.0.join("bound"))];
    let output = run.arg(&scratch.0).envs(loader).output().unwrap();
    if without_what_is_skipped(&["redis-server", "redis-benchmark"], &output).len() == 2 {
        let files = std::fs::read_dir(&scratch.0).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
        let bound: String = files.map(|file| String::from_utf8_lossy(&file).into_owned()).collect();
        let servers = bound.lines().filter(|line| line.contains("file redis-server ") && line.contains("`malloc'"));
        let servers: Vec<&str> = servers.collect();
        assert!(!servers.is_empty(), "no server is bound to any malloc");
        assert!(servers.iter().all(|line| line.contains("/libc.so")), "{servers:#?}");
    }
}

/// Jobs work where their run does: a machine without /var/tmp is measured in another directory.
#[test]
fn jobs_want_no_directory_but_that_of_their_run() {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("jobs-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    let alone = |line: &str| {
        let line = format!("mount -t tmpfs tmpfs /var && {line}");
        let mut run = Command::new("unshare");
        run.args(["--mount", "sh", "-c", &line, env!("CARGO_BIN_EXE_selfpage")]).arg(&scratch).output()
    };
    if !alone("test -x \"$0\"").is_ok_and(|output| output.status.success()) {
        return skip::skip("mount", "an empty /var for this test alone cannot be mounted: it takes root");
    }
    let run = r#"exec "$0" bench faults --quick --reps 1 --case first-touch-4k --system kernel --dir "$1""#;
    let output = alone(run).unwrap();
    std::fs::remove_dir_all(&scratch).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn a_reader_that_goes_away_ends_a_run_that_is_not_kept() {
    let scratch = Place::new("unread");
    let kept = scratch.0.join("kept");
    let unread = |options: &[&str]| {
        let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
        run.args(["bench", "faults", "--quick", "--json", "--reps", "1", "--system", "kernel"]);
        run.args(["--case", "first-touch-4k", "--case", "first-touch-4k-scattered"]).args(options);
        let mut run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(run.stdout.take());
        let output = run.wait_with_output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{errors}");
        assert!(!errors.contains("selfpage bench:"), "{errors}");
        errors
    };
    let errors = unread(&[]);
    assert!(errors.contains("[1/2]") && !errors.contains("[2/2]"), "{errors}");
    let errors = unread(&["--save", kept.to_str().unwrap()]);
    assert!(errors.contains("[2/2]"), "{errors}");
    assert_eq!(std::fs::read_to_string(kept.join("raw.jsonl")).unwrap().lines().count(), 2);
}

#[test]
fn a_kept_run_is_drawn() {
    let runs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../papers/arxiv11-umpa/runs");
    let run = runs.join("2026-11-22-vm2-page-alloc");
    let plot = |arguments: &[&Path]| {
        Command::new(env!("CARGO_BIN_EXE_selfpage")).arg("plot").args(arguments).output().unwrap()
    };
    let drawn = plot(&[&run]);
    assert_eq!(drawn.status.code(), Some(0), "{}", text(&drawn.stderr));
    let picture = text(&drawn.stdout);
    let records = std::fs::read_to_string(run.join("raw.jsonl")).unwrap().lines().count();
    assert_eq!(picture.matches("class=\"value\"").count(), records);
    let scratch = Place::new("plot");
    for (content, said) in
        [(None, "`selfpage bench --save`"), (Some("{\n"), "line 1"), (Some(""), "raw.jsonl is empty")]
    {
        if let Some(content) = content {
            std::fs::write(scratch.0.join("raw.jsonl"), content).unwrap();
        }
        let refused = plot(&[&scratch.0]);
        let errors = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{errors}");
        assert!(errors.lines().count() == 1 && errors.contains(said), "{errors}");
    }
    let nowhere = plot(&[&run, Path::new("-o"), &scratch.0.join("none/plot.svg")]);
    assert_eq!(nowhere.status.code(), Some(1), "{}", text(&nowhere.stderr));
}

#[test]
fn a_paging_case_runs_and_leaves_nothing_but_what_was_saved() {
    let scratch = Place::new("case");
    if let Err(why) = scratch.has_device() {
        return skip::skip("disk", why);
    }
    let kept = Place::new("kept");
    let (dir, save) = (scratch.0.to_str().unwrap(), kept.0.to_str().unwrap());
    let arguments = ["paging", "--quick", "--reps", "1", "--json", "--case", "seq-write-2t"];
    let arguments = [&arguments[..], &["--system", "mmap-default", "--system", "raw-2m", "--dir", dir, "--save", save]];
    let output = bench(&arguments.concat());
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let lines = text(&output.stdout);
    assert_eq!(lines.lines().count(), 2, "{lines}");
    // Without the right to make a cgroup, both places say so.
    assert_eq!(lines.contains(r#""constrained":false"#), errors.contains("SKIP(cgroup:"), "{errors}{lines}");
    assert!(lines.contains(r#""counts":true"#), "{lines}");
    assert!(scratch.is_empty(), "files were left");
    assert_eq!(std::fs::read_to_string(kept.0.join("raw.jsonl")).unwrap(), lines);
    let machine = std::fs::read_to_string(kept.0.join("machine.txt")).unwrap();
    assert!(machine.contains("command: selfpage bench paging --quick --reps 1 --case seq-write-2t"), "{machine}");
    assert!(!machine.contains(dir) && !machine.contains(save), "{machine}");
}

/// Control groups below `directory` that the run with this process has made.
fn groups_of(run: u32, directory: &Path) -> Vec<PathBuf> {
    let below = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let groups = below.filter(|path| path.is_dir() && !path.is_symlink()).flat_map(|path| {
        let own = path.ends_with(format!("selfpage-bench-{run}")).then(|| path.clone());
        own.into_iter().chain(groups_of(run, &path)).collect::<Vec<_>>()
    });
    groups.collect()
}

#[test]
fn a_signal_in_a_case_cleans_up() {
    let scratch = Place::new("signal");
    if let Err(why) = scratch.has_device() {
        return skip::skip("disk", why);
    }
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"))
        .args(["bench", "paging", "--quick", "--reps", "50", "--case", "rnd-read-1t", "--system", "raw-4k", "--dir"])
        .arg(&scratch.0)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The first result is out: the second case is running.
    let mut errors = std::io::BufReader::new(run.stderr.take().unwrap());
    let mut lines = Vec::new();
    while !lines.last().is_some_and(|line: &String| line.starts_with("[1/")) {
        let mut line = String::new();
        assert_ne!(std::io::BufRead::read_line(&mut errors, &mut line).unwrap(), 0, "ended early");
        lines.push(line);
    }
    assert!(!scratch.is_empty());
    let groups = Path::new("/sys/fs/cgroup");
    let is_confined = !lines.iter().any(|line| line.starts_with("SKIP(cgroup:"));
    // Each case has a group of its own; between two there is none.
    while is_confined && groups_of(run.id(), groups).is_empty() {
        assert!(run.try_wait().unwrap().is_none(), "ended early");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    kill_process(Pid::from_child(&run), Signal::TERM).unwrap();
    assert_eq!(run.wait().unwrap().signal(), Some(libc::SIGTERM));
    assert!(scratch.is_empty(), "files were left");
    assert_eq!(groups_of(run.id(), groups), [] as [PathBuf; 0]);
    if !is_confined {
        skip::skip("cgroup", "nothing shows that the group goes: there was none; run as root");
    }
}

#[test]
fn a_caller_that_ignores_the_end_of_children_hinders_nothing() {
    let scratch = Place::new("children");
    let mut run = Command::new("env");
    run.args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_selfpage"), "bench", "faults", "--quick", "--reps", "1"]);
    run.args(["--case", "first-touch-4k", "--system", "kernel", "--dir"]).arg(&scratch.0);
    let output = run.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn a_hangup_that_the_caller_ignores_ends_nothing() {
    let scratch = Place::new("hangup");
    if let Err(why) = scratch.has_device() {
        return skip::skip("disk", why);
    }
    let line =
        r#"trap "" HUP; exec "$0" bench paging --quick --reps 2 --case rnd-read-1t --system raw-4k --json --dir "$1""#;
    let mut run = Command::new("sh");
    run.args(["-c", line, env!("CARGO_BIN_EXE_selfpage")])
        .arg(&scratch.0)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut run = run.spawn().unwrap();
    let mut errors = std::io::BufReader::new(run.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("[1/") {
        line.clear();
        assert_ne!(std::io::BufRead::read_line(&mut errors, &mut line).unwrap(), 0, "ended early");
    }
    kill_process(Pid::from_child(&run), Signal::HUP).unwrap();
    std::io::copy(&mut errors, &mut std::io::sink()).unwrap();
    let output = run.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout).lines().count()), (Some(0), 1));
}

/// A swap file in use, of a run of nobody's that was killed.
struct Left(PathBuf);

impl Left {
    fn new(parent: &Path) -> Result<Left, String> {
        let directory = parent.join("selfpage-bench-left");
        let line = r#"PATH=$PATH:/sbin:/usr/sbin; mkdir "$1" && touch "$1/lock" && fallocate -l 1M "$1/swap" && chmod 600 "$1/swap" &&
            mkswap -q "$1/swap" && chown -R 65534:65534 "$1" && chmod 755 "$1" && swapon "$1/swap""#;
        let made =
            Command::new("sh").args(["-c", line, "sh"]).arg(&directory).output().map_err(|why| why.to_string())?;
        let left = Left(directory);
        if made.status.success() { Ok(left) } else { Err(text(&made.stderr)) }
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let line = r#"PATH=$PATH:/sbin:/usr/sbin; swapoff "$1/swap"; rm -rf "$1""#;
        let _ = Command::new("sh").args(["-c", line, "sh"]).arg(&self.0).output();
    }
}

#[test]
fn a_swap_file_that_stays_in_use_is_named_by_every_run_until_it_is_not() {
    let scratch = Place::new("left");
    let tool = scratch.copy_of_tool("selfpage");
    let left = match Left::new(&scratch.0) {
        Ok(left) => left,
        Err(why) => return skip::skip("swap", &why),
    };
    for _ in 0..2 {
        let mut run = Command::new(&tool);
        run.args([
            "bench",
            "faults",
            "--quick",
            "--reps",
            "1",
            "--case",
            "first-touch-4k",
            "--system",
            "kernel",
            "--dir",
        ]);
        let output = run.arg(&scratch.0).current_dir("/").uid(65534).gid(65534).output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(&format!("swapoff {}", left.0.join("swap").display())), "{errors}");
    }
    drop(left);
}
