//! The page allocator, in processes of its own: its state is the process's.

mod batches;
mod bounds;
mod checked;
#[path = "../child/mod.rs"]
mod child;
mod exchanges;
mod input;
mod limits;
mod model;
mod own_process;
mod packed;
mod pressure;
mod random;
mod reserve;
mod threads;
mod vector;

#[path = "../../../../tests/filter.rs"]
mod filter;
#[path = "../../../../tests/limited_group.rs"]
mod limited_group;
#[path = "../../../../tests/skip.rs"]
mod skip;

/// Bytes of anonymous memory of the process that are in memory: walked page by page, since the kernel's counts lag by
/// some pages a CPU, and without the test's own code, whose pages come as it runs.
fn resident_bytes() -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let anonymous = smaps.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    anonymous.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}
