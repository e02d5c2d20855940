//! Futexes whose words the kernel changes itself: each case of tests/c/futexes.c.

mod run;

#[track_caller]
fn case(name: &str, options: &[&str]) {
    case_of(&[], name, options);
}

/// The same with flags for the compiler.
#[track_caller]
fn case_of(flags: &[&str], name: &str, options: &[&str]) {
    if !run::possible() {
        return;
    }
    let ran = run::run_with("/".as_ref(), options, run::compile("futexes", flags), &[name]);
    assert_eq!((ran.code(), ran.text().as_str()), (0, "ok\n"), "{}", ran.errors());
    // Whatever limits its time has a trace, too.
    let (errors, traces) = (ran.errors(), "selfpage run: the trace is in ");
    assert!(errors.lines().all(|line| options.contains(&"--trace") && line.starts_with(traces)), "{errors}");
}

#[test]
fn mutexes_with_priority_inheritance_stay_in_core() {
    case("inherit", &["--frames", "8M"]);
}

#[test]
fn mutexes_that_have_gone_keep_nothing_in_core() {
    case("come_and_go", &["--frames", "16M"]);
}

#[test]
fn futexes_by_number_are_served_on_absent_pages() {
    case("by_number", &["--frames", "8M"]);
}

#[test]
fn threads_that_the_program_made_itself_are_seen_to_end() {
    case("cleared", &["--frames", "8M"]);
    // The C library has a second name for it.
    case_of(&["-Dclone=__clone"], "cleared", &["--frames", "8M"]);
    case("cleared_in_a_fork", &["--frames", "8M"]);
}

/// Samples take pages away for a moment, to see whether they are used.
#[test]
fn samples_leave_them_where_they_are() {
    let directory = run::directory();
    let trace = directory.path().join("trace");
    for name in ["inherit", "by_number"] {
        case(name, &["--frames", "8M", "--trace", trace.to_str().unwrap(), "--sample-ms", "10"]);
    }
}
