//! What the tool refuses: in one line that names the verb, with status 2, and nothing is begun or left.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

#[path = "../../../tests/programs.rs"]
mod programs;
#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use tool::{Place, rows, selfpage, text};

#[track_caller]
fn refused(arguments: &[&str], begin: &str, names: &[&str]) -> String {
    let output = selfpage(arguments);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
    assert!(errors.lines().count() == 1 && errors.starts_with(begin), "{arguments:?}: {errors}");
    assert!(names.iter().all(|name| errors.contains(name)), "{arguments:?}: {errors}");
    assert!(output.stdout.is_empty(), "{arguments:?}: {}", text(&output.stdout));
    errors
}

#[test]
fn bad_usage_is_one_line_with_the_verb() {
    refused(&["tuor"], "selfpage: ", &["'tuor'", "there is tour", "`selfpage --help`"]);
    refused(&["tour", "--quik"], "selfpage tour: ", &["--quik", "there is --quick", "`selfpage tour --help`"]);
    refused(&["run"], "selfpage run: ", &["<PROGRAM>", "`selfpage run --help`"]);
    let mistyped = ["run", "--frame", "64M", "--store", "/nonexistent/store", "--", "true"];
    refused(&mistyped, "selfpage run: ", &["--frame", "there is --frames", "`selfpage run --help`"]);
    refused(&["run", "--", "--frame"], "selfpage run: ", &["there is no program --frame", "give its path"]);
    refused(&["run", "--sample-ms", "-5", "--", "true"], "selfpage run: ", &["--sample-ms", "0..="]);
    // What follows the program is the program's.
    refused(&["run", "/nonexistent", "--frame"], "selfpage run: ", &["cannot run /nonexistent"]);
    let unreadable = Command::new(env!("CARGO_BIN_EXE_selfpage")).arg(OsStr::from_bytes(b"\xff")).output().unwrap();
    let errors = text(&unreadable.stderr);
    assert_eq!(unreadable.status.code(), Some(2), "{errors}");
    assert!(errors.lines().count() == 1 && errors.starts_with("selfpage: "), "{errors}");
    let unreadable = Command::new(env!("CARGO_BIN_EXE_selfpage"))
        .args(["run".as_ref(), "--frames".as_ref(), OsStr::from_bytes(b"\xff"), "true".as_ref()])
        .output()
        .unwrap();
    let errors = text(&unreadable.stderr);
    assert!(
        errors.lines().count() == 1 && errors.starts_with("selfpage run: --frames \u{fffd}: that is not"),
        "{errors}"
    );
    for reps in ["-1", "0"] {
        let line = refused(&["bench", "faults", "--reps", reps], "selfpage bench: ", &["--reps", "1..="]);
        assert!(!line.contains("-- -1"), "{line}");
    }
}

#[test]
fn a_list_measures_nothing() {
    for option in ["--case=a", "--system=a", "--reps=1", "--dir=/", "--save=/nonexistent", "--quick"] {
        let name = option.split('=').next().unwrap();
        refused(&["bench", "list", option], "selfpage bench: ", &[name, "list"]);
    }
    let objects = rows(&selfpage(&["bench", "list", "--json"]));
    assert!(objects.iter().any(|object| object["bench"] == "paging" && object["about"].is_string()));
}

#[test]
fn a_place_that_cannot_be_written_is_named_with_another() {
    let bench = ["bench", "faults", "--quick", "--case", "first-touch-4k", "--system", "kernel"];
    refused(&[&bench[..], &["--dir", "/proc"]].concat(), "selfpage bench: cannot write in /proc: ", &["--dir"]);
    refused(&[&bench[..], &["--save", "/proc/run"]].concat(), "selfpage bench: cannot make /proc/run: ", &["--save"]);
}

#[test]
fn what_run_is_told_in_vain() {
    let place = Place::new("run");
    let (own, fifo) = (place.path("own"), place.path("fifo"));
    std::fs::write(&own, format!("#!{own}\n")).unwrap();
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let run = |arguments: &[&str], names: &[&str]| refused(&[&["run"], arguments].concat(), "selfpage run: ", names);
    run(&["--sample-ms", "5", "--", "true"], &["--sample-ms", "--frames"]);
    run(&["--frames", "16M", "--sample-ms", "5", "--", "true"], &["--sample-ms", "--trace FILE"]);
    // Each would write over the other.
    let file = place.path("file");
    let same = place.path(&format!("../{}/file", place.0.file_name().unwrap().display()));
    let there = place.path("there");
    std::fs::write(&there, "").unwrap();
    std::fs::hard_link(&there, place.path("link")).unwrap();
    for (one, other) in [(&file, &file), (&file, &same), (&there, &place.path("link"))] {
        for (stats, trace, store) in [(one, other, "memory"), (one, &own, other.as_str()), (&own, one, other)] {
            let arguments = ["--frames", "16M", "--stats", stats, "--trace", trace, "--store", store, "--", "true"];
            run(&arguments, &["are both ", one, other, "name two files"]);
        }
    }
    assert!(!Path::new(&file).exists(), "something was left");
    run(&["--frames", "16M", "--", ""], &["the name of the program is empty"]);
    run(&["--frames", "16M", "--", &own], &["chain of its interpreters does not end"]);
    run(
        &["--frames", "16M", "--store", "", "--", "true"],
        &["a file, a block device, a directory, `memory`, or `none`"],
    );
    let line =
        run(&["--frames", "16M", "--store", &fifo, "--", "true"], &["neither", "a directory, `memory`, or `none`"]);
    assert_eq!(line.matches(&fifo).count(), 1, "{line}");
    for (mistyped, meant) in [("Memory", "`memory`"), ("NONE", "`none`")] {
        run(
            &["--frames", "16M", "--store", mistyped, "--", "true"],
            &["did you mean ", meant, &format!("./{mistyped}")],
        );
    }
    for option in ["--stats", "--trace", "--store"] {
        run(&["--frames", "16M", option, "-", "--", "true"], &[option, " -: ", "name a file", "./-"]);
    }
}

#[test]
fn io_that_there_is_not_is_no_fault_of_the_place() {
    programs::build(&["selfpage-preload"]);
    for (arguments, elsewhere) in
        [(&["tour", "--quick"][..], "TMPDIR"), (&["run", "--frames", "16M", "--", "true"], "--store")]
    {
        let mut tool = Command::new(env!("CARGO_BIN_EXE_selfpage"));
        let output = tool.args(arguments).env("SELFPAGE_IO", "poll").output().unwrap();
        let errors = text(&output.stderr);
        if errors.contains("userfaultfd") {
            return skip::skip("uffd", &errors);
        }
        assert!(errors.contains("SELFPAGE_IO=poll; set it to auto or pool"), "{errors}");
        assert!(!output.status.success() && !errors.contains(elsewhere), "{errors}");
    }
}

#[test]
fn a_tool_without_its_libraries_says_where_they_come_from() {
    let place = Place::new("alone");
    let output = Command::new(place.copy_of_tool("selfpage")).args(["run", "--", "true"]).output().unwrap();
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(2) && errors.lines().count() == 1, "{errors}");
    assert!(errors.contains("cargo build ") && errors.contains("copy it there from target/"), "{errors}");
}

/// The tool under a limit of the shell's: what it says in one line, with what status.
fn under(limit: &str, arguments: &str) -> (Option<i32>, String) {
    let line = format!(r#"{limit} && exec "$0" {arguments}"#);
    let output = Command::new("sh").args(["-c", &line, env!("CARGO_BIN_EXE_selfpage")]).output().unwrap();
    let errors = text(&output.stderr);
    assert!(errors.lines().count() <= 1 && errors.is_empty() == output.status.success(), "{limit}: {errors}");
    (output.status.code(), errors)
}

#[test]
fn a_stack_that_is_too_small_is_told_with_the_remedy() {
    programs::build(&["selfpage-malloc", "selfpage-preload"]);
    // With less the loader itself comes to the end of it, in some environments.
    for (kib, arguments) in [(20, "run -- true"), (32, "run -- true"), (48, "doctor"), (48, "--help")] {
        let (status, errors) = under(&format!("ulimit -c 0; ulimit -s {kib}"), arguments);
        assert!(status == Some(1) && errors.starts_with("selfpage: "), "{kib}: {status:?} {errors}");
        assert!(errors.contains("`ulimit -s`") && errors.contains(&format!("{kib} KiB")), "{errors}");
    }
    // The kernel puts a pointer to each argument there too.
    let (status, errors) = under("ulimit -c 0; ulimit -s 140", "run -- true $(yes a | head -11000)");
    assert!(status == Some(1) && errors.contains("`ulimit -s` to 192"), "{status:?} {errors}");
    // What the line asks for is enough.
    for arguments in ["run -- true", "run --frames 8M -- true", "doctor"] {
        let errors = under("ulimit -s 128", arguments).1;
        assert!(!errors.contains("ulimit -s"), "{errors}");
    }
}

#[test]
fn a_limit_that_keeps_the_program_from_its_start_is_told_with_the_remedy() {
    programs::build(&["selfpage-malloc", "selfpage-preload"]);
    for open_files in 4..16 {
        for arguments in ["run -- true", "run --frames 8M -- true"] {
            let (status, errors) = under(&format!("ulimit -n {open_files}"), arguments);
            assert!(status == Some(0) || errors.contains("ulimit -n"), "{open_files}: {arguments}: {errors}");
        }
    }
    let place = Place::new("processes");
    for file in ["selfpage", "libselfpage_malloc.so"] {
        std::fs::copy(Path::new(env!("CARGO_BIN_EXE_selfpage")).with_file_name(file), place.path(file)).unwrap();
    }
    // A user with no other processes, for whom this one is all that may be.
    let mut limited = Command::new("prlimit");
    limited.args(["--nproc=1", "setpriv", "--reuid=64124", "--clear-groups", &place.path("selfpage")]);
    let Ok(output) = limited.args(["run", "--", "true"]).current_dir("/").output() else {
        return skip::skip("prlimit", "there is no prlimit(1): apt-get install util-linux");
    };
    let errors = text(&output.stderr);
    if errors.contains("setpriv: ") || errors.contains("prlimit: ") {
        return skip::skip("root", &errors);
    }
    assert!(output.status.code() == Some(2) && errors.contains("`ulimit -u`"), "{errors}");
}

#[test]
fn a_store_that_is_refused_is_not_left() {
    programs::build(&["selfpage-preload"]);
    let place = Place::new("store");
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.args(["run", "--frames", "16M", "--store", &place.path("store"), "--", "true"]);
    // Found wanting when the file is made already, as a full disk is.
    let output = run.env("SELFPAGE_IO", "nonsense").output().unwrap();
    let errors = text(&output.stderr);
    if output.status.code() == Some(1) {
        return skip::skip("uffd", &errors);
    }
    assert!(output.status.code() == Some(2) && errors.contains("SELFPAGE_IO"), "{errors}");
    assert_eq!(std::fs::read_dir(&place.0).unwrap().count(), 0, "the store was left");
}

/// Says in the C library's place that files of any place are on vfat, which not every kernel has.
const VFAT: &str = "#include <sys/vfs.h>
int statfs(const char *path, struct statfs *about) { (void)path; *about = (struct statfs){ .f_type = 0x4d44 }; return 0; }
";

#[test]
fn a_store_where_files_have_no_holes_is_refused_before_anything_is_removed() {
    programs::build(&["selfpage-preload"]);
    let place = Place::new("holes");
    let (trace, source) = (place.path("trace"), place.path("vfat.c"));
    std::fs::write(&source, VFAT).unwrap();
    std::fs::write(&trace, "old").unwrap();
    let vfat = programs::compile(&place.0, Path::new(&source), &["-shared", "-fPIC"]);
    let run = |store: &str| {
        let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
        run.args(["run", "--frames", "8M", "--trace", &trace, "--store", store, "--", "true"]);
        run.env("LD_PRELOAD", &vfat).output().unwrap()
    };
    for store in [place.path("new"), place.0.display().to_string()] {
        let output = run(&store);
        let errors = text(&output.stderr);
        if output.status.code() == Some(1) {
            return skip::skip("uffd", &errors);
        }
        assert_eq!((output.status.code(), errors.lines().count()), (Some(2), 1), "{errors}");
        assert!(errors.starts_with(&format!("selfpage run: --store {store}: files on vfat have no holes")), "{errors}");
        assert_eq!(std::fs::read(&trace).unwrap(), b"old");
        assert!(!Path::new(&place.path("new")).exists(), "the store was left");
    }
    // Nothing is asked of a place where nothing goes.
    assert!(run("memory").status.success());
}

#[test]
fn several_files_of_a_trace_are_told() {
    programs::build(&["selfpage-preload"]);
    let place = Place::new("traces");
    let trace = place.path("trace");
    let run = |script: &str| selfpage(&["run", "--frames", "16M", "--trace", &trace, "--", "/bin/sh", "-c", script]);
    let one = run("exit 0");
    if one.status.code() == Some(1) {
        return skip::skip("uffd", &text(&one.stderr));
    }
    assert_eq!((one.status.code(), text(&one.stderr).as_str()), (Some(0), ""));
    let errors = text(&run("/bin/true; /bin/true; exit 0").stderr);
    assert!(errors.lines().count() == 1 && errors.contains(" files, ") && errors.contains("largest"), "{errors}");
    assert!(errors.starts_with("selfpage run: the trace is in ") && errors.contains(&trace), "{errors}");
}

#[test]
fn a_name_tells_the_terminal_nothing() {
    let name = "no\x1b[2Jsuch\nfile";
    for arguments in [&["plot", name][..], &["heatmap", name], &["trace", name], &["tour", name], &["bench", name]] {
        let line = refused(arguments, "selfpage", &["no?[2Jsuch"]);
        assert!(!line.trim_end().contains(char::is_control), "{line:?}");
    }
    refused(&["run", "--frames", name, "true"], "selfpage run: ", &["--frames no?[2Jsuch?file"]);
}
