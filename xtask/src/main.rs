//! The project's own tool: tests, and the checks that rustc and clippy do not make. See `cargo xtask --help`.
#![deny(unsafe_code)]

mod breaks;
mod examples;
mod link;
mod qemu;
mod steps;
mod style;
mod suite;
mod tally;

#[cfg(test)]
#[path = "../../tests/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
cargo xtask VERB

  test            every check and every test; the last line is `N passed, N failed, N skipped`
  test --quick    format, clippy, style, link check, debug tests
  style           the rules of STYLE.md that a program can check
  link            core's fault path links with nothing underneath, and the check itself can fail
  link --break    the same with a deliberate panic in the path: fails, and names the line
  examples        the library's examples run, and what they assert holds
  breaks          lines of core removed one at a time: the simulation notices each; about a minute for each
  qemu-test --guest
                  the tests of selfpage-guest on a CPU that qemu emulates, under a kernel fetched with apt-get
  qemu-test --keys
                  the tests of protection domains and of dirty pages, in the same way, on CPUs that have protection keys and
                  under a kernel that has soft-dirty bits
  qemu-bench --keys
                  what switching protection domains takes there, beside mprotect, in instructions
  qemu-bench --dirty
                  what finding dirty pages takes there, by each way

Examples:
  cargo xtask test --quick
  SELFPAGE_REQUIRE=uffd,move cargo xtask test     a test that skips one of these fails
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let root = root();
    let fine = match args.as_slice() {
        [] | ["help" | "-h" | "--help"] => {
            print!("{HELP}");
            true
        }
        ["test"] => suite::run(&root, suite::Extent::Full),
        ["test", "--quick"] => suite::run(&root, suite::Extent::Quick),
        ["style"] => style::run(&root),
        ["link"] => link::run(&root),
        ["link", "--break"] => link::run_broken(&root),
        ["examples"] => examples::run(&root),
        ["breaks"] => breaks::run(&root),
        ["qemu-test", "--guest"] => qemu::run(&root, &qemu::GUEST),
        ["qemu-test", "--keys"] => qemu::run(&root, &qemu::KEYS),
        ["qemu-bench", "--keys"] => qemu::run(&root, &qemu::KEYS_BENCH),
        ["qemu-bench", "--dirty"] => qemu::run(&root, &qemu::DIRTY_BENCH),
        _ => {
            eprintln!("cargo xtask {}: no such verb or option; `cargo xtask --help` lists them", args.join(" "));
            return ExitCode::from(2);
        }
    };
    if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The repository's root: where it is now, not where xtask was built.
fn root() -> PathBuf {
    let manifest =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    manifest.parent().unwrap_or(Path::new(".")).to_path_buf()
}
