//! The page allocator, in processes of its own: its state is the process's.

mod batches;
mod bounds;
mod checked;
mod exchanges;
mod input;
mod model;
mod own_process;
mod random;
mod threads;
mod vector;

#[path = "../../../../tests/skip.rs"]
mod skip;
