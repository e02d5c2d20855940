//! What becomes of signals that come to `selfpage run`, or to its program.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

mod frames;
#[path = "../../../tests/programs.rs"]
mod programs;
#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use frames::{FRAMES, can_page, run, seen};
use tool::{in_a_pid_namespace, text};

#[test]
fn a_timer_that_was_set_before_it_ends_the_program() {
    if !can_page() {
        return;
    }
    let timed = |options: &[&str]| {
        let set = || {
            // SAFETY: test: a number.
            unsafe { libc::alarm(8) };
            Ok(())
        };
        let mut run = run(options, &["sleep", "60"]);
        // SAFETY: test: one system call.
        unsafe { run.pre_exec(set) }.spawn().unwrap()
    };
    let [paged, plain] = [FRAMES, &[]].map(timed).map(|mut run| run.wait().unwrap());
    for ended in [paged, plain] {
        assert_eq!(ended.signal(), Some(libc::SIGALRM), "{ended}");
    }
}

/// `selfpage run`, by somebody who has some signals blocked.
fn blocking(options: &[&str], program: &[&str]) -> Command {
    let mut run = run(options, program);
    run.stdout(Stdio::piped());
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

/// The number of `sleep 60`, which the tool runs.
fn sleeper(tool: u32) -> String {
    let children = format!("/proc/{tool}/task/{tool}/children");
    seen("no program", || {
        let pid = std::fs::read_to_string(&children).ok()?.trim().to_owned();
        // The tool asks the loader first, without an argument.
        let is_it = std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|said| said == b"sleep\x0060\0");
        is_it.then_some(pid)
    })
}

fn send(pid: u32, signal: i32) {
    // SAFETY: test: numbers.
    assert_eq!(unsafe { libc::kill(pid.cast_signed(), signal) }, 0);
}

fn ends(mut run: Child) -> (ExitStatus, String) {
    let began = Instant::now();
    while run.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(20) {
            let _ = (run.kill(), run.wait());
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = run.wait_with_output().unwrap();
    (output.status, String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn what_its_caller_has_blocked_is_blocked_in_the_program_alone() {
    if !can_page() {
        return;
    }
    let bit = |signal: i32| 1u64 << (signal - 1);
    let blocked = bit(libc::SIGCHLD) | bit(libc::SIGTERM) | bit(libc::SIGTTIN);
    for options in [FRAMES, &[]] {
        let (status, text) = ends(blocking(options, &["grep", "SigBlk", "/proc/self/status"]).spawn().unwrap());
        assert_eq!((status.code(), text), (Some(0), format!("SigBlk:\t{blocked:016x}\n")));
    }
    // It waits for the program, not for the tool.
    let run = blocking(FRAMES, &["sleep", "60"]).spawn().unwrap();
    let tool = run.id();
    let program = sleeper(tool);
    send(tool, libc::SIGTERM);
    seen("the signal is not passed on", || {
        let status = std::fs::read_to_string(format!("/proc/{program}/status")).unwrap();
        status.contains(&format!("ShdPnd:\t{:016x}", bit(libc::SIGTERM))).then_some(())
    });
    send(program.parse().unwrap(), libc::SIGKILL);
    assert_eq!(ends(run).0.signal(), Some(libc::SIGKILL));
}

/// A terminal: its master's side, and the other one.
fn terminal() -> (OwnedFd, OwnedFd) {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    let mut name = [0; 64];
    // SAFETY: test: descriptors that were just made, and a name as long as said.
    unsafe {
        let master = libc::posix_openpt(flags);
        assert!(libc::grantpt(master) == 0 && libc::unlockpt(master) == 0);
        assert_eq!(libc::ptsname_r(master, name.as_mut_ptr(), name.len()), 0);
        let other = libc::open(name.as_ptr(), flags);
        assert!(other >= 0);
        (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(other))
    }
}

/// Begins a session whose terminal is standard input.
fn lead() -> std::io::Result<()> {
    // SAFETY: test: numbers.
    let leads = unsafe { libc::setsid() > 0 && libc::ioctl(0, libc::TIOCSCTTY, 0) == 0 };
    if leads { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The kernel tells the leader of the terminal's session alone.
#[test]
fn that_its_terminal_is_gone_reaches_the_program_where_the_tool_leads_the_session() {
    if !can_page() {
        return;
    }
    let (master, other) = terminal();
    let mut run = run(FRAMES, &["sleep", "60"]);
    run.stdin(other).stdout(Stdio::null());
    // SAFETY: test: two system calls.
    let run = unsafe { run.pre_exec(lead) }.spawn().unwrap();
    let program = sleeper(run.id());
    drop(master);
    let (status, _) = ends(run);
    // Where the tool was killed for it, it is there still.
    let _ = Command::new("kill").args(["-KILL", &program]).stderr(Stdio::null()).status();
    assert_eq!(status.signal(), Some(libc::SIGHUP));
}

const MEANS_NOTHING: [(i32, &str); 3] = [(libc::SIGCHLD, "CHLD\n"), (libc::SIGPIPE, "PIPE\n"), (libc::SIGURG, "URG\n")];

/// What a caller does with them before it starts the tool.
fn disposing(disposition: libc::sighandler_t) -> impl FnMut() -> std::io::Result<()> {
    move || {
        for (signal, _) in MEANS_NOTHING {
            // SAFETY: test: numbers.
            unsafe { libc::signal(signal, disposition) };
        }
        Ok(())
    }
}

/// A program that prints its number, and then which signals come to it, until its input ends.
struct Listener {
    run: Child,
    printed: BufReader<ChildStdout>,
    program: u32,
}

impl Listener {
    /// Leads a group, after its caller has done this with some signals.
    fn new(options: &[&str], disposition: libc::sighandler_t) -> Option<Listener> {
        if !skip::has("perl") || !can_page() {
            return None;
        }
        // It looks up again and again: perl runs no handler of a signal that comes just before it waits.
        let script = r#"$| = 1; alarm 20; $SIG{$_} = sub { print "@_\n" } for qw(ABRT CHLD PIPE URG USR1);
            print "$$\n"; vec($input, fileno(STDIN), 1) = 1; 1 until select($_ = $input, undef, undef, 0.1) > 0"#;
        let mut run = run(options, &["perl", "-e", script]);
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        // SAFETY: test: system calls alone.
        let mut run = unsafe { run.pre_exec(disposing(disposition)) }.spawn().unwrap();
        let printed = BufReader::new(run.stdout.take().unwrap());
        let mut listener = Listener { run, printed, program: 0 };
        listener.program = listener.line().trim().parse().unwrap();
        Some(listener)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.printed.read_line(&mut line).unwrap();
        line
    }

    /// Ends its input: what it printed after one signal more.
    fn ends(mut self) -> String {
        send(self.run.id(), libc::SIGUSR1);
        assert_eq!(self.line(), "USR1\n");
        drop(self.run.stdin.take());
        let mut rest = String::new();
        self.printed.read_to_string(&mut rest).unwrap();
        assert_eq!(self.run.wait().unwrap().code(), Some(0));
        rest
    }
}

#[test]
fn signals_that_mean_nothing_to_most_programs_reach_those_that_wait_for_them() {
    for options in [FRAMES, &[]] {
        let Some(mut listener) = Listener::new(options, libc::SIG_DFL) else { return };
        for (signal, name) in MEANS_NOTHING {
            send(listener.run.id(), signal);
            assert_eq!(listener.line(), name);
        }
        // The tool's own child: nobody sent that.
        let program = listener.program;
        send(program, libc::SIGSTOP);
        seen("it does not stop", || {
            std::fs::read_to_string(format!("/proc/{program}/stat")).unwrap().contains(" T ").then_some(())
        });
        // It may have stopped as well.
        send(listener.run.id(), libc::SIGCONT);
        assert_eq!(listener.ends(), "");
    }
}

#[test]
fn what_its_caller_ignores_is_not_passed_on() {
    let Some(listener) = Listener::new(FRAMES, libc::SIG_IGN) else { return };
    MEANS_NOTHING.iter().for_each(|(signal, _)| send(listener.run.id(), *signal));
    assert_eq!(listener.ends(), "");
}

#[test]
fn what_its_caller_ignores_the_program_ignores() {
    if !can_page() {
        return;
    }
    for (disposition, is_ignored) in [(libc::SIG_IGN, true), (libc::SIG_DFL, false)] {
        for options in [FRAMES, &[]] {
            let mut run = run(options, &["grep", "SigIgn", "/proc/self/status"]);
            // SAFETY: test: system calls alone.
            let output = unsafe { run.pre_exec(disposing(disposition)) }.output().unwrap();
            let said = text(&output.stdout);
            let ignored = u64::from_str_radix(said.trim_start_matches("SigIgn:").trim(), 16).unwrap();
            for (signal, name) in MEANS_NOTHING {
                assert_eq!(ignored >> (signal - 1) & 1 == 1, is_ignored, "{name} {options:?}: {said}");
            }
        }
    }
}

#[test]
fn what_is_sent_to_its_group_comes_once_to_a_program_without_frames() {
    let Some(mut listener) = Listener::new(&[], libc::SIG_DFL) else { return };
    // The kernel makes one of two that come before the first is heard.
    for _ in 0..20 {
        // SAFETY: test: numbers.
        assert_eq!(unsafe { libc::kill(-listener.run.id().cast_signed(), libc::SIGURG) }, 0);
        assert_eq!(listener.line(), "URG\n");
    }
    assert_eq!(listener.ends(), "");
}

#[test]
fn what_a_watchdog_sends_reaches_the_program() {
    let Some(mut listener) = Listener::new(FRAMES, libc::SIG_DFL) else { return };
    send(listener.run.id(), libc::SIGABRT);
    assert_eq!(listener.line(), "ABRT\n");
    assert_eq!(listener.ends(), "");
}

/// As `/proc` shows it: a letter; `None` where there is no such process.
fn state(pid: &str) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

#[test]
fn the_program_ends_where_the_tool_is_killed() {
    if !can_page() {
        return;
    }
    for signal in [libc::SIGKILL, libc::SIGSYS] {
        let mut run = run(FRAMES, &["sleep", "60"]).spawn().unwrap();
        let program = sleeper(run.id());
        send(run.id(), signal);
        assert_eq!(run.wait().unwrap().signal(), Some(signal));
        // Process 1 may be slow to hear of it.
        seen("the program goes on", || state(&program).is_none_or(|state| "ZX".contains(state)).then_some(()));
    }
}

#[test]
fn what_the_program_has_forked_outlives_it_and_the_tool() {
    if !can_page() {
        return;
    }
    let mut run = run(FRAMES, &["sh", "-c", "exec 3<&0; cat <&3 & exit 7"]);
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut printed) = (run.stdin.take().unwrap(), run.stdout.take().unwrap());
    assert_eq!(run.wait().unwrap().code(), Some(7));
    input.write_all(b"said").unwrap();
    drop(input);
    let mut text = String::new();
    printed.read_to_string(&mut text).unwrap();
    assert_eq!(text, "said");
}

/// `timeout` does so, where it is not told otherwise.
#[test]
fn what_a_terminal_sends_reaches_a_program_that_leads_a_group_of_its_own() {
    if !skip::has("perl") || !can_page() {
        return;
    }
    // It looks again and again, as a listener does.
    let script = r#"$| = 1; alarm 20; setpgrp; $SIG{INT} = sub { exit 7 }; $SIG{QUIT} = sub { print "QUIT\n" };
        print "ready\n"; select(undef, undef, undef, 0.1) while 1"#;
    let (master, other) = terminal();
    let mut run = run(FRAMES, &["perl", "-e", script]);
    run.stdin(other).stdout(Stdio::piped());
    // SAFETY: test: two system calls.
    let mut run = unsafe { run.pre_exec(lead) }.spawn().unwrap();
    let mut printed = BufReader::new(run.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(printed.next().as_deref(), Some("ready"));
    let mut master = File::from(master);
    master.write_all(b"\x1c").unwrap();
    assert_eq!(printed.next().as_deref(), Some("QUIT"));
    master.write_all(b"\x03").unwrap();
    assert_eq!(ends(run).0.code(), Some(7));
}

/// What waitpid(2) says of it, ended or stopped, once there is something to say.
fn becomes(pid: u32) -> i32 {
    seen("it neither stops nor ends", || {
        let mut status = 0;
        // SAFETY: test: a place of this closure's.
        let of = unsafe { libc::waitpid(pid.cast_signed(), &raw mut status, libc::WNOHANG | libc::WUNTRACED) };
        (of == pid.cast_signed()).then_some(status)
    })
}

#[test]
fn a_program_that_stops_is_seen_to_stop_and_goes_on_with_the_tool() {
    if !can_page() {
        return;
    }
    const STOPS: usize = 20;
    let line = format!("for i in $(seq {STOPS}); do kill -STOP $$; done; exit 7");
    let mut run = run(FRAMES, &["sh", "-c", &line]);
    // As a shell starts its jobs.
    let run = run.process_group(0).spawn().unwrap();
    for _ in 0..STOPS {
        let status = becomes(run.id());
        assert!(libc::WIFSTOPPED(status), "{status:x}");
        send(run.id(), libc::SIGCONT);
    }
    assert_eq!(ends(run).0.code(), Some(7));
}

/// Nobody could continue the tool there as a shell does.
#[test]
fn a_program_that_somebody_stops_where_there_are_no_jobs_goes_on_by_itself() {
    if !can_page() {
        return;
    }
    let mut run = run(FRAMES, &["sleep", "60"]);
    let lead = || {
        // SAFETY: test: no arguments.
        if unsafe { libc::setsid() } > 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: test: one system call.
    let run = unsafe { run.pre_exec(lead) }.spawn().unwrap();
    let sleeper = sleeper(run.id());
    let program = sleeper.parse().unwrap();
    send(program, libc::SIGSTOP);
    seen("it does not stop", || (state(&sleeper) == Some('T')).then_some(()));
    send(program, libc::SIGCONT);
    send(program, libc::SIGTERM);
    assert_eq!(ends(run).0.signal(), Some(libc::SIGTERM));
}

/// When it has written what there is to write.
#[test]
fn a_signal_that_ends_the_program_ends_the_tool() {
    if !can_page() {
        return;
    }
    for signal in [libc::SIGTERM, libc::SIGKILL, libc::SIGQUIT, libc::SIGSEGV, libc::SIGRTMIN()] {
        let place = tool::Place::new("ended");
        let stats = place.path("stats");
        let program = format!("ulimit -c 0; /bin/true; kill -{signal} $$; exit 1");
        let mut run = run(&["--frames", "8M", "--stats", &stats], &["sh", "-c", &program]);
        let (status, _) = ends(run.spawn().unwrap());
        assert_eq!(status.signal(), Some(signal), "{status}");
        assert!(!status.core_dumped(), "{status}");
        assert!(std::fs::read_to_string(&stats).unwrap().contains("faults_total"));
    }
}

#[test]
fn in_process_1_which_no_signal_ends_it_is_a_status() {
    if !can_page() {
        return;
    }
    let (output, errors) = match in_a_pid_namespace(&run(FRAMES, &["sh", "-c", "kill -TERM $$"])) {
        Ok(ended) => ended,
        Err((needs, why)) => return skip::skip(needs, &why),
    };
    assert_eq!((output.status.code(), errors.as_str()), (Some(128 + libc::SIGTERM), ""));
}

/// What is outside of a PID namespace has no number in it: our caller's group, and ours, is 0.
#[test]
fn in_a_group_without_a_number_there_is_nothing_to_follow() {
    if !can_page() {
        return;
    }
    let tool = run(FRAMES, &["sh", "-c", "(sleep 1; kill -CONT $$) & kill -STOP $$; exit 7"]);
    let mut script = Command::new("sh");
    script.args(["-c", "\"$@\"; exit $?", "sh"]).arg(tool.get_program()).args(tool.get_args());
    let (output, errors) = match in_a_pid_namespace(&script) {
        Ok(ended) => ended,
        Err((needs, why)) => return skip::skip(needs, &why),
    };
    assert_eq!((output.status.code(), errors.as_str()), (Some(7), ""));
}

/// Whoever waits for the tool there does not look whether it has stopped.
#[test]
fn a_program_that_stops_below_a_script_goes_on_by_itself() {
    if !can_page() {
        return;
    }
    let tool = run(FRAMES, &["sh", "-c", "(sleep 1; kill -CONT $$) & kill -STOP $$; exit 7"]);
    let mut script = Command::new("sh");
    script.args(["-c", "\"$@\"; exit $?", "sh"]).arg(tool.get_program()).args(tool.get_args());
    assert_eq!(ends(script.process_group(0).spawn().unwrap()).0.code(), Some(7));
}

/// `selfpage run` with something that happens while it is in a call. `None`: it cannot be run here.
fn meanwhile(what: &str, program: &[&str]) -> Option<Child> {
    if !skip::has("gcc") || !can_page() {
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/meanwhile.c");
    let made = programs::build(&["selfpage-preload"]).join("selfpage-test-programs");
    let library = programs::compile(&made, &source, &["-Wall", "-Werror", "-shared", "-fPIC", what]);
    Some(run(FRAMES, program).env("LD_PRELOAD", library).process_group(0).spawn().unwrap())
}

#[test]
fn a_program_that_ends_while_the_tool_stops_with_it_is_seen_to_end() {
    let Some(run) = meanwhile("-DENDS_IN_RAISE", &["sh", "-c", "kill -STOP $$"]) else { return };
    assert_eq!(ends(run).0.signal(), Some(libc::SIGKILL));
}

#[test]
fn what_is_sent_to_the_program_before_it_is_executed_is_not_lost() {
    let Some(run) = meanwhile("-DSIGNAL_IN_FORK", &["sleep", "5"]) else { return };
    assert_eq!(ends(run).0.signal(), Some(libc::SIGTERM));
}
