//! Programs that give up their rights: each case of tests/c/rights.c, in frames fewer than it touches.

mod run;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use run::Ran;

fn case(name: &str) -> Option<Ran> {
    case_under(&[], name)
}

/// The case, with `selfpage run` started by another command.
fn case_under(command: &[&str], name: &str) -> Option<Ran> {
    if !run::possible() {
        return None;
    }
    if !run::is_root() {
        run::skip("root", "only root can become another user");
        return None;
    }
    Some(run::run_under(command, "/".as_ref(), &["--frames", "8M"], run::compile("rights", &["-pthread"]), &[name]))
}

macro_rules! cases {
    ($($name:ident,)*) => { $(
        #[test]
        fn $name() {
            let Some(ran) = case(stringify!($name)) else { return };
            let ran = ran.ok();
            assert_eq!(ran.text(), "ok\n");
            // The file for records is out of its reach, but not out of its pager threads'.
            assert!(ran.stats["evictions_total"].as_u64().unwrap() > 1000, "{}", ran.stats);
        }
    )* };
}

cases! { kept, by_number, by_the_library, amid_faults, often, another_threads_own, filtered, never_blocked, }

/// Where the store has threads of its own, since io_uring is refused.
#[test]
fn threads_that_move_data_follow() {
    for name in ["kept", "by_number"] {
        let Some(ran) = case_under(&["env", "SELFPAGE_IO=pool"], name) else { return };
        assert_eq!(ran.ok().text(), "ok\n", "{name}");
    }
}

/// The case, which forks as another user, without a file that it could not have: how it ended, in its words, and what was said beside.
fn fork_case(name: &str) -> Option<(String, String)> {
    if !run::possible() {
        return None;
    }
    if !run::is_root() {
        run::skip("root", "only root can become another user");
        return None;
    }
    let options = ["--frames", "8M", "--store", "memory"];
    let ran = run::run_with("/".as_ref(), &options, run::compile("rights", &["-pthread"]), &[name]);
    assert_eq!(ran.code(), 0, "{}{}", ran.text(), ran.errors());
    Some((ran.text(), ran.errors()))
}

/// There was no child, and one line says why in these words.
#[track_caller]
fn no_fork((text, errors): (String, String), says: &[&str]) {
    assert_eq!((text.as_str(), errors.lines().count()), ("no fork\nok\n", 1), "{errors}");
    assert!(errors.starts_with("selfpage: no fork: ") && says.iter().all(|words| errors.contains(words)), "{errors}");
}

/// It may open its own memory, and needs no file.
#[test]
fn a_fork_without_the_right_to_serve_system_calls_says_so() {
    let Some(ran) = fork_case("dumpable_then_fork") else { return };
    // Where everybody has that right, its child has all its memory.
    let is_everybodys = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|it| it != "0\n");
    let device = std::fs::metadata("/dev/userfaultfd").map_or(0, |about| about.mode());
    if is_everybodys || device & 0o006 == 0o006 {
        return assert_eq!(ran, ("the child went on\nok\n".to_owned(), String::new()));
    }
    no_fork(ran, &["open userfaultfd: ", "CAP_SYS_PTRACE"]);
}

/// It may not open its own memory. What it was to be kept from is not opened for it.
#[test]
fn a_fork_of_what_is_not_dumpable_says_so() {
    let Some(ran) = fork_case("then_fork") else { return };
    no_fork(ran, &["open /proc/thread-self/mem: ", "not dumpable"]);
}

/// The store's file is root's alone.
#[test]
fn a_fork_without_the_right_to_the_stores_file_says_so() {
    let Some(ran) = case("dumpable_then_fork") else { return };
    assert_eq!(ran.code(), 0, "{}{}", ran.text(), ran.errors());
    no_fork((ran.text(), ran.errors()), &["open store in /var/tmp: ", "keep the right to that"]);
}

/// Has setpriv(1) execute echo(1) as another user with these options, which goes well.
fn as_nobody(options: &[&str]) -> Option<Ran> {
    if !run::possible() {
        return None;
    }
    if !run::is_root() || !Path::new("/usr/bin/setpriv").exists() {
        run::skip("root", "only root can become another user, by setpriv: apt-get install util-linux");
        return None;
    }
    let line = [&["--reuid=65534", "--clear-groups"], options, &["/bin/echo", "ran"]].concat();
    let ran = run::run("8M", "/usr/bin/setpriv", &line);
    assert_eq!((ran.code(), ran.text().as_str()), (0, "ran\n"), "{}", ran.errors());
    Some(ran)
}

#[test]
fn setpriv_executes_what_runs_as_another_user() {
    let Some(ran) = as_nobody(&[]) else { return };
    assert_eq!(ran.count("setpriv", "frames_bytes"), 8 << 20, "{}", ran.stats);
}

#[test]
fn what_may_not_open_the_record_says_so() {
    // It may have faults inside system calls served, so it is managed.
    let Some(ran) = as_nobody(&["--inh-caps=+sys_ptrace", "--ambient-caps=+sys_ptrace"]) else { return };
    let says = "selfpage: not in the statistics, because it has no right to open ";
    assert!(ran.errors().starts_with(says) && ran.errors().lines().count() == 1, "{}", ran.errors());
    assert_eq!(ran.stats["processes"].as_array().unwrap().len(), 1, "{}", ran.stats);
}
