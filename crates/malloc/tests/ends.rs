//! Threads that end, and processes that end with them, where the allocator has a thread of its own or is in the middle of something.

#[path = "../../../tests/limited_group.rs"]
mod limited_group;
mod preloaded;

use std::path::Path;

use limited_group::{Group, REASON};
use preloaded::{compile, errors, preloaded, skip, text};

/// The keeper has all signals blocked: what hangs with it alone is ended by no other.
fn ends(program: &Path, arguments: &[&str]) {
    let output =
        preloaded("/usr/bin/timeout").args(["-s", "KILL", "60"]).arg(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {:?} {}", output.status, errors(&output));
    assert_eq!(text(&output), "done\n", "{arguments:?}");
}

#[test]
fn a_process_whose_main_has_ended_ends_with_its_last_thread() {
    let program = compile("main_ends.c", &[]);
    for mode in ["plain", "thrd", "cancelled", "joined", "child"] {
        ends(&program, &[mode]);
    }
}

#[test]
fn also_where_the_keeper_begins_at_that_moment() {
    let program = compile("main_ends.c", &[]);
    for _ in 0..8 {
        ends(&program, &["race"]);
    }
}

#[test]
fn what_the_keeper_found_last_bounds_nothing_when_it_has_ended() {
    let Some(group) = Group::limited(256 << 20) else { return skip("cgroup", REASON) };
    let mut command = preloaded("/bin/sh");
    command.args(["-c", "echo $$ > \"$0\" && exec timeout -s KILL 60 \"$@\""]).arg(group.path.join("cgroup.procs"));
    let output = command.arg(compile("main_ends.c", &[])).arg("limited").output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
    assert_eq!(text(&output), "done\n");
}

#[test]
fn nobody_is_cancelled_in_the_middle_of_an_allocation() {
    ends(&compile("cancel.c", &[]), &[]);
}

/// Of all that threads have of their own, which lies in the keeper's stack, too.
#[test]
fn the_keeper_has_a_stack_beside_what_each_thread_has() {
    for kib in [64, 112, 116, 118, 120, 124, 128, 256, 1024] {
        let program = compile("thread_local.c", &[&format!("-DBYTES={}", kib << 10)]);
        ends(&program, &[]);
    }
}

/// The keeper pays with what the thread has of its own, or already without.
#[test]
fn what_a_thread_on_a_stack_of_the_programs_had_is_freed() {
    let library = compile("own_stack.c", &["-DLIBRARY", "-shared", "-fPIC"]);
    let program = compile("own_stack.c", &["-ldl"]);
    for mib in ["255", "300"] {
        ends(&program, &[library.to_str().unwrap(), mib]);
    }
}
