//! `selfpage run` as whoever starts it meets it. What it does to programs, the tests of what it preloads show.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

#[path = "../../../tests/filter.rs"]
mod filter;
mod frames;
#[path = "../../../tests/mounts.rs"]
mod mounts;
#[path = "../../../tests/programs.rs"]
mod programs;
#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use filter::Call;
use frames::{FRAMES, can_page};
use mounts::with_mounts;
use tool::{Place, in_a_pid_namespace, text};

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
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let memfd_create = Call::with(libc::SYS_memfd_create, 1, flags);
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
    let mut tool = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    tool.arg("run").args(FRAMES).args(["--", "sh", "-c", &orphan]);
    let (output, errors) = match in_a_pid_namespace(&tool) {
        Ok(ended) => ended,
        Err((needs, why)) => return skip::skip(needs, &why),
    };
    assert_eq!((text(&output.stdout).as_str(), errors.as_str()), ("gone\n", ""));
}

#[test]
fn what_a_service_manager_says_to_its_process_is_said_to_the_program_in_frames() {
    if !can_page() {
        return;
    }
    let program = r#"[ $LISTEN_PID.$WATCHDOG_PID.$SYSTEMD_EXEC_PID = $$.$$.$$ ] && sh -c 'echo taken ${LISTEN_PIDFDID-alone} $LISTEN_FDS'"#;
    let line = format!(
        r#"export LISTEN_PID=$$ WATCHDOG_PID=$$ SYSTEMD_EXEC_PID=$$ LISTEN_PIDFDID=7 LISTEN_FDS=1; exec "$0" run {} -- sh -c "$1""#,
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

#[test]
fn a_program_that_may_not_be_executed_where_it_lies_is_said_to_lie_there() {
    programs::build(&["selfpage-malloc", "selfpage-preload"]);
    let place = Place::new("noexec");
    let line = r#"mount -t tmpfs -o noexec none "$1" && cp /bin/true "$1/only-here" && PATH="$1:$PATH" && "$0" run $2 -- "$3""#;
    for options in ["", "--frames 8M"] {
        for program in [&place.path("only-here"), "only-here"] {
            let output = match with_mounts(line, [env!("CARGO_BIN_EXE_selfpage"), &place.path(""), options, program]) {
                Ok(output) => output,
                Err(why) => return skip::skip("mount", &why),
            };
            let errors = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{errors}");
            let says = ["only-here: ", "mounted noexec", "copy it elsewhere, or remount it with exec"];
            assert!(says.iter().all(|what| errors.contains(what)) && !errors.contains("chmod"), "{errors}");
        }
    }
}

/// Waits until nobody has the other end of a pipe open.
fn is_left(end: impl AsFd) -> bool {
    let mut look = libc::pollfd { fd: end.as_fd().as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: test: one descriptor, in a place of this function's.
    unsafe { libc::poll(&raw mut look, 1, 20_000) == 1 && look.revents & (libc::POLLHUP | libc::POLLERR) != 0 }
}

#[test]
fn what_the_program_closes_the_tool_has_closed() {
    if !can_page() {
        return;
    }
    let place = Place::new("closed");
    // `read` keeps it there until the test has looked.
    let program = "read line; exec <&- >&- 9>&-; read line <&8 && exit 7";
    for stats in [&place.path("stats"), "/dev/stderr"] {
        let ((ours, input), (output, kept)) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
        let ((nine, ready), (held, goes_on)) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
        let mut run = frames::run(&["--frames", "8M", "--stats", stats], &["sh", "-c", program]);
        run.stdin(ours).stdout(kept).stderr(Stdio::piped());
        let inherit = move || {
            // SAFETY: test: numbers, and descriptors that live as long as this.
            let done = unsafe {
                // Either may be at the other's number already.
                let [ready, held] =
                    [&ready.as_fd(), &held.as_fd()].map(|end| libc::fcntl(end.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 10));
                libc::dup2(ready, 9) == 9 && libc::dup2(held, 8) == 8
            };
            if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: test: two system calls.
        unsafe { run.pre_exec(inherit) };
        let child = run.spawn().unwrap();
        // With our own ends.
        drop(run);
        (&input).write_all(b"said\n").unwrap();
        let left = [is_left(&input), is_left(&output), is_left(&nine)];
        (&goes_on).write_all(b"go on\n").unwrap();
        let ended = child.wait_with_output().unwrap();
        let errors = text(&ended.stderr);
        assert_eq!((ended.status.code(), left), (Some(7), [true; 3]), "{errors}");
        // What the tool has to say comes nevertheless.
        let said = if stats == "/dev/stderr" { errors } else { std::fs::read_to_string(stats).unwrap() };
        assert!(said.contains("faults_total"), "{said}");
    }
}
