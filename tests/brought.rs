//! Allocators that a program may load beside the one that it has: for `crates/malloc/tests/c/brought.c`. Include it where tests need it:
//! `#[path = "../../../tests/brought.rs"] mod brought;`

pub const LIBRARIES: [&str; 3] = ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2"];

/// What a test that skips for want of one of them calls it, as others do.
pub fn name(library: &str) -> &str {
    library.trim_start_matches("lib").split(['.', '_']).next().unwrap_or(library)
}

/// They keep more in each thread's own block than the loader leaves room for.
pub const ROOM: [(&str, &str); 1] = [("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=20000")];
