//! The programs, and what they work on. `$ALLOCATOR` is preloaded for the program alone, not for the shell around it.

use std::fmt::Write as _;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::super::error::Error;

/// How much a program has to do.
#[derive(Clone, Copy)]
pub enum Work {
    /// For a look.
    Little,
    /// For figures.
    Whole,
}

impl Work {
    /// One of two sizes.
    fn pick<T>(self, little: T, whole: T) -> T {
        match self {
            Work::Little => little,
            Work::Whole => whole,
        }
    }
}

/// A program with its work.
pub struct Program {
    pub name: &'static str,
    /// A shell's words.
    pub script: &'static str,
    /// What must be there, and the package that has it.
    needs: &'static [(&'static str, &'static str)],
    /// Makes its input.
    pub prepare: fn(&Path, Work) -> io::Result<()>,
}

impl Program {
    /// An error where something that it needs is not installed.
    pub fn is_installed(&self) -> Result<(), Error> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_here = |program| std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
        self.needs.iter().try_for_each(|(program, package)| match is_here(program) {
            true => Ok(()),
            false => Err(Error::skip(program, format!("it is not installed: {package} has it"))),
        })
    }
}

const GCC: &[(&str, &str)] = &[("g++", "g++")];
/// By its path: a `python3` in `PATH` may be a shell's script, which would be measured with it.
const PYTHON: &[(&str, &str)] = &[("/usr/bin/python3", "python3")];

/// All of them.
pub const ALL: &[Program] = &[
    Program {
        name: "g++-maps",
        script: "LD_PRELOAD=$ALLOCATOR exec g++ -O2 -c -o maps.o maps.cc",
        needs: GCC,
        prepare: maps,
    },
    Program {
        name: "g++-regex",
        script: "LD_PRELOAD=$ALLOCATOR exec g++ -O2 -c -o regex.o regex.cc",
        needs: GCC,
        prepare: regex,
    },
    Program {
        name: "g++-threads",
        script: "LD_PRELOAD=$ALLOCATOR exec g++ -O2 -c -o threads.o threads.cc",
        needs: GCC,
        prepare: threads,
    },
    Program {
        name: "g++-templates",
        script: "LD_PRELOAD=$ALLOCATOR exec g++ -O2 -c -o templates.o templates.cc",
        needs: GCC,
        prepare: templates,
    },
    Program {
        name: "python-objects",
        script: "LD_PRELOAD=$ALLOCATOR exec /usr/bin/python3 -S objects.py",
        needs: PYTHON,
        prepare: objects,
    },
    Program {
        name: "python-loop",
        script: "LD_PRELOAD=$ALLOCATOR exec /usr/bin/python3 -S loop.py",
        needs: PYTHON,
        prepare: loops,
    },
    Program {
        name: "sort",
        script: "LD_PRELOAD=$ALLOCATOR exec sort --parallel=2 -o sorted lines",
        needs: &[("sort", "coreutils")],
        prepare: lines,
    },
    Program {
        name: "sqlite3",
        script: "LD_PRELOAD=$ALLOCATOR exec sqlite3 :memory: < query.sql",
        needs: &[("sqlite3", "sqlite3")],
        prepare: query,
    },
    Program {
        name: "redis",
        // In the foreground: else timeout(1) leaves the group of processes that a signal ends. Whether the server answers is asked so often that
        // what is waited too long is no part of the time.
        script: "LD_PRELOAD=$ALLOCATOR timeout --foreground 300 redis-server --port 0 --unixsocket ./socket --save '' --appendonly no & server=$!; \
                 until redis-cli -s ./socket ping; do kill -0 $server || exit 1; sleep 0.001; done; \
                 redis-benchmark -s ./socket -n $(cat requests) -r 100000 -d 200 -P 16 -t set,get,lpush,hset -q; \
                 status=$?; redis-cli -s ./socket shutdown nosave; wait $server; exit $status",
        needs: &[("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")],
        prepare: requests,
    },
    // rustup's rustc is an executable with a `malloc` in it, which no library that is preloaded comes before: it would be compared with
    // itself. The distribution's has none.
    Program {
        name: "rustc",
        script: "LD_PRELOAD=$ALLOCATOR exec /usr/bin/rustc @arguments",
        needs: &[("/usr/bin/rustc", "Debian's rustc-web, or rustc from 1.65 on,")],
        prepare: regex_syntax,
    },
];

fn write(directory: &Path, name: &str, text: &str) -> io::Result<()> {
    std::fs::write(directory.join(name), text)
}

/// A C++ file: headers, and `body` once for each number.
fn numbered(directory: &Path, name: &str, count: usize, headers: &str, body: &str) -> io::Result<()> {
    let mut text = format!("{headers}\nusing namespace std;\n");
    for number in 0..count {
        let _ = writeln!(text, "{}", body.replace('@', &number.to_string()));
    }
    write(directory, name, &text)
}

fn maps(directory: &Path, work: Work) -> io::Result<()> {
    let body = "struct K@ { int a; string s; bool operator<(K@ const &o) const { return tie(a, s) < tie(o.a, o.s); } };\n\
        int f@(int n) { map<K@, vector<string>> m; set<K@> q; unordered_map<string, K@> u;\n\
        for (int i = 0; i < n; i++) { K@ k{i, to_string(i)}; m[k].push_back(k.s); u[k.s] = k; q.insert(k); }\n\
        return m.size() + q.size() + u.size(); }";
    numbered(directory, "maps.cc", work.pick(1, 8), "#include <bits/stdc++.h>", body)
}

fn regex(directory: &Path, work: Work) -> io::Result<()> {
    let body = "struct T@ : regex_traits<char> {};\n\
        bool r@(string const &s) { basic_regex<char, T@> r(\"a+(b|c)*@\"); return regex_match(s, r); }";
    numbered(directory, "regex.cc", work.pick(1, 4), "#include <regex>\n#include <string>", body)
}

fn threads(directory: &Path, work: Work) -> io::Result<()> {
    let body = "struct V@ { int x[@ + 1]; }; int t@() { promise<V@> p; auto f = p.get_future(); deque<function<V@()>> q;\n\
        q.emplace_back([] { return V@{}; }); thread t([&] { p.set_value(q.front()()); }); t.join();\n\
        auto a = async([] { return make_shared<V@>(); }); return f.get().x[0] + a.get()->x[@]; }";
    numbered(directory, "threads.cc", work.pick(1, 25), "#include <bits/stdc++.h>", body)
}

fn templates(directory: &Path, work: Work) -> io::Result<()> {
    let body = "template <int N> struct F@ { static constexpr long value = F@<N - 1>::value + N % 7; array<tuple<int, F@<N - 1> *>, 2> a; };\n\
        template <> struct F@<0> { static constexpr long value = 0; }; long g@() { return F@<300>::value; }";
    numbered(directory, "templates.cc", work.pick(1, 4), "#include <array>\n#include <tuple>", body)
}

fn objects(directory: &Path, work: Work) -> io::Result<()> {
    let count = work.pick(20_000, 600_000);
    write(
        directory,
        "objects.py",
        &format!(
            "words = ['%d' % (i * 7919 % 1000003) for i in range({count})]\n\
             table = {{w: [w, (w,), {{w: 1}}] for w in words}}\nwords.sort()\n\
             big = [bytes(i % 5000 + 600) for i in range({count} // 10)]\n\
             assert len(table) <= len(words) and len(big)\n"
        ),
    )
}

fn loops(directory: &Path, work: Work) -> io::Result<()> {
    let count = work.pick(100_000, 10_000_000);
    write(directory, "loop.py", &format!("x = 0\nfor i in range({count}):\n    x = (x + i * i) & 65535\nprint(x)\n"))
}

fn lines(directory: &Path, work: Work) -> io::Result<()> {
    let mut text = String::new();
    for number in 0..work.pick(20_000, 2_000_000u64) {
        let _ = writeln!(text, "{:016x} line", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    write(directory, "lines", &text)
}

fn query(directory: &Path, work: Work) -> io::Result<()> {
    let count = work.pick(10_000, 800_000);
    write(
        directory,
        "query.sql",
        &format!(
            "create table a(x integer primary key, y text);\n\
             with recursive c(i) as (select 1 union all select i + 1 from c where i < {count})\n\
             insert into a select i, hex(i * 7919) || 'abcdefghijklmnopqrstuvwxyz' from c;\n\
             create index b on a(y);\nselect count(*), max(y) from a;\n"
        ),
    )
}

fn requests(directory: &Path, work: Work) -> io::Result<()> {
    write(directory, "requests", work.pick("5000", "400000"))
}

/// The newest source of regex-syntax that cargo has from crates.io, and its version: a crate that this workspace is built with and that
/// depends on none.
fn regex_syntax_source() -> Option<(PathBuf, String)> {
    let own = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from).or(own).unwrap_or_default();
    let entries = |path: PathBuf| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let crates = entries(cargo.join("registry/src")).flat_map(entries);
    let sources = crates.filter_map(|path| {
        let version = path.file_name()?.to_str()?.strip_prefix("regex-syntax-")?.to_owned();
        Some((path.join("src/lib.rs"), version))
    });
    sources.max_by_key(|(_, version)| numbers(version))
}

/// 0.8.10 comes after 0.8.9.
fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|number| number.parse().ok()).collect()
}

/// Which version is compiled.
pub fn regex_syntax_version() -> Option<String> {
    regex_syntax_source().map(|(_, version)| version)
}

fn regex_syntax(directory: &Path, work: Work) -> io::Result<()> {
    let missing = "cargo has no source of regex-syntax: `cargo fetch` in a clone of selfpage brings it";
    let (source, _) = regex_syntax_source().ok_or_else(|| io::Error::new(ErrorKind::NotFound, missing))?;
    // What `cargo check` does; the tables of Unicode are most of it.
    let mut arguments = String::from("--edition=2021\n--crate-type=lib\n--crate-name=regex_syntax\n--emit=metadata\n");
    let tables = ["age", "bool", "case", "gencat", "perl", "script", "segment"].map(|table| format!("unicode-{table}"));
    let features = work.pick(&tables[..0], &tables[..]);
    for feature in features.iter().map(String::as_str).chain(["std"]) {
        let _ = writeln!(arguments, "--cfg=feature=\"{feature}\"");
    }
    write(directory, "arguments", &format!("{arguments}{}\n", source.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_their_numbers() {
        assert!(numbers("0.8.10") > numbers("0.8.9") && numbers("0.10.0") > numbers("0.8.10"));
    }
}
