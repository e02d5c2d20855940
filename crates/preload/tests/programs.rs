//! Real programs in a quarter of the memory that their heap has: the same output, and pages that went.

#[path = "../../../tests/brought.rs"]
mod brought;
#[path = "../../../tests/by_handle.rs"]
mod by_handle;
mod run;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the program says without us.
fn plainly(directory: &Path, program: &str, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new(program).args(arguments).current_dir(directory).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Runs a program with all the memory that it likes, then in a quarter of what it took; compares what it says each time.
fn same_in_a_quarter(directory: &Path, program: &str, arguments: &[&str], with_heap: &str) {
    if !run::has(program) {
        return;
    }
    let said = plainly(directory, program, arguments);
    let ran = run::run_in(directory, "1G", program, arguments).ok();
    assert!(ran.output.stdout == said, "{program} says something else");
    let heap_bytes = ran.largest(with_heap, "resident_bytes_max");
    let frames_bytes = heap_bytes / 4;
    assert!(frames_bytes >= 1 << 20, "{with_heap} has a heap of {heap_bytes} bytes only");
    let ran = run::run_in(directory, &frames_bytes.to_string(), program, arguments).ok();
    assert!(ran.output.stdout == said, "{program} says something else in {frames_bytes} bytes");
    assert!(ran.largest(with_heap, "resident_bytes_max") <= frames_bytes);
    let evictions = ran.count(with_heap, "evictions_total");
    assert!(evictions > frames_bytes / 4096, "{evictions} evictions: {}", ran.stats);
}

#[test]
fn python() {
    if !run::possible() {
        return;
    }
    let script = "
numbers = [(i * 7919) % 60013 for i in range(60000)]
by_number = {n: [n, -n] for n in range(20000)}
numbers.sort()
words = sorted('%06d' % (n * 31 % 99991) for n in range(8000))
print(len(numbers), numbers[::6000], sum(v[0] - v[1] for v in by_number.values()), words[::1600])
";
    same_in_a_quarter(Path::new("/"), "/usr/bin/python3", &["-S", "-c", script], "python3");
}

/// Of a file of 22 MB, with room for all of it at once: sort puts nothing into files of its own.
#[test]
fn sort() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let mut lines = String::new();
    for number in 0..1_000_000u64 {
        let _ = writeln!(lines, "{:016x} line", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    std::fs::write(directory.path().join("lines"), lines).unwrap();
    same_in_a_quarter(directory.path(), "/usr/bin/sort", &["--parallel=2", "-S", "200M", "lines"], "sort");
}

#[test]
fn compiler() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let mut source = String::new();
    for number in 0..1500 {
        let _ = writeln!(source, "struct S{number} {{ int a[{}]; S{number}() : a() {{}} }};", number % 50 + 1);
        let _ =
            writeln!(source, "int f{number}(S{number} const &s) {{ int n = 0; for (int x : s.a) n += x; return n; }}");
    }
    std::fs::write(directory.path().join("large.cc"), source).unwrap();
    same_in_a_quarter(directory.path(), "/usr/bin/g++", &["-O0", "-S", "-o", "-", "large.cc"], "cc1plus");
}

#[test]
fn c_compiler() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let mut source = String::new();
    for number in 0..700 {
        let _ = writeln!(source, "struct s{number} {{ int a[{}]; char *name; }};", number % 50 + 1);
        let _ = writeln!(source, "static const struct s{number} table{number} = {{ {{ {number} }}, \"s{number}\" }};");
        let _ = writeln!(
            source,
            "int f{number}(struct s{number} *s) {{ int n = 0; for (int i = 0; i < {}; i++) if (s->a[i] > n) n ^= s->a[i] * \
             {number}; return n + table{number}.a[0]; }}",
            number % 50 + 1
        );
    }
    std::fs::write(directory.path().join("large.c"), source).unwrap();
    same_in_a_quarter(directory.path(), "/usr/bin/gcc", &["-O0", "-S", "-o", "-", "large.c"], "cc1");
}

/// With threads, an allocator of its own, and some hundreds of megabytes.
#[test]
fn rust_compiler() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    let mut source = String::new();
    for number in 0..800 {
        let len = number % 50 + 1;
        let _ = writeln!(
            source,
            "#[derive(Clone, Debug, PartialEq)] pub struct S{number} {{ a: [i32; {len}], name: String }}"
        );
        let _ = writeln!(
            source,
            "impl S{number} {{ pub fn f(&self) -> usize {{ self.a.len() * {number} + self.name.len() }} }}"
        );
    }
    std::fs::write(directory.path().join("large.rs"), source).unwrap();
    // Beside cargo: by its own name it is a program of rustup's.
    let rustc = Path::new(env!("CARGO")).with_file_name("rustc");
    let arguments = ["--crate-type", "lib", "--emit", "asm=-", "large.rs"];
    same_in_a_quarter(directory.path(), rustc.to_str().unwrap(), &arguments, "rustc");
}

/// A list that both kinds of children work on, in a pool and one by one; `fork` leaves it where it is, `spawn` sends it.
const MULTIPROCESSING: &str = "
import multiprocessing, sys
def digits(words):
    return sum(int(word) % 97 for word in words), words[0], words[-1]
def answer(queue, words):
    queue.put((len(words), digits(words[::3])))
if __name__ == '__main__':
    words = ['%06d' % n for n in range(70000)]
    parts = [words[n::4] for n in range(4)]
    for kind in 'fork', 'spawn':
        context = multiprocessing.get_context(kind)
        with context.Pool(2) as pool:
            print(kind, pool.map(digits, parts), pool.apply(digits, (words,)))
            pool.close()
            pool.join()
        queue = context.Queue()
        one = context.Process(target=answer, args=(queue, words))
        one.start()
        print(queue.get())
        one.join()
        print(one.exitcode, words[::30000])
";

#[test]
fn python_multiprocessing() {
    if !run::possible() {
        return;
    }
    let directory = run::directory();
    std::fs::write(directory.path().join("several.py"), MULTIPROCESSING).unwrap();
    same_in_a_quarter(directory.path(), "/usr/bin/python3", &["-S", "several.py"], "python3");
}

#[test]
fn sqlite() {
    if !run::possible() {
        return;
    }
    let query = "
create table a(x integer primary key, y text);
with recursive c(i) as (select 1 union all select i + 1 from c where i < 60000)
  insert into a select i, hex(i * 7919) || 'abcdefghijklmnopqrstuvwxyz' from c;
create table b as select x * 2 as x, y from a;
select count(*), sum(length(a.y)), max(b.y) from a join b on a.x = b.x;";
    same_in_a_quarter(Path::new("/"), "/usr/bin/sqlite3", &[":memory:", query], "sqlite3");
}

#[test]
fn git() {
    if !run::possible() || !run::has("git") {
        return;
    }
    let directory = run::directory();
    let script = "
set -e
export HOME=$PWD GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_DATE='1000000000 +0000' GIT_COMMITTER_DATE='1000000000 +0000'
rm -rf r; git init -q r; cd r; git config user.name n; git config user.email e@x; git config gc.auto 0
for i in 1 2 3; do seq $i 150000 > numbers; seq 1 ${i}000 > few; git add .; git commit -qm $i; done
git repack -adfq --window=20 --threads=1; git fsck --full 2>/dev/null; git log --stat --format=%H";
    same_in_a_quarter(directory.path(), "/bin/sh", &["-c", script], "git");
}

/// A program of the allocator's that is tested without frames.
fn of_malloc(name: &str, flags: &[&str]) -> PathBuf {
    run::compile(&format!("../../../malloc/tests/c/{name}"), &[&["-fno-builtin"], flags].concat())
}

#[test]
fn a_program_with_an_allocator_of_its_own_keeps_it() {
    if !run::possible() {
        return;
    }
    // What it maps for its blocks is paged.
    let program = of_malloc("own_malloc", &[]);
    let ran = run::run("2M", &program, &[]).ok();
    assert_eq!(ran.text(), "done\n");
    assert!(ran.stats["evictions_total"].as_u64().unwrap() > 100, "{}", ran.stats);
    // A child's pager threads are started before anybody can bring what is that allocator's.
    for _ in 0..6 {
        assert_eq!(run::run("2M", &program, &["fork"]).ok().text(), "done\n");
    }
    let program = run::compile("child_malloc", &["-fno-builtin"]);
    assert_eq!(run::run("2M", &program, &[]).ok().text(), "done\n");
}

#[test]
fn programs_that_load_another_allocator() {
    if !run::possible() {
        return;
    }
    let program = of_malloc("brought", &["-ldl"]);
    for library in brought::LIBRARIES {
        let plain = Command::new(&program).arg(library).envs(brought::ROOM).output().unwrap();
        if !plain.status.success() {
            let why = format!("{library} cannot be loaded: {}", String::from_utf8_lossy(&plain.stdout));
            run::skip(brought::name(library), &why);
            continue;
        }
        let room = brought::ROOM.map(|(name, value)| format!("{name}={value}"));
        let arguments = [&room[0], program.to_str().unwrap(), library];
        assert_eq!(run::run("4M", "/usr/bin/env", &arguments).ok().text(), "done\n", "{library}");
    }
}

/// Whether a program mixes them with the plain names, or has its own `malloc` over them.
#[test]
fn the_c_librarys_second_names() {
    if !run::possible() {
        return;
    }
    for flags in [&["-ldl"][..], &["-ldl", "-DCOUNTS"]] {
        assert_eq!(run::run("4M", of_malloc("second_names", flags), &[]).ok().text(), "done\n", "{flags:?}");
    }
}

/// By the C library's handle there are the same functions as without.
#[test]
fn functions_by_a_handle() {
    if !run::possible() {
        return;
    }
    let inner = of_malloc("by_handle", &by_handle::INNER);
    let outer = of_malloc("by_handle", &[&by_handle::OUTER[..], &[inner.to_str().unwrap()]].concat());
    let library = run::tool().with_file_name("libselfpage_frames.so");
    let exported = by_handle::exported(&library);
    let mut arguments = [&outer, &inner, &library].map(|path| path.to_str().unwrap()).to_vec();
    arguments.extend(exported.iter().map(String::as_str));
    for flags in by_handle::PROGRAMS {
        // A few of the pages that are dropped are in core.
        let program = of_malloc("by_handle", &flags);
        assert_eq!(run::run("4M", program, &arguments).ok().text(), "done\n", "{flags:?}");
    }
    if run::has("/usr/bin/python3") {
        assert_eq!(run::run("12M", "/usr/bin/python3", &["-S", "-c", by_handle::PYTHON]).ok().text(), "0\n");
    }
}

#[test]
fn programs_are_told_in_time_that_memory_is_short_and_go_on() {
    if !run::possible() {
        return;
    }
    let program = of_malloc("short", &["-Wno-alloc-size-larger-than"]);
    for size in ["16777216", "1048576", "300000", "5000"] {
        let ran = run::run("64M", &program, &[size, "200000000"]);
        assert_eq!((ran.code(), ran.text().as_str()), (0, "done\n"), "{size}: {}", ran.errors());
    }
}

/// The store's file is as long as files may be.
#[test]
fn under_a_limit_on_files() {
    if !run::possible() {
        return;
    }
    let mut command = Command::new("timeout");
    command.args(["120", "prlimit", "--fsize=67108864"]).arg(run::tool()).args(["run", "--frames", "4M", "--"]);
    let output = command.arg(run::compile("objects", &[])).output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, String::from_utf8_lossy(&output.stderr));
}

/// It had all frames in use, and pages went for want of more.
#[track_caller]
fn filled_its_frames(ran: &run::Ran, frames_bytes: u64, test: &str) {
    let most_bytes = ran.largest("python3", "resident_bytes_max");
    assert!(most_bytes <= frames_bytes && most_bytes > frames_bytes / 2, "{test}: {}", ran.stats);
    let evictions = ran.count("python3", "evictions_total");
    assert!(evictions > 100, "{test}: {evictions} evictions in {}", ran.stats);
}

#[test]
fn cpythons_own_tests() {
    if !run::possible() {
        return;
    }
    let tests = ["test_list", "test_dict", "test_mmap", "test_threading", "test_subprocess"];
    let have = Command::new("/usr/bin/python3").args(["-c", "import test.test_list"]).output();
    if !have.is_ok_and(|output| output.status.success()) {
        return run::skip("cpython", "Python's own tests are not installed: apt-get install libpython3-testsuite");
    }
    let directory = run::directory();
    for test in tests {
        let arguments = ["-m", "test", "-q", test];
        let ran = run::run_in(directory.path(), "12M", "/usr/bin/python3", &arguments);
        if ran.code() != 0 {
            let mut plain = Command::new("/usr/bin/python3");
            let plain = plain.args(arguments).current_dir(directory.path()).output().unwrap();
            assert!(!plain.status.success(), "{test}: {}{}", ran.text(), ran.errors());
            run::skip("cpython", &format!("{test} fails without us as well"));
            continue;
        }
        filled_its_frames(&ran, 12 << 20, test);
    }
}

#[test]
fn cpythons_own_tests_of_forks_and_of_c() {
    if !run::possible() {
        return;
    }
    let have = Command::new("/usr/bin/python3").args(["-c", "import test.test_ctypes"]).output();
    if !have.is_ok_and(|output| output.status.success()) {
        return run::skip("cpython", "Python's own tests are not installed: apt-get install libpython3-testsuite");
    }
    let directory = run::directory();
    // All tests of multiprocessing take more than a minute, most of it asleep.
    let tests = [
        (8 << 20, &["test_fork1"][..]),
        (16 << 20, &["test_ctypes"]),
        (
            16 << 20,
            &["test_multiprocessing_fork", "-m", "WithProcessesTestPool", "-m", "WithProcessesTestSharedMemory"],
        ),
    ];
    for (frames_bytes, test) in tests {
        let arguments = [&["-m", "test", "-q"], test].concat();
        let ran = run::run_in(directory.path(), &frames_bytes.to_string(), "/usr/bin/python3", &arguments);
        assert_eq!(ran.code(), 0, "{test:?}: {}{}", ran.text(), ran.errors());
        filled_its_frames(&ran, frames_bytes, test[0]);
    }
}
