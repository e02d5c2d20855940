// mimalloc, with its pages from one range of addresses that we lay out (range.h), and the entries that the Rust side calls.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "range.h"
#include <linux/futex.h>
#include <linux/prctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define mmap heap_mmap
#define munmap heap_munmap
#define mprotect heap_mprotect
#define madvise heap_madvise
// Names for mappings, and the end of huge pages for all of the process: neither is wanted.
#define prctl(...) (-1)
// How long a page is, is all that is asked: the C library would look it up in tables that a small program has no other use for.
#define sysconf(name) ((name) == _SC_PAGESIZE ? 4096L : -1L)
#define MI_DEFAULT_ARENA_RESERVE ((long)(HEAP_BYTES >> 10))
#define MI_DEFAULT_ARENA_EAGER_COMMIT 0
// At exit the kernel takes everything at once.
#define MI_SKIP_COLLECT_ON_EXIT 1
#include "mimalloc.h"
#include "mimalloc/internal.h"

// Only one thread purges at a time; the flag that says so is out of reach within a function of mimalloc's. In a forked child nobody
// would ever reset it if another thread was purging at that instant, so it is here.
static _Atomic(uintptr_t) purging;
#undef mi_atomic_guard
#define mi_atomic_guard(unused) \
    (void)(unused); \
    uintptr_t free_to_go = 0; \
    for (bool once = mi_atomic_cas_strong_acq_rel(&purging, &free_to_go, (uintptr_t)1); once; \
         once = false, mi_atomic_store_release(&purging, (uintptr_t)0))

// Where there is no range, segments that threads leave when they end are in a list, under a lock. The thread that forks holds it
// meanwhile, so that the child has all of the list.
static void lock_acquire(mi_lock_t *lock);
static bool lock_try_acquire(mi_lock_t *lock);
static void lock_release(mi_lock_t *lock);
#define mi_lock_acquire lock_acquire
#define mi_lock_try_acquire lock_try_acquire
#define mi_lock_release lock_release

// Pages of 64 KiB are for objects up to here; longer ones share 512 KiB. With up to 8 KiB, as mimalloc has it, up to a ninth of a page
// would be left over at its end, and in memory that has huge pages what is left over is in core as well.
#undef MI_SMALL_OBJ_SIZE_MAX
#define MI_SMALL_OBJ_SIZE_MAX ((size_t)4 << 10)

#include "static.c"
#undef mmap
#undef munmap
#undef mprotect
#undef madvise
#undef prctl
#undef sysconf
#undef mi_lock_acquire
#undef mi_lock_try_acquire
#undef mi_lock_release

// What the Rust side does: blocks of whole pages, and programs that freed what they never had. Hidden: where a plugin has this heap by its
// line, and the program has it preloaded, either half of either is to find its own other half.
#pragma GCC visibility push(hidden)
extern void *selfpage_large_allocate(size_t size, size_t align, bool zeroed);
extern void *selfpage_large_reallocate(void *block, size_t before, size_t size);
extern bool selfpage_large_free(void *block);
extern size_t selfpage_large_usable(const void *block);
extern bool selfpage_large_owns(const void *block);
extern bool selfpage_large_is_all(size_t size);
extern void selfpage_prepare_for_forks(void);
extern void selfpage_look_around(void);
extern void selfpage_look_for_limit(void);
extern _Noreturn void selfpage_foreign(const char *call, const void *block);
extern _Noreturn void selfpage_freed_already(const char *call, const void *block);
extern _Noreturn void selfpage_within(const char *call, const void *at, const void *block, size_t len);
extern _Noreturn void selfpage_damaged(void);
#pragma GCC visibility pop

// Room for a link and a mark, in one line of the cache.
#define SMALLEST_BYTES ((size_t)16)

// In the first words of our range, and at a multiple of 8, in one comparison: the three low bits become the highest.
static inline bool is_in_first(size_t words, const void *block) {
    size_t offset = heap_offset(block);
    return mi_likely((offset >> 3 | offset << 61) < words);
}

static inline bool is_object(const void *block) { return is_in_first(range.open_words, block); }

static inline bool is_trusted_object(const void *block) { return is_in_first(range.trusted_words, block); }

static void on_error(int error, void *unused) {
    (void)unused;
    if (error == EFAULT) selfpage_damaged();
    errno = ENOMEM;
}

// Other libraries' constructors run before ours, and C++'s allocates. Until mimalloc's own has run it would take such objects from
// the kernel, outside of the range. Nothing that it would use then is missing: the C library is set up before all others.
#define SET_UP 1u
// And what a free has found to be due that may start a thread. The C library frees under a lock that it wants for that as well, and allocates
// under none.
#define LOOK_AROUND 2u
static unsigned to_do = SET_UP;
// Whether the thread is in a free that looks for the limit: what it allocates for that may be under such a lock, too.
static __thread bool looks_in_free;

void selfpage_heap_look_around_soon(void) { __atomic_fetch_or(&to_do, LOOK_AROUND, __ATOMIC_RELAXED); }

static __attribute__((noinline)) void do_first(void) {
    unsigned now = __atomic_exchange_n(&to_do, 0, __ATOMIC_RELAXED);
    if (now & LOOK_AROUND) {
        if (looks_in_free) selfpage_heap_look_around_soon();
        else selfpage_look_around();
    }
    if (!(now & SET_UP)) return;
    os_preloading = false;
    mi_option_set_default(mi_option_eager_commit_delay, 0);
    // Either may still be set otherwise by a variable.
    bool at_once = mi_option_is_enabled(mi_option_eager_commit) && mi_option_get(mi_option_eager_commit_delay) == 0;
    opens_in_parts = !at_once;
    mi_register_error(on_error, NULL);
    // Asked here, not by the first object: where there is one node it fails, and a malloc that succeeds leaves errno as it is.
    int saved = errno;
    _mi_os_numa_node_count();
    errno = saved;
    // Who lays out the range sees to forks as well.
    if (ground == NULL) selfpage_prepare_for_forks();
}

static inline void do_what_comes_first(void) {
    if (mi_unlikely(to_do != 0)) do_first();
}

void selfpage_heap_look_in_free(void) {
    looks_in_free = true;
    selfpage_look_for_limit();
    looks_in_free = false;
}

void selfpage_heap_attend_forks(void) { do_what_comes_first(); }

void selfpage_heap_begin(long purge_delay_ms) {
    do_what_comes_first();
    mi_option_set_default(mi_option_purge_delay, purge_delay_ms);
}

// Over `len` bytes at `start`, both multiples of SEGMENT_BYTES, that are all zero and not open yet; at most MOST_BYTES.
bool selfpage_heap_begin_over(const struct selfpage_ground *given, void *start, size_t len, long purge_delay_ms) {
    // mimalloc's own variables can have given it memory already, which is not the ground's.
    if (mi_arena_get_count() != 0) return false;
    ground = given;
    range.start = start;
    range_bytes = len;
    selfpage_heap_begin(purge_delay_ms);
    mi_option_set(mi_option_disallow_arena_alloc, 0);
    // The ground is told of each part when it is needed.
    mi_option_set(mi_option_eager_commit, 0);
    return mi_manage_os_memory(start, len, false, false, true, -1);
}

// A freed object has a mark in its second word (the first is mimalloc's link), until it is handed out again. The mark belongs to
// its address, so that a copy of freed memory has none, and is no address itself: no program has it there in a live object.
static inline volatile uintptr_t *mark_of(void *block) {
    // Volatile: gcc would put link and mark together in a vector register first, which takes longer than two stores.
    return (volatile uintptr_t *)block + 1;
}

static inline uintptr_t freed(const void *block) {
    return (uintptr_t)block ^ (uintptr_t)(intptr_t)INT32_C(-0x4a52b136);
}

static inline void prefetch_to_write(void *block) {
#ifdef __x86_64__
    // The compiler takes this one only where every CPU of its target has it; one that has not takes it for nothing.
    __asm__ volatile("prefetchw %0" : : "m"(*(char *)block));
#else
    __builtin_prefetch(block, 1);
#endif
}

static inline void *handed_out(void *block) {
    if (mi_likely(block != NULL)) *mark_of(block) = 0;
    return block;
}

static inline mi_page_t *page_of(void *block) {
    return _mi_segment_page_of(_mi_ptr_segment(block), block);
}

// Ends the process for an object that is not live, as far as can be told: without the mark, where its memory was given back to the
// kernel, its page has no objects. Its page's own line is looked at only where the memory could be fresh.
static inline void check_live(const char *call, void *block) {
    uintptr_t mark = *mark_of(block);
    if (mi_unlikely(mark == freed(block))) selfpage_freed_already(call, block);
    if (mi_unlikely(mark == 0 && *(uintptr_t *)block == 0 && page_of(block)->used == 0)) selfpage_freed_already(call, block);
}

// What mimalloc knows of the page around an address of the open range, live or not; NULL: nothing. The start of a segment may be free, or
// the inside of a long object.
static mi_page_t *page_around(const void *at) {
    mi_segment_t *segment = (mi_segment_t *)((uintptr_t)at & ~MI_SEGMENT_MASK);
    if (!may_be_read((char *)segment) || segment->cookie != _mi_ptr_cookie(segment)) return NULL;
    size_t number = ((uintptr_t)at & MI_SEGMENT_MASK) / MI_SEGMENT_SLICE_SIZE;
    mi_slice_t *slice = &segment->slices[number];
    return slice->slice_offset <= number * sizeof *slice ? mi_slice_to_page(mi_slice_first(slice)) : NULL;
}

// No page has objects there. Zeros were given back to the kernel, as a rule: that nobody ever had them is not told from that. Where segments
// are opened in parts, there may be no memory to look at.
static _Noreturn void blame(const char *call, void *block) {
    if (!opens_in_parts && (*mark_of(block) == freed(block) || (*mark_of(block) | *(uintptr_t *)block) == 0))
        selfpage_freed_already(call, block);
    selfpage_foreign(call, block);
}

// Ends the process for a pointer into the open range at which no object begins. Where some of a page's objects begin within blocks, for their
// alignment, it is not known which do: there one may begin at any multiple of what all are aligned to. A page that has no live object may be
// changed meanwhile.
static __attribute__((noinline)) void check_begins(const char *call, void *block) {
    mi_page_t *page = page_around(block);
    size_t size = page == NULL ? 0 : __atomic_load_n(&page->block_size, __ATOMIC_RELAXED);
    size_t offset = page == NULL ? 0 : (size_t)((uint8_t *)block - page->page_start);
    // Wraps where it lies before the first.
    if (size == 0 || offset / size >= page->capacity) blame(call, block);
    mi_page_flags_t flags = {.full_aligned = __atomic_load_n(&page->flags.full_aligned, __ATOMIC_RELAXED)};
    size_t within = offset % size;
    if (flags.x.has_aligned ? within % SMALLEST_BYTES : within) selfpage_within(call, block, (char *)block - within, size);
}

static __attribute__((noinline)) void free_rare(void *block) {
    check_live("free", block);
    *mark_of(block) = freed(block);
    mi_free(block);
}

// As `mi_free_generic_mt`, all in one. Another thread's object is mostly in that one's cache: it is fetched to be written at once, not
// first to be read. And it is divided by its length only where it may begin within a block: what says so was there before the object
// was.
static __attribute__((noinline)) void free_of_another(mi_segment_t *segment, mi_page_t *page, void *object) {
    prefetch_to_write(object);
    mi_page_flags_t flags = {.full_aligned = __atomic_load_n(&page->flags.full_aligned, __ATOMIC_RELAXED)};
    check_live("free", object);
    *mark_of(object) = freed(object);
    mi_block_t *block = flags.x.has_aligned ? _mi_page_ptr_unalign(page, object) : object;
    // A segment that nobody has may become this thread's, and of a page that its owner has put away the owner is told: mimalloc sees to both.
    bool plain = segment->kind != MI_SEGMENT_HUGE && mi_atomic_load_relaxed(&segment->thread_id) != 0;
    mi_thread_free_t list = mi_atomic_load_relaxed(&page->xthread_free);
    while (mi_likely(plain && mi_tf_delayed(list) != MI_USE_DELAYED_FREE)) {
        mi_block_set_next(page, block, mi_tf_block(list));
        if (mi_likely(mi_atomic_cas_weak_release(&page->xthread_free, &list, mi_tf_set_block(list, block)))) return;
    }
    mi_free_block_mt(page, segment, block, object, false);
}

// What mimalloc does now and then as pages run out of objects: it fetches what other threads have freed, and gives back what nobody uses.
// The pages of a thread that takes what it has just freed never run out.
#define UPKEEP_FREES 1024
static __thread unsigned frees_left = UPKEEP_FREES;

static __attribute__((noinline)) void upkeep(void) {
    frees_left = UPKEEP_FREES;
    mi_heap_t *heap = mi_prim_get_default_heap();
    if (!mi_heap_is_initialized(heap)) return;
    _mi_heap_delayed_free_partial(heap);
    _mi_heap_collect_retired(heap, false);
    _mi_arenas_collect(false);
    // All pages are looked at, which takes its time where there are many.
    if (++heap->generic_collect_count < mi_option_get_clamp(mi_option_generic_collect, 1, 1000000)) return;
    heap->generic_collect_count = 0;
    mi_heap_collect(heap, false);
}

static __attribute__((noinline)) void free_last(mi_page_t *page, void *block) {
    if (page->used != 0) selfpage_freed_already("free", block);
    _mi_page_retire(page);
    if (--frees_left == 0) upkeep();
}

// What sends a free the long way, and whether what is free of the page is zero, which stands beside it: one load for both.
static inline uint16_t flags_of(const mi_page_t *page) {
    _Static_assert(offsetof(mi_page_t, flags) + 2 == offsetof(mi_page_t, free) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "side by side");
    uint16_t flags;
    memcpy(&flags, &page->flags, sizeof flags);
    return flags & 0x1ff;
}

// As `mi_free` begins, with the mark looked at; `free_rare` does all else. A page has at most 8192 objects, so that one look tells
// whether this was its last, or there was none.
static inline void free_object(void *block) {
    mi_segment_t *segment = (mi_segment_t *)((uintptr_t)block & ~MI_SEGMENT_MASK);
    mi_page_t *page = _mi_segment_page_of(segment, block);
    bool own = mi_atomic_load_relaxed(&segment->thread_id) == _mi_prim_thread_id();
    if (mi_unlikely(!own)) {
        free_of_another(segment, page, block);
        return;
    }
    if (mi_unlikely(flags_of(page) != 0 || *mark_of(block) == freed(block))) {
        if (page->flags.full_aligned != 0 || *mark_of(block) == freed(block)) {
            free_rare(block);
            return;
        }
        page->free_is_zero = false;
    }
    *mark_of(block) = freed(block);
    mi_block_set_next(page, block, page->free);
    page->free = block;
    if (mi_unlikely((int16_t)--page->used <= 0)) free_last(page, block);
    else if (mi_unlikely(--frees_left == 0)) upkeep();
}

static inline size_t at_least(size_t size) {
    return size < SMALLEST_BYTES ? SMALLEST_BYTES : size;
}

// Whether that is all there is to say: else the block is one for mimalloc. Where the process may not have all addresses, the page allocator
// has few long slots, or none, while there may be room in our range, or no such range, and room elsewhere. And each of its slots takes two of the
// process's mappings, where our range takes one or two for 32 MiB.
static bool is_settled(const void *block, size_t size, int errno_before) {
    if (block != NULL) return true;
    // The first object has the range reserved, and there may have been none.
    if (range.start == NO_HEAP) mi_free(mi_malloc(SMALLEST_BYTES));
    bool settled = range.start != NO_HEAP && selfpage_large_is_all(size);
    errno = settled ? ENOMEM : errno_before;
    return settled;
}

static void *allocate_large(size_t size, size_t align) {
    int before = errno;
    void *block = selfpage_large_allocate(size, align, false);
    return mi_likely(is_settled(block, size, before)) ? block : handed_out(mi_malloc_aligned(size, align));
}

// What comes before an object that may have a page to itself. Such pages that other threads have freed are fetched first: mimalloc does so at every
// hundredth object that it looks for, which may be 100 MB, and begins further parts of the range meanwhile.
static inline void prepare_for(size_t size) {
    do_what_comes_first();
    if (mi_likely(size <= MI_MEDIUM_OBJ_SIZE_MAX)) return;
    mi_heap_t *heap = mi_prim_get_default_heap();
    if (mi_heap_is_initialized(heap)) _mi_heap_delayed_free_partial(heap);
}

static __attribute__((noinline)) void *malloc_rare(size_t size) {
    prepare_for(size);
    if (mi_likely(size < LARGE_BYTES)) return handed_out(mi_malloc(at_least(size)));
    return allocate_large(size, 1);
}

// The page that has objects of `size` bytes next. mimalloc's pages are for multiples of 16 bytes, but for the smallest, which have no
// room for a mark: to round up keeps clear of those, and costs nothing.
static inline mi_page_t *next_page(mi_heap_t *heap, size_t size) {
    return heap->pages_free_direct[(size + SMALLEST_BYTES - 1) / SMALLEST_BYTES * (SMALLEST_BYTES / sizeof(void *))];
}

// The next list's first object is fetched meanwhile: lists are mostly in the order of frees, which is none in memory.
static inline void *pop(mi_page_t *page, mi_block_t *block) {
    page->free = mi_block_next(page, block);
    __builtin_prefetch(page->free, 1);
    page->used++;
    *mark_of(block) = 0;
    return block;
}

// As `mi_malloc` begins.
void *selfpage_heap_malloc(size_t size) {
    if (mi_unlikely(size > MI_SMALL_SIZE_MAX)) return malloc_rare(size);
    mi_page_t *page = next_page(mi_prim_get_default_heap(), size);
    mi_block_t *block = page->free;
    return mi_likely(block != NULL) ? pop(page, block) : malloc_rare(size);
}

void *selfpage_heap_calloc(size_t count, size_t size) {
    size_t total;
    if (mi_unlikely(__builtin_mul_overflow(count, size, &total))) total = SIZE_MAX;
    prepare_for(total);
    // All of the object becomes zero, the mark with it.
    if (mi_likely(total < LARGE_BYTES)) return mi_zalloc(at_least(total));
    int before = errno;
    void *block = selfpage_large_allocate(total, 1, true);
    return mi_likely(is_settled(block, total, before)) ? block : mi_zalloc(total);
}

void *selfpage_heap_aligned(size_t align, size_t size) {
    // Where an object does not lie at such an alignment by itself mimalloc looks for one in which it does.
    size_t most = align > MI_MAX_ALIGN_SIZE && size <= SIZE_MAX - align ? size + align : size;
    prepare_for(most);
    // mimalloc would ask the kernel for objects at large alignments, outside of the range.
    if (size < LARGE_BYTES && align < LARGE_BYTES) return handed_out(mi_malloc_aligned(at_least(size), align));
    return allocate_large(size, align);
}

// Of a pointer that is neither in what is open of the range nor a larger block: ends the process where it cannot be an object from the kernel.
static void check_elsewhere(const char *call, const void *block) {
    _Static_assert(SEGMENTS_KNOWN_TO == MI_SEGMENT_MAP_MAX_ADDRESS, "where mimalloc's table ends");
    enum elsewhere where = objects_elsewhere();
    if (where == NOWHERE || ((uintptr_t)block & 7) || heap_offset(block) < range_bytes || selfpage_large_owns(block)
        || (where == WHERE_MIMALLOC_KNOWS && !mi_is_in_heap_region(block)))
        selfpage_foreign(call, block);
}

static __attribute__((noinline)) void free_other(void *block) {
    if (is_object(block)) check_begins("free", block);
    else if (block == NULL || selfpage_large_free(block)) return;
    else check_elsewhere("free", block);
    // At alignments above 16 MiB mimalloc has one begin 32 MiB behind its segment, where `free_object` would take it for the next one's start.
    if (((uintptr_t)block & MI_SEGMENT_MASK) == 0) free_rare(block);
    else free_object(block);
}

void selfpage_heap_free(void *block) {
    if (is_trusted_object(block)) free_object(block);
    else free_other(block);
}

static size_t usable(const char *call, void *block) {
    if (!is_trusted_object(block)) {
        size_t large = is_object(block) ? 0 : selfpage_large_usable(block);
        if (large != 0) return large;
        if (is_object(block)) check_begins(call, block);
        else check_elsewhere(call, block);
    }
    check_live(call, block);
    return mi_usable_size(block);
}

size_t selfpage_heap_usable(void *block) {
    return block == NULL ? 0 : usable("malloc_usable_size", block);
}

void *selfpage_heap_realloc(void *block, size_t size) {
    if (block == NULL) return selfpage_heap_malloc(size);
    size_t before = usable("realloc", block);
    int errno_before = errno;
    if (is_object(block)) {
        // It stays where it fits and is not too large.
        if (size <= before && size >= before / 2) return block;
    } else if (size >= LARGE_BYTES && selfpage_large_owns(block)) {
        void *resized = selfpage_large_reallocate(block, before, size);
        if (mi_likely(is_settled(resized, size, errno_before))) return resized;
    }
    void *new_block = selfpage_heap_malloc(size);
    // That memory is used up is no reason to refuse less of it.
    if (new_block == NULL) {
        if (size > before) return NULL;
        errno = errno_before;
        return block;
    }
    memcpy(new_block, block, before < size ? before : size);
    selfpage_heap_free(block);
    return new_block;
}

void selfpage_heap_check_pointers(void) { trust_nobody(); }

void selfpage_heap_collect(void) { mi_collect(true); }

// Bytes of objects' pages that are accessible now, and at most so far.
void selfpage_heap_stats(size_t *now, size_t *most) {
    mi_stat_count_t committed = _mi_stats_main.committed;
    *now = (size_t)committed.current;
    *most = (size_t)committed.peak;
}

// The lock of that list says from the first moment on which thread has it (0 is none), and that thread comes again as it likes: handlers of
// a fork allocate too, on both sides, and a handler of a signal may fork whatever it interrupted, another fork as well.
static _Atomic(uintptr_t) list_holder;
static volatile size_t list_held_again;

static bool try_hold_list(void) {
    uintptr_t own = _mi_prim_thread_id(), seen = 0;
    if (mi_atomic_cas_strong_acq_rel(&list_holder, &seen, own)) return true;
    if (seen != own) return false;
    list_held_again++;
    return true;
}

static void hold_list(void) {
    // Seldom, and then most likely until another thread has forked: asleep for moments, so that one with less of a right to run may do so. By
    // the call that every program with threads makes, whatever else is forbidden to it, and at which none is cancelled.
    int before = errno;
    struct timespec moment = {.tv_nsec = 50000};
    while (!try_hold_list())
        syscall(SYS_futex, &list_holder, FUTEX_WAIT_PRIVATE, (uint32_t)mi_atomic_load_relaxed(&list_holder), &moment, NULL, 0);
    errno = before;
}

static void let_go_of_list(void) {
    if (list_held_again != 0) list_held_again--;
    else mi_atomic_store_release(&list_holder, (uintptr_t)0);
}

static bool is_of_list(const mi_lock_t *lock) {
    return lock == &mi_subproc_default.abandoned_os_lock;
}

static void lock_acquire(mi_lock_t *lock) {
    is_of_list(lock) ? hold_list() : mi_lock_acquire(lock);
}

static bool lock_try_acquire(mi_lock_t *lock) {
    return is_of_list(lock) ? try_hold_list() : mi_lock_try_acquire(lock);
}

static void lock_release(mi_lock_t *lock) {
    is_of_list(lock) ? let_go_of_list() : mi_lock_release(lock);
}

bool selfpage_heap_try_hold_over_fork(void) { return try_hold_list(); }

void selfpage_heap_let_go_after_fork(void) { let_go_of_list(); }

// mimalloc's locks are open in a child, whoever held them, but for what a handler of a signal interrupted. What is under the one that is held
// over the fork is whole; the others have nothing under them that could be torn: one lets one thread at a time walk along that list, two
// are taken where one of mimalloc's variables asks for messages, or for visits. What is done once (`mi_atomic_do_once`) is done before there is
// a second thread. All else is atomic, and of the flags that a thread sets for a while those that others heed are reset here and below.
static void open_locks(void) {
    // Where somebody else lays out the range nobody takes the list for the fork: there it is empty.
    if (mi_atomic_load_relaxed(&list_holder) == _mi_prim_thread_id()) {
        let_go_of_list();
    } else {
        list_held_again = 0;
        mi_atomic_store_relaxed(&list_holder, (uintptr_t)0);
    }
    mi_lock_init(&mi_subproc_default.abandoned_os_visit_lock);
    mi_lock_init(&out_buf_lock);
    for (size_t at = 0; at < mi_arena_get_count(); at++) {
        mi_arena_t *arena = mi_arena_from_index(at);
        if (arena != NULL) mi_lock_init(&arena->abandoned_visit_lock);
    }
}

// Whose segments threads have that a child does not: an odd number, as no thread has.
#define NO_THREAD ((mi_threadid_t)1)

// A thread that is gone may have been in the middle of making the segment: then its cookie is not there yet, and nobody has anything of it.
// Nor is there one where this is the inside of a long object.
static void disown(mi_segment_t *segment) {
    _Static_assert(offsetof(mi_segment_t, slices) <= 4096, "in the page that may_be_read asks for");
    mi_threadid_t id = mi_atomic_load_relaxed(&segment->thread_id);
    if (id == 0 || id == NO_THREAD || id == _mi_prim_thread_id() || segment->cookie != _mi_ptr_cookie(segment)) return;
    mi_atomic_store_relaxed(&segment->thread_id, NO_THREAD);
}

// A thread that the child starts may get the stack of one that it does not have, and with it that one's number: it would take its segments for
// its own, in the middle of whatever was being done to them. From now on all find them another thread's, which they are.
static void disown_others(void) {
    int before = errno;
    for (size_t at = 0; at < mi_arena_get_count(); at++) {
        mi_arena_t *arena = mi_arena_from_index(at);
        for (size_t field = 0; arena != NULL && field < arena->field_count; field++) {
            for (uintptr_t left = mi_atomic_load_relaxed(&arena->blocks_inuse[field]); left != 0; left &= left - 1) {
                size_t block = field * MI_BITMAP_FIELD_BITS + mi_ctz(left);
                // Behind its last block all is marked as in use.
                if (block >= arena->block_count) break;
                char *segment = (char *)arena->start + block * MI_ARENA_BLOCK_SIZE;
                if (may_be_read(segment)) disown((mi_segment_t *)segment);
            }
        }
    }
    // And those that lie in no arena, as far as mimalloc knows where they are.
    for (size_t at = 0; at < MI_SEGMENT_MAP_MAX_PARTS; at++) {
        mi_segmap_part_t *part = mi_atomic_load_ptr_relaxed(mi_segmap_part_t, &mi_segment_map[at]);
        for (size_t field = 0; part != NULL && field < MI_SEGMENT_MAP_PART_ENTRIES; field++) {
            for (uintptr_t left = mi_atomic_load_relaxed(&part->map[field]); left != 0; left &= left - 1) {
                size_t bit = field * MI_INTPTR_BITS + mi_ctz(left);
                disown((mi_segment_t *)(at * MI_SEGMENT_MAP_PART_SPAN + bit * MI_SEGMENT_MAP_PART_BIT_SPAN));
            }
        }
    }
    errno = before;
}

// A forked child has no other threads. One of them may have been freeing a block of ours at that instant, and would have
// let go of the page's flag a moment later: nobody else does now.
void selfpage_heap_settle_in_child(void) {
    mi_atomic_store_release(&purging, (uintptr_t)0);
    open_locks();
    disown_others();
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
