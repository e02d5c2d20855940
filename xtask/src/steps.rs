//! One step of a run: commands whose output is shown as it comes, counted, and ended when they hang.

use crate::tally::{Panics, Skip, Tally};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How long output may stay open after the command has ended, in a process that it left behind.
const LEFTOVER: Duration = Duration::from_secs(3);

/// Commands that stand or fall together. The first that fails ends the step.
pub struct Step {
    pub name: String,
    pub limit: Duration,
    pub commands: Vec<Command>,
}

/// What became of a step.
#[derive(Default, Debug)]
pub struct Report {
    /// What the tests in the step said, without the step itself.
    pub tests: Tally,
    pub skips: Vec<Skip>,
    /// The names of the tests that failed.
    pub failed_tests: Vec<String>,
    /// How they panicked.
    pub panics: Panics,
    /// Why the step failed, if it did.
    pub failure: Option<String>,
}

/// Cargo in a directory, with arguments that hold no spaces.
pub fn cargo(dir: &Path, arguments: &str) -> Command {
    let mut command = Command::new(cargo_program());
    command.current_dir(dir).args(arguments.split(' '));
    command
}

/// The cargo that has started us, whichever toolchain's it is.
pub fn cargo_program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// What a command prints.
///
/// # Errors
/// What it printed on standard error, if it failed.
pub fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{name} did not start: {error}; it must be installed, and in PATH"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("{name}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim_end()))
}

impl Step {
    /// Runs the commands one after the other, at most `limit` for all of them, and shows what they print on `out`.
    pub fn run(mut self, out: &mut impl Write) -> Report {
        let deadline = Instant::now() + self.limit;
        let mut report = Report::default();
        for command in &mut self.commands {
            report.failure = report.follow(command, deadline, out).err();
            if report.failure.is_some() {
                break;
            }
        }
        report
    }
}

impl Report {
    fn follow(&mut self, command: &mut Command, deadline: Instant, out: &mut impl Write) -> Result<(), String> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().map_err(|error| format!("{:?} did not start: {error}", command.get_program()))?;
        let (send, lines) = channel();
        send_lines(child.stdout.take(), &send);
        send_lines(child.stderr.take(), &send);
        drop(send);

        let in_time = self.hear(&mut child, &lines, deadline, out);
        if !in_time {
            end_tree(child.id());
        }
        let status = child.wait().map_err(|error| format!("its end was not seen: {error}"))?;
        match (in_time, status.success()) {
            (false, _) => Err("it took longer than its limit and was ended".into()),
            (true, false) => Err(status.to_string()),
            (true, true) => Ok(()),
        }
    }

    /// Shows and counts lines until the command has ended. False: the deadline came first.
    fn hear(&mut self, child: &mut Child, lines: &Receiver<String>, deadline: Instant, out: &mut impl Write) -> bool {
        let mut ended = None;
        while Instant::now() < deadline {
            let open = match lines.recv_timeout(Duration::from_millis(100)) {
                Ok(line) => {
                    let _ = writeln!(out, "{line}");
                    self.note(&line);
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => true,
                Err(RecvTimeoutError::Disconnected) => {
                    thread::sleep(Duration::from_millis(10));
                    false
                }
            };
            if matches!(child.try_wait(), Ok(Some(_))) {
                let since = ended.get_or_insert_with(Instant::now);
                if !open || since.elapsed() > LEFTOVER {
                    return true;
                }
            }
        }
        false
    }

    fn note(&mut self, line: &str) {
        self.panics.hear(line);
        if let Some(tally) = Tally::read(line) {
            self.tests += tally;
        } else if let Some(skip) = Skip::read(line) {
            self.skips.push(skip);
        } else if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failed_tests.push(name.into());
        }
    }
}

fn send_lines(stream: Option<impl Read + Send + 'static>, send: &Sender<String>) {
    let Some(stream) = stream else { return };
    let send = send.clone();
    thread::spawn(move || {
        for line in BufReader::new(stream).split(b'\n') {
            let Ok(line) = line else { return };
            if send.send(String::from_utf8_lossy(&line).trim_end_matches('\r').to_string()).is_err() {
                return;
            }
        }
    });
}

/// Kills a process and all that came of it. A process group would do, but would also take Ctrl-C away from it.
fn end_tree(root: u32) {
    let mut tree = vec![root as i32];
    let parents = parents();
    let mut next = 0;
    while let Some(&pid) = tree.get(next) {
        tree.extend(parents.iter().filter(|(_, parent)| *parent == pid).map(|(child, _)| *child));
        next += 1;
    }
    for pid in tree {
        if let Some(pid) = rustix::process::Pid::from_raw(pid) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Every process and its parent.
fn parents() -> Vec<(i32, i32)> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // pid (name, which may hold anything) state parent …
            let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
            Some((pid, parent))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Report {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Step { name: "shell".into(), limit, commands: vec![command] }.run(&mut std::io::sink())
    }

    #[test]
    fn counts_both_streams() {
        let report = shell(
            "echo 'test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured'
             echo 'SKIP(uffd: no)' >&2
             echo 'test a::b ... FAILED'
             echo 'test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured'",
            Duration::from_secs(20),
        );
        assert_eq!(report.tests, Tally { passed: 7, failed: 1, skipped: 1 });
        assert_eq!(report.skips.len(), 1);
        assert_eq!(report.failed_tests, ["a::b"]);
        assert_eq!(report.failure, None);
    }

    #[test]
    fn a_bad_status_is_a_failure() {
        assert!(shell("exit 3", Duration::from_secs(20)).failure.unwrap().contains('3'));
    }

    #[test]
    fn a_step_that_hangs_is_ended_with_its_children() {
        let began = Instant::now();
        // A time that nobody else's sleeps.
        let time = format!("311.{}", std::process::id());
        let report = shell(&format!("echo pid $$; sleep {time} & sleep 312; true"), Duration::from_millis(600));
        assert!(report.failure.unwrap().contains("limit"));
        assert!(began.elapsed() < Duration::from_secs(20));
        // The background sleep was a child, not the shell itself.
        thread::sleep(Duration::from_millis(200));
        assert!(!running(&format!("sleep\0{time}\0")), "a child outlived its step");
    }

    #[test]
    fn output_held_open_by_a_process_left_behind_does_not_hang_the_run() {
        let began = Instant::now();
        let report = shell("(setsid sleep 20 &) ; exit 0", Duration::from_secs(60));
        assert_eq!(report.failure, None);
        assert!(began.elapsed() < Duration::from_secs(15));
    }

    fn running(arguments: &str) -> bool {
        parents().iter().any(|(pid, _)| {
            std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(arguments.as_bytes()))
        })
    }
}
