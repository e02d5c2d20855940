//! `selfpage run` as whoever starts it meets it. What it does to programs, the tests of what it preloads show.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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

/// `selfpage run`, by somebody who has some signals blocked.
fn blocking(program: &[&str]) -> Command {
    programs::build(&["selfpage-malloc"]);
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.args(["run", "--"]).args(program).stdout(Stdio::piped());
    let block = || {
        // SAFETY: test: a set of the closure's own.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            for signal in [libc::SIGCHLD, libc::SIGTERM, libc::SIGTTIN] {
                libc::sigaddset(&mut set, signal);
            }
            libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
        }
        Ok(())
    };
    // SAFETY: test: one system call.
    unsafe { run.pre_exec(block) };
    run
}

/// Looks until there is something to see.
fn seen<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ends(mut run: Child) -> (Option<i32>, String) {
    let began = Instant::now();
    while run.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(20) {
            run.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = run.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn what_its_caller_has_blocked_is_blocked_in_the_program_alone() {
    let (code, text) = ends(blocking(&["grep", "SigBlk", "/proc/self/status"]).spawn().unwrap());
    let bit = |signal: i32| 1u64 << (signal - 1);
    let blocked = bit(libc::SIGCHLD) | bit(libc::SIGTERM) | bit(libc::SIGTTIN);
    assert_eq!((code, text), (Some(0), format!("SigBlk:\t{blocked:016x}\n")));
    // It waits for the program, not for the tool.
    let run = blocking(&["sleep", "60"]).spawn().unwrap();
    let tool = run.id();
    let children = format!("/proc/{tool}/task/{tool}/children");
    let program = seen("no program", || {
        let pid = std::fs::read_to_string(&children).ok()?.trim().to_owned();
        // The tool asks the loader first, without an argument.
        let is_it = std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|said| said == b"sleep\x0060\0");
        is_it.then_some(pid)
    });
    let send = |pid: &str, signal| {
        // SAFETY: test: numbers.
        assert_eq!(unsafe { libc::kill(pid.parse().unwrap(), signal) }, 0);
    };
    send(&tool.to_string(), libc::SIGTERM);
    seen("the signal is not passed on", || {
        let status = std::fs::read_to_string(format!("/proc/{program}/status")).unwrap();
        status.contains(&format!("ShdPnd:\t{:016x}", bit(libc::SIGTERM))).then_some(())
    });
    send(&program, libc::SIGKILL);
    assert_eq!(ends(run).0, Some(128 + libc::SIGKILL));
}
