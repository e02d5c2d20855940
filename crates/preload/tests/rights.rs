//! Programs that give up their rights: each case of tests/c/rights.c, in frames fewer than it touches.

mod run;

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
    if !is_root() {
        run::skip("root", "only root can become another user");
        return None;
    }
    Some(run::run_under(command, "/".as_ref(), &["--frames", "8M"], run::compile("rights", &["-pthread"]), &[name]))
}

/// Whether this process may become another user and leave its groups.
fn is_root() -> bool {
    // SAFETY: test: a call without arguments.
    unsafe { libc::geteuid() == 0 }
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

cases! { kept, by_number, by_the_library, amid_faults, often, another_threads_own, filtered, }

/// Where the store has threads of its own, since io_uring is refused.
#[test]
fn threads_that_move_data_follow() {
    for name in ["kept", "by_number"] {
        let Some(ran) = case_under(&["env", "SELFPAGE_IO=pool"], name) else { return };
        assert_eq!(ran.ok().text(), "ok\n", "{name}");
    }
}

#[test]
fn a_fork_without_the_rights_that_a_child_needs_says_why_it_fails() {
    let Some(ran) = case("then_fork") else { return };
    assert_eq!(ran.code(), 0, "{}{}", ran.text(), ran.errors());
    match ran.text().as_str() {
        "the child went on\nok\n" => assert_eq!(ran.errors(), ""),
        text => {
            assert_eq!(text, "no fork\nok\n", "{}", ran.errors());
            assert!(
                ran.errors().starts_with("selfpage: no fork: ") && ran.errors().lines().count() == 1,
                "{}",
                ran.errors()
            );
        }
    }
}

/// Nor without a file that it could not have: it may not open its own memory. What it was to be kept from is not opened for it.
#[test]
fn a_fork_of_what_is_not_dumpable_says_so() {
    if !run::possible() {
        return;
    }
    if !is_root() {
        return run::skip("root", "only root can become another user");
    }
    let options = ["--frames", "8M", "--store", "memory"];
    let ran = run::run_with("/".as_ref(), &options, run::compile("rights", &["-pthread"]), &["then_fork"]);
    assert_eq!((ran.code(), ran.text()), (0, "no fork\nok\n".to_owned()), "{}", ran.errors());
    let errors = ran.errors();
    let says = ["selfpage: no fork: ", "not dumpable"];
    assert!(errors.lines().count() == 1 && says.iter().all(|words| errors.contains(words)), "{errors}");
}

/// Has setpriv(1) execute echo(1) as another user with these options, which goes well.
fn as_nobody(options: &[&str]) -> Option<Ran> {
    if !run::possible() {
        return None;
    }
    if !is_root() || !Path::new("/usr/bin/setpriv").exists() {
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
