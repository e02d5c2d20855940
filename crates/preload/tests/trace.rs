//! `selfpage run --trace`, `selfpage trace` and `selfpage heatmap`: what a trace has in it, and what is done with a bad one.

#[path = "../../../tests/mounts.rs"]
mod mounts;
mod run;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use selfpage::trace::{Kind, RECORD_BYTES, Record, Trace};

fn heatmap(trace: &Path, picture: &Path) -> Output {
    Command::new(run::tool()).arg("heatmap").arg(trace).arg("-o").arg(picture).output().unwrap()
}

fn lines(trace: &Path, form: &[&str]) -> Output {
    Command::new(run::tool()).arg("trace").arg(trace).args(form).output().unwrap()
}

const PYTHON: &str = "/usr/bin/python3";

/// A program that writes 4000 pages twice in 8 MiB of frames, traced.
fn traced(directory: &Path) -> std::path::PathBuf {
    let script = "
import time
pages = [bytearray(4096) for _ in range(4000)]
for turn in range(2):
    for page in pages: page[0] = turn
    time.sleep(0.3)
";
    let file = directory.join("trace");
    // One that is there already goes.
    std::fs::write(&file, "old").unwrap();
    let ran = Command::new(run::tool())
        .args(["run", "--frames", "8M", "--sample-ms", "50", "--trace"])
        .arg(&file)
        .args(["--", PYTHON, "-S", "-c", script])
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    file
}

#[test]
fn a_trace_has_what_happened_and_its_picture_is_always_the_same() {
    if !run::possible() || !run::has(PYTHON) {
        return;
    }
    let directory = run::directory();
    let file = traced(directory.path());
    let trace = Trace::read(&file).unwrap();
    assert_eq!(trace.head.page_bytes, 4096);
    let count = |kind: Kind| trace.events().filter(|event| event.kind == kind).count() as u64;
    assert!(trace.dropped() > 0 || count(Kind::First) + count(Kind::Ahead) >= 4000, "{} pages", count(Kind::First));
    for kind in [Kind::Fill, Kind::Evict, Kind::Save, Kind::Sample] {
        assert!(count(kind) > 100, "{} of {kind:?}", count(kind));
    }
    let faults: Vec<_> = trace.events().filter(|event| event.kind.is_fault()).collect();
    assert!(faults.iter().filter(|event| event.thread != 0).count() * 2 > faults.len(), "threads are not known");
    let regions = trace.records.iter().filter_map(|record| match record {
        Record::Region { first, pages, name } => Some((first.0..first.0 + pages, name.as_str())),
        _ => None,
    });
    let regions: Vec<_> = regions.collect();
    let mut names: Vec<_> = regions.iter().map(|region| region.1).collect();
    names.sort_unstable();
    assert_eq!(names, ["large blocks", "mappings", "objects"]);
    assert!(faults.iter().all(|event| regions.iter().any(|region| region.0.contains(&event.page.0))));
    let sets = trace.records.iter().filter_map(|record| match record {
        Record::WorkingSet { pages, least, most, .. } => Some((*pages, u64::from(*least), u64::from(*most))),
        _ => None,
    });
    let sets: Vec<_> = sets.collect();
    assert!(!sets.is_empty() && sets.iter().all(|(pages, least, most)| least <= pages && pages <= most), "{sets:?}");

    for form in [&[][..], &["--json"]] {
        let printed = lines(&file, form);
        assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
        assert_eq!(printed.stdout.iter().filter(|byte| **byte == b'\n').count(), trace.records.len());
    }

    let (one, other) = (directory.path().join("one.svg"), directory.path().join("other.svg"));
    for picture in [&one, &other] {
        let drawn = heatmap(&file, picture);
        assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    }
    let picture = std::fs::read_to_string(&one).unwrap();
    assert!(picture == std::fs::read_to_string(&other).unwrap());
    assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
    for part in ["time (s)", "address", "objects", "faults in a cell", "class=\"working-set\"", "process"] {
        assert!(picture.contains(part), "{part} is missing");
    }
    assert_eq!(picture.matches("<text").count(), picture.matches("</text>").count());
}

/// The pages that a program uses in each of two times.
const USED: [u64; 2] = [4000, 400];

#[test]
fn a_trace_tells_the_working_sets_of_two_times_apart() {
    if !run::possible() || !run::has(PYTHON) {
        return;
    }
    // All of it stays in core, so that only samples can tell.
    let script = format!(
        "
import time
memory = bytearray({} * 4096)
print(time.time_ns())
for pages in {USED:?}:
    end = time.time_ns() + 1_500_000_000
    while time.time_ns() < end:
        for at in range(0, pages * 4096, 4096): memory[at] = 1
    print(time.time_ns())
",
        USED[0]
    );
    let directory = run::directory();
    let file = directory.path().join("trace");
    let mut command = Command::new(run::tool());
    let command = command.args(["run", "--frames", "64M", "--sample-ms", "50", "--trace"]).arg(&file);
    let ran = command.args(["--", PYTHON, "-S", "-c", &script]).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let printed = String::from_utf8(ran.stdout).unwrap();
    let turns: Vec<u64> = printed.lines().map(|line| line.parse().unwrap()).collect();

    let trace = Trace::read(&file).unwrap();
    let sets = trace.records.iter().filter_map(|record| match record {
        Record::WorkingSet { time_ns, pages, least, most } => {
            Some((trace.head.began_unix_ns + time_ns, *pages, u64::from(*least)..=u64::from(*most)))
        }
        _ => None,
    });
    let sets: Vec<_> = sets.collect();
    for (used, turn) in USED.into_iter().zip(turns.windows(2)) {
        // Each is of the time since the one before. The interpreter uses some pages, too.
        let of_time = sets.windows(2).filter(|pair| turn[0] <= pair[0].0 && pair[1].0 <= turn[1]).map(|pair| &pair[1]);
        let mut found: Vec<_> = of_time.map(|(_, pages, bounds)| (*pages, bounds.clone())).collect();
        found.sort_by_key(|(pages, _)| *pages);
        assert!(found.len() >= 5, "{sets:?} at {turns:?}");
        let middle = found[found.len() / 2].0;
        assert!((used * 3 / 4..used * 7 / 4).contains(&middle), "{used} pages were used: {found:?}");
        let right = found.iter().filter(|(_, bounds)| *bounds.start() < used * 5 / 4 && used <= *bounds.end()).count();
        assert!(right * 2 > found.len(), "{used} pages were used: {found:?}");
    }
}

#[test]
fn a_bad_trace_is_one_line_and_no_picture() {
    let directory = run::directory();
    let picture = directory.path().join("picture.svg");
    let mut whole = b"SELFPGTR\x01\0\0\0\0\x10\0\0\x20\0\0\0\x01\0\0\0".to_vec();
    whole.extend_from_slice(&[0; 8]);
    let head = whole.clone();
    whole.extend_from_slice(&[1; 8]);
    whole.extend_from_slice(&[0; 24]);
    let with = |at: usize, byte: u8| {
        let mut bytes = whole.clone();
        bytes[at] = byte;
        bytes
    };
    let bad = [
        (Vec::new(), "empty"),
        (b"something else altogether, and longer".to_vec(), "no trace"),
        (whole[..20].to_vec(), "cut short after 20 bytes, within its header"),
        (whole[..whole.len() - 1].to_vec(), "cut short after 63 bytes, within a record"),
        (with(8, 2), "version 2"),
        (with(16, 16), "header is damaged"),
        (with(RECORD_BYTES, 200), "no kind 200"),
    ];
    for (bytes, says) in bad {
        let file = directory.path().join("bad");
        std::fs::write(&file, bytes).unwrap();
        let drawn = heatmap(&file, &picture);
        let errors = String::from_utf8(drawn.stderr).unwrap();
        assert_eq!(drawn.status.code(), Some(2), "{says}: {errors}");
        assert!(errors.contains(says) && errors.lines().count() == 1, "{says}: {errors}");
        assert!(!picture.exists(), "{says}: a picture was left");
        let printed = lines(&file, &["--json"]);
        let errors = String::from_utf8(printed.stderr).unwrap();
        assert_eq!((printed.status.code(), printed.stdout.len()), (Some(2), 0), "{says}: {errors}");
        assert!(errors.contains(says) && errors.lines().count() == 1, "{says}: {errors}");
    }
    // Without a fault there is nothing to draw, and no line to print.
    let file = directory.path().join("head");
    std::fs::write(&file, head).unwrap();
    let drawn = heatmap(&file, &picture);
    assert_eq!(drawn.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&drawn.stderr).contains("no faults") && !picture.exists());
    let printed = lines(&file, &[]);
    assert_eq!((printed.status.code(), printed.stdout.len()), (Some(0), 0));
    let missing = heatmap(&directory.path().join("missing"), &picture);
    assert_eq!(missing.status.code(), Some(2));
    std::fs::write(directory.path().join("whole"), &whole).unwrap();
    let nowhere = heatmap(&directory.path().join("whole"), &directory.path().join("none/picture.svg"));
    assert_eq!(nowhere.status.code(), Some(1), "{}", String::from_utf8_lossy(&nowhere.stderr));
}

/// What a command says of a trace for which its memory is too small.
fn in_little_memory(verb: &str, trace: &str) -> Output {
    let limited = "ulimit -v 400000; exec timeout 60 \"$0\" \"$@\"";
    Command::new("sh").args(["-c", limited]).arg(run::tool()).args([verb, trace]).output().unwrap()
}

#[test]
fn a_file_without_an_end_is_no_trace_at_once() {
    let directory = run::directory();
    let head = b"SELFPGTR\x01\0\0\0\0\x10\0\0\x20\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0";
    // Larger than the memory: one of zeros behind its header, and one of events.
    let (damaged, whole) = (directory.path().join("damaged"), directory.path().join("whole"));
    for path in [&damaged, &whole] {
        std::fs::write(path, head).unwrap();
    }
    let appended = |path| std::fs::OpenOptions::new().append(true).open(path).unwrap();
    appended(&damaged).set_len(1 << 30).unwrap();
    let mut event = [0u8; RECORD_BYTES];
    event[0] = 1;
    let (mut file, some) = (appended(&whole), event.repeat(1 << 15));
    (0..512).for_each(|_| file.write_all(&some).unwrap());
    for verb in ["trace", "heatmap"] {
        for (file, says) in [("/dev/zero", "no trace"), (damaged.to_str().unwrap(), "record 0 is damaged")] {
            let told = in_little_memory(verb, file);
            let errors = String::from_utf8_lossy(&told.stderr);
            assert_eq!((told.status.code(), told.stdout.len()), (Some(2), 0), "{verb} {file}: {errors}");
            assert!(errors.contains(says) && errors.lines().count() == 1, "{verb} {file}: {errors}");
        }
    }
    let drawn = in_little_memory("heatmap", whole.to_str().unwrap());
    let errors = String::from_utf8_lossy(&drawn.stderr);
    assert!(
        drawn.status.code() == Some(2) && errors.contains("out of memory") && errors.lines().count() == 1,
        "{errors}"
    );
    // What is printed is not kept.
    let line = "ulimit -v 400000; timeout 60 \"$0\" trace \"$1\" | head -1";
    let printed = Command::new("sh").args(["-c", line]).arg(run::tool()).arg(&whole).output().unwrap();
    assert!(printed.stdout.starts_with(b"   0.000000000  first") && printed.stderr.is_empty(), "{printed:?}");
}

#[test]
fn what_is_whole_before_some_damage_is_printed() {
    let directory = run::directory();
    let file = directory.path().join("cut");
    let mut bytes = b"SELFPGTR\x01\0\0\0\0\x10\0\0\x20\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    for kind in [1, 2, 64] {
        bytes.push(kind);
        bytes.extend_from_slice(&[0; RECORD_BYTES - 1]);
    }
    for (damage, says) in
        [(&b"half"[..], "cut short"), (&[65; RECORD_BYTES * 2 + 1], "cut short"), (&[99; 32], "no kind 99")]
    {
        std::fs::write(&file, [&bytes, damage].concat()).unwrap();
        let printed = lines(&file, &[]);
        let errors = String::from_utf8_lossy(&printed.stderr);
        assert!(errors.contains(says) && errors.lines().count() == 1, "{says}: {errors}");
        let count = printed.stdout.iter().filter(|byte| **byte == b'\n').count();
        assert_eq!((printed.status.code(), count), (Some(2), 3), "{says}");
    }
}

#[test]
fn a_trace_that_cannot_be_written_is_refused_before_anything_runs() {
    let ran = Command::new(run::tool())
        .args(["run", "--frames", "8M", "--trace", "/nonexistent/trace", "--", "/bin/echo", "ran"])
        .output()
        .unwrap();
    assert_eq!(ran.status.code(), Some(2));
    assert!(ran.stdout.is_empty() && String::from_utf8_lossy(&ran.stderr).contains("--trace"));
}

#[test]
fn a_link_in_the_traces_place_is_refused_and_stays() {
    // As /dev/stdout is one, to a file where that is redirected.
    let directory = run::directory();
    let (file, link) = (directory.path().join("file"), directory.path().join("link"));
    std::fs::write(&file, "kept").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let mut command = Command::new(run::tool());
    let ran = command.args(["run", "--frames", "8M", "--trace"]).arg(&link).args(["--", "/bin/echo", "ran"]).output();
    let ran = ran.unwrap();
    let errors = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.code() == Some(2) && ran.stdout.is_empty() && errors.contains("no file of its own"), "{errors}");
    assert_eq!((std::fs::read_to_string(&file).unwrap().as_str(), link.is_symlink()), ("kept", true));
}

/// Runs a line of the shell's with mounts of its own; `$0` is the tool, `$1` the directory. `None`: there is no mounting here.
fn with_mounts(directory: &Path, line: &str) -> Option<Output> {
    let ran = mounts::with_mounts(line, [run::tool().as_ref(), directory]);
    ran.map_err(|why| run::skip("mount", &why)).ok()
}

#[test]
fn a_full_disk_is_named_with_the_trace_and_leaves_none_that_is_empty() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    // Refused before the program; by the library, where an empty trace is there to be replaced; and in the midst of it.
    let line = r#"cd "$1" && mount -t tmpfs -o size=64k none . && cd "$1" && head -c 64k /dev/zero > fill
        traced() { "$0" run --frames 8M --trace t -- "$@"; echo $?; ls; }
        traced echo ran; : > t; traced echo ran; rm fill
        traced /usr/bin/python3 -S -W ignore -c 'x = [bytearray(4096) for _ in range(4000)]
import os, time
time.sleep(0.5)
child = os.fork()
os._exit(os.waitpid(child, 0)[1] if child else 0)' && "$0" trace t | tail -1"#;
    let Some(ran) = with_mounts(directory.path(), line) else { return };
    let (text, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(text.starts_with("2\nfill\n125\nfill\n0\nt\n"), "{text}{errors}");
    assert!(text.lines().last().is_some_and(|last| last.contains("0x")), "{text}{errors}");
    let told: Vec<_> = errors.lines().collect();
    let named = |line: &str| {
        line.contains("No space left")
            && (line.contains("/t ends here:")
                || line.contains("/t: ")
                || line.contains(" t: ")
                || line.contains("no trace of this process: "))
    };
    assert!(told.len() == 4 && told.iter().all(|line| named(line)), "{errors}");
}

#[test]
fn a_trace_that_cannot_be_replaced_leaves_no_statistics() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let line = r#"cd "$1" && echo old > t && mount --bind t t && ln -s nothing link && echo old > kept
        for stats in s link kept; do "$0" run --frames 8M --stats $stats --trace t -- echo ran; echo $?; done; ls; cat t kept"#;
    let Some(ran) = with_mounts(directory.path(), line) else { return };
    let (text, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert_eq!(text, "2\n2\n2\nkept\nlink\nt\nold\nold\n", "{errors}");
    assert!(
        errors.lines().count() == 3
            && errors.lines().all(|line| line.starts_with("selfpage run: --trace /") && line.contains("/t: ")),
        "{errors}"
    );
}
