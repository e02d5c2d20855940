//! The page allocator, in processes of its own: its state is the process's.

mod batches;
mod bounds;
mod checked;
mod exchanges;
mod input;
mod limits;
mod model;
mod own_process;
mod packed;
mod random;
mod reserve;
mod threads;
mod vector;

#[path = "../../../../tests/skip.rs"]
mod skip;

/// Bytes of the process that are in memory.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
