//! Compiles mimalloc, as its crate carries it, together with the few lines of ours around it.

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=src/heap.c");
    println!("cargo:rerun-if-changed=src/mark.c");
    println!("cargo:rerun-if-changed=src/range.h");
    println!("cargo:rerun-if-changed=src/streams.c");
    let include =
        PathBuf::from(std::env::var_os("DEP_MIMALLOC_INCLUDE_DIR").expect("libmimalloc-sys says where it is"));
    let source = include.with_file_name("src");
    cc::Build::new()
        .file("src/heap.c")
        .file("src/mark.c")
        .file("src/streams.c")
        .include(&include)
        .include(&source)
        .opt_level(3)
        .define("NDEBUG", None)
        .define("MI_BUILD_RELEASE", None)
        .define("MI_DEBUG", "0")
        .flag("-fno-builtin-malloc")
        // A library that is loaded with the program has a place in each thread's own block: no call to find it.
        .flag("-ftls-model=initial-exec")
        // mimalloc's own warnings are its authors' business.
        .warnings(false)
        .compile("selfpage_heap");
}
