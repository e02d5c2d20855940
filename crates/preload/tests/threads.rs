//! Threads of programs, at moments when few begin or end: each case of tests/c/threads.c.

mod run;

/// The cases end well, each within a minute or two.
#[track_caller]
fn end_well(names: &[&str]) {
    end_with(8, names);
}

/// The same with another status.
#[track_caller]
fn end_with(status: i32, names: &[&str]) {
    if !run::possible() {
        return;
    }
    let program = run::compile("threads", &[]);
    for name in names {
        let ran = run::run("8M", &program, &[name]);
        if ran.text() == "no tracing\n" {
            let why = "a process may not trace the one that forked it: sysctl kernel.yama.ptrace_scope=1";
            return run::skip("ptrace", why);
        }
        assert_eq!((ran.code(), ran.text(), ran.errors()), (status, "ok\n".into(), String::new()), "{name}");
    }
}

#[test]
fn a_child_that_a_handler_forks_as_a_thread_begins_has_that_thread() {
    end_well(&["forks_as_one_begins", "forks_as_one_begins_in_c11"]);
}

#[test]
fn a_child_that_a_handler_forks_as_no_thread_can_begin_ends_with_its_last() {
    end_well(&["forks_as_none_begins"]);
}

#[test]
fn the_last_counted_thread_looks_seldom_for_others() {
    end_well(&["timers_alone"]);
}

/// A name in /proc is cut, and may then be no text.
#[test]
fn the_last_counted_thread_waits_for_others_whatever_the_programs_name_is() {
    end_well(&["has_a_cut_name"]);
}

#[test]
fn the_last_counted_thread_waits_for_others_where_it_cannot_look_for_them_itself() {
    end_well(&["has_no_descriptor"]);
    end_with(0, &["is_alone_without_a_descriptor"]);
    if !run::is_root() {
        return run::skip("root", "only root can change its root directory");
    }
    end_well(&["has_another_root"]);
    end_with(0, &["is_alone_under_another_root"]);
}

#[test]
fn a_thread_may_fork_before_it_has_begun() {
    end_well(&["forks_before_it_runs"]);
}

#[test]
fn a_thread_that_is_off_the_count_does_not_become_a_child_of_its_own() {
    end_well(&["forks_as_it_returns", "forks_as_it_exits"]);
}

#[test]
fn a_child_that_is_forked_as_its_thread_ends_ends_with_it() {
    end_well(&["forks_in_a_destructor", "forks_in_the_last_destructor", "forks_in_a_timers_destructor"]);
}

#[test]
fn a_grandchild_that_is_forked_there_ends_too() {
    end_well(&["forks_twice_in_the_last_destructor", "forks_twice_in_a_timers_destructor"]);
}

#[test]
fn a_child_that_is_forked_there_ends_as_the_c_library_has_it() {
    end_well(&["speaks_in_the_last_destructor"]);
}
