//! `selfpage run` as tests start it.
#![allow(dead_code)]

use std::process::Command;
use std::time::{Duration, Instant};

use crate::tool::{self, text};
use crate::{programs, skip};

/// With frames the tool follows the program; without, it becomes the program.
pub const FRAMES: &[&str] = &["--frames", "8M"];

/// Whether a program can be paged here.
pub fn can_page() -> bool {
    programs::build(&["selfpage-malloc", "selfpage-preload"]);
    let output = tool::selfpage(&[&["run"], FRAMES, &["--", "true"]].concat());
    if output.status.code() == Some(1) {
        skip::skip("uffd", &text(&output.stderr));
    }
    output.status.code() != Some(1)
}

/// `selfpage run`, of what [`can_page`] has built.
pub fn run(options: &[&str], program: &[&str]) -> Command {
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.arg("run").args(options).arg("--").args(program);
    run
}

/// Looks until there is something to see.
pub fn seen<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
