//! The library that `selfpage run --frames` preloads: it gives an unmodified program a domain of its own, and answers the calls with
//! which the program asks for memory from the domain's regions.
//!
//! Without `SELFPAGE_RUN` in the environment it hands out memory as any malloc does, and leaves mappings to the kernel.

mod by_handle;
mod caller;
mod calls;
mod children;
mod clone;
mod elf;
mod environment;
mod filters;
mod futex;
mod heap;
mod holes;
mod lending;
mod limits;
mod lock;
mod malloc;
mod managed;
mod maps;
mod objects;
mod pagers;
mod process;
mod program;
mod promises;
mod ranges;
mod record;
mod rights;
mod second_names;
mod service;
mod setup;
mod space;
mod sys;
mod threads;
mod watch;

#[global_allocator]
static OWN_HEAP: heap::OwnHeap = heap::OwnHeap;
