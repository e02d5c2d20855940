//! `selfpage run` as whoever starts it meets it. What it does to programs, the tests of what it preloads show.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

#[path = "../../../tests/filter.rs"]
mod filter;
#[path = "../../../tests/mounts.rs"]
mod mounts;
#[path = "../../../tests/programs.rs"]
mod programs;
#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use filter::Call;
use mounts::with_mounts;
use tool::{Place, text};

/// With frames the tool follows the program; without, it becomes the program.
const FRAMES: &[&str] = &["--frames", "8M"];

/// Whether a program can be paged here.
fn can_page() -> bool {
    programs::build(&["selfpage-malloc", "selfpage-preload"]);
    let output = tool::selfpage(&[&["run"], FRAMES, &["--", "true"]].concat());
    if output.status.code() == Some(1) {
        skip::skip("uffd", &text(&output.stderr));
    }
    output.status.code() != Some(1)
}

/// `selfpage run`, of what [`can_page`] has built.
fn run(options: &[&str], program: &[&str]) -> Command {
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.arg("run").args(options).arg("--").args(program);
    run
}

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
    assert_eq!(paged.code(), Some(128 + libc::SIGALRM), "{paged}");
    assert_eq!(plain.signal(), Some(libc::SIGALRM), "{plain}");
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
    if !can_page() {
        return;
    }
    let bit = |signal: i32| 1u64 << (signal - 1);
    let blocked = bit(libc::SIGCHLD) | bit(libc::SIGTERM) | bit(libc::SIGTTIN);
    for options in [FRAMES, &[]] {
        let (code, text) = ends(blocking(options, &["grep", "SigBlk", "/proc/self/status"]).spawn().unwrap());
        assert_eq!((code, text), (Some(0), format!("SigBlk:\t{blocked:016x}\n")));
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
    assert_eq!(ends(run).0, Some(128 + libc::SIGKILL));
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

/// The kernel tells the leader of the terminal's session alone.
#[test]
fn that_its_terminal_is_gone_reaches_the_program_where_the_tool_leads_the_session() {
    if !can_page() {
        return;
    }
    let (master, other) = terminal();
    let mut run = run(FRAMES, &["sleep", "60"]);
    run.stdin(other).stdout(Stdio::null());
    let lead = || {
        // SAFETY: test: numbers.
        let leads = unsafe { libc::setsid() > 0 && libc::ioctl(0, libc::TIOCSCTTY, 0) == 0 };
        if leads { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: test: two system calls.
    let run = unsafe { run.pre_exec(lead) }.spawn().unwrap();
    let program = sleeper(run.id());
    drop(master);
    let (code, _) = ends(run);
    // Where the tool was killed for it, it is there still.
    let _ = Command::new("kill").args(["-KILL", &program]).stderr(Stdio::null()).status();
    assert_eq!(code, Some(128 + libc::SIGHUP));
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
        let script = r#"$| = 1; alarm 20; $SIG{$_} = sub { print "@_\n" } for qw(CHLD PIPE URG USR1);
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
        send(program, libc::SIGCONT);
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
fn a_service_manager_finds_a_program_without_frames_under_the_number_that_it_started() {
    programs::build(&["selfpage-malloc"]);
    let line = r#"LISTEN_PID=$$ exec "$0" run -- sh -c '[ $$ = $LISTEN_PID ] && echo same'"#;
    let output = Command::new("sh").args(["-c", line, env!("CARGO_BIN_EXE_selfpage")]).output().unwrap();
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("same\n", ""));
}

#[test]
fn there_need_be_no_null_device() {
    programs::build(&["selfpage-malloc", "selfpage-preload"]);
    for options in ["", "--frames 8M"] {
        let line = format!(r#"mount -t tmpfs none /dev && echo said | "$0" run {options} -- cat"#);
        let output = match with_mounts(&line, [env!("CARGO_BIN_EXE_selfpage")]) {
            Ok(output) => output,
            Err(why) => return skip::skip("mount", &why),
        };
        let errors = text(&output.stderr);
        if output.status.code() == Some(1) {
            return skip::skip("uffd", &errors);
        }
        // Nothing read it before the program did.
        assert_eq!((errors.as_str(), text(&output.stdout).as_str()), ("", "said\n"));
    }
}

/// `selfpage run` where a filter refuses a system call.
fn without(call: Call, options: &[&str]) -> Output {
    let mut filtered = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    filtered.arg("run").args(options).args(["--", "sh", "-c", "sleep 0.2; echo ran"]);
    // SAFETY: test: three system calls.
    let filtered = unsafe {
        filtered.pre_exec(move || {
            // It may be one without which the tool would wait for ever.
            libc::alarm(20);
            call.fails(libc::EPERM)
        })
    };
    filtered.output().unwrap()
}

#[test]
fn a_call_that_a_filter_refuses_is_named_with_the_remedy_before_anything_begins() {
    programs::build(&["selfpage-malloc", "selfpage-preload"]);
    let place = Place::new("filtered");
    let (stats, trace) = (place.path("stats"), place.path("trace"));
    let options = ["--frames", "8M", "--stats", &stats, "--trace", &trace];
    if text(&tool::selfpage(&[&["run"], &options[..], &["--", "true"]].concat()).stderr).contains("system calls") {
        return skip::skip("uffd", "no program can be paged here");
    }
    [&stats, &trace].into_iter().for_each(|file| std::fs::write(file, "old").unwrap());
    let memfd_create = Call::with(libc::SYS_memfd_create, 1, libc::MFD_CLOEXEC);
    for (call, status, names) in [
        (memfd_create, 2, ["memfd_create: ", "allow memfd_create in"]),
        (
            Call::with(libc::SYS_pidfd_open, 1, libc::O_EXCL as u32),
            1,
            ["pidfd_open", "allow pidfd_open and pidfd_getfd in"],
        ),
        (Call::with(libc::SYS_pidfd_getfd, 2, 0), 1, ["pidfd_getfd", "allow pidfd_open and pidfd_getfd in"]),
    ] {
        let output = without(call, &options);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{errors}");
        assert!(errors.lines().count() == 1 && errors.starts_with("selfpage run: "), "{errors}");
        assert!(names.iter().all(|name| errors.contains(name)) && output.stdout.is_empty(), "{errors}");
        [&stats, &trace].into_iter().for_each(|file| assert_eq!(std::fs::read(file).unwrap(), b"old", "{errors}"));
    }
    // Without frames nothing is on record.
    assert_eq!(text(&without(memfd_create, &[]).stdout), "ran\n");
}

#[test]
fn what_signals_are_heard_by_is_tried_before_anything_begins() {
    programs::build(&["selfpage-malloc", "selfpage-preload"]);
    for (number, name) in [(libc::SYS_recvfrom, "recvfrom"), (libc::SYS_sendto, "sendto")] {
        let output = without(Call::any(number), FRAMES);
        let errors = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{name}: {errors}");
        assert!(
            errors.lines().count() == 1 && errors.starts_with("selfpage run: cannot listen for signals: "),
            "{errors}"
        );
        assert!(errors.contains("allow socketpair, sendto and recvfrom in"), "{errors}");
        // Without frames nobody listens but the program.
        assert_eq!(text(&without(Call::any(number), &[]).stdout), "ran\n");
    }
}

#[test]
fn a_filter_that_refuses_ioctl_keeps_no_program_from_our_allocator() {
    programs::build(&["selfpage-malloc"]);
    let output = without(Call::any(libc::SYS_ioctl), &[]);
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("ran\n", ""));
}

/// Puts a program of somebody else's there, which has a user's or a group's rights by `mode`.
fn somebodys(path: &str, mode: u32) -> std::io::Result<()> {
    std::fs::copy("/bin/echo", path)?;
    std::os::unix::fs::chown(path, Some(65534), Some(65534))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

#[test]
fn a_program_that_gains_no_rights_is_run() {
    programs::build(&["selfpage-malloc", "selfpage-preload"]);
    let place = Place::new("rights");
    let program = place.path("program");
    for mode in [0o4755, 0o2755] {
        if let Err(why) = somebodys(&program, mode) {
            return skip::skip("root", &why.to_string());
        }
        let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
        run.args(["run", "--", &program, "ran"]);
        assert_eq!(run.output().unwrap().status.code(), Some(2));
        let gives_up = || {
            // SAFETY: test: numbers.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            Ok(())
        };
        // SAFETY: test: one system call.
        let output = unsafe { run.pre_exec(gives_up) }.output().unwrap();
        assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("ran\n", ""));
    }
    // Where a file system gives none.
    let (tool, mounted) = (env!("CARGO_BIN_EXE_selfpage"), place.path("mounted"));
    std::fs::create_dir(&mounted).unwrap();
    for how in [r#"-- "$2/program" ran"#, r#"--frames 8M -- sh -c '"$0" ran; exit' "$2/program""#] {
        let line = format!(r#"mount -t tmpfs -o nosuid none "$2" && cp -p "$1" "$2" && exec "$0" run {how}"#);
        let output = match with_mounts(&line, [tool, &program, &mounted]) {
            Ok(output) => output,
            Err(why) => return skip::skip("mount", &why),
        };
        let errors = text(&output.stderr);
        if output.status.code() == Some(1) {
            return skip::skip("uffd", &errors);
        }
        assert_eq!((text(&output.stdout).as_str(), errors.as_str()), ("ran\n", ""));
    }
}

/// Its number comes back from `sh` as $1; it has ended, and nobody has heard of it, when that runs.
const GONE: &str =
    r#"for _ in $(seq 400); do [ -e /proc/$1 ] || exec echo gone; sleep 0.05; done; cat /proc/$1/status"#;

#[test]
fn children_that_it_was_executed_with_are_not_left_as_zombies() {
    if !can_page() {
        return;
    }
    let line = format!(r#"true & exec "$0" run {} -- sh -c "$1" sh $!"#, FRAMES.join(" "));
    let output = Command::new("sh").args(["-c", &line, env!("CARGO_BIN_EXE_selfpage"), GONE]).output().unwrap();
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("gone\n", ""));
}

#[test]
fn orphans_that_come_to_process_1_are_not_left_as_zombies() {
    if !can_page() {
        return;
    }
    let orphan = format!("set -- $(true >&- & echo $!); {GONE}");
    let mut first = Command::new("unshare");
    first.args(["--pid", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_selfpage"), "run"]).args(FRAMES);
    let Ok(output) = first.args(["--", "sh", "-c", &orphan]).output() else {
        return skip::skip("unshare", "there is no unshare(1): apt-get install util-linux");
    };
    let errors = text(&output.stderr);
    if errors.contains("unshare: ") {
        return skip::skip("root", &errors);
    }
    assert_eq!((text(&output.stdout).as_str(), errors.as_str()), ("gone\n", ""));
}

#[test]
fn what_a_service_manager_says_to_its_process_is_said_to_the_program_in_frames() {
    if !can_page() {
        return;
    }
    let program = r#"[ $LISTEN_PID.$WATCHDOG_PID = $$.$$ ] && sh -c 'echo taken ${LISTEN_PIDFDID-alone} $LISTEN_FDS'"#;
    let line = format!(
        r#"export LISTEN_PID=$$ WATCHDOG_PID=$$ LISTEN_PIDFDID=7 LISTEN_FDS=1; exec "$0" run {} -- sh -c "$1""#,
        FRAMES.join(" ")
    );
    let run = |line: &str| {
        let output = Command::new("sh").args(["-c", line, env!("CARGO_BIN_EXE_selfpage"), program]).output().unwrap();
        (text(&output.stdout), text(&output.stderr))
    };
    assert_eq!(run(&line), ("taken alone 1\n".into(), String::new()));
    // What is for another process stays so.
    assert_eq!(run(&line.replace("LISTEN_PID=$$", "LISTEN_PID=1")).0, "");
}
