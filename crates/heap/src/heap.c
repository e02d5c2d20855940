// mimalloc, with its pages from one range of addresses that we lay out, and the entries that the Rust side calls.
//
// mimalloc's calls of the mmap family go to the functions below. It reserves one arena, HEAP_BYTES of addresses without
// access, and makes 32 MiB of it accessible at a time. The start of the range has small pages, so that a small program
// stays small; what lies beyond has huge ones.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <linux/mman.h>
#include <linux/prctl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#define HEAP_BYTES ((size_t)64 << 30)
#define SEGMENT_BYTES ((size_t)32 << 20)
// Up to here the heap has small pages: at most one huge page in so much memory is not all in use.
#define SMALL_PAGES_BYTES ((size_t)16 << 20)
#define HUGE_PAGE_BYTES ((size_t)2 << 20)

static char *heap_start;
// Set once mimalloc has objects outside of the range: then a pointer that is not ours cannot be told from one that is.
static bool objects_elsewhere;

// What the range stands on, where that is not the kernel: memory that somebody else lays out and pages.
struct selfpage_ground {
    // Memory beside the range, all zero, in whole pages. NULL: there is none.
    void *(*map)(size_t len);
    void (*unmap)(void *at, size_t len);
    // A part of the range is to be used, for the first time; it lies in one segment.
    bool (*open)(void *at, size_t len);
    // What is in a part of the range is garbage.
    void (*drop)(void *at, size_t len);
};
// NULL: the kernel.
static const struct selfpage_ground *ground;

static void *ground_mmap(size_t len) {
    // Beside the range there is only what mimalloc keeps of threads. A range that is full stays full.
    void *found = len < SEGMENT_BYTES ? ground->map(len) : NULL;
    if (found != NULL) return found;
    errno = ENOMEM;
    return MAP_FAILED;
}

static void *heap_mmap(void *at, size_t len, int protection, int flags, int file, long offset) {
    if (ground != NULL) return ground_mmap(len);
    if (len != HEAP_BYTES || heap_start != NULL) {
        objects_elsewhere |= len >= SEGMENT_BYTES;
        return mmap(at, len, protection, flags, file, offset);
    }
    char *start = mmap(NULL, len + SEGMENT_BYTES, protection, flags, file, offset);
    if (start == MAP_FAILED) return start;
    heap_start = (char *)(((uintptr_t)start + SEGMENT_BYTES - 1) & ~(SEGMENT_BYTES - 1));
    return heap_start;
}

// How far into the range an address is; at least HEAP_BYTES if it is not in there.
static inline size_t heap_offset(const void *at) {
    return (size_t)((const char *)at - heap_start);
}

static int heap_munmap(void *at, size_t len) {
    if (ground == NULL) return munmap(at, len);
    ground->unmap(at, len);
    return 0;
}

static int heap_mprotect(void *at, size_t len, int protection) {
    if (ground != NULL) {
        if (!(protection & PROT_WRITE) || ground->open(at, len)) return 0;
        errno = ENOMEM;
        return -1;
    }
    size_t from = heap_offset(at), end = from + len;
    if (mprotect(at, len, protection) != 0) return -1;
    if (heap_start != NULL && from < HEAP_BYTES && end > SMALL_PAGES_BYTES && (protection & PROT_WRITE)) {
        if (from < SMALL_PAGES_BYTES) from = SMALL_PAGES_BYTES;
        // A kernel without huge pages goes on with small ones.
        int before = errno;
        madvise(heap_start + from, end - from, MADV_HUGEPAGE);
        errno = before;
    }
    return 0;
}

static int heap_madvise(void *at, size_t len, int advice) {
    if (ground != NULL) {
        if (advice == MADV_DONTNEED || advice == MADV_FREE) ground->drop(at, len);
        return 0;
    }
    // To drop a part of a huge page splits it, which costs more than the part is worth. Nothing relies on zeros.
    size_t from = heap_offset(at);
    bool huge = heap_start != NULL && from < HEAP_BYTES && from >= SMALL_PAGES_BYTES;
    if (huge && (advice == MADV_DONTNEED || advice == MADV_FREE)) {
        size_t end = (from + len) & ~(HUGE_PAGE_BYTES - 1);
        from = (from + HUGE_PAGE_BYTES - 1) & ~(HUGE_PAGE_BYTES - 1);
        return from < end ? madvise(heap_start + from, end - from, advice) : 0;
    }
    return madvise(at, len, advice);
}

#define mmap heap_mmap
#define munmap heap_munmap
#define mprotect heap_mprotect
#define madvise heap_madvise
// Names for mappings, and the end of huge pages for all of the process: neither is wanted.
#define prctl(...) (-1)
#define MI_DEFAULT_ARENA_RESERVE ((long)(HEAP_BYTES >> 10))
#define MI_DEFAULT_ARENA_EAGER_COMMIT 0
// At exit the kernel takes everything at once.
#define MI_SKIP_COLLECT_ON_EXIT 1
#include "static.c"
#undef mmap
#undef munmap
#undef mprotect
#undef madvise
#undef prctl

// What the Rust side does: blocks of whole pages, and programs that freed what they never had.
extern void *selfpage_large_allocate(size_t size, size_t align, bool zeroed);
extern void *selfpage_large_reallocate(void *block, size_t size);
extern bool selfpage_large_free(void *block);
extern size_t selfpage_large_usable(const void *block);
extern _Noreturn void selfpage_foreign(const void *block);
extern _Noreturn void selfpage_damaged(void);

// Requests from here on get pages of their own.
#define LARGE_BYTES ((size_t)1 << 20)

// In our range, and at a multiple of 8, in one comparison: the three low bits become the highest.
static inline bool is_object(const void *block) {
    size_t offset = heap_offset(block);
    return mi_likely((offset >> 3 | offset << 61) < HEAP_BYTES >> 3);
}

static void on_error(int error, void *unused) {
    (void)unused;
    if (error == EFAULT) selfpage_damaged();
    errno = ENOMEM;
}

void selfpage_heap_begin(long purge_delay_ms) {
    mi_option_set_default(mi_option_eager_commit_delay, 0);
    mi_option_set_default(mi_option_purge_delay, purge_delay_ms);
    mi_register_error(on_error, NULL);
}

// Over `len` bytes at `start`, both multiples of SEGMENT_BYTES, that are all zero and not open yet; at most HEAP_BYTES.
bool selfpage_heap_begin_over(const struct selfpage_ground *given, void *start, size_t len, long purge_delay_ms) {
    // mimalloc's own variables can have given it memory already, which is not the ground's.
    if (mi_arena_get_count() != 0) return false;
    ground = given;
    heap_start = start;
    selfpage_heap_begin(purge_delay_ms);
    mi_option_set(mi_option_disallow_arena_alloc, 0);
    // The ground is told of each part when it is needed.
    mi_option_set(mi_option_eager_commit, 0);
    return mi_manage_os_memory(start, len, false, false, true, -1);
}

void *selfpage_heap_malloc(size_t size) {
    if (mi_likely(size < LARGE_BYTES)) return mi_malloc(size);
    return selfpage_large_allocate(size, 1, false);
}

void *selfpage_heap_calloc(size_t count, size_t size) {
    size_t total;
    if (mi_unlikely(__builtin_mul_overflow(count, size, &total))) total = SIZE_MAX;
    if (mi_likely(total < LARGE_BYTES)) return mi_zalloc(total);
    return selfpage_large_allocate(total, 1, true);
}

void *selfpage_heap_aligned(size_t align, size_t size) {
    // mimalloc would ask the kernel for objects at large alignments, outside of the range.
    if (size < LARGE_BYTES && align < LARGE_BYTES) return mi_malloc_aligned(size, align);
    return selfpage_large_allocate(size, align, false);
}

static __attribute__((noinline)) void free_other(void *block) {
    if (block == NULL || selfpage_large_free(block)) return;
    if (!objects_elsewhere || ((uintptr_t)block & 7)) selfpage_foreign(block);
    mi_free(block);
}

void selfpage_heap_free(void *block) {
    if (is_object(block)) mi_free(block);
    else free_other(block);
}

size_t selfpage_heap_usable(const void *block) {
    if (is_object(block)) return mi_usable_size(block);
    size_t large = block == NULL ? 0 : selfpage_large_usable(block);
    if (block == NULL || large != 0) return large;
    if (!objects_elsewhere) selfpage_foreign(block);
    return mi_usable_size(block);
}

void *selfpage_heap_realloc(void *block, size_t size) {
    if (block == NULL) return selfpage_heap_malloc(size);
    bool object = is_object(block);
    if (object && size < LARGE_BYTES) return mi_realloc(block, size);
    size_t before = selfpage_heap_usable(block);
    if (!object && size >= LARGE_BYTES && selfpage_large_usable(block) != 0) return selfpage_large_reallocate(block, size);
    void *new_block = selfpage_heap_malloc(size);
    if (new_block != NULL) {
        memcpy(new_block, block, before < size ? before : size);
        selfpage_heap_free(block);
    }
    return new_block;
}

void selfpage_heap_collect(void) {
    mi_collect(true);
}

// Bytes of objects' pages that are accessible now, and at most so far.
void selfpage_heap_stats(size_t *now, size_t *most) {
    mi_stat_count_t committed = _mi_stats_main.committed;
    *now = (size_t)committed.current;
    *most = (size_t)committed.peak;
}

// A forked child has no other threads. One of them may have been freeing a block of ours at that instant, and would have
// let go of the page's flag a moment later: nobody else does now.
void selfpage_heap_settle_in_child(void) {
    mi_heap_t *own = mi_prim_get_default_heap();
    if (own->tld == NULL) return;
    for (mi_heap_t *heap = own->tld->heaps; heap != NULL; heap = heap->next) {
        for (size_t bin = 0; bin <= MI_BIN_FULL; bin++) {
            for (mi_page_t *page = heap->pages[bin].first; page != NULL; page = page->next) {
                mi_thread_free_t word = mi_atomic_load_relaxed(&page->xthread_free);
                if (mi_tf_delayed(word) == MI_DELAYED_FREEING)
                    mi_atomic_store_relaxed(&page->xthread_free, mi_tf_set_delayed(word, MI_USE_DELAYED_FREE));
            }
        }
    }
}
