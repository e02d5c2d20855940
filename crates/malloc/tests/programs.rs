//! Real programs with the library preloaded, and by `selfpage run`: the same output as without.

#[path = "../../../tests/brought.rs"]
mod brought;
#[path = "../../../tests/by_handle.rs"]
mod by_handle;
mod preloaded;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use preloaded::{compile, cpython, directory, errors, has, library, plain_plugin, plugin, preloaded, skip, text, tool};

fn same(directory: &Path, program: &str, arguments: &[&str]) {
    if !has(program) {
        return;
    }
    let plain = Command::new(program).args(arguments).current_dir(directory).output().unwrap();
    assert!(plain.status.success(), "{program}: {}", errors(&plain));
    let with = preloaded(program).args(arguments).current_dir(directory).output().unwrap();
    assert!(with.status.success(), "{program}: {}", errors(&with));
    assert!(with.stdout == plain.stdout, "{program} says something else");
    assert_eq!(errors(&with), errors(&plain));
}

#[test]
fn python() {
    let script = "
numbers = [(i * 7919) % 60013 for i in range(300000)]
by_number = {n: [n, -n] for n in range(100000)}
numbers.sort()
print(len(numbers), numbers[::6000], sum(v[0] - v[1] for v in by_number.values()), len(b'x' * 50000000))";
    same(Path::new("/"), "/usr/bin/python3", &["-S", "-c", script]);
}

#[test]
fn sort() {
    let directory = directory();
    let mut lines = String::new();
    for number in 0..150_000u64 {
        let _ = writeln!(lines, "{:016x} line", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    std::fs::write(directory.path().join("lines"), lines).unwrap();
    same(directory.path(), "/usr/bin/sort", &["--parallel=2", "lines"]);
}

#[test]
fn compiler() {
    let directory = directory();
    let source = "#include <map>\n#include <string>\n#include <vector>\n\
                  std::map<std::string, std::vector<int>> f() { return {{\"a\", {1, 2}}}; }\n";
    std::fs::write(directory.path().join("a.cc"), source).unwrap();
    same(directory.path(), "/usr/bin/g++", &["-O1", "-S", "-o", "-", "a.cc"]);
}

#[test]
fn sqlite() {
    let query = "create table a(x integer primary key, y text);
with recursive c(i) as (select 1 union all select i + 1 from c where i < 60000)
  insert into a select i, hex(i * 7919) from c;
select count(*), sum(length(y)), max(y) from a;";
    same(Path::new("/"), "/usr/bin/sqlite3", &[":memory:", query]);
}

#[test]
fn run_without_frames() {
    let run = |arguments: &[&str]| Command::new(tool()).arg("run").args(arguments).output().unwrap();
    let shown = run(&["--", "sh", "-c", "grep -c libselfpage_malloc /proc/$$/maps; exit 7"]);
    assert_eq!(shown.status.code(), Some(7), "{}", errors(&shown));
    assert_ne!(text(&shown).trim(), "0");
    let refused = run(&["--policy", "lru", "--", "true"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(errors(&refused).contains("--frames"), "{}", errors(&refused));
}

/// Each library more is felt by each small program.
#[test]
fn no_other_library_is_loaded() {
    let maps = text(&preloaded("/bin/cat").arg("/proc/self/maps").output().unwrap());
    let ours = maps.lines().find(|line| line.contains("libselfpage_malloc"));
    assert!(ours.is_some() && !maps.contains("libgcc_s"), "{maps}");
}

#[test]
fn a_program_with_an_allocator_of_its_own_keeps_it() {
    let output = preloaded(compile("own_malloc.c", &[])).arg("fork").output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
    assert_eq!(text(&output), "done\n");
}

/// Each of the two heaps has a half in C and one in Rust, which call each other by name.
#[test]
fn a_plugin_that_has_the_heap_by_its_line_keeps_it() {
    let output = preloaded(compile("plugin.c", &["-ldl"])).arg(plugin()).output().unwrap();
    assert!(output.status.success(), "{:?} {}{}", output.status, text(&output), errors(&output));
    let bytes = [10, 100_000, 3 << 20].map(|size| 2 * size + size / 2).iter().sum::<usize>() + 2 * (2 << 20);
    assert_eq!(text(&output).trim(), bytes.to_string());
    if !has("nm") {
        return;
    }
    for library in [library(), plugin()] {
        let symbols = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output().unwrap();
        let shown = text(&symbols);
        let inner: Vec<&str> =
            shown.lines().filter(|line| line.contains("selfpage_") && !line.contains("test")).collect();
        assert!(shown.contains(" T ") && inner.is_empty(), "{}: {inner:?}", library.display());
    }
}

/// Its keeper runs code of the library's.
#[test]
fn a_plugin_with_a_keeper_stays_when_its_host_closes_it() {
    // The host has the C library's own heap, and no thread.
    let output = Command::new(compile("closed_plugin.c", &["-ldl"])).arg(plain_plugin()).output().unwrap();
    assert!(output.status.success(), "{:?} {}{}", output.status, text(&output), errors(&output));
    assert_eq!(text(&output), "done\n");
}

/// A thread in `getline` has a stream and waits for memory, one in `fflush` has all of them and waits for that.
#[test]
fn forks_beside_threads_that_use_streams() {
    let output =
        preloaded("/usr/bin/timeout").args(["-s", "KILL", "60"]).arg(compile("streams.c", &[])).output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
    assert_eq!(text(&output), "done\n");
}

#[test]
fn programs_that_load_another_allocator() {
    let program = compile("brought.c", &["-ldl"]);
    for library in brought::LIBRARIES {
        let run = |mut command: Command| command.arg(library).envs(brought::ROOM).output().unwrap();
        let plain = run(Command::new(&program));
        if !plain.status.success() {
            skip(brought::name(library), &format!("{library} cannot be loaded: {}", text(&plain)));
            continue;
        }
        let with = run(preloaded(&program));
        assert!(with.status.success(), "{library}: {:?} {}{}", with.status, text(&with), errors(&with));
    }
}

#[test]
fn an_allocator_that_is_preloaded_before_gets_what_it_gave() {
    let program = compile("arrays.c", &[]);
    for library in brought::LIBRARIES {
        let run = |libraries: &str| {
            let mut command = preloaded(&program);
            command.env("LD_PRELOAD", libraries).output().unwrap()
        };
        let alone = run(library);
        if !errors(&alone).is_empty() {
            skip(brought::name(library), &format!("{library} cannot be loaded: {}", errors(&alone)));
            continue;
        }
        let both = run(&format!("{library}:{}", self::library().display()));
        assert!(both.status.success(), "{library}: {:?} {}", both.status, errors(&both));
        assert_eq!(text(&both), "done\n", "{library}");
    }
    let output = preloaded(&program).output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
}

/// Whether a program mixes them with the plain names, or has its own `malloc` over them.
#[test]
fn the_c_librarys_second_names() {
    for flags in [&["-ldl"][..], &["-ldl", "-DCOUNTS"]] {
        let output = preloaded(compile("second_names.c", flags)).output().unwrap();
        assert!(output.status.success(), "{flags:?}: {:?} {}", output.status, errors(&output));
        assert_eq!(text(&output), "done\n");
    }
}

/// By the C library's handle there are the same functions as without.
#[test]
fn functions_by_a_handle() {
    let inner = compile("by_handle.c", &by_handle::INNER);
    let outer = compile("by_handle.c", &[&by_handle::OUTER[..], &[inner.to_str().unwrap()]].concat());
    for flags in by_handle::PROGRAMS {
        let mut program = preloaded(compile("by_handle.c", &flags));
        program.args([&outer, &inner, &library()]).args(by_handle::exported(&library()));
        let output = program.output().unwrap();
        assert!(output.status.success(), "{flags:?}: {:?} {}{}", output.status, text(&output), errors(&output));
        assert_eq!(text(&output), "done\n");
    }
    same(Path::new("/"), "/usr/bin/python3", &["-S", "-c", by_handle::PYTHON]);
}

/// Few addresses: neither the objects' range nor the page allocator's can be reserved. Little data: what is reserved cannot be opened.
fn is_told_in_time_and_goes_on(threads: &str, sizes: &[&str]) {
    let program = compile("short.c", &[]);
    let program = program.to_str().unwrap();
    for size in sizes {
        for limit in ["ulimit -v 400000; exec \"$0\" \"$1\" 0 \"$2\"", "exec \"$0\" \"$1\" 200000000 \"$2\""] {
            let output = preloaded("/bin/sh").args(["-c", limit, program, size, threads]).output().unwrap();
            assert!(output.status.success(), "{limit}, {size}: {:?} {}", output.status, errors(&output));
            assert_eq!(text(&output), "done\n");
        }
    }
}

#[test]
fn programs_are_told_in_time_that_memory_is_short_and_go_on() {
    is_told_in_time_and_goes_on("1", &["16777216", "1048576", "300000", "5000", "100"]);
}

#[test]
fn threads_that_run_out_of_memory_at_once_are_all_told_and_go_on() {
    is_told_in_time_and_goes_on("4", &["16777216", "1048576", "300000", "100"]);
    is_told_in_time_and_goes_on("16", &["300000", "5000"]);
}

#[test]
fn variables() {
    let ran = |name: &str, value: &str| preloaded("/bin/true").env(name, value).output().unwrap();
    let shown = errors(&ran("SELFPAGE_SHOW_STATS", "1"));
    assert!(shown.contains("objects below 1 MiB") && shown.contains("page faults"), "{shown}");
    assert!(errors(&ran("SELFPAGE_VERBOSE", "1")).contains("1.25 times what was live at most"));
    let off = [("SELFPAGE_VERBOSE", "1"), ("SELFPAGE_KEEPER", "0"), ("SELFPAGE_MAPS", "0"), ("SELFPAGE_CHECKED", "1")];
    let said = errors(&preloaded("/bin/true").envs(off).output().unwrap());
    assert!(
        ["starts no thread", "maps itself to the kernel", "pointer into objects"].iter().all(|set| said.contains(set)),
        "{said}"
    );
    assert_eq!(errors(&ran("SELFPAGE_RETAIN", "64M")), "");
    for (name, value) in [("SELFPAGE_RETAIN", "lots"), ("SELFPAGE_RETAIN", "-1"), ("SELFPAGE_SHOW_STATS", "maybe")] {
        let output = ran(name, value);
        let said = errors(&output);
        assert!(output.status.success() && said.lines().count() == 1, "{said}");
        assert!(said.contains(name) && said.contains(value), "{said}");
    }
}

#[test]
fn the_keeper_comes_to_programs_that_take_much_memory() {
    let python = "/usr/bin/python3";
    if !has(python) {
        return;
    }
    let script = "
import os, sys, time
blocks = [bytes(size) for size in [40 << 20] * int(sys.argv[1])]
def there():
    return any('keeper' in open(f'/proc/self/task/{task}/comm').read() for task in os.listdir('/proc/self/task'))
# A thread takes its name only when it runs.
for _ in range(int(sys.argv[2])):
    if not there(): time.sleep(0.02)
print(there())";
    let threads = |value: &str, blocks: &str, looks: &str| {
        let output =
            preloaded(python).args(["-S", "-c", script, blocks, looks]).env("SELFPAGE_KEEPER", value).output().unwrap();
        assert!(output.status.success(), "{}", errors(&output));
        text(&output)
    };
    assert_eq!(threads("", "8", "1000").trim(), "True");
    assert_eq!(threads("0", "8", "10").trim(), "False");
    assert_eq!(threads("1", "2", "10").trim(), "False");
}

#[test]
fn cpythons_own_tests() {
    let tests = ["test_list", "test_dict", "test_threading", "test_fork1", "test_mmap", "test_ctypes"];
    if tests.iter().all(|test| cpython(&[test], "malloc")) {
        // With the allocator of its own that Python has for small objects.
        for test in ["test_list", "test_dict"] {
            cpython(&[test], "default");
        }
        // All of it takes minutes: `cpython.rs`.
        let parts =
            ["Queue", "Lock", "Heap", "SharedCTypes", "Connection"].map(|part| format!("WithProcessesTest{part}"));
        let chosen = parts.iter().flat_map(|part| ["-m", part]);
        let arguments: Vec<&str> = ["test_multiprocessing_fork"].into_iter().chain(chosen).collect();
        cpython(&arguments, "malloc");
    }
}
