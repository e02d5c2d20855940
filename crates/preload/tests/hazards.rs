//! Where programs break a pager: each case of tests/c/hazards.c, in frames fewer than it touches.

mod run;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use run::Ran;

fn programs() -> Option<&'static PathBuf> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM
        .get_or_init(|| {
            run::possible().then(|| {
                let library = run::compile("library", &["-shared", "-fPIC"]);
                // SAFETY: set before the first test reads the environment, under the lock of `PROGRAM`.
                unsafe { std::env::set_var("SELFPAGE_TEST_LIBRARY", library) };
                run::compile("hazards", &[])
            })
        })
        .as_ref()
}

fn case(name: &str) -> Option<Ran> {
    programs().map(|program| run::run("8M", program, &[name]))
}

/// The case says so when it has found everything right, pages went and came, and never more than the frames were used.
fn ok(name: &str) -> Option<Ran> {
    let ran = case(name)?.ok();
    assert_eq!(ran.text(), "ok\n");
    assert!(ran.stats["evictions_total"].as_u64().unwrap() > 1000, "{}", ran.stats);
    assert!(ran.stats["resident_bytes_max"].as_u64().unwrap() <= 8 << 20, "{}", ran.stats);
    Some(ran)
}

macro_rules! cases {
    ($($name:ident,)*) => { $(#[test] fn $name() { ok(stringify!($name)); })* };
}

cases! {
    storm, threads, fork_amid, fork_amid_signals, fork_from_thread, fork_with_libraries, dlopen_tls, own_handler, close_all, calls_on_absent_pages, robust, robust_again, robust_unlocked, own_stacks, signals,
    main_ends_first, last_is_cancelled, all_end_at_once, quick, zero_copy, lend_to_pipe,
}

#[test]
fn fork_and_go_on() {
    let Some(ran) = ok("fork_and_go_on") else { return };
    // Four children with a child each, and the parent: every one with pages of its own that went.
    let processes = ran.stats["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 9, "{}", ran.stats);
    assert!(processes.iter().all(|process| process["evictions_total"].as_u64().unwrap() > 100), "{}", ran.stats);
}

/// A line says that there was no frame for the reader, who has less than it asked for; the process that it read goes on.
#[test]
fn a_process_goes_on_of_which_another_read_more_at_once_than_the_frames_hold() {
    let Some(program) = programs() else { return };
    let ran = run::run("2M", program, &["read_by_another"]);
    assert_eq!((ran.text().as_str(), ran.code()), ("ok\n", 0), "{}", ran.errors());
    assert!(ran.errors().contains("no frame") && ran.errors().lines().count() == 1, "{}", ran.errors());
}

/// Where the store has threads of its own, since io_uring is refused.
#[test]
fn threads_that_move_data_keep_no_program_from_ending() {
    let Some(program) = programs() else { return };
    let pool = ["env", "SELFPAGE_IO=pool"];
    let ran = run::run_under(&pool, "/".as_ref(), &["--frames", "8M"], program, &["main_ends_first"]).ok();
    assert_eq!(ran.text(), "ok\n");
}

/// There its threads have other numbers than they know themselves by.
#[test]
fn in_a_pid_namespace_under_the_outer_proc() {
    let Some(program) = programs().and_then(|program| program.to_str()) else { return };
    let apart = ["--pid", "--fork"];
    let probe = Command::new("unshare").args(apart).arg("true").output();
    if !probe.as_ref().is_ok_and(|probe| probe.status.success()) {
        return run::skip("unshare", &format!("no PID namespace of a program's own: {probe:?}"));
    }
    for name in ["fork_and_go_on", "fork_from_thread", "main_ends_first"] {
        let ran = run::run("8M", "unshare", &[&apart[..], &[program, name]].concat()).ok();
        assert_eq!(ran.text(), "ok\n", "{name}");
        assert!(ran.stats["evictions_total"].as_u64().unwrap() > 1000, "{name}: {}", ran.stats);
    }
}

/// A program, and a library whose constructor runs before ours.
fn with_an_early_library(arguments: &[&str]) -> Option<Ran> {
    if !run::possible() {
        return None;
    }
    let library = run::compile("early", &["-shared", "-fPIC", "-DLIBRARY"]);
    let program = run::compile("early", &[library.to_str().unwrap()]);
    Some(run::run("8M", program, arguments).ok())
}

#[test]
fn handlers_of_forks_that_were_there_before_ours_may_use_managed_memory() {
    let Some(ran) = with_an_early_library(&[]) else { return };
    assert_eq!(ran.text(), "0 0 0\n");
}

#[test]
fn a_thread_that_was_there_before_us_is_not_waited_for() {
    with_an_early_library(&["end"]);
}

#[test]
fn a_thread_that_was_there_before_us_ends_the_process_when_it_is_the_last() {
    for what in ["run_on", "begin_another", "filter"] {
        let Some(ran) = with_an_early_library(&["end", what]) else { return };
        assert_eq!(ran.text(), "done\n", "{what}");
    }
}

#[test]
fn without_a_domain_forks_find_the_heap_whole() {
    let Some(program) = programs() else { return };
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "100"]).arg(program).arg("fork_often");
    let output = command.env("LD_PRELOAD", run::tool().with_file_name("libselfpage_frames.so")).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{:?}", output.status);
}

#[test]
fn fork_exec() {
    let Some(ran) = ok("fork_exec") else { return };
    let processes = ran.stats["processes"].as_array().unwrap();
    assert!(processes.iter().any(|process| process["program"] == "echo"));
    // An exec that failed leaves no record: what the process counts goes into one.
    let mut who: Vec<_> = processes.iter().map(|one| format!("{} {}", one["pid"], one["program"])).collect();
    who.sort_unstable();
    let count = who.len();
    who.dedup();
    assert_eq!(who.len(), count, "{}", ran.stats);
}

#[test]
fn an_exec_by_descriptor_is_on_the_record() {
    let Some(ran) = ok("exec_at") else { return };
    let names: Vec<_> = ran.stats["processes"].as_array().unwrap().iter().map(|one| one["program"].clone()).collect();
    assert_eq!(names.len(), 5, "{names:?}");
    assert_eq!(names.iter().filter(|name| **name == "true").count(), 2, "{names:?}");
}

#[test]
fn an_exec_that_fails_after_vfork_leaves_the_parents_record_alone() {
    let Some(ran) = ok("vfork_search") else { return };
    let processes = ran.stats["processes"].as_array().unwrap();
    let names: Vec<_> = processes.iter().map(|one| one["program"].as_str().unwrap()).collect();
    assert!(names.len() == 2 && names[0] == "true" && names[1].starts_with("hazards"), "{}", ran.stats);
    assert_ne!(processes[0]["pid"], processes[1]["pid"]);
}

#[test]
fn a_child_that_a_handler_ends_at_once_has_a_record() {
    let Some(ran) = ok("fork_end_early") else { return };
    assert_eq!(ran.stats["processes"].as_array().unwrap().len(), 11, "{}", ran.stats);
}

#[test]
fn what_a_program_counted_before_it_becomes_another_is_kept() {
    let Some(ran) = ok("become") else { return };
    let names: Vec<_> = ran.stats["processes"].as_array().unwrap().iter().map(|one| one["program"].clone()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(names[1], "echo");
}

#[test]
fn a_bug_of_the_programs_own_is_its_own_sigsegv() {
    for name in ["own_segv", "beyond_the_heap"] {
        let Some(ran) = case(name) else { return };
        assert_eq!(ran.code(), 128 + libc::SIGSEGV, "{name}: {}{}", ran.text(), ran.errors());
        assert_eq!(ran.errors(), "");
    }
}

#[test]
fn every_thread_follows_a_change_of_user() {
    if !run::is_root() {
        return run::skip("root", "only root can become another user");
    }
    ok("change_user");
}

#[test]
fn the_status_is_the_programs() {
    let Some(ran) = case("status_seven") else { return };
    assert_eq!(ran.code(), 7);
    assert_eq!(ran.errors(), "");
}

#[test]
fn a_last_thread_that_ends_by_number_ends_the_process() {
    for (name, status) in [("exit_by_number", 7), ("both_exit_by_number", 3)] {
        let Some(ran) = case(name) else { return };
        assert_eq!((ran.code(), ran.errors().as_str()), (status, ""), "{name}");
        assert!(ran.stats["evictions_total"].as_u64().unwrap() > 1000, "{name}: no record of it: {}", ran.stats);
    }
}

/// Whoever reads what a daemon says has all of it when the daemon has closed it, not when the daemon ends.
#[test]
fn a_daemon_holds_no_pipe_open() {
    let Some(program) = programs() else { return };
    let directory = run::directory();
    let end = directory.path().join("end");
    let mut command = Command::new(run::tool());
    command.args(["run", "--frames", "8M", "--"]).arg(program).arg("serve").env("SELFPAGE_TEST_END", &end);
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::write(&end, "").unwrap();
    for _ in 0..600 {
        if !end.exists() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!("the daemon had ended before its pipe did");
}

#[test]
fn what_is_ignored_stays_ignored() {
    if !run::possible() || !run::has("bash") {
        return;
    }
    // As nohup has it, and a caller that does not wait for its children.
    let script = "trap '' HUP CHLD; exec \"$0\" run --frames 8M -- sh -c 'kill -HUP $$; echo $0 lives'";
    let output = Command::new("bash").args(["-c", script]).arg(run::tool()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "sh lives\n", "{}", String::from_utf8_lossy(&output.stderr));
}

/// What a program ignores is what the caller of `run` did, and no more or less.
#[test]
fn signals_are_inherited_as_they_were() {
    if !run::possible() || !run::has("bash") {
        return;
    }
    // The C library's own, 32 and 33, have handlers of its own as soon as there is a thread.
    let of_the_library = 3 << 31;
    let ignored = |signals: &str, run: &str| {
        let trap = if signals.is_empty() { String::new() } else { format!("trap '' {signals}; ") };
        let script = format!("{trap}exec {run} grep -E 'Sig(Ign|Blk)' /proc/self/status");
        let output = Command::new("bash").args(["-c", &script]).arg(run::tool()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let masks = String::from_utf8(output.stdout).unwrap();
        let mask =
            |line: &str| u64::from_str_radix(line.split('\t').next_back().unwrap(), 16).unwrap() & !of_the_library;
        masks.lines().map(mask).collect::<Vec<u64>>()
    };
    for signals in ["", "PIPE", "CHLD", "HUP INT", "PIPE CHLD HUP INT QUIT TERM USR1 USR2 ALRM TSTP URG"] {
        let plain = ignored(signals, "");
        assert!(signals.is_empty() || plain != ignored("", ""), "{plain:x?}");
        assert_eq!(ignored(signals, "\"$0\" run --frames 8M --"), plain, "{signals}");
        assert_eq!(ignored(signals, "\"$0\" run --"), plain, "{signals}, without frames");
    }
}

#[test]
fn a_record_is_written_to_the_file_for_it_alone_and_within_limits() {
    let Some(program) = programs() else { return };
    // `selfpage run` has ended, and its number is another's.
    let other = tempfile::NamedTempFile::new().unwrap();
    let about = std::fs::metadata("/").unwrap();
    let named = |path: &str| format!("frames=8388608;record=0:{}:{}:{path}", about.dev(), about.ino());
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "100"]).arg(program).arg("status_seven");
    command.env("LD_PRELOAD", run::tool().with_file_name("libselfpage_frames.so"));
    let ended = command.env("SELFPAGE_RUN", named(other.path().to_str().unwrap())).status().unwrap();
    assert_eq!((ended.code(), other.as_file().metadata().unwrap().len()), (Some(7), 0));
    // A limit on the size of files that a program sets itself is not its end.
    let ran = run::run("8M", "/bin/sh", &["-c", "ulimit -f 0; exit 3"]);
    assert_eq!((ran.code(), ran.errors().as_str()), (3, ""));
}

#[test]
fn signals_reach_the_program_and_nothing_is_left() {
    let Some(program) = programs() else { return };
    for signal in [libc::SIGTERM, libc::SIGXCPU, libc::SIGKILL] {
        let directory = run::directory();
        let mut running = Command::new(run::tool())
            .args(["run", "--frames", "8M", "--store"])
            .arg(directory.path())
            .arg("--")
            .arg(program)
            .arg("wait_for_end")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(running.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        // SIGKILL goes to the program itself: nobody could pass it on.
        let task = format!("/proc/{0}/task/{0}/children", running.id());
        let child: i32 = std::fs::read_to_string(task).unwrap().trim().parse().unwrap();
        let to = if signal == libc::SIGKILL { child } else { running.id() as i32 };
        // SAFETY: a number of a process that we started, and that is not waited for yet.
        assert_eq!(unsafe { libc::kill(to, signal) }, 0);
        assert_eq!(running.wait().unwrap().signal(), Some(signal));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files were left");
    }
}
