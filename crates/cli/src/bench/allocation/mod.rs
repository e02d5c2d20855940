//! The benches of the allocator: what a block costs, against the allocators that programs have.

pub mod batch;
pub mod exchange;
pub mod objects;
pub mod page_alloc;
pub mod resize;

use super::error::Error;
use super::preload::{Origin, Preload};
use super::raw::blocks::{Filled, Source};
use super::system::{Entry, Group};
use crate::process::status_bytes;

const fn malloc(name: &'static str, file: &'static str, package: &'static str) -> (Entry, Source) {
    let preload = Some(Preload { name, file, origin: Origin::Distribution(package) });
    (Entry { preload, ..Entry::plain(name, Group::Malloc) }, Source::Malloc)
}

const fn built(name: &'static str, file: &'static str, package: &'static str, group: Group) -> (Entry, Source) {
    let preload = Some(Preload { name, file, origin: Origin::Workspace(package) });
    (Entry { preload, ..Entry::plain(name, group) }, Source::Malloc)
}

/// `malloc` of the library that `selfpage run` preloads.
pub const fn our_malloc(name: &'static str) -> (Entry, Source) {
    built(name, "libselfpage_malloc.so", "selfpage-malloc", Group::Ours)
}

// Each with where its blocks come from.
pub const OURS: (Entry, Source) = (Entry::plain("selfpage", Group::Ours), Source::Pages);
/// What a program gets of it: small blocks are objects there.
pub const OUR_MALLOC: (Entry, Source) = our_malloc("selfpage-malloc");
pub const KEPT: (Entry, Source) = built("mimalloc-2.3", "libselfpage_mimalloc.so", "selfpage-mimalloc", Group::Kept);
/// Preloaded like the others: a caller may have another `malloc` preloaded, and a program be linked with one (Debian's redis-server, with
/// jemalloc).
pub const GLIBC: (Entry, Source) = {
    let preload = Some(Preload { name: "glibc", file: "libc.so.6", origin: Origin::Process });
    (Entry { preload, ..Entry::plain("glibc", Group::Glibc) }, Source::Malloc)
};
pub const JEMALLOC: (Entry, Source) = malloc("jemalloc", "libjemalloc.so.2", "libjemalloc2");
pub const MIMALLOC: (Entry, Source) = malloc("mimalloc", "libmimalloc.so.2.0", "libmimalloc2.0");
pub const TCMALLOC: (Entry, Source) = malloc("tcmalloc", "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4");
pub const MMAP: (Entry, Source) = (Entry::plain("mmap", Group::Kernel), Source::Mmap(Filled::AsTouched));
pub const POPULATE: (Entry, Source) = (Entry::plain("mmap-populate", Group::Kernel), Source::Mmap(Filled::AtOnce));
pub const THP: (Entry, Source) = (Entry::plain("mmap-thp", Group::Kernel), Source::Mmap(Filled::Huge));

/// Refuses lengths that the machine has no memory for.
fn need(bytes: usize) -> Result<(), Error> {
    let available = super::host::available_bytes();
    if available < bytes {
        let reason = format!("{} MiB are available, {} are needed", available >> 20, bytes >> 20);
        return Err(Error::skip("memory", reason));
    }
    Ok(())
}

fn no_memory() -> Error {
    Error::Failed("no memory".into())
}

/// Bytes of the process that are in memory, without what is mapped of files: code that is run for the first time is not kept memory.
fn resident_bytes() -> usize {
    status_bytes("RssAnon").unwrap_or(0) as usize
}
