//! What `selfpage run` refuses, and that it says why in one line and starts nothing.

mod run;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

const PYTHON: &str = "/usr/bin/python3";

#[track_caller]
fn refused(arguments: &[&str], status: i32, names: &[&str]) {
    let output = Command::new(run::tool()).arg("run").args(arguments).output().unwrap();
    is_refusal(&output, &format!("{arguments:?}"), status, names);
}

#[track_caller]
fn is_refusal(output: &Output, what: &str, status: i32, names: &[&str]) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{what}: {errors}");
    assert!(errors.lines().count() == 1 && errors.starts_with("selfpage run: "), "{errors}");
    assert!(names.iter().all(|name| errors.contains(name)), "{what}: {errors}");
    assert!(output.stdout.is_empty(), "{what} ran");
}

fn write(path: &Path, contents: &[u8], mode: u32) {
    std::fs::write(path, contents).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn sizes_and_names_that_make_no_sense() {
    for size in ["", "many", "-4M", "64MB", "1.5G", "99999999999999999999G"] {
        refused(&[&format!("--frames={size}"), "--", "echo", "ran"], 2, &["--frames"]);
    }
    refused(&["--frames", "64K", "--", "echo", "ran"], 2, &["1M"]);
    refused(&["--frames", "16M", "--policy", "best", "--", "echo", "ran"], 2, &["best", "lru"]);
    refused(&["--frames", "16M", "--store", "/nonexistent/store", "--", "echo", "ran"], 2, &["/nonexistent"]);
    refused(
        &["--frames", "16M", "--stats", "/nonexistent/stats", "--", "echo", "ran"],
        2,
        &["/nonexistent", "make its directory"],
    );
    refused(&["--frames", "16M", "--stats", "/tmp", "--", "echo", "ran"], 2, &["/tmp", "name a file"]);
    refused(&["--frames", "16M", "--", "no-such-program"], 2, &["no-such-program", "PATH"]);
    refused(&["--frames", "16M", "--", "/nonexistent/program"], 2, &["/nonexistent/program"]);
}

#[test]
fn what_earlier_runs_left_stays_and_nothing_new_comes() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (stats, trace) = (path("stats"), path("trace"));
    let (ours, echo) = (["--frames", "16M", "--stats", &stats, "--trace", &trace], ["--", "echo", "ran"]);
    let refused_with = |options: &[&str], names: &[&str]| refused(&[&ours, options, &echo].concat(), 2, names);
    std::fs::write(&stats, "old counts").unwrap();
    std::fs::write(&trace, "old events").unwrap();
    refused_with(&["--store", "/dev/null"], &["/dev/null"]);
    refused(&["--frames", "16M", "--stats", &stats, "--trace", &stats, "--", "echo", "ran"], 2, &["both", &stats]);
    assert_eq!(std::fs::read_to_string(&stats).unwrap(), "old counts");
    assert_eq!(std::fs::read_to_string(&trace).unwrap(), "old events");
    std::fs::remove_file(&stats).unwrap();
    std::fs::remove_file(&trace).unwrap();
    refused_with(&["--store", "/dev/null"], &["/dev/null"]);
    let store = path("store");
    refused(&["--frames", "16M", "--store", &store, "--stats", "/nonexistent/stats", "--", "echo"], 2, &["--stats"]);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "something was left");
}

#[test]
fn programs_that_cannot_be_entered() {
    let directory = run::directory();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let frames = ["--frames", "16M", "--"];
    let refused = |program: &str, names: &[&str]| refused(&[&frames[..], &[program]].concat(), 2, names);

    let Some(static_program) = run::compile_static("library", &["-Wl,-e,slot", "-nostartfiles"]) else { return };
    refused(static_program.to_str().unwrap(), &["statically linked"]);
    let musl = run::compile("hazards", &["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"]);
    refused(musl.to_str().unwrap(), &["another C library", "ld-musl"]);

    let mut small = std::fs::read("/bin/true").unwrap();
    small[4] = 1;
    write(Path::new(&path("small")), &small, 0o755);
    refused(&path("small"), &["64-bit"]);
    write(Path::new(&path("plain")), b"echo ran\n", 0o755);
    refused(&path("plain"), &["neither a program nor a script"]);
    write(Path::new(&path("data")), b"#!/bin/sh\necho ran\n", 0o644);
    refused(&path("data"), &["not executable", "chmod"]);
    let script = format!("#!{}\n", static_program.display());
    write(Path::new(&path("script")), script.as_bytes(), 0o755);
    refused(&path("script"), &["script", "statically linked"]);
    refused(directory.path().to_str().unwrap(), &["no file"]);
    write(Path::new(&path("dos")), b"#!/bin/sh\r\necho ran\r\n", 0o755);
    refused(&path("dos"), &["dos: ", "the interpreter /bin/sh ", "carriage return", "Unix line ends"]);
    // Headers of its parts at the end of all addresses.
    small[4] = 2;
    small[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
    write(Path::new(&path("damaged")), &small, 0o755);
    refused(&path("damaged"), &["damaged: ", "ELF header is damaged"]);

    std::fs::copy("/bin/true", path("other")).unwrap();
    if std::os::unix::fs::chown(path("other"), Some(65534), Some(65534)).is_err() {
        return run::skip("root", "only root can make a program that becomes another user");
    }
    std::fs::set_permissions(path("other"), std::fs::Permissions::from_mode(0o4755)).unwrap();
    refused(&path("other"), &["more rights", "setuid"]);
}

#[test]
fn to_a_script_linux_gives_no_rights() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let script = directory.path().join("script");
    write(&script, b"#!/bin/sh\necho ran\n", 0o755);
    if std::os::unix::fs::chown(&script, Some(65534), Some(65534)).is_err() {
        return run::skip("root", "only root can make a file somebody else's");
    }
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o6755)).unwrap();
    let executes_it = format!("{0}; {0}", script.display());
    for (program, arguments, says) in
        [(script.as_path(), &[][..], "ran\n"), (Path::new("/bin/sh"), &["-c", &executes_it][..], "ran\nran\n")]
    {
        let ran = run::run("8M", program, arguments).ok();
        assert_eq!((ran.text().as_str(), &ran.stats["not_managed"]), (says, &serde_json::json!([])), "{program:?}");
    }
}

#[test]
fn the_loader_is_a_program_too() {
    if !run::possible() {
        return;
    }
    let ran = run::run("16M", "/lib64/ld-linux-x86-64.so.2", &["/bin/echo", "ran"]).ok();
    assert_eq!((ran.text().as_str(), ran.stats["processes"].as_array().unwrap().len()), ("ran\n", 1), "{}", ran.stats);
}

/// As it is told: a letter tells programs from each other, and a cut one does no harm.
#[test]
fn a_name_is_told_as_it_is() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let Some(alone) = run::compile_static("alone", &[]) else { return };
    let letters = ["größe", "grüße", "a\"b\\c", "tab\there"];
    let names = letters.map(|name| directory.path().join(name).to_str().unwrap().to_owned());
    names.iter().for_each(|name| _ = std::fs::copy(&alone, name).unwrap());
    let ran = run::run(
        "8M",
        "/bin/sh",
        &["-c", r#"for program; do "$program"; done; exit 3"#, "sh"]
            .iter()
            .copied()
            .chain(names.iter().map(String::as_str))
            .collect::<Vec<_>>(),
    );
    let errors = ran.errors();
    assert_eq!((ran.code(), errors.lines().count()), (3, names.len()), "{errors}");
    let told: Vec<_> =
        ran.stats["not_managed"].as_array().unwrap().iter().map(|one| one["not_managed"].as_str().unwrap()).collect();
    assert_eq!(told, names);
    assert!(errors.contains("größe was executed"), "{errors}");
    // What is no text, and more of it than a line has room for.
    let long = format!("{}/{}", "/.".repeat(600), directory.path().join("größe").display());
    let bytes = "cp \"$1\" \"$0/$(printf 'a\\377b')\"; \"$0/$(printf 'a\\377b')\"; \"$2\"; exit 3";
    let ran =
        run::run("8M", "/bin/sh", &["-c", bytes, directory.path().to_str().unwrap(), alone.to_str().unwrap(), &long]);
    let told = &ran.stats["not_managed"];
    assert!(
        ran.code() == 3 && told[0]["not_managed"].as_str().unwrap().ends_with("/a\u{fffd}b"),
        "{}{told}",
        ran.errors()
    );
    let cut = told[1]["not_managed"].as_str().unwrap();
    assert!(cut.len() > 900 && long.starts_with(cut), "{told}");
    // As the kernel has it: fifteen bytes.
    let named = directory.path().join("обработка_данных");
    std::fs::copy("/bin/true", &named).unwrap();
    let ran = run::run("8M", &named, &[]).ok();
    assert_eq!(ran.stats["processes"][0]["program"], "обработ\u{fffd}");
}

#[test]
fn programs_that_are_executed_and_cannot_be_entered() {
    if !run::possible() || !run::has(PYTHON) {
        return;
    }
    let directory = run::directory();
    let Some(alone) = run::compile_static("alone", &[]) else { return };
    let alone = alone.to_str().unwrap();
    let other = directory.path().join("other");
    std::fs::copy("/bin/true", &other).unwrap();
    let changes_user = std::os::unix::fs::chown(&other, Some(65534), Some(65534)).is_ok();
    std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o4755)).unwrap();

    // A script's shell calls execve; Python calls posix_spawn too, and looks through PATH.
    let script = format!("{alone}; {alone}; {}; /bin/true; exit 3", other.display());
    let spawn = "import os, sys; d, n = os.path.split(sys.argv[1]); os.environ['PATH'] = '/nonexistent:' + d
pid = os.posix_spawnp(n, [n], os.environ); sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))";
    let by_shell = run::run("8M", "/bin/sh", &["-c", &script]);
    let by_python = run::run("8M", PYTHON, &["-S", "-c", spawn, alone]);
    assert_eq!((by_shell.code(), by_python.code()), (3, 7), "{}{}", by_shell.errors(), by_python.errors());
    for (ran, also) in [(by_shell, changes_user), (by_python, false)] {
        let errors = ran.errors();
        assert_eq!(errors.lines().count(), 1 + usize::from(also), "{errors}");
        assert!(errors.contains(alone) && errors.contains("linked statically"), "{errors}");
        assert_eq!(errors.contains("other was executed and not managed: it runs with more rights"), also, "{errors}");
        let told = ran.stats["not_managed"].as_array().unwrap();
        assert!(told.len() == errors.lines().count() && told[0]["not_managed"] == alone, "{}", ran.stats);
    }
}

/// musl's loader loads the library, finds no functions of its C library for it, and ends.
#[test]
fn programs_with_another_c_library_are_executed_without_ours() {
    const OTHER: &str = "import ctypes, os, sys
c = ctypes.CDLL(None)
program = sys.argv[1]
folder, name = (text.encode() for text in os.path.split(program))
os.environ['PATH'] = '/nonexistent:' + folder.decode()
path, no = program.encode(), None
strings = lambda *items: (ctypes.c_char_p * (len(items) + 1))(*items, None)
pid = ctypes.c_int()
ways = {
    'execv': lambda: c.execv(path, strings(name)),
    'execve': lambda: c.execve(path, strings(name), strings(b'OTHER=1', b'LD_PRELOAD=' + b'/nonexistent.so:' + library + b' /other.so')),
    'execvp': lambda: c.execvp(name, strings(name)),
    'execl': lambda: c.execl(path, name, no),
    'null': lambda: c.execve(path, strings(name), no),
    'many': lambda: c.execve(path, strings(name), strings(*[b'X%d=' % index for index in range(1020)], b'LD_PRELOAD=' + library)),
    'spawn': lambda: c.posix_spawn(ctypes.byref(pid), path, no, no, strings(name), env) or os.waitpid(pid.value, 0),
    'spawnp': lambda: c.posix_spawnp(ctypes.byref(pid), name, no, no, strings(name), env) or os.waitpid(pid.value, 0),
}
library = os.environb[b'LD_PRELOAD']
env = strings(*[name + b'=' + value for name, value in os.environb.items()])
for name_of_way, way in ways.items():
    sys.stdout.write(name_of_way + ': ')
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        way()
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 7, (name_of_way, status)
";
    if !run::possible() || !run::has(PYTHON) {
        return;
    }
    let loader = run::compile("loader", &["-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-O1"]);
    let program = run::compile("alone", &[&format!("-Wl,--dynamic-linker={}", loader.display())]);
    let ran = run::run("8M", PYTHON, &["-S", "-c", OTHER, program.to_str().unwrap()]);
    let own = "none, none\n";
    let others = "/nonexistent.so:/other.so, 1\n";
    let expected =
        format!("execv: {own}execve: {others}execvp: {own}execl: {own}null: {own}many: {own}spawn: {own}spawnp: {own}");
    assert_eq!((ran.text(), ran.code()), (expected, 0), "{}", ran.errors());
    assert!(ran.errors().contains("another C library"), "{}", ran.errors());
}

/// It lies deep down, as those of a store of packages.
#[test]
fn a_loader_with_a_long_name_is_glibcs_all_the_same() {
    if !run::possible() {
        return;
    }
    let place = run::directory();
    let deep = place.path().join("d".repeat(200)).join("e".repeat(200));
    std::fs::create_dir_all(&deep).unwrap();
    let loader = deep.join("ld-linux-x86-64.so.2");
    std::os::unix::fs::symlink("/lib64/ld-linux-x86-64.so.2", &loader).unwrap();
    let program = run::compile("alone", &[&format!("-Wl,--dynamic-linker={}", loader.display())]);
    let ran = run::run("8M", "/bin/sh", &["-c", "\"$0\"; [ $? = 7 ]", program.to_str().unwrap()]).ok();
    assert_eq!(ran.stats["processes"].as_array().unwrap().len(), 2, "{}", ran.stats);
}

/// As behind `chroot`, or in another mount namespace.
#[test]
fn programs_that_are_executed_where_the_library_is_not() {
    if !run::possible() || !run::has("unshare") {
        return;
    }
    let tool = run::tool();
    // Ours need not be the first name.
    let script = r#"exec env LD_PRELOAD=libm.so.6:$LD_PRELOAD sh -c '/bin/true && mount -t tmpfs none "$0" && exec /bin/echo ran' "$0""#;
    let arguments = ["-c", script, tool.parent().unwrap().to_str().unwrap()];
    let ran = run::run_under(&["unshare", "-m"], "/".as_ref(), &["--frames", "8M"], "/bin/sh", &arguments);
    let errors = ran.errors();
    if errors.contains("mount: ") || errors.contains("unshare: ") {
        return run::skip("mount", &errors);
    }
    assert_eq!((ran.code(), ran.text().as_str()), (0, "ran\n"), "{errors}");
    // The loader's own line comes before, as the program begins.
    let told = "selfpage run: /bin/echo was executed and not managed: the library cannot be read where it runs";
    assert_eq!(errors.lines().last(), Some(told), "{errors}");
    let told = ran.stats["not_managed"].as_array().unwrap();
    assert!(told.len() == 1 && told[0]["not_managed"] == "/bin/echo", "{}", ran.stats);
}

#[test]
fn a_line_that_cannot_be_said_takes_nothing_from_the_run() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let stats = directory.path().join("stats");
    let Some(alone) = run::compile_static("alone", &[]) else { return };
    let mut command = Command::new(run::tool());
    command.args(["run", "--frames", "8M", "--stats"]).arg(&stats).args(["--", "/bin/sh", "-c", "\"$0\"; exit 3"]);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let ended = command.arg(&alone).stderr(full).status().unwrap();
    let told = std::fs::read_to_string(&stats).unwrap();
    assert!(ended.code() == Some(3) && told.contains("linked statically"), "{ended}: {told}");
}

#[test]
fn the_search_for_a_program_is_the_c_librarys() {
    if !run::possible() || !run::has(PYTHON) {
        return;
    }
    // A directory of that name comes first in PATH, and then where we are, as an element that is empty.
    let directory = run::directory();
    let Some(alone) = run::compile_static("alone", &[]) else { return };
    let name = alone.file_name().unwrap().to_str().unwrap();
    std::fs::create_dir(directory.path().join(name)).unwrap();
    let spawn = "import os, sys; os.environ['PATH'] = sys.argv[1] + ':'
pid = os.posix_spawnp(sys.argv[2], [sys.argv[2]], os.environ); sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))";
    let arguments = ["-S", "-c", spawn, directory.path().to_str().unwrap(), name];
    let ran = run::run_in(alone.parent().unwrap(), "8M", PYTHON, &arguments);
    assert_eq!(ran.code(), 7, "{}", ran.errors());
    assert!(ran.errors().contains(&format!("./{name} was executed and not managed")), "{}", ran.errors());
}

#[test]
fn a_library_that_the_loader_would_ignore() {
    if !run::possible() {
        return;
    }
    let tool = run::tool();
    let directory = run::directory();
    let refused_in = |name: &str, library: Option<&[u8]>, names: &[&str]| {
        let there = directory.path().join(name);
        std::fs::create_dir(&there).unwrap();
        std::fs::copy(&tool, there.join("selfpage")).unwrap();
        for file in ["libselfpage_frames.so", "libselfpage_malloc.so"] {
            match library {
                Some(bytes) => std::fs::write(there.join(file), bytes).unwrap(),
                None => {
                    std::fs::copy(tool.with_file_name("libselfpage_frames.so"), there.join(file)).map(drop).unwrap()
                }
            }
        }
        for arguments in [&["run", "--frames", "16M", "--"][..], &["run", "--"]] {
            let ran = Command::new(there.join("selfpage")).args(arguments).args(["/bin/echo", "ran"]).output().unwrap();
            is_refusal(&ran, &format!("{name}: {arguments:?}"), 2, names);
        }
    };
    refused_in("a space", None, &["LD_PRELOAD", "space", "move selfpage"]);
    refused_in("a:colon", None, &["LD_PRELOAD", "colon", "move selfpage"]);
    refused_in("damaged", Some(b"no library"), &["loader", "/bin/echo", "damaged/libselfpage"]);
}

#[test]
fn without_the_right_to_serve_the_kernels_faults() {
    if !run::possible() || !run::has("setpriv") {
        return;
    }
    if !run::is_root() {
        return run::skip("root", "only root can become another user");
    }
    let open = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|text| text.trim() == "1");
    let is_for_all = |about: std::fs::Metadata| about.permissions().mode() & 0o006 == 0o006;
    if open || std::fs::metadata("/dev/userfaultfd").is_ok_and(is_for_all) {
        return run::skip("unprivileged", "every user may serve the kernel's faults");
    }
    let tool = run::tool();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--clear-groups", "--no-new-privs"]).arg(&tool).args([
        "run",
        "--frames",
        "16M",
        "--",
        "/bin/echo",
        "ran",
    ]);
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("Permission denied") && errors.contains("setpriv") {
        return run::skip("unprivileged", "another user cannot reach what was built");
    }
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("system calls cannot be served") && errors.contains("--ambient-caps +sys_ptrace"),
        "{errors}"
    );
    assert!(output.stdout.is_empty());
}

/// The tool under a limit of the shell's, with options of its own, and the files of an earlier run.
fn under(limit: &str, kib: &str, options: &str) -> Output {
    let directory = run::directory();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (stats, trace) = (path("stats"), path("trace"));
    [&stats, &trace].into_iter().for_each(|file| std::fs::write(file, "old").unwrap());
    let script = format!(
        "{limit} {kib} && exec \"$0\" run --frames 8M --stats {stats} --trace {trace} {options} -- /bin/echo ran"
    );
    let output = Command::new("/bin/sh").args(["-c", &script]).arg(run::tool()).output().unwrap();
    let is_old = [&stats, &trace].map(|file| std::fs::read(file).unwrap() == b"old");
    assert_eq!(is_old, [!output.status.success(); 2], "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Says by which limits a program has too little, and that as much as the line asks for is enough; for a store in memory it may not be.
fn is_too_low(limit: &str, too_low: &[&str], line: &str) {
    let text = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    for kib in too_low {
        let below = format!("{limit} {kib}; exec /bin/true");
        let below = run::run("8M", "/bin/sh", &["-c", &below]);
        let above = under(limit, kib, "");
        assert_eq!((above.status.code(), below.code()), (Some(125), 125), "{}{}", text(&above), below.errors());
        for (who, errors) in [("selfpage run", text(&above)), ("selfpage", below.errors())] {
            assert!(errors.lines().count() == 1 && errors.starts_with(&format!("{who}: {line}")), "{errors}");
            assert!(errors.contains(kib) && errors.contains("GiB"), "{errors}");
        }
        assert!(above.stdout.is_empty());
    }
    for options in ["", "--store memory", "--store none"] {
        let errors = text(&under(limit, too_low[0], options));
        let asked = errors.split(['(', ')']).nth(1).unwrap();
        let ran = under(limit, asked, options);
        assert_eq!((ran.status.code(), &*ran.stdout), (Some(0), &b"ran\n"[..]), "{asked}: {}", text(&ran));
        let in_memory = under(limit, asked, "--store memory").status.code();
        assert!((options == "--store memory") == (in_memory == Some(0)), "{asked}");
    }
}

#[test]
fn too_few_addresses() {
    if run::possible() {
        is_too_low("ulimit -v", &["1000000", "70000000", "213000000"], "too few addresses");
    }
}

#[test]
fn too_little_memory_to_write_to() {
    if run::possible() {
        is_too_low("ulimit -d", &["50000", "150000", "700000"], "too little memory to write to");
    }
}

#[test]
fn a_limit_that_the_librarys_own_files_do_not_fit_is_named_too() {
    if !run::possible() {
        return;
    }
    for (limit, kib, line) in
        [("ulimit -d", "5000", "too little memory to write to"), ("ulimit -v", "10000", "too few addresses")]
    {
        is_refusal(&under(limit, kib, ""), limit, 125, &[line, limit, "GiB"]);
    }
}

#[test]
fn what_the_program_alone_finds_out_leaves_the_counts_of_an_earlier_run() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let stats = directory.path().join("stats");
    let lowers = run::compile("lowers", &["-shared", "-fPIC"]);
    let ran = |preloaded: &Path| {
        let mut command = Command::new(run::tool());
        command.args(["run", "--frames", "8M", "--stats"]).arg(&stats).args(["--", "/bin/sh", "-c", "exit 125"]);
        let output = command.env("LD_PRELOAD", preloaded).output().unwrap();
        assert_eq!(output.status.code(), Some(125));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let refused = || assert!(ran(&lowers).starts_with("selfpage: too few addresses"));
    refused();
    assert!(!stats.exists(), "something was left");
    std::fs::write(&stats, "old").unwrap();
    refused();
    assert_eq!(std::fs::read_to_string(&stats).unwrap(), "old");
    // It is the program's own status, too.
    assert_eq!(ran(Path::new("")), "");
    assert!(std::fs::read_to_string(&stats).unwrap().contains("\"program\":\"sh\""));
}
