//! A test that cannot run here says so, loudly. Include it where tests need it:
//! `#[path = "../../../tests/skip.rs"] mod skip;`, then `return skip::skip("uffd", "why, and what would help")`.

use std::io::Write;
use std::process::{Command, Stdio};

/// Says that the calling test is skipped for want of `name`.
///
/// # Panics
/// If `SELFPAGE_REQUIRE`, a comma list, contains `name`: then the machine was promised to have it.
#[allow(dead_code)]
pub fn skip(name: &str, reason: &str) {
    let required = std::env::var("SELFPAGE_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|one| one.trim() == name), "{name} is in SELFPAGE_REQUIRE, but: {reason}");
    // One write straight to the stream: the test harness swallows what a passing test prints.
    let _ = std::io::stderr().write_all(format!("{}{}\n", line(name, reason), by()).as_bytes());
}

/// Whether `program`, a path or a name in `PATH`, is installed. Where it is not, the calling test is skipped for want of it.
///
/// # Panics
/// As [`skip`].
#[allow(dead_code)]
pub fn has(program: &str) -> bool {
    let started = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    if let Err(error) = &started {
        skip(program.rsplit('/').next().unwrap_or(program), &format!("{program} cannot be started: {error}"));
    }
    started.is_ok()
}

/// Which test says so, by which a test that says it more than once counts as one. Nothing on a thread that is not the test's own.
fn by() -> String {
    let on = std::thread::current();
    on.name()
        .map_or_else(String::new, |test| format!(" in {} {} {test}", env!("CARGO_PKG_NAME"), env!("CARGO_CRATE_NAME")))
}

/// The line that `cargo xtask test` collects.
pub fn line(name: &str, reason: &str) -> String {
    format!("SKIP({name}: {})", reason.replace('\n', " "))
}
