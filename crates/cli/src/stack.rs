//! The stack that this program runs on, which its caller may have made small.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use selfpage_core::linux::limit::{self, Resource};

/// What reading the arguments takes at most, and with it what any verb takes before it begins.
const NEEDS_BYTES: u64 = 60 << 10;
const POINTER_BYTES: u64 = size_of::<usize>() as u64;
/// In what steps a limit is proposed.
const STEP_KIB: u64 = 64;

/// Says that the stack is too small, and what would do. Std's own words for one that overflowed are a bug's, with SIGABRT.
pub fn lack() -> Option<String> {
    // Where the limit is not told the stack may do.
    let limit_bytes = limit::of_this_process(Resource::Stack).ok().flatten()?;
    // Each has a pointer to it there too.
    let len = |text: &OsStr| text.as_bytes().len() as u64 + 1;
    let arguments: u64 = std::env::args_os().map(|argument| len(&argument) + POINTER_BYTES).sum();
    let environment: u64 = std::env::vars_os().map(|(name, value)| len(&name) + len(&value) + POINTER_BYTES).sum();
    let needs_bytes = NEEDS_BYTES + arguments + environment;
    (limit_bytes < needs_bytes).then(|| {
        let (has_kib, needs_kib) = (limit_bytes >> 10, needs_bytes.div_ceil(STEP_KIB << 10) * STEP_KIB);
        format!("the stack may have {has_kib} KiB, and this program needs more; raise `ulimit -s` to {needs_kib}, or lift it")
    })
}
