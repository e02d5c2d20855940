//! Programs that end as few do have their record all the same: each case of tests/c/endings.c.

mod run;

use std::path::PathBuf;
use std::sync::OnceLock;

/// The case ends well, and each process of it leaves one record under the program's own name.
#[track_caller]
fn is_on_record(name: &str, processes: usize) {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| run::possible().then(|| run::compile("endings", &[])));
    let Some(program) = program else { return };
    let ran = run::run("8M", program, &[name]).ok();
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
fn a_process_with_another_root_has_a_record() {
    // SAFETY: test: a call without arguments.
    if unsafe { libc::geteuid() } != 0 {
        return run::skip("root", "only root can change its root");
    }
    is_on_record("another_root", 1);
}

#[test]
fn a_process_that_another_thread_ends_is_on_record_by_its_own_name() {
    is_on_record("by_worker", 1);
}
