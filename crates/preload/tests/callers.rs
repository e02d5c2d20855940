//! Whose memory stays the kernel's, for the sake of who maps it.

mod run;

use std::path::Path;

/// What tests/c/callers.c maps, and as much again in blocks.
const MAPPED_BYTES: u64 = 16 << 20;

/// What is mapped is the kernel's, and counted; blocks are paged.
fn comes_through(program: &Path, arguments: &[&str]) {
    let ran = run::run("4M", program, arguments);
    assert_eq!(ran.text(), "ok\n", "{}", ran.errors());
    let ran = ran.ok();
    let unmanaged = ran.stats["unmanaged_bytes_max"].as_u64().unwrap();
    assert!((MAPPED_BYTES..MAPPED_BYTES + (4 << 20)).contains(&unmanaged), "{}", ran.stats);
    assert!(ran.stats["evictions_total"].as_u64().unwrap() > 1000, "{}", ran.stats);
}

/// How a Go object can be told from others: by what its linker writes, or by what it exports, in either table of symbols.
const SIGNS: [&[&str]; 3] =
    [&["-DNOTE"], &["-DSYMBOL", "-rdynamic"], &["-DSYMBOL", "-rdynamic", "-Wl,--hash-style=sysv"]];

#[test]
fn what_gos_runtime_maps_stays_the_kernels() {
    if run::possible() {
        SIGNS.iter().for_each(|flags| comes_through(&run::compile("callers", flags), &[]));
    }
}

#[test]
fn what_go_in_a_library_maps_stays_the_kernels() {
    if !run::possible() {
        return;
    }
    let program = run::compile("callers", &[]);
    for flags in SIGNS {
        let library = run::compile("callers", &[flags, &["-shared", "-fPIC"]].concat());
        comes_through(&program, &[library.to_str().unwrap()]);
    }
}
