//! What the C library's handle gives of this library's functions: all of them.

use std::ffi::{c_char, c_void};

use crate::{forks, malloc, maps, second_names};

selfpage_heap::by_handle! {
    forks: __register_atfork;
    malloc: malloc calloc realloc free memalign aligned_alloc posix_memalign valloc pvalloc malloc_usable_size malloc_trim
        mallinfo2;
    maps: mmap mmap64 munmap;
    second_names: __libc_malloc __libc_calloc __libc_realloc __libc_free cfree __libc_memalign __libc_valloc __libc_pvalloc;
}
