//! Programs that end as few do have their record all the same: each case of tests/c/endings.c.

mod run;

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The case ends well, and each process of it leaves one record under the program's own name.
#[track_caller]
fn is_on_record(name: &str, processes: usize) {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| run::possible().then(|| run::compile("endings", &[])));
    let Some(program) = program else { return };
    let ran = run::run("8M", program, &[name]).ok();
    if ran.text() == "no landlock\n" {
        return run::skip("landlock", "the kernel has none: CONFIG_SECURITY_LANDLOCK, and lsm=landlock");
    }
    let of_program = |process: &&serde_json::Value| process["program"].as_str().unwrap().starts_with("endings-");
    let on_record = ran.stats["processes"].as_array().unwrap();
    assert_eq!(on_record.iter().filter(of_program).count(), processes, "{name}: {}", ran.stats);
    assert_eq!(on_record.len(), processes, "{name}: {}", ran.stats);
}

#[test]
fn threads_that_end_a_process_at_once_leave_its_record() {
    is_on_record("at_once", 101);
}

#[test]
fn a_process_that_has_no_descriptor_left_has_a_record() {
    is_on_record("no_descriptors", 1);
}

#[test]
fn a_process_that_may_not_look_at_the_run_any_more_has_a_record() {
    is_on_record("after_landlock", 1);
    if !run::is_root() {
        return run::skip("root", "only root can become another user");
    }
    is_on_record("as_another_user", 1);
}

#[test]
fn a_process_with_another_root_has_a_record() {
    if !run::is_root() {
        return run::skip("root", "only root can change its root");
    }
    is_on_record("another_root", 1);
}

/// Whether namespaces are to be had as these options of unshare(1) have them.
fn apart(options: &[&str]) -> bool {
    let probe = Command::new("unshare").args(options).arg("true").output();
    let there = probe.as_ref().is_ok_and(|probe| probe.status.success());
    if !there {
        run::skip("unshare", &format!("no namespaces of a program's own: {probe:?}"));
    }
    there
}

#[test]
fn a_process_that_hides_proc_from_itself_has_a_record() {
    if apart(&["--mount"]) {
        is_on_record("another_proc", 3);
    }
}

/// Those that bring it about are on record; what they execute cannot be, and says so.
#[test]
fn a_program_under_a_proc_of_its_own_says_that_it_is_not_on_record() {
    let options = ["--pid", "--fork", "--mount-proc"];
    if !run::possible() || !apart(&options) {
        return;
    }
    let program = run::compile("endings", &[]);
    let ran = run::run("8M", "unshare", &[&options[..], &[program.to_str().unwrap(), "by_worker"]].concat());
    let (errors, on_record) = (ran.errors(), ran.stats["processes"].as_array().unwrap());
    assert_eq!((ran.code(), errors.lines().count()), (0, 1), "{errors}");
    assert!(errors.starts_with("selfpage: not in the statistics, because \"/proc/"), "{errors}");
    assert!(errors.contains("start `selfpage run` where"), "{errors}");
    assert!(on_record.len() == 2 && on_record.iter().all(|process| process["program"] == "unshare"), "{}", ran.stats);
}

/// Nobody waits for the record of a program that is executed later.
#[test]
fn a_program_that_is_executed_after_the_run_says_nothing() {
    if !run::possible() || !apart(&["--pid", "--fork"]) {
        return;
    }
    let wait = "while [ -e /proc/$RUN ]; do sleep 0.05; done; /bin/true; /bin/true";
    for apart in ["", "unshare --pid --fork"] {
        let directory = run::directory();
        let line = format!(
            "export RUN=$PPID; ({apart} sh -c '{wait}' </dev/null >/dev/null 2>said; echo >ended; mv ended done) &"
        );
        run::run_in(directory.path(), "8M", "/bin/sh", &["-c", &line]).ok();
        let begun = Instant::now();
        while !directory.path().join("done").exists() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{apart}");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(std::fs::read_to_string(directory.path().join("said")).unwrap(), "", "{apart}");
    }
}

#[test]
fn a_process_that_another_thread_ends_is_on_record_by_its_own_name() {
    is_on_record("by_worker", 1);
}
