//! `unsafe` has its rooms, and each block says which named invariant makes it sound.

use super::findings::Finding;
use super::source::{Source, words};

/// Files and folders in which `unsafe` may stand (`x` means `x.rs` and all of `x/`), and what they need it for.
const ROOMS: &[(&str, &str)] = &[
    ("crates/core/src/linux", "system calls"),
    ("crates/core/src/frame", "the contents of frames, and tables in memory that the library supplies"),
    ("crates/core/src/page", "the page word's lower half"),
    ("crates/core/src/region", "regions and pagers that the library keeps alive: the map holds their addresses"),
    ("crates/core/src/tables", "page tables in memory that the program supplies"),
    ("crates/selfpage/src/alloc", "blocks of memory: what is under an allocator has only addresses"),
    ("crates/selfpage/src/arena", "the mappings that core's tables are carved from"),
    ("crates/selfpage/src/cancel", "the C library's cancellation of threads"),
    ("crates/selfpage/src/dirty", "watching the program's memory"),
    ("crates/selfpage/src/pool", "the mapping of a domain's frames"),
    ("crates/selfpage/src/region", "the mappings of regions, and typed views of them"),
    ("crates/selfpage/src/pthread", "threads of the C library's"),
    ("crates/selfpage/src/placement", "addresses that a region is given"),
    ("crates/selfpage/src/protection", "protections and keys of mappings, the register of keys, a handler of signals"),
    ("crates/selfpage/src/handler", "protections of a region's mapping, and contents that the program drops"),
    ("crates/selfpage/src/mapping", "changes of a region's mapping"),
    ("crates/selfpage/src/domain", "core's state, put together from tables, pool and machine"),
    ("crates/selfpage/src/fork", "what runs between fork and the child's first line"),
    ("crates/selfpage/src/trap", "signal handlers, their stacks, and pager threads"),
    ("crates/selfpage/src/store/linux", "store memory, descriptors by number, requests that the kernel works on"),
    ("crates/cli/src/bench/raw", "memory that the kernel changes under a bench, and calls that std lacks"),
    ("crates/cli/src/bench/guest/inside", "closures in a virtual machine, and the memory that they find there"),
    ("crates/cli/src/run/blocked", "the signals that this thread has blocked"),
    ("crates/cli/src/run/bond", "what is asked of the kernel between fork and exec"),
    ("crates/cli/src/run/group", "numbers that are 0 in some namespaces, which safe calls do not allow for"),
    ("crates/cli/src/run/ignored", "signals as they were before the runtime, and between fork and exec"),
    ("crates/cli/src/run/inherited", "descriptors that whoever executed this process left open"),
    ("crates/heap", "an allocator: mimalloc in C, and Rust's and C's contracts for blocks"),
    ("crates/malloc", "the C library's malloc family"),
    ("crates/mimalloc", "the C library's malloc family"),
    ("crates/preload", "the C library's own functions"),
    ("crates/collector", "the Boehm collector's own functions, its heap and its objects"),
    ("crates/guest", "page tables of another machine"),
    ("xtask/trapcheck", "an entry without a mangled name"),
];

/// Why is in the comment just above: `// SAFETY: name: why`, or several names with commas.
const SAFETY: &str = "// SAFETY:";

/// The invariants that docs/soundness.md has a heading for.
pub fn invariants(soundness: &str) -> Vec<&str> {
    soundness.lines().filter_map(|line| line.strip_prefix("### ")).map(|name| name.trim().trim_matches('`')).collect()
}

pub fn check(source: &Source, invariants: &[&str]) -> Vec<Finding> {
    // Tests, benchmarks and examples are nobody's soundness; clippy still wants a comment on each block there.
    let outside = ["tests/", "benches/", "examples/", "fuzz/"];
    let is_test = source.path.ends_with("_tests.rs")
        || outside.iter().any(|dir| source.path.split_inclusive('/').any(|part| part == *dir));
    if !source.is_rust() || is_test {
        return Vec::new();
    }
    let in_room = ROOMS.iter().any(|(room, _)| is_in(&source.path, room));
    let tests_from = source.code.find("#[cfg(test)]\nmod tests {").unwrap_or(source.code.len());
    let mut findings = Vec::new();
    for at in words(&source.code, "unsafe") {
        if !in_room {
            findings.push(source.finding(at, "`unsafe` outside its rooms (xtask/src/style/rooms.rs lists them)"));
            continue;
        }
        let after = source.code.get(at + "unsafe".len()..).unwrap_or_default().trim_start();
        let promises = after.starts_with('{') || words(after, "impl").next() == Some(0);
        if !promises || at > tests_from {
            continue;
        }
        let Some(said) = safety(&source.text, at) else {
            findings.push(source.finding(at, "no `// SAFETY: name: why` just above this `unsafe`"));
            continue;
        };
        let (names, why) = said.split_once(':').unwrap_or((said, ""));
        if why.trim().is_empty() {
            findings.push(source.finding(at, format!("SAFETY says `{names}`, and not why: `// SAFETY: name: why`")));
        }
        let unknown = names.split(',').map(str::trim).filter(|name| !invariants.contains(name));
        findings.extend(unknown.map(|name| {
            source.finding(at, format!("SAFETY cites `{name}`, which has no `### {name}` in docs/soundness.md"))
        }));
    }
    findings
}

fn is_in(path: &str, room: &str) -> bool {
    path.strip_prefix(room).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

/// What the comment above the statement that holds the byte `at` says after [`SAFETY`], on that line.
fn safety(text: &str, at: usize) -> Option<&str> {
    let own_line = text[..at].rfind('\n')?;
    let mut in_comment = false;
    for line in text[..own_line].lines().rev().map(str::trim) {
        if let Some(said) = line.strip_prefix(SAFETY) {
            return Some(said.trim());
        }
        let comment = line.starts_with("//");
        // Above the statement: the end of another one, or the end of the comment.
        if (in_comment && !comment) || line.is_empty() || (!comment && line.ends_with([';', '{', '}'])) {
            return None;
        }
        in_comment |= comment;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: &str = "crates/core/src/linux/uffd.rs";

    fn found(path: &str, text: &str) -> Vec<String> {
        check(&Source::new(path, text), &["frame-owned"]).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn unsafe_stays_in_its_rooms() {
        let text = "// SAFETY: frame-owned: ours\nunsafe { f() }";
        assert!(found("crates/core/src/stream.rs", text)[0].contains("outside"));
        assert!(found("crates/core/src/linuxes.rs", text)[0].contains("outside"));
        assert!(found(ROOM, text).is_empty());
        assert!(found("crates/core/src/linux.rs", text).is_empty());
        assert!(found("crates/selfpage/tests/storm.rs", "unsafe { f() }").is_empty());
        assert!(found("crates/selfpage/src/store/file_tests.rs", "unsafe { f() }").is_empty());
        assert!(found("crates/selfpage/src/store/tests.rs", "unsafe { f() }").len() == 1);
        assert!(found("crates/core/src/stream.rs", "#![deny(unsafe_code)] // unsafe").is_empty());
    }

    #[test]
    fn a_block_cites_an_invariant() {
        assert!(found(ROOM, "fn f() {\n    unsafe { g() }\n}")[0].contains("no `// SAFETY"));
        assert!(found(ROOM, "// SAFETY: frame-owned: ours\nlet a = 1;\nunsafe { g() }")[0].contains("no `// SAFETY"));
        assert!(found(ROOM, "// SAFETY: frame-lost: hm\nunsafe { g() }")[0].contains("frame-lost"));
        assert!(found(ROOM, "// SAFETY: frame-owned\nunsafe { g() }")[0].contains("not why"));
        assert_eq!(found(ROOM, "// SAFETY: it is fine\nunsafe { g() }").len(), 2);
        assert!(found(ROOM, "unsafe impl Send for A {}").len() == 1);
    }

    #[test]
    fn the_comment_may_be_long_and_the_statement_broken() {
        assert!(found(ROOM, "// SAFETY: frame-owned: it is\n// ours.\nlet a =\n    unsafe { g() };").is_empty());
        assert!(found(ROOM, "f(\n    // SAFETY: frame-owned: ours\n    a.map(|x| unsafe { g(x) }),\n)").is_empty());
        assert!(found(ROOM, "// SAFETY: frame-owned, frame-lost: two\nunsafe { g() }").len() == 1);
        assert!(found(ROOM, "/// # Safety\n/// The frame is held.\npub unsafe fn f() {}").is_empty());
    }

    #[test]
    fn tests_in_a_room_are_left_to_clippy() {
        assert!(found(ROOM, "#[cfg(test)]\nmod tests {\n    fn f() { unsafe { g() } }\n}").is_empty());
    }

    #[test]
    fn every_room_is_there_and_needs_to_be_one() {
        let sources = crate::style::source::tree(&crate::root());
        for (room, _) in ROOMS {
            let mut files = sources.iter().filter(|source| source.is_rust() && is_in(&source.path, room));
            assert!(files.any(|source| words(&source.code, "unsafe").next().is_some()), "{room} has no `unsafe`");
        }
    }

    #[test]
    fn headings_name_the_invariants() {
        assert_eq!(invariants("# Soundness\n### frame-owned\ntext\n### `word-half`\n"), ["frame-owned", "word-half"]);
    }
}
