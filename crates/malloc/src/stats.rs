//! `SELFPAGE_SHOW_STATS=1`: one table on standard error when the process ends.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{maps, sys};

static WANTED: AtomicBool = AtomicBool::new(false);

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = show;

/// Has the table written when the process ends by itself.
pub fn show_at_exit() {
    WANTED.store(true, Ordering::Relaxed);
}

extern "C" fn show() {
    if !WANTED.swap(false, Ordering::Relaxed) {
        return;
    }
    let heap = selfpage_heap::stats();
    // SAFETY: plain-old-data: the structure is numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: out-pointer: it outlives the call.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let mib = |bytes: usize| bytes.div_ceil(1 << 20);
    let (served_bytes, huge_bytes) = maps::served_bytes();
    sys::say(format_args!(
        "selfpage: process {}\n\
         memory                          now MiB   most MiB\n\
         objects below 1 MiB, mapped  {:>10} {:>10}\n\
         larger blocks                {:>10} {:>10}\n\
         larger blocks and kept       {:>10}\n\
         mapped by the program itself {:>10}            of them {} where huge pages may be\n\
         resident                                {:>7}\n\
         page faults {} minor, {} major\n",
        std::process::id(),
        mib(heap.object_bytes),
        mib(heap.object_bytes_max),
        mib(heap.large_bytes),
        mib(heap.large_bytes_max),
        mib(heap.large_retained_bytes),
        mib(served_bytes),
        mib(huge_bytes),
        usage.ru_maxrss >> 10,
        usage.ru_minflt,
        usage.ru_majflt,
    ));
}
