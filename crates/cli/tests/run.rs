//! `selfpage run` as whoever starts it meets it. What it does to programs, the tests of what it preloads show.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;

#[path = "../../../tests/programs.rs"]
mod programs;

#[test]
fn a_timer_that_was_set_before_it_ends_the_program() {
    programs::build(&["selfpage-malloc"]);
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.args(["run", "--", "sleep", "20"]);
    let set = || {
        // SAFETY: test: a number.
        unsafe { libc::alarm(1) };
        Ok(())
    };
    // SAFETY: test: one system call.
    let output = unsafe { run.pre_exec(set) }.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(128 + libc::SIGALRM), "{:?}: {errors}", output.status.signal());
}
