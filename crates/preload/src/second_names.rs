//! The C library's second names of functions that are ours. Programs that count their allocations have a `malloc` of their own over
//! `__libc_malloc`, or take a block under one name and give it back under the other. (`cfree` and `__pthread_mutex_init` are names that old
//! programs have.)

use crate::{children, clone, malloc, threads};

selfpage_heap::second_names! {
    children::fork: __fork;
    clone::clone: __clone;
    malloc::malloc: __libc_malloc;
    malloc::calloc: __libc_calloc;
    malloc::realloc: __libc_realloc;
    malloc::free: __libc_free cfree;
    malloc::memalign: __libc_memalign;
    malloc::valloc: __libc_valloc;
    malloc::pvalloc: __libc_pvalloc;
    threads::pthread_mutex_init: __pthread_mutex_init;
}
