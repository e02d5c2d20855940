//! For C programs that use the collector.

use std::ffi::c_int;

use crate::library::Library;
use crate::tracking::{Writes, prepare};

/// Has the collector learn of writes from selfpage, once the program calls `GC_enable_incremental`: to be called before that.
/// 0, or -1 and a line on stderr, and the collector runs as it would have.
///
/// A program's own `GC_set_on_collection_event` comes before this call, or not at all.
// SAFETY: c-library: a name that nobody else has.
#[unsafe(no_mangle)]
pub extern "C" fn selfpage_collector_prepare() -> c_int {
    match Library::load().and_then(|library| prepare(&library, Writes::Tracked)) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("selfpage: {error}");
            -1
        }
    }
}
