//! Standard output and standard error that take no more: a disk that is full, and a reader that has gone away.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};

#[path = "../../../tests/filter.rs"]
mod filter;
#[path = "../../../tests/mounts.rs"]
mod mounts;
#[path = "../../../tests/programs.rs"]
mod programs;
#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use tool::{Place, selfpage, text};

/// A directory with a trace of one fault in it.
fn place(name: &str) -> Place {
    let place = Place::new(name);
    let mut trace = b"SELFPGTR\x01\0\0\0\0\x10\0\0\x20\0\0\0\x01\0\0\0".to_vec();
    trace.extend_from_slice(&[0; 8]);
    trace.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
    [5u64, 1000, 0].iter().for_each(|word| trace.extend_from_slice(&word.to_le_bytes()));
    std::fs::write(place.path("trace"), trace).unwrap();
    place
}

/// A command of each verb that prints, and the name by which it speaks of itself.
fn commands(place: &Place) -> Vec<(&'static str, Vec<String>)> {
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../papers/arxiv11-umpa/runs/2026-11-22-vm2-page-alloc");
    let (trace, dir) = (place.0.join("trace").display().to_string(), place.0.display().to_string());
    let bench = |option: &str| {
        let line = format!("bench faults --quick --reps 1 --case first-touch-4k --system kernel --dir {dir} {option}");
        line.split_whitespace().map(String::from).collect()
    };
    vec![
        ("bench", vec!["bench".into(), "list".into()]),
        ("bench", bench("")),
        ("bench", bench("--json")),
        ("doctor", vec!["doctor".into()]),
        ("heatmap", vec!["heatmap".into(), trace.clone()]),
        ("plot", vec!["plot".into(), run.display().to_string()]),
        ("trace", vec!["trace".into(), trace]),
    ]
}

fn run(arguments: &[String], stdout: Stdio) -> (Output, String) {
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    let output = run.args(arguments).stdout(stdout).stderr(Stdio::piped()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, errors)
}

#[test]
fn a_picture_for_a_dash_goes_to_standard_output() {
    let place = place("dash");
    let mut drawn = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    let drawn = drawn.args(["heatmap", "trace", "-o", "-"]).current_dir(&place.0).output().unwrap();
    assert!(drawn.status.success() && text(&drawn.stdout).starts_with("<svg"), "{}", text(&drawn.stderr));
    assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 1, "a file has that name");
}

#[test]
fn a_full_disk_is_one_line_and_status_1() {
    let place = place("full");
    for (verb, arguments) in commands(&place) {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let (output, errors) = run(&arguments, full.into());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {errors}");
        let said = errors.lines().filter(|line| line.starts_with(&format!("selfpage {verb}: "))).count();
        assert!(said == 1 && errors.contains("No space left"), "{arguments:?}: {errors}");
        assert!(!errors.contains("panicked"), "{arguments:?}: {errors}");
    }
}

#[test]
fn help_that_cannot_be_written_is_one_line_and_status_1() {
    for arguments in ["--help", "--version", "help tour"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let arguments: Vec<String> = arguments.split(' ').map(String::from).collect();
        let (output, errors) = run(&arguments, full.into());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {errors}");
        assert!(errors.lines().count() == 1 && errors.starts_with("selfpage: standard output: No space"), "{errors}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert!(run(&arguments, writer.into()).0.status.success());
    }
}

#[test]
fn nobody_who_reads_is_no_panic_and_no_failure() {
    let place = place("gone");
    for (verb, arguments) in commands(&place) {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (output, errors) = run(&arguments, writer.into());
        assert!(!errors.contains("panicked"), "{arguments:?}: {errors}");
        // The doctor says what it found by its status, whoever reads.
        let quiet = !errors.contains(&format!("selfpage {verb}: "));
        assert!(quiet && (output.status.success() || verb == "doctor"), "{arguments:?}: {errors}");
    }
}

#[test]
fn a_picture_does_not_replace_what_it_is_drawn_of() {
    let place = place("same");
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../papers/arxiv11-umpa/runs/2026-11-22-vm2-page-alloc");
    std::fs::copy(kept.join("raw.jsonl"), place.0.join("raw.jsonl")).unwrap();
    std::fs::hard_link(place.0.join("trace"), place.0.join("other")).unwrap();
    let path = |name: &str| place.path(name);
    for (verb, of, to) in [
        ("heatmap", "trace", "trace"),
        ("heatmap", "trace", "other"),
        ("plot", "", "raw.jsonl"),
        ("plot", "raw.jsonl", "raw.jsonl"),
    ] {
        let before = std::fs::read(path(to)).unwrap();
        let (output, errors) = run(&[verb.into(), path(of), "-o".into(), path(to)], Stdio::null());
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.starts_with(&format!("selfpage {verb}: {}: ", path(to))) && errors.contains("-o"), "{errors}");
        assert!(std::fs::read(path(to)).unwrap() == before, "{to} was written to");
    }
    // A link stays, and what it names is made, and then replaced.
    std::os::unix::fs::symlink("picture", place.0.join("link")).unwrap();
    for _ in 0..2 {
        let (output, errors) = run(&["heatmap".into(), path("trace"), "-o".into(), path("link")], Stdio::null());
        assert!(output.status.success() && place.0.join("link").is_symlink(), "{errors}");
        assert!(std::fs::read_to_string(path("picture")).unwrap().ends_with("</svg>\n"));
        std::fs::write(path("picture"), "old").unwrap();
    }
    assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 5, "something was left");
}

/// That another trace is larger is told of a picture that there is.
#[test]
fn a_picture_that_cannot_be_written_is_not_drawn() {
    let place = place("larger");
    std::fs::copy(place.0.join("trace"), place.0.join("trace.7")).unwrap();
    let longer = std::fs::File::options().append(true).open(place.0.join("trace.7")).unwrap();
    longer.set_len(1 << 12).unwrap();
    let drawn =
        |picture: &str| run(&["heatmap".into(), place.path("trace"), "-o".into(), place.path(picture)], Stdio::null());
    let (output, errors) = drawn("none/picture");
    assert!(output.status.code() == Some(1) && errors.lines().count() == 1, "{errors}");
    assert!(errors.contains("none/picture: ") && !errors.contains("is drawn"), "{errors}");
    let (output, errors) = drawn("picture");
    assert!(output.status.success() && errors.contains("is drawn; the trace of another process is larger"), "{errors}");
}

/// What `line` of a shell, with the tool as $0, gives where $1 is a disk of one page. `None`, and said so, where there can be none.
fn on_a_small_disk(place: &Place, line: &str) -> Option<Output> {
    let line = format!(r#"mount -t tmpfs -o size=4k none "$1" && {line}"#);
    let output = mounts::with_mounts(&line, [Path::new(env!("CARGO_BIN_EXE_selfpage")), &place.0]);
    output.map_err(|why| skip::skip("mount", &why)).ok()
}

#[test]
fn a_picture_that_has_no_room_leaves_the_old_one() {
    let (place, other) = (place("old"), place("trace"));
    let line = format!(
        r#"echo old > "$1/picture" && ! "$0" heatmap {}/trace -o "$1/picture" && ls -A "$1" && cat "$1/picture""#,
        other.0.display()
    );
    let Some(output) = on_a_small_disk(&place, &line) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.contains("No space left"), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "picture\nold\n");
}

#[test]
fn a_bench_without_room_for_its_file_says_so_once() {
    let place = place("room");
    let Some(output) = on_a_small_disk(&place, r#"exec "$0" bench paging --quick --dir "$1""#) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), errors.lines().count()), (Some(1), 1), "{errors}");
    assert!(errors.contains(" MiB are free in ") && errors.contains("--dir"), "{errors}");
}

/// What a shell's line gives, with the tool as $0 and a directory as $1, where files may have no contents.
fn without_contents(place: &Place, line: &str) -> (Output, String) {
    let line = format!("ulimit -c 0; ulimit -f 0; {line}");
    let mut run = Command::new("sh");
    let output = run.args(["-c", &line, env!("CARGO_BIN_EXE_selfpage")]).arg(&place.0).output().unwrap();
    let errors = text(&output.stderr);
    (output, errors)
}

#[test]
fn a_limit_on_the_length_of_files_is_an_error_and_no_signal() {
    let place = Place::new("length");
    let can_run = selfpage(&["doctor"]).status.code();
    let (output, errors) = without_contents(&place, r#"exec "$0" doctor"#);
    assert_eq!((output.status.code(), errors.as_str()), (can_run, ""));
    assert!(text(&output.stdout).contains("ulimit -f"), "{}", text(&output.stdout));
    for line in [
        r#"exec "$0" doctor > "$1/found""#,
        r#"exec "$0" bench paging --quick --case rnd-read-1t --system mmap-default --dir "$1""#,
        r#"exec "$0" run --frames 8M --store memory --trace "$1/trace" -- true"#,
    ] {
        let (output, errors) = without_contents(&place, line);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{line}: {errors}");
        // Where no device counts what `bench` reads it says that.
        assert!(errors.contains("File too large") || errors.contains("--dir"), "{line}: {errors}");
        let _ = std::fs::remove_file(place.path("found"));
        assert!(place.is_empty(), "{line} left something");
    }
    // To the program the signal is what it is without us.
    programs::build(&["selfpage-malloc"]);
    let (output, errors) = without_contents(&place, r#"exec "$0" run -- sh -c 'exec printf more > "$0"' "$1/file""#);
    let by_itself = without_contents(&place, r#"exec sh -c 'exec printf more > "$0"' "$1/file""#).0;
    let ended_by = [output, by_itself].map(|output| output.status.signal());
    assert_eq!(ended_by, [Some(libc::SIGXFSZ); 2], "{errors}");
}

/// What works in memory and writes files all the same.
#[test]
fn a_bench_without_room_for_its_images_says_so_once() {
    let place = place("images");
    let Some(output) = on_a_small_disk(&place, r#"exec "$0" bench snapshot --quick --dir "$1""#) else { return };
    let errors = text(&output.stderr);
    assert_eq!((output.status.code(), errors.lines().count()), (Some(1), 1), "{errors}");
    assert!(errors.contains(" MiB are free in ") && errors.contains("--dir"), "{errors}");
}

#[test]
fn a_record_that_cannot_be_saved_is_shown() {
    let place = place("unsaved");
    // Room for one page, which machine.txt takes.
    let line = r#""$0" bench faults --quick --reps 1 --case first-touch-4k --system userfaultfd-alone --system kernel --save "$1/run"
        status=$?; ls "$1/run"; exit $status"#;
    let Some(output) = on_a_small_disk(&place, line) else { return };
    let (shown, errors) = (text(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("raw.jsonl: No space left"), "{errors}");
    let measured = ["kernel", "userfaultfd-alone"].map(|system| shown.contains(&format!("first-touch-4k  {system}")));
    assert!(measured[0] && (measured[1] || errors.contains("SKIP(uffd: ")), "{shown}{errors}");
    assert!(!shown.contains("machine.txt") && !shown.contains("raw.jsonl"), "a run without records stays: {shown}");
}

#[test]
fn a_line_that_cannot_be_said_leaves_the_status() {
    for (arguments, status) in [
        (&["bench", "nonsense"][..], 2),
        (&["bench", "faults", "--quick", "--reps", "1", "--case", "first-touch-4k", "--system", "kernel"], 0),
        (&["heatmap", "/nonexistent"], 2),
        (&["plot", "/nonexistent"], 2),
        (&["run", "--frames", "64K", "--", "/bin/true"], 2),
        (&["tour", "/nonexistent"], 2),
        (&["trace", "/nonexistent"], 2),
    ] {
        let (reader, gone) = std::io::pipe().unwrap();
        drop(reader);
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        for stderr in [Stdio::from(full), gone.into()] {
            let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
            let ended = run.args(arguments).stdout(Stdio::null()).stderr(stderr).status().unwrap();
            assert_eq!(ended.code(), Some(status), "{arguments:?}");
        }
    }
}

#[test]
fn a_run_whose_machine_cannot_be_described_leaves_nothing() {
    let place = place("undescribed");
    let line = r#"echo full > "$1/full"
        "$0" bench faults --quick --reps 1 --case first-touch-4k --system kernel --save "$1/run"; status=$?; ls -A "$1/run"; exit $status"#;
    let Some(output) = on_a_small_disk(&place, line) else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains("machine.txt: No space left"), "{errors}");
    assert_eq!(text(&output.stdout), "", "{errors}");
}

#[test]
fn a_picture_that_the_user_may_not_write_stays() {
    let place = place("read-only");
    let tool = place.copy_of_tool("selfpage");
    std::fs::write(place.path("picture"), "old").unwrap();
    std::fs::set_permissions(place.path("picture"), std::fs::Permissions::from_mode(0o444)).unwrap();
    let mut run = Command::new(&tool);
    run.args(["heatmap", "trace", "-o", "picture"]).current_dir(&place.0);
    if rustix::process::geteuid().is_root() {
        run.uid(65534).gid(65534);
    }
    let output = run.output().unwrap();
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains("picture: Permission denied"), "{errors}");
    assert_eq!(std::fs::read_to_string(place.path("picture")).unwrap(), "old");
    assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 3, "something was left");
}

#[test]
fn a_picture_is_written_past_what_a_killed_one_with_its_number_left() {
    let place = place("stale");
    let line = r#"cd "$1" && echo part > .selfpage-$$ && exec "$0" heatmap trace -o picture"#;
    let mut run = Command::new("sh");
    let output = run.args(["-c", line, env!("CARGO_BIN_EXE_selfpage")]).arg(&place.0).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(std::fs::read_to_string(place.path("picture")).unwrap().ends_with("</svg>\n"));
    assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 2, "something was left");
}

/// A name may be on the disk before the contents are.
#[test]
fn a_picture_that_is_not_on_the_disk_replaces_nothing() {
    let place = place("lost");
    std::fs::write(place.path("picture"), "old").unwrap();
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.args(["heatmap", "trace", "-o", "picture"]).current_dir(&place.0);
    // SAFETY: test: two system calls.
    let output = unsafe { run.pre_exec(|| filter::Call::any(libc::SYS_fsync).fails(libc::EIO)) }.output().unwrap();
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains("picture: Input/output error"), "{errors}");
    assert_eq!(std::fs::read_to_string(place.path("picture")).unwrap(), "old");
    assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 2, "something was left");
}
