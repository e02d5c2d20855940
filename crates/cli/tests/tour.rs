//! `selfpage tour` as a newcomer meets it: no terminal here, so plain lines.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

#[path = "../../../tests/mounts.rs"]
mod mounts;
#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use tool::{Place, selfpage, text, without_escapes};

const NOBODY: u32 = 65534;

fn tour(arguments: &[&str]) -> Output {
    selfpage(&[&["tour"], arguments].concat())
}

/// Whether it could run here; says so where it could not.
fn ran(output: &Output) -> bool {
    let errors = text(&output.stderr);
    if output.status.code() == Some(1) && errors.contains("selfpage doctor") {
        skip::skip("uffd", &errors);
        return false;
    }
    assert_eq!(output.status.code(), Some(0), "{errors}{}", text(&output.stdout));
    true
}

/// The percentage that a line of the table states for `policy`.
fn percent(table: &str, policy: &str) -> u32 {
    let line = table.lines().find(|line| line.starts_with("loop over") && line.contains(&format!("with {policy} ")));
    let before = line.unwrap().split(" %").next().unwrap();
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

/// With LRU each pass reads all of it again, with MRU what the frames do not hold.
fn check_passes(table: &str) {
    // Above 100: on a busy machine a page that was read ahead is given up before its use, and read once more.
    assert!((95..=110).contains(&percent(table, "lru")) && percent(table, "mru") <= 40, "{table}");
}

fn check(shown: &str) {
    check_passes(&shown[shown.find("step  ").expect("no table")..]);
    assert!(!shown.contains('\x1b') && !shown.contains('\r'), "escapes without a terminal");
}

/// How many MiB stand behind `word`, as in `in core 8.0 MiB of 8.0 MiB`.
fn mib_after(line: &str, word: &str) -> Option<f64> {
    line.split_once(word)?.1.split_once(" MiB")?.0.trim().parse().ok()
}

/// Residency stays flat: never above the frames, and the process never grows by more than frames, tables and 8 MiB.
fn check_flat(shown: &str, frames_mib: f64, array_mib: f64) {
    let mut looks = 0;
    let mut least_process_mib = f64::MAX;
    for line in shown.lines().filter(|line| line.contains("ing: in core ")) {
        let told = |word| mib_after(line, word).unwrap_or_else(|| panic!("no {word} in {line}"));
        assert!(told("in core ") <= frames_mib, "{line}");
        assert_eq!(told(" of "), frames_mib, "{line}");
        least_process_mib = least_process_mib.min(told("process "));
        assert!(told("process ") < least_process_mib + frames_mib + 8.0, "it goes on growing: {shown}");
        looks += 1;
    }
    assert!(looks >= 2, "writing and reading show a line each at least: {shown}");
    let most = mib_after(shown, "At most ").unwrap();
    assert!(most <= frames_mib && most >= frames_mib / 2.0, "{shown}");
    let grown_mib = mib_after(shown, "never grew by more than ").unwrap();
    let tables_mib = array_mib * 24.0 / 4096.0;
    assert!(grown_mib <= frames_mib + tables_mib + 8.0, "it grew by {grown_mib} MiB");
}

#[test]
fn the_whole_tour_as_whoever_runs_this() {
    let place = Place::new("whole");
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    let output = run.args(["tour", "--quick"]).env("TMPDIR", &place.0).output().unwrap();
    if !ran(&output) {
        return;
    }
    let shown = text(&output.stdout);
    check(&shown);
    for step in ["write 32.0 MiB of array", "evict", "prefetch", "discard", "in core 4.0 MiB -> 0.0 MiB, 0.0 MiB saved"]
    {
        assert!(shown.contains(step), "{step} is missing in {shown}");
    }
    // 4 MiB that fit: all of it is saved once, and what was fetched costs no fault.
    for (step, figures) in
        [("evict ", "in core 4.0 MiB -> 0.0 MiB, 4.0 MiB saved, "), ("read what was prefetched ", " saved, 0 faults ")]
    {
        let line = shown.lines().find(|line| line.starts_with(step)).unwrap_or_else(|| panic!("no {step} in {shown}"));
        assert!(line.contains(figures), "{line}");
    }
    for verb in ["writing", "reading"] {
        assert!(shown.lines().any(|line| line.contains(&format!("{verb}: in core "))), "no progress: {shown}");
    }
    check_flat(&shown, 8.0, 32.0);
    assert!(place.is_empty(), "files were left");
}

#[test]
fn the_whole_tour_as_nobody() {
    let place = Place::new("nobody");
    let tool = place.copy_of_tool("selfpage");
    let mut run = Command::new(&tool);
    run.args(["tour", "--quick"]).env("TMPDIR", &place.0).current_dir("/");
    if text(&Command::new("id").arg("-u").output().unwrap().stdout).trim() == "0" {
        run.uid(NOBODY).gid(NOBODY);
    }
    let output = run.output().unwrap();
    if ran(&output) {
        check(&text(&output.stdout));
    }
}

/// What the tool shows on a terminal of 120 columns, without escapes. `None`: it cannot be had here.
fn on_terminal(place: &Place, arguments: &str) -> Option<String> {
    let shown = tool::on_terminal(Some("xterm"), place, arguments);
    let shown = shown.map_err(|(needs, why)| skip::skip(needs, &why)).ok()?;
    assert!(shown.contains("\x1b["), "no live line: {shown}");
    Some(without_escapes(&shown))
}

#[test]
fn on_a_terminal_there_is_a_live_line_and_the_table_is_as_without() {
    let Some(plain) = on_terminal(&Place::new("terminal"), "tour --quick") else { return };
    let strange = |byte: char| byte.is_control() && !matches!(byte, '\n' | '\r');
    assert!(!plain.contains(strange) && !plain.contains('\u{fffd}'), "{plain:?}");
    // Each state of the live line is a whole line, as wide as the terminal at most.
    let live: Vec<&str> = plain.split(['\r', '\n']).filter(|line| line.contains(" %  ")).collect();
    assert!(live.iter().any(|line| line.contains("writing: in core ")), "no progress: {plain}");
    assert!(live.iter().all(|line| line.chars().count() <= 120), "{live:?}");
    // When all is done it is gone, and the table stands below the text.
    let table = &plain[plain.rfind("step  ").expect("no table")..].replace('\r', "");
    assert!(table.lines().all(|line| !line.contains(" %  ")), "{table:?}");
    check_passes(table);
}

#[test]
fn of_a_large_file_the_first_part_is_read_and_each_pass_is_shown() {
    let place = Place::new("large");
    let file = place.0.join("data");
    // One hole: it takes no disk.
    std::fs::File::create(&file).unwrap().set_len(300 << 20).unwrap();
    let Some(plain) = on_terminal(&place, &format!("tour {}", file.display())) else { return };
    let first = format!("The first 256.0 MiB of the 300.0 MiB of {}, read from front to back", file.display());
    assert!(plain.contains(&first), "{plain}");
    // So many MiB take longer than a live line waits.
    for policy in ["lru", "mru"] {
        let pass = format!("{policy}, pass 0: ");
        let live = plain.split(['\r', '\n']).find(|line| line.contains(" %  ") && line.contains(&pass));
        let done = live.and_then(|line| mib_after(line, &pass)).unwrap_or_else(|| panic!("no {pass} in {plain}"));
        assert!(done > 0.0 && done < 256.0, "{live:?}");
    }
    check_passes(&plain[plain.rfind("step  ").expect("no table")..]);
}

#[test]
fn a_file_of_ones_own_is_read_and_left_as_it_was() {
    let place = Place::new("file");
    let file = place.0.join("data");
    let bytes: Vec<u8> = (0..12_345_678u32).map(|at| (at / 7) as u8).collect();
    std::fs::write(&file, &bytes).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o444)).unwrap();
    let output = tour(&["--quick", file.to_str().unwrap()]);
    if ran(&output) {
        check(&text(&output.stdout));
        assert!(std::fs::read(&file).unwrap() == bytes);
    }
}

#[test]
fn a_file_that_cannot_be_used_is_one_line_and_exit_2() {
    let place = Place::new("bad");
    let (empty, small) = (place.0.join("empty"), place.0.join("small"));
    std::fs::write(&empty, "").unwrap();
    std::fs::write(&small, "some").unwrap();
    let bad = [
        ("/nonexistent", "No such file"),
        ("/var", "directory"),
        ("/dev/zero", "regular"),
        (empty.to_str().unwrap(), "empty"),
        (small.to_str().unwrap(), "4 bytes"),
    ];
    for (path, names) in bad {
        let output = tour(&[path]);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{path}: {errors}");
        assert!(errors.lines().count() == 1 && errors.contains(names) && errors.contains(path), "{errors}");
        assert!(output.stdout.is_empty(), "{path}: something was begun");
    }
}

#[test]
fn a_file_that_is_cut_short_meanwhile_is_named() {
    let place = Place::new("short");
    let path = place.0.join("data");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(256 << 20).unwrap();
    let mut tour = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    let mut tour = tour.arg("tour").arg(&path).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The first pass is over: others follow.
    let mut lines = BufReader::new(tour.stdout.take().unwrap()).lines();
    let begun = lines.by_ref().any(|line| line.unwrap().contains("pass 0 read"));
    file.set_len(1 << 20).unwrap();
    lines.for_each(drop);
    let output = tour.wait_with_output().unwrap();
    let errors = text(&output.stderr);
    if errors.contains("selfpage doctor") {
        return skip::skip("uffd", &errors);
    }
    assert!(begun && output.status.code() == Some(2), "{:?} {errors}", output.status);
    let names = [path.to_str().unwrap(), "cut short"];
    assert!(errors.lines().count() == 1 && names.iter().all(|name| errors.contains(name)), "{errors}");
}

#[test]
fn a_disk_without_room_is_one_line_and_status_1() {
    let place = Place::new("room");
    let line = r#"mount -t tmpfs -o size=16m none "$1" && export TMPDIR="$1" && exec "$0" tour --quick"#;
    let Some(output) = on_mount(&place, line) else { return };
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{:?} {errors}", output.status);
    assert!(errors.lines().count() == 1 && errors.contains("TMPDIR") && errors.contains(" MiB"), "{errors}");
}

/// What a shell's `line` gives, with the tool as $0, where $1 is a directory that nobody else sees anything mounted on. `None`, and said so,
/// where that or the tour cannot be had.
fn on_mount(place: &Place, line: &str) -> Option<Output> {
    let output = mounts::with_mounts(line, [Path::new(env!("CARGO_BIN_EXE_selfpage")), &place.0]);
    let output = output.map_err(|why| skip::skip("mount", &why)).ok()?;
    let errors = text(&output.stderr);
    if errors.contains("selfpage doctor") {
        skip::skip("uffd", &errors);
        return None;
    }
    Some(output)
}

#[test]
fn a_directory_that_cannot_be_had_or_written_is_named_with_another() {
    let place = Place::new("read-only");
    let missing = on_mount(&place, r#"export TMPDIR="$1/none" && exec "$0" tour --quick"#);
    let read_only =
        on_mount(&place, r#"mount -t tmpfs -o ro,size=1g none "$1" && export TMPDIR="$1" && exec "$0" tour --quick"#);
    for output in missing.into_iter().chain(read_only) {
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{:?} {errors}", output.status);
        assert!(errors.lines().count() == 1 && errors.contains("TMPDIR=DIRECTORY names another"), "{errors}");
    }
}

#[test]
fn an_empty_name_for_temporary_files_is_none() {
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    ran(&run.args(["tour", "--quick"]).env("TMPDIR", "").output().unwrap());
}

/// Where a thread's stack, or what it begins with, is the first that there is no room for.
#[test]
fn too_few_addresses_for_threads() {
    if !ran(&tour(&["--quick"])) {
        return;
    }
    let under = |limit_kib: usize| {
        let script = format!("ulimit -v {limit_kib} && exec \"$@\"");
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &script, "sh", "timeout", "-s", "KILL", "60", env!("CARGO_BIN_EXE_selfpage")]);
        let output = command.args(["tour", "--quick"]).env_remove("RUST_BACKTRACE").output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let lacks_threads = |errors: &str| errors.contains("start pager threads");
    // From there on the trial's domain, which is the first, has all it wants.
    let is_past = |code: Option<i32>, errors: &str| {
        code == Some(0) || ["reserve a pool of 2048 ", "reserve a region"].iter().any(|later| errors.contains(later))
    };
    let (mut below, mut enough) = (0, 1_000_000);
    while enough - below > 8 {
        let limit_kib = (below + enough) / 2;
        let (code, errors) = under(limit_kib);
        if is_past(code, &errors) { enough = limit_kib } else { below = limit_kib }
    }
    let mut threads = 0;
    for limit_kib in (enough - 1500..enough).step_by(16) {
        let (code, errors) = under(limit_kib);
        assert!(code == Some(1) && errors.lines().count() == 1, "{limit_kib} KiB of {enough}: {code:?} {errors}");
        if lacks_threads(&errors) {
            assert!(errors.contains("ulimit -v") && !errors.contains("ulimit -u"), "{errors}");
            threads += 1;
        }
    }
    assert!(threads > 5, "{threads} limits that threads had too few of");
}

#[test]
fn what_cannot_be_shown_is_one_line_and_status_1() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    let output = run.args(["tour", "--quick"]).stdout(full).stderr(Stdio::piped()).output().unwrap();
    let errors = text(&output.stderr);
    if errors.contains("selfpage doctor") {
        return skip::skip("uffd", &errors);
    }
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.lines().count() == 1 && errors.contains("standard output: No space left"), "{errors}");
}

#[test]
fn every_verb_helps_with_what_it_is_and_examples() {
    let help = |arguments: &[&str]| {
        let output = selfpage(&[arguments, &["--help"]].concat());
        assert_eq!(output.status.code(), Some(0));
        text(&output.stdout)
    };
    let all = help(&[]);
    for verb in ["tour", "doctor", "bench", "run", "trace", "heatmap", "plot"] {
        let line = all.lines().find_map(|line| line.trim().strip_prefix(verb)).expect(verb);
        assert!(line.trim().len() > 20, "{verb} has no description: {all}");
        let own = help(&[verb]);
        assert!(!own.starts_with("Usage"), "{verb} does not say what it is: {own}");
        for part in ["Examples:\n  selfpage ", "\nExit status: "] {
            assert!(own.contains(part) && all.contains(part), "no {part:?} in the help of {verb}: {own}");
        }
    }
    for (arguments, status) in [(&["--version"][..], 0), (&["tuor"], 2), (&["tour", "--nonsense"], 2), (&[], 2)] {
        assert_eq!(selfpage(arguments).status.code(), Some(status), "{arguments:?}");
    }
}

#[test]
fn a_name_tells_a_terminal_nothing() {
    let place = Place::new("name");
    let file = place.0.join("red\x1b[31m");
    std::fs::write(&file, vec![1; 5 << 20]).unwrap();
    let output = tour(&["--quick", file.to_str().unwrap()]);
    if ran(&output) {
        let shown = text(&output.stdout);
        assert!(shown.contains("red?[31m, read from front to back") && !shown.contains('\x1b'), "{shown:?}");
    }
}
