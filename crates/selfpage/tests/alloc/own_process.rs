//! Tests that measure, or end, the process run in one of their own.

use std::process::{Command, Output};

const CHILD: &str = "SELFPAGE_TEST_CHILD";
const LIMIT_SECONDS: u32 = 300;

/// Runs `body` in a child process, which is this test alone, and expects it to end well.
pub fn run(test: &str, body: impl FnOnce()) {
    if let Some(output) = output(test, body) {
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        // A name of no test is one that nothing fails for.
        assert!(output.status.success() && text.contains("test result: ok. 1 passed"), "{}: {text}", output.status);
        text.lines().filter(|line| line.starts_with("SKIP(")).for_each(|line| eprintln!("{line}"));
    }
}

/// The same, for whatever the child says. `None` in the child.
pub fn output(test: &str, body: impl FnOnce()) -> Option<Output> {
    if std::env::var_os(CHILD).is_some() {
        // SAFETY: a call without pointers, which ends the process where it hangs.
        unsafe { libc::alarm(LIMIT_SECONDS) };
        body();
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    Some(command.args([test, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap())
}
