//! `selfpage bench` that is stopped, or whose programs do not start: it ends, and nothing of it is left.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

mod tool;

use tool::{Place, text};

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `what` gives something.
#[track_caller]
fn wait_for<T>(mut what: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "it does not come");
    }
}

/// How a program ended; one that does not is killed, and `None`.
fn end_of(run: &mut Child) -> Option<ExitStatus> {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        if let Some(status) = run.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = run.kill();
    let _ = run.wait();
    None
}

/// The state of a process and its parent. `None`: it is gone, or waits to be reaped.
fn state(pid: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.chars().next()?;
    (state != 'Z' && state != 'X').then_some((state, fields.next()?.parse().ok()?))
}

fn child_of(parent: u32) -> Option<u32> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| state(*pid).is_some_and(|(_, above)| above == parent))
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Whether a process stays, which is killed then. One that ends lets go of its memory first.
fn is_left(pid: u32) -> bool {
    let began = Instant::now();
    while state(pid).is_some() && began.elapsed() < PATIENCE / 6 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let is_left = state(pid).is_some();
    if is_left {
        signal(pid, Signal::KILL);
    }
    is_left
}

/// A run whose job has a fork that holds its memory, which the job, stopped, does not end: the run, the job and the fork.
fn with_a_fork(place: &Place) -> (Child, u32, u32) {
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.args(["bench", "dirty", "--quick", "--reps", "1000", "--case", "arm-4k", "--system", "fork", "--dir"]);
    let run = run.arg(&place.0).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let (job, fork) = wait_for(|| {
        let job = child_of(run.id())?;
        child_of(job)?;
        signal(job, Signal::STOP);
        // One that is killed already takes a while to let go of its memory.
        std::thread::sleep(Duration::from_millis(100));
        let fork = child_of(job);
        if fork.is_none() {
            signal(job, Signal::CONT);
        }
        Some((job, fork?))
    });
    (run, job, fork)
}

#[test]
fn a_signal_ends_a_job_with_the_fork_that_it_has_made() {
    let place = Place::new("fork");
    let (mut run, _, fork) = with_a_fork(&place);
    signal(run.id(), Signal::TERM);
    let ended = end_of(&mut run);
    let is_left = is_left(fork);
    let errors = std::io::read_to_string(run.stderr.take().unwrap()).unwrap();
    assert_eq!(ended.and_then(|status| status.signal()), Some(libc::SIGTERM), "{errors}");
    assert!(!is_left, "the fork holds its memory for ever");
    assert_eq!(errors.lines().last(), Some("selfpage bench: stopped by a signal"), "{errors}");
}

#[test]
fn a_run_that_is_killed_leaves_no_fork() {
    let place = Place::new("killed");
    let (mut run, job, fork) = with_a_fork(&place);
    run.kill().unwrap();
    run.wait().unwrap();
    let left: Vec<u32> = [job, fork].into_iter().filter(|pid| is_left(*pid)).collect();
    assert!(left.is_empty(), "they hold their memory for ever");
}

/// `redis-cli` reaches no server here: the case waits for it until it is stopped.
#[test]
fn a_signal_ends_the_programs_of_a_bench() {
    for (case, program) in [("sort", "sort"), ("redis", "redis-server")] {
        let (place, programs) = (Place::new("programs"), Place::new(case));
        for name in ["redis-cli", "redis-benchmark"] {
            programs.program(name, "exit 1");
        }
        programs.program(program, &format!("echo $$ > {}\nexec sleep 600", programs.path("pid")));
        let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
        run.args(["bench", "apps", "--quick", "--reps", "1", "--case", case, "--system", "glibc", "--dir"]);
        run.arg(&place.0).env("PATH", programs.first_in_path());
        let mut run = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let program: u32 = wait_for(|| std::fs::read_to_string(programs.path("pid")).ok()?.trim().parse().ok());
        signal(run.id(), Signal::TERM);
        let ended = end_of(&mut run);
        let is_left = is_left(program);
        assert_eq!(ended.and_then(|status| status.signal()), Some(libc::SIGTERM), "{case}");
        assert!(!is_left, "the program of {case} goes on");
    }
}

#[test]
fn of_a_job_that_is_killed_no_limit_is_told_that_it_did_not_have() {
    let place = Place::new("limit");
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.args(["bench", "dirty", "--quick", "--reps", "1", "--case", "scan", "--system", "mprotect", "--dir"]);
    let run = run.arg(&place.0).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    signal(wait_for(|| child_of(run.id())), Signal::KILL);
    let output = run.wait_with_output().unwrap();
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains("SIGKILL"), "{errors}");
    assert!(!errors.contains("memory limit"), "{errors}");
}

#[test]
fn a_server_that_does_not_start_is_not_waited_for() {
    let (place, programs) = (Place::new("servers"), Place::new("redis"));
    for name in ["redis-server", "redis-cli", "redis-benchmark"] {
        programs.program(name, "exit 1");
    }
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    run.args(["bench", "apps", "--quick", "--reps", "1", "--case", "redis", "--system", "glibc", "--dir"]);
    let run = run.arg(&place.0).env("PATH", programs.first_in_path()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut run = run.spawn().unwrap();
    let ended = end_of(&mut run);
    let errors = std::io::read_to_string(run.stderr.take().unwrap()).unwrap();
    assert!(ended.and_then(|status| status.code()) == Some(1) && errors.contains("redis: it failed"), "{errors}");
}

/// What is preloaded or set where the tool is started is not what is measured.
#[test]
fn the_c_library_is_measured_as_it_is() {
    let (place, programs) = (Place::new("bound"), Place::new("environment"));
    programs.program("sort", &format!("env > {}; exec /usr/bin/sort \"$@\"", programs.path("seen")));
    let settings = [("MALLOC_ARENA_MAX", "1"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")];
    let run = |bench: &[&str]| {
        let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
        run.arg("bench").args(bench).args(["--quick", "--reps", "1", "--system", "glibc", "--dir"]).arg(&place.0);
        run.envs(settings).env("PATH", programs.first_in_path());
        run
    };
    let output = run(&["apps", "--case", "sort"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let seen = std::fs::read_to_string(programs.path("seen")).unwrap();
    assert!(settings.iter().all(|(name, _)| !seen.contains(name)), "{seen}");

    // Something that is no allocator will do: the loader says for each process what it has loaded.
    let mut run = run(&["objects", "--case", "larson-1t"]);
    run.env("LD_PRELOAD", "libresolv.so.2").env("LD_DEBUG", "libs").env("LD_DEBUG_OUTPUT", programs.path("loaded"));
    let run = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let own = format!("loaded.{}", run.id());
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let loaded = |path: &Path| std::fs::read_to_string(path).unwrap().contains("libresolv");
    let files = std::fs::read_dir(&programs.0).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.display().to_string().contains("/loaded.")).collect();
    assert!(files.len() > 1 && loaded(&programs.0.join(&own)), "{files:?}");
    let those: Vec<_> = files.iter().filter(|path| !path.ends_with(&own) && loaded(path)).collect();
    assert!(those.is_empty(), "{those:?}");
}
