//! Forks at moments and in places where a pager is easily caught: each case of tests/c/forks.c, and forks in handlers of signals.

mod run;

/// Runs the case, which ends within a minute.
fn case(name: &str) {
    if run::possible() {
        let ran = run::run("8M", run::compile("forks", &[]), &[name]).ok();
        assert_eq!(ran.text(), "ok\n");
    }
}

#[test]
fn a_handler_forks_in_the_middle_of_an_allocation() {
    case("in_a_handler");
}

#[test]
fn a_stack_that_forks_is_managed() {
    case("on_a_coroutine");
    case("on_a_signal_stack");
}

#[test]
fn a_thread_that_is_cancelled_forks_first() {
    case("cancelled");
}

/// A store in a file it could not open anew.
#[test]
fn a_child_that_shares_the_programs_memory_forks() {
    if run::possible() {
        let options = ["--frames", "8M", "--store", "memory"];
        let program = run::compile("forks", &[]);
        let ran = run::run_with("/".as_ref(), &options, program, &["between_vfork_and_exec"]).ok();
        assert_eq!(ran.text(), "ok\n");
    }
}

#[test]
fn what_is_empty_in_a_child_is_so_before_its_first_handler() {
    case("wiped_before_handlers");
}

#[test]
fn a_fork_fails_where_its_child_could_not_have_its_memory() {
    if !run::possible() {
        return;
    }
    let limits = [("at_limits", "ulimit -n"), ("at_data_limits", "ulimit -d")];
    let cases = ["/var/tmp", "memory"].map(|store| limits.map(|limit| (run::compile("forks", &[]), store, limit)));
    // The C library has a second name for it.
    let by_second_name = (run::compile("forks", &["-Dfork=__fork"]), "memory", limits[0]);
    for (program, store, (name, limit)) in cases.into_iter().flatten().chain([by_second_name]) {
        let ran = run::run_with("/".as_ref(), &["--frames", "8M", "--store", store], &program, &[name]);
        // Said once.
        assert_eq!((ran.code(), ran.text().as_str(), ran.errors().lines().count()), (0, "ok\n", 1), "{}", ran.errors());
        assert!(ran.errors().contains("no fork") && ran.errors().contains(limit), "{}", ran.errors());
    }
}

/// The pager threads' table is full then, and a child has one of its own.
#[test]
fn a_fork_under_a_limit_from_before_the_start() {
    if !run::possible() {
        return;
    }
    let program = run::compile("forks", &[]);
    for most in 15..25 {
        for (store, frames) in [("/var/tmp", "4M"), ("memory", "8M")] {
            let limit = format!("--nofile={most}:{most}");
            let options = ["--frames", frames, "--store", store];
            let ran = run::run_under(&["prlimit", &limit], "/".as_ref(), &options, &program, &["at_this_limit"]);
            assert_eq!((ran.code(), ran.text().as_str()), (0, "ok\n"), "{most}, {store}: {}", ran.errors());
            assert!(ran.errors().lines().all(|line| line.contains("no fork")), "{most}, {store}: {}", ran.errors());
        }
    }
}

#[test]
fn a_fork_fails_where_its_child_may_not_open_its_memory() {
    if !run::possible() {
        return;
    }
    let options = ["--frames", "8M", "--store", "/var/tmp"];
    let ran = run::run_with("/".as_ref(), &options, run::compile("forks", &[]), &["after_landlock"]);
    if ran.text() == "no landlock\n" {
        return run::skip("landlock", "the kernel has none: CONFIG_SECURITY_LANDLOCK, and lsm=landlock");
    }
    // Said once.
    assert_eq!((ran.code(), ran.text().as_str(), ran.errors().lines().count()), (0, "ok\n", 1), "{}", ran.errors());
    let says = ["selfpage: no fork: open /proc/thread-self/mem: ", "Landlock"];
    assert!(says.iter().all(|words| ran.errors().contains(words)), "{}", ran.errors());
}

#[test]
fn three_hundred_children_at_a_time_have_their_memory() {
    case("many_children");
}

#[test]
fn a_fork_fails_where_the_store_has_no_room_for_another_process() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let store = directory.path().join("store");
    let store = store.to_str().unwrap();
    let options = ["--frames", "8M", "--store", store];
    let ran = run::run_with("/".as_ref(), &options, run::compile("forks", &[]), &["in_a_full_family", store]);
    // Said once.
    assert_eq!((ran.code(), ran.text().as_str(), ran.errors().lines().count()), (0, "ok\n", 1), "{}", ran.errors());
    let says = ["selfpage: no fork: ", store, "processes share it", "--store memory"];
    assert!(says.iter().all(|words| ran.errors().contains(words)), "{}", ran.errors());
}

#[test]
fn a_fork_opens_little_beforehand() {
    case("opens_little");
}

#[test]
fn a_clone_with_a_descriptor_of_the_child_is_a_fork() {
    case("with_pidfd");
}

#[test]
fn a_fork_leaves_errno_alone() {
    if !run::possible() {
        return;
    }
    // A file would be its maker's.
    let options = ["--frames", "8M", "--store", "memory"];
    let does = |name| {
        let ran = run::run_with("/".as_ref(), &options, run::compile("forks", &[]), &[name]).ok();
        assert_eq!(ran.text(), "ok\n", "{name}");
    };
    does("errno_is_kept");
    if !run::is_root() {
        return run::skip("root", "only root can become another user, whose limit on processes is met");
    }
    does("errno_without_a_child");
}

#[test]
fn a_handler_forks_and_its_child_goes_on() {
    if !run::possible() {
        return;
    }
    let program = run::compile("handler_forks", &[]);
    for threads in ["1", "2"] {
        let ran = run::run("8M", &program, &[threads]).ok();
        assert_eq!(ran.text(), "done\n", "{threads}");
    }
}

#[test]
fn forks_beside_threads_that_use_streams() {
    if run::possible() {
        assert_eq!(run::run("32M", run::compile("streams", &[]), &[]).ok().text(), "done\n");
    }
}
