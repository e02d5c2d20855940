//! The C library's second names of its allocator's functions. Programs that count their allocations have a `malloc` of their own over
//! `__libc_malloc`, or take a block under one name and give it back under the other. (`cfree` is one that old programs have.)

use crate::malloc;

selfpage_heap::second_names! {
    malloc::malloc: __libc_malloc;
    malloc::calloc: __libc_calloc;
    malloc::realloc: __libc_realloc;
    malloc::free: __libc_free cfree;
    malloc::memalign: __libc_memalign;
    malloc::valloc: __libc_valloc;
    malloc::pvalloc: __libc_pvalloc;
}
