//! What the environment asks for is what the program gets; and handlers of its own that fork calls.

mod preloaded;

use preloaded::{compile, errors, preloaded, text};

/// MiB of memory that a program still has, which touched 128 MiB and freed them.
fn kept_mib(retain: Option<&str>) -> usize {
    let mut command = preloaded(compile("variables.c", &[]));
    if let Some(size) = retain {
        command.env("SELFPAGE_RETAIN", size);
    }
    let output = command.output().unwrap();
    assert!(output.status.success() && errors(&output).is_empty(), "{:?} {}", output.status, errors(&output));
    text(&output).trim().parse().unwrap()
}

#[test]
fn so_much_is_kept_of_freed_blocks_as_was_said() {
    // A variable that is empty says as little as one that is not there.
    for (retain, least, most) in [
        (Some("0"), 0, 4),
        (Some("20M"), 16, 24),
        (Some("64M"), 60, 68),
        (Some("1G"), 124, 132),
        (Some(""), 124, 132),
        (None, 124, 132),
    ] {
        let kept = kept_mib(retain);
        assert!((least..=most).contains(&kept), "SELFPAGE_RETAIN={retain:?}: {kept} MiB are kept");
    }
}

/// Objects are freed, and the program goes on: most of what they had is the kernel's again.
fn goes_back(by: &str) {
    let output = preloaded(compile("variables.c", &[])).arg(by).output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
    let mib: Vec<usize> = text(&output).split_whitespace().map(|mib| mib.parse().unwrap()).collect();
    let [with_all, left] = mib[..] else { panic!("{mib:?}") };
    assert!(with_all >= 256 && left <= with_all / 8, "{left} of {with_all} MiB are left");
}

#[test]
fn what_objects_had_goes_back_to_the_kernel_as_the_program_goes_on() {
    goes_back("objects");
}

#[test]
fn so_does_what_another_thread_frees_while_this_one_never_runs_out() {
    goes_back("freed-elsewhere");
}

#[test]
fn handlers_of_a_fork_from_before_the_first_block_may_allocate_and_lock() {
    for what in ["forks", "locks"] {
        let output = preloaded(compile("variables.c", &[])).arg(what).output().unwrap();
        assert!(output.status.success(), "{what}: {:?} {}", output.status, errors(&output));
        assert_eq!(text(&output), "done\n", "{what}");
    }
}

/// Another thread may be changing it when the keeper starts, which is in the middle of some `malloc`.
#[test]
fn the_environment_is_read_when_the_library_is_loaded_and_not_later() {
    let output = preloaded(compile("variables.c", &[])).arg("no-environment").output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
    assert_eq!(text(&output), "done\n");
}
