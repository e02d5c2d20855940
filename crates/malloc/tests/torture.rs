//! The usual patterns that break allocators, in C programs with the library preloaded.

mod preloaded;
#[path = "../../../tests/torture.rs"]
mod torture;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;

use preloaded::{compile, errors, has, preloaded, skip, text};

fn torture(arguments: &[&str]) -> Output {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    preloaded(PROGRAM.get_or_init(|| compile("torture.c", &["-ldl"]))).args(arguments).output().unwrap()
}

fn comes_through(arguments: &[&str]) -> String {
    let output = torture(arguments);
    assert!(output.status.success(), "{arguments:?}: {:?} {}", output.status, errors(&output));
    assert!(text(&output).contains("done"), "{arguments:?}: {}", text(&output));
    assert_eq!(errors(&output), "");
    text(&output)
}

/// Seconds of the storm: ten minutes with `SELFPAGE_STORM_SECONDS=600`.
#[test]
fn storm() {
    let seconds = std::env::var("SELFPAGE_STORM_SECONDS").unwrap_or_else(|_| "4".into());
    let seed = std::process::id().to_string();
    println!("seed {seed}");
    println!("{}", comes_through(&["storm", &seconds, &seed]));
}

/// Also of those that have ended; where addresses are limited there is no range of objects.
#[test]
fn threads_find_and_free_what_others_filled() {
    let program = compile("crossing.c", &[]);
    let seed = std::process::id().to_string();
    println!("seed {seed}");
    for (addresses, checked) in [("unlimited", "0"), ("unlimited", "1"), ("8000000", "0")] {
        let limited = format!("ulimit -v {addresses}; exec \"$0\" \"$1\"");
        let mut command = preloaded("/bin/sh");
        command.args(["-c", &limited]).arg(&program).arg(&seed).env("SELFPAGE_CHECKED", checked);
        let output = command.output().unwrap();
        let case = format!("ulimit -v {addresses}, SELFPAGE_CHECKED={checked}");
        assert!(output.status.success(), "{case}: {:?} {}", output.status, errors(&output));
        assert_eq!(text(&output), "done\n", "{case}");
    }
}

/// What others have freed is used before further parts of the range are.
#[test]
fn a_thread_that_hands_its_objects_over_takes_little_more_than_is_live() {
    let program = compile("handed_over.c", &[]);
    for way in ["malloc", "calloc", "aligned", "aligned_by_far"] {
        let output = preloaded(&program).arg(way).output().unwrap();
        assert!(output.status.success(), "{way}: {:?} {}", output.status, errors(&output));
        let bytes: usize = text(&output).trim().parse().unwrap();
        // 16 MiB are live at most.
        assert!(bytes < 64 << 20, "{way}: {bytes} bytes");
    }
}

#[test]
fn forks_while_threads_free_each_others_blocks_and_begin_and_end() {
    comes_through(&["forks", "60"]);
}

/// There is no range for objects then: what threads leave that end is in a list, with a lock.
#[test]
fn forks_while_threads_begin_and_end_where_addresses_are_limited() {
    let program = compile("torture.c", &["-ldl"]);
    let limit = "ulimit -v 8000000; exec \"$0\" forks 60";
    let output = preloaded("/bin/sh").args(["-c", limit]).arg(&program).output().unwrap();
    assert!(output.status.success() && text(&output) == "done\n", "{:?} {}", output.status, errors(&output));
}

#[test]
fn forks_while_a_thread_gives_memory_back() {
    comes_through(&["purges", "40", "resident"]);
}

/// In the middle of an allocation as well, under the lock, or where frames go back to the kernel without it.
#[test]
fn forks_by_a_handler_of_a_signal() {
    let program = compile("handler_forks.c", &[]);
    for (threads, retain) in [("1", "1G"), ("1", "0"), ("2", "0")] {
        let output = preloaded(&program).arg(threads).env("SELFPAGE_RETAIN", retain).output().unwrap();
        assert!(output.status.success(), "{threads}, {retain}: {:?} {}", output.status, errors(&output));
        assert_eq!(text(&output), "done\n");
    }
}

/// Where addresses are limited, what threads leave is in a list with a lock.
fn comes_through_with_and_without_a_range(program: &Path) {
    for limit in ["unlimited", "8000000"] {
        let limited = format!("ulimit -v {limit}; exec timeout -s KILL 60 \"$0\"");
        let output = preloaded("/bin/sh").args(["-c", &limited]).arg(program).output().unwrap();
        assert!(output.status.success(), "{limit}: {:?} {}", output.status, errors(&output));
        assert_eq!(text(&output), "done\n", "{limit}");
    }
}

#[test]
fn forks_by_a_handler_of_a_signal_in_the_middle_of_a_fork() {
    comes_through_with_and_without_a_range(&compile("nested_forks.c", &[]));
}

#[test]
fn forks_by_handlers_of_signals_on_several_threads_at_once() {
    let program = compile("two_forks.c", &["-fno-builtin"]);
    for limit in ["unlimited", "8000000"] {
        let limited = format!("ulimit -v {limit}; exec \"$0\"");
        let mut command = preloaded("/bin/sh");
        let output = command.args(["-c", &limited]).arg(&program).env("SELFPAGE_RETAIN", "0").output().unwrap();
        assert!(output.status.success(), "{limit}: {:?} {}", output.status, errors(&output));
        assert_eq!(text(&output), "done\n", "{limit}");
    }
}

#[test]
fn forks_while_a_thread_ends_whose_number_the_childs_thread_gets() {
    comes_through_with_and_without_a_range(&compile("ended_at_fork.c", &[]));
}

#[test]
fn threads_that_come_and_go() {
    comes_through(&["threads"]);
}

#[test]
fn before_main_and_after_exit() {
    let output = torture(&["ends"]);
    assert!(output.status.success(), "{}", errors(&output));
    assert_eq!(text(&output), "done\nended\n");
}

#[test]
fn what_may_come_before_the_first_malloc() {
    let output = preloaded(compile("first.c", &[])).output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
}

/// As every later block that is longer than the machine.
#[test]
fn the_first_block_of_all_may_be_too_long() {
    let setting = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap();
    if setting.trim() == "1" {
        return skip("overcommit", "the machine's owner has nothing refused (vm.overcommit_memory)");
    }
    let output = preloaded(compile("first.c", &[])).arg("too-much").output().unwrap();
    assert!(errors(&output).contains("no block of this allocator"), "{:?} {}", output.status, errors(&output));
}

#[test]
fn libraries_that_come_and_go() {
    let library = compile("library.c", &["-shared", "-fPIC"]);
    comes_through(&["library", library.to_str().unwrap()]);
}

#[test]
fn sizes_and_alignments_as_c_says() {
    comes_through(&["limits"]);
}

#[test]
fn alignments_that_cannot_be_as_c_says() {
    comes_through(&["alignments"]);
}

/// Of which nothing goes back to the kernel, though all is to.
#[test]
fn free_leaves_errno_alone_where_memory_is_locked() {
    let program = compile("torture.c", &["-ldl"]);
    let output = preloaded(program).arg("locked").env("SELFPAGE_RETAIN", "0").output().unwrap();
    if text(&output).contains("not to be locked") {
        return skip("mlock", "the process may not lock all of its memory: be root, or raise ulimit -l");
    }
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
}

#[test]
fn pieces_that_a_program_maps() {
    comes_through(&["maps"]);
}

#[test]
fn what_mallinfo2_and_malloc_trim_tell_of_large_blocks() {
    comes_through(&["figures"]);
}

#[test]
fn the_user_changes_while_the_keeper_runs() {
    let output = preloaded(compile("user.c", &[])).output().unwrap();
    assert!(output.status.success() && text(&output) == "done\n", "{:?} {}", output.status, errors(&output));
}

#[test]
fn new_and_delete() {
    if !has("g++") {
        return;
    }
    let output = preloaded(compile("objects.cc", &["-std=c++17"])).output().unwrap();
    assert!(output.status.success() && text(&output) == "done\n", "{}", errors(&output));
}

#[test]
fn long_blocks_where_addresses_are_limited() {
    let program = compile("torture.c", &["-ldl"]);
    for kib in ["100000000", "75000000", "40000000"] {
        let limit = format!("ulimit -v {kib}; exec \"$0\" long-blocks");
        let output = preloaded("/bin/sh").args(["-c", &limit]).arg(&program).output().unwrap();
        assert!(output.status.success(), "{kib}: {:?} {}", output.status, errors(&output));
    }
}

#[test]
fn what_is_served_some_other_way_comes_back_and_is_no_error() {
    let program = compile("scarce.c", &["-lpthread"]);
    for kib in ["400000", "1500000"] {
        let limit = format!("ulimit -v {kib}; exec \"$0\"");
        let output = preloaded("/bin/sh").args(["-c", &limit]).arg(&program).output().unwrap();
        assert!(output.status.success() && text(&output) == "done\n", "{kib}: {:?} {}", output.status, errors(&output));
    }
}

/// No `/proc` says what the kernel has moved. What is locked cannot be dropped, either.
#[test]
fn blocks_move_where_the_kernel_moves_nothing() {
    let program = compile("refused.c", &[]);
    for why in ["limit", "moves", "locked"] {
        let output = preloaded(&program).arg(why).output().unwrap();
        if errors(&output).contains("mlockall") {
            skip("mlock", "the process may not lock all of its memory: be root, or raise ulimit -l");
            continue;
        }
        assert!(output.status.success() && text(&output) == "done\n", "{why}: {:?} {}", output.status, errors(&output));
    }
}

fn ends_naming(arguments: &[&str], what: &str) {
    let output = torture(arguments);
    let (said, pointer) = (errors(&output), text(&output));
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{arguments:?}: {said}");
    torture::names_what_it_is(arguments, &pointer, &said, what);
}

/// The C++ library allocates before ours is set up by the loader: such objects, too, lie where ours do.
#[test]
fn a_pointer_that_is_no_object_of_cpp_is_named() {
    if !has("g++") {
        return;
    }
    let output = preloaded(compile("objects.cc", &["-std=c++17", "-w"])).arg("foreign").output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{}", errors(&output));
    assert!(errors(&output).contains(&format!("free({}): no block", text(&output).trim())), "{}", errors(&output));
}

#[test]
fn a_pointer_that_is_no_block_is_named() {
    for (program, what) in torture::NO_BLOCKS {
        ends_naming(&[program], what);
    }
}

/// More than the range of objects has parts for.
#[test]
fn a_pointer_that_is_no_block_is_named_beside_any_number_of_threads() {
    let program = compile("crowd.c", &["-Wno-free-nonheap-object"]);
    let output = preloaded(&program).output().unwrap();
    if text(&output) == "too few threads\n" {
        return skip("threads", "the process may not start 2,200: raise ulimit -u and pids.max");
    }
    assert!(output.status.success() && text(&output) == "done\n", "{:?} {}", output.status, errors(&output));
    for call in ["free", "realloc"] {
        let output = preloaded(&program).arg(call).output().unwrap();
        let said = errors(&output);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{call}: {said}");
        assert!(said.contains(&format!("{call}({}): no block", text(&output).trim())), "{call}: {said}");
    }
}

/// There is no range of objects then.
#[test]
fn a_pointer_that_is_no_block_is_named_where_addresses_are_limited() {
    let program = compile("torture.c", &["-ldl"]);
    for what in ["foreign", "beyond"] {
        let mut command = preloaded("/bin/sh");
        command.args(["-c", "ulimit -v 8000000; exec \"$0\" \"$1\""]).arg(&program).arg(what);
        let output = command.output().unwrap();
        let (said, pointer) = (errors(&output), text(&output));
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{what}: {said}");
        torture::names_what_it_is(&[what], &pointer, &said, "no block");
    }
}

#[test]
fn an_object_that_is_freed_twice_is_named() {
    for way in torture::WAYS_TO_FREE_TWICE {
        for size in ["1", "24", "400", "20000", "200000"] {
            ends_naming(&["object-freed-twice", way, size], "freed already");
        }
    }
}

#[test]
fn a_larger_block_that_is_used_after_it_was_freed_ends_the_checked_program() {
    let program = compile("torture.c", &["-ldl"]);
    for size in ["1048576", "2097152", "50000000"] {
        let used = |checked: &str| {
            let mut command = preloaded(&program);
            command.args(["used-after-free", size]).env("SELFPAGE_CHECKED", checked).output().unwrap()
        };
        let stopped = used("1");
        assert_eq!(stopped.status.signal(), Some(libc::SIGSEGV), "{size}: {}", errors(&stopped));
        let unnoticed = used("0");
        assert!(unnoticed.status.success(), "{size}: {:?} {}", unnoticed.status, errors(&unnoticed));
    }
}

#[test]
fn all_goes_on_in_a_checked_program() {
    let program = compile("torture.c", &["-ldl"]);
    let seed = std::process::id().to_string();
    println!("seed {seed}");
    for arguments in [&["storm", "2", &seed][..], &["forks", "20"], &["limits"]] {
        let output = preloaded(&program).args(arguments).env("SELFPAGE_CHECKED", "1").output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {:?} {}", output.status, errors(&output));
        assert!(text(&output).contains("done"), "{arguments:?}: {}", text(&output));
    }
}

#[test]
fn a_checked_program_names_mistakes_as_any_other_does() {
    let program = compile("torture.c", &["-ldl"]);
    let names = |arguments: &[&str], what: &str| {
        let output = preloaded(&program).args(arguments).env("SELFPAGE_CHECKED", "1").output().unwrap();
        let (said, pointer) = (errors(&output), text(&output));
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{arguments:?}: {said}");
        torture::names_what_it_is(arguments, &pointer, &said, what);
    };
    for (program, what) in torture::NO_BLOCKS {
        names(&[program], what);
    }
    for way in torture::WAYS_TO_FREE_TWICE {
        for size in ["1", "400", "200000"] {
            names(&["object-freed-twice", way, size], "freed already");
        }
    }
}

/// What `interior.c` says in a checked program, and what is said to it.
fn interior(arguments: &[&str]) -> (Output, String, String) {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| compile("interior.c", &["-Wno-free-nonheap-object", "-Wno-use-after-free"]));
    let addresses = match arguments {
        // There is no range for objects.
        ["beside", ..] => "8000000",
        [.., "long"] => "75000000",
        _ => "unlimited",
    };
    let mut command = preloaded("/bin/sh");
    command.args(["-c", &format!("ulimit -v {addresses}; exec \"$0\" \"$@\"")]).arg(program).args(arguments);
    let output = command.env("SELFPAGE_CHECKED", "1").output().unwrap();
    let (expected, said) = (text(&output).trim().to_owned(), errors(&output));
    (output, expected, said)
}

fn is_told_what_it_expects(arguments: &[&str]) {
    let (output, expected, said) = interior(arguments);
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{arguments:?}: {expected}: {said}");
    assert!(!expected.is_empty() && said.trim_end().ends_with(&expected), "{arguments:?}: {expected}: {said}");
    assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
}

#[test]
fn a_pointer_into_an_object_ends_the_checked_program() {
    for size in [16, 24, 48, 400, 5000, 20_000, 200_000, 500 << 10] {
        for by in [8, (size - 1) / 16 * 16] {
            for whose in ["own", "anothers", "left"] {
                for call in ["free", "realloc-less", "realloc-more", "malloc_usable_size"] {
                    if by != 0 {
                        is_told_what_it_expects(&["inside", call, whose, &size.to_string(), &by.to_string()]);
                    }
                }
            }
        }
    }
}

#[test]
fn aligned_objects_of_a_checked_program_are_none_of_that() {
    let (output, expected, said) = interior(&["aligned"]);
    assert!(output.status.success() && expected == "done" && said.is_empty(), "{:?} {said}", output.status);
    is_told_what_it_expects(&["inside-aligned"]);
}

#[test]
fn a_pointer_among_objects_where_there_are_none_ends_the_checked_program() {
    for place in ["start", "unused", "stray", "behind", "long"] {
        for call in ["free", "realloc-more", "malloc_usable_size"] {
            is_told_what_it_expects(&["nowhere", call, place]);
        }
    }
}

/// As far as that can be told there: objects lie anywhere.
#[test]
fn what_is_no_block_beside_objects_from_the_kernel_ends_the_program() {
    for what in ["within", "freed", "askew"] {
        for call in ["free", "realloc-less", "realloc-more", "malloc_usable_size"] {
            is_told_what_it_expects(&["beside", call, what]);
        }
    }
}
