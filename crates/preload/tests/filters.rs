//! Programs that filter their own system calls: each case of tests/c/filters.c, in frames fewer than it touches. It ends as it would
//! without us, and has its record.

mod run;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use run::Ran;

const SIGSYS: i32 = 128 + libc::SIGSYS;
const SIGABRT: i32 = 128 + libc::SIGABRT;

fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM.get_or_init(|| run::possible().then(|| run::compile("filters", &[]))).as_deref()
}

fn case(name: &str) -> Option<Ran> {
    Some(run::run("8M", program()?, &[name]))
}

/// The case, which says that all is right and ends with that status.
fn ends(name: &str, status: i32) -> Option<Ran> {
    let ran = case(name)?;
    let found = (ran.code(), ran.text(), ran.errors());
    assert_eq!(found, (status, "ok\n".into(), String::new()), "{name}");
    Some(ran)
}

fn evictions(ran: &Ran) -> Vec<u64> {
    let processes = ran.stats["processes"].as_array().unwrap();
    processes.iter().map(|one| one["evictions_total"].as_u64().unwrap()).collect()
}

/// Evictions of a case that has set its filter, and of one that has gone on and worked after that.
const BEFORE: std::ops::Range<u64> = 2000..20_000;
const IN_ALL: u64 = 25_000;

#[test]
fn a_filter_that_kills_lets_its_program_end_and_its_counts_go_on() {
    let names = ["by_prctl", "by_number", "after_refusals", "refused", "twice", "as_another_user"];
    for name in names {
        if name == "as_another_user" && !run::is_root() {
            run::skip("root", "only root can become another user");
            continue;
        }
        let Some(ran) = ends(name, 8) else { return };
        assert!(matches!(evictions(&ran)[..], [count] if count > IN_ALL), "{name}: {}", ran.stats);
    }
}

#[test]
fn what_a_filter_says_holds_for_managed_memory() {
    ends("holds_for_managed_memory", 8);
    ends("killed_for_managed_memory", SIGSYS);
    ends("executed_to_be_trapped", 8);
}

#[test]
fn a_childs_filter_is_its_own() {
    for name in ["in_a_child", "after_vfork"] {
        let Some(ran) = ends(name, 8) else { return };
        // The child ends first.
        let [child, parent] = evictions(&ran)[..] else { panic!("{name}: {}", ran.stats) };
        assert!(parent > IN_ALL && (name == "after_vfork" || child > BEFORE.start), "{name}: {}", ran.stats);
    }
}

#[test]
fn a_filter_may_forbid_to_ask_which_thread_one_is() {
    ends("starts_threads", 8);
}

/// A case in which something is done at one moment of a call that sets a filter.
fn meanwhile(name: &str) -> Option<Ran> {
    had_its_moment(case(name)?, name)
}

fn had_its_moment(ran: Ran, name: &str) -> Option<Ran> {
    if ran.text() == "no tracing\n" {
        run::skip("ptrace", "a process may not trace the one that forked it: sysctl kernel.yama.ptrace_scope=1");
        return None;
    }
    if ran.text() == "no faults of the kernel's\n" {
        let why = "this user may answer no faults of the kernel's: sysctl vm.unprivileged_userfaultfd=1";
        run::skip("userfaultfd", why);
        return None;
    }
    assert_eq!((ran.code(), ran.text(), ran.errors()), (8, "ok\n".into(), String::new()), "{name}");
    Some(ran)
}

#[test]
fn a_thread_may_begin_as_a_filter_is_set() {
    meanwhile("set_as_a_thread_begins");
}

#[test]
fn a_child_that_a_handler_forks_as_a_filter_is_set_knows_that_it_has_one() {
    for name in ["forks_just_before", "killed_and_forked_just_before", "killed_and_forked_as_its_watch_begins"] {
        let Some(_) = meanwhile(name) else { return };
    }
}

/// A part of it is the C library's for itself, and a few threads'.
const UNMANAGED_BYTES: u64 = 4 << 20;

#[test]
fn what_the_c_library_allocates_in_a_child_that_is_forked_as_a_watch_begins_is_managed() {
    let Some(ran) = meanwhile("forks_as_its_watch_begins") else { return };
    let unmanaged = ran.stats["unmanaged_bytes_max"].as_u64().unwrap();
    assert!(evictions(&ran).len() == 2 && unmanaged < UNMANAGED_BYTES, "{}", ran.stats);
}

/// A case, under a filter that was there before `selfpage run`, as in a container.
fn case_in_a_container(name: &str) -> Option<Ran> {
    let program = program()?;
    let under = [program.to_str().unwrap()];
    Some(run::run_under(&under, Path::new("/"), &["--frames", "8M"], program, &[name]))
}

#[test]
fn a_process_ends_whose_last_thread_a_filter_of_its_container_kills() {
    for (name, status, processes) in [("ask", SIGSYS, 1), ("child_asks", 8, 2)] {
        let Some(ran) = case_in_a_container(name) else { return };
        assert_eq!((ran.code(), ran.text(), ran.errors()), (status, "ok\n".into(), String::new()), "{name}");
        assert_eq!(evictions(&ran).len(), processes, "{name}: {}", ran.stats);
    }
}

#[test]
fn what_looks_for_the_last_thread_has_no_part_in_the_programs_descriptors() {
    let Some(ran) = case_in_a_container("closes_all_after_main") else { return };
    assert_eq!((ran.code(), ran.text(), ran.errors()), (8, "ok\n".into(), String::new()));
    ends("closes_all_in_a_child", 8);
}

#[test]
fn a_filter_that_was_there_before_the_program_says_nothing_about_its_own() {
    let Some(ran) = case_in_a_container("forks_meanwhile") else { return };
    let Some(ran) = had_its_moment(ran, "forks_meanwhile") else { return };
    assert!(matches!(evictions(&ran)[..], [_, parent] if parent > IN_ALL), "{}", ran.stats);
}

#[test]
fn a_filter_that_is_set_as_another_is_taken_back_keeps_the_record() {
    for name in ["sets_one_after_a_refusal", "sets_one_after_an_exec"] {
        let Some(ran) = meanwhile(name) else { return };
        assert!(matches!(evictions(&ran)[..], [count] if count > IN_ALL), "{name}: {}", ran.stats);
    }
}

#[test]
fn a_filter_that_is_refused_leaves_the_records_of_others_alone() {
    for name in ["forks_meanwhile", "vforks_meanwhile"] {
        let Some(ran) = meanwhile(name) else { return };
        // The child ends first.
        let [child, parent] = evictions(&ran)[..] else { panic!("{name}: {}", ran.stats) };
        assert!(parent > IN_ALL && (name == "vforks_meanwhile" || child > BEFORE.start), "{name}: {}", ran.stats);
    }
    let ran = meanwhile("sets_one_meanwhile").unwrap();
    assert!(matches!(evictions(&ran)[..], [count] if count > IN_ALL), "{}", ran.stats);
}

#[test]
fn a_record_that_is_counted_on_is_not_taken_back() {
    let Some(ran) = case("executes_as_one_fails") else { return };
    if ran.text() == "no tracing\n" || ran.text() == "no faults of the kernel's\n" {
        return drop(had_its_moment(ran, "executes_as_one_fails"));
    }
    assert_eq!((ran.code(), ran.text(), ran.errors()), (0, "ok\n".into(), String::new()));
    assert!(matches!(evictions(&ran)[..], [count, _] if count > IN_ALL), "{}", ran.stats);
    let ran = meanwhile("exits_as_one_fails").unwrap();
    assert!(matches!(evictions(&ran)[..], [count] if count > IN_ALL), "{}", ran.stats);
}

#[test]
fn a_filter_that_not_all_threads_can_have_is_none() {
    let Some(ran) = ends("for_all_but_one", 8) else { return };
    // The child ends first.
    let [child, parent] = evictions(&ran)[..] else { panic!("{}", ran.stats) };
    assert!(child > BEFORE.start && parent > IN_ALL, "{}", ran.stats);
}

#[test]
fn a_process_goes_on_whose_threads_hand_it_on_to_one_another() {
    ends("handed_on", 8);
}

#[test]
fn a_filter_may_forbid_to_look_for_the_last_thread() {
    ends("last_by_return", 0);
}

#[test]
fn a_process_ends_whose_last_thread_a_filter_kills() {
    let Some(ran) = ends("killed", SIGSYS) else { return };
    assert!(matches!(evictions(&ran)[..], [count] if count > IN_ALL), "{}", ran.stats);
    let ran = ends("killed_by_what_it_inherits", SIGSYS).unwrap();
    let is_of_two = matches!(evictions(&ran)[..], [first, second] if BEFORE.contains(&first) && second > IN_ALL);
    assert!(is_of_two && ran.stats["processes"][0]["program"] == ran.stats["processes"][1]["program"], "{}", ran.stats);
    ends("killed_under_a_cut_name", SIGSYS);
    for name in ["killed_child", "killed_child_by_what_it_inherits"] {
        ends(name, 8);
    }
    // The kernel says of a first thread how it has ended, and of others nothing.
    ends("killed_without_main", 5);
}

#[test]
fn a_process_in_strict_mode_ends_as_without_us() {
    ends("strict_exit", 6);
    ends("strict_by_number", 6);
    ends("strict_killed", 128 + libc::SIGKILL);
}

#[test]
fn pages_that_a_filter_keeps_from_being_read_lose_nothing() {
    let Some(program) = program() else { return };
    for name in ["unreadable_to_read", "unreadable_to_nobody"] {
        let ran = run::run_with(Path::new("/"), &["--frames", "8M", "--store", "memory"], program, &[name]);
        assert_eq!((ran.code(), ran.text(), ran.errors()), (8, "ok\n".into(), String::new()), "{name}");
    }
}

#[test]
fn under_another_root_the_last_threads_end_is_seen() {
    if !run::is_root() {
        return run::skip("root", "only root can change its root directory");
    }
    ends("killed_under_another_root", SIGSYS);
}

#[test]
fn a_program_that_is_executed_under_a_filter_runs_without_a_domain() {
    for name in ["executed", "executed_where_threads_are_killed"] {
        let Some(ran) = case(name) else { return };
        assert_eq!((ran.code(), ran.text().as_str()), (0, "ok\n"), "{name}: {}", ran.errors());
        let says = "selfpage: not managed, because a filter forbids it system calls: ";
        assert!(ran.errors().starts_with(says) && ran.errors().lines().count() == 1, "{name}: {}", ran.errors());
        assert!(matches!(evictions(&ran)[..], [count] if BEFORE.contains(&count)), "{name}: {}", ran.stats);
    }
}

#[test]
fn so_does_one_in_a_pid_namespace_of_its_own() {
    let Some(program) = program() else { return };
    if !run::is_root() {
        return run::skip("root", "only root can make a namespace of process numbers");
    }
    let unshare = ["-pf", "--mount-proc", program.to_str().unwrap(), "executed"];
    let ran = run::run("8M", "unshare", &unshare);
    assert_eq!((ran.code(), ran.text().as_str()), (0, "ok\n"), "{}", ran.errors());
    // Beside that it may have no record where its /proc is.
    let says = "selfpage: not managed, because a filter forbids it system calls: ";
    assert_eq!(ran.errors().lines().filter(|line| line.starts_with(says)).count(), 1, "{}", ran.errors());
}

#[test]
fn a_program_whose_watch_a_filter_kills_runs_without_it() {
    let Some(ran) = case("executed_where_its_watch_is_killed") else { return };
    assert_eq!((ran.code(), ran.text(), ran.errors()), (0, "ok\n".into(), String::new()));
}

#[test]
fn a_child_whose_pager_threads_a_filter_kills_ends() {
    let Some(ran) = case("forked_where_threads_are_killed") else { return };
    assert_eq!((ran.code(), ran.text().as_str()), (8, "ok\n"), "{}", ran.errors());
    let says = "selfpage: a forked child cannot go on: ";
    assert!(ran.errors().starts_with(says) && ran.errors().lines().count() == 1, "{}", ran.errors());
}

/// Its table of descriptors has no standard error.
#[test]
fn a_panic_of_a_pager_thread_says_what_it_was() {
    let Some(program) = program() else { return };
    // Nobody filters what io_uring writes.
    let ran =
        run::run_under(&["env", "SELFPAGE_IO=pool"], Path::new("/"), &["--frames", "8M"], program, &["saver_panics"]);
    assert_eq!((ran.code(), ran.text().as_str()), (SIGABRT, ""), "{}", ran.errors());
    let errors = ran.errors();
    assert!(errors.lines().any(|line| line.starts_with("selfpage: a bug of ours: ")), "{errors}");
}
