//! The page allocator, in processes of its own: its state is the process's.

mod batches;
mod bounds;
mod input;
mod model;
mod own_process;
mod random;
mod threads;
mod vector;
