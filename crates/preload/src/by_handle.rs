//! What the C library's handle gives of this library's functions: all of them.

use std::ffi::{c_char, c_void};

use crate::{calls, children, clone, malloc, process, rights, second_names, threads};

/// The other of that name has the kernel's arguments.
mod syncing {
    pub use crate::maps::msync_in_c as msync;
}

selfpage_heap::by_handle! {
    calls: mmap mmap64 munmap mprotect pkey_mprotect mremap madvise posix_madvise mlock mlock2 munlock mlockall munlockall mseal
        mincore process_madvise setsockopt vmsplice capset chroot pivot_root mount move_mount umount umount2 unshare setns prctl
        syscall;
    children: fork;
    clone: clone;
    malloc: malloc calloc realloc free memalign aligned_alloc posix_memalign valloc pvalloc malloc_usable_size malloc_trim
        mallinfo2;
    process: __register_atfork _Fork _exit _Exit execve execv execvp execvpe fexecve execveat execl execlp execle
        posix_spawn posix_spawnp;
    rights: setuid seteuid setreuid setresuid;
    second_names: __fork __clone __libc_malloc __libc_calloc __libc_realloc __libc_free cfree __libc_memalign __libc_valloc
        __libc_pvalloc __pthread_mutex_init;
    syncing: msync;
    threads: pthread_create thrd_create pthread_mutex_init __cxa_thread_atexit_impl;
}
