//! The page allocator, in processes of its own: its state is the process's.

mod model;
mod random;
