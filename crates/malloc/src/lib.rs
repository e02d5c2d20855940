//! `LD_PRELOAD=libselfpage_malloc.so PROGRAM`: the C library's malloc family over selfpage's heap, and huge pages for what a
//! program maps for itself in pieces.
//!
//! `selfpage run -- PROGRAM` without `--frames` preloads it. With `--frames` another library is preloaded in its place, so no call
//! in here asks which of the two it is.

#[cfg(target_arch = "x86_64")]
mod by_handle;
mod forks;
mod malloc;
mod maps;
#[cfg(target_arch = "x86_64")]
mod second_names;
mod setup;
mod stats;
mod sys;

#[global_allocator]
static HEAP: selfpage_heap::Allocator = selfpage_heap::Allocator;
