// The range of addresses that objects lie in, and what mimalloc's calls of the mmap family come to.
//
// mimalloc reserves one arena, HEAP_BYTES of addresses without access, and makes 32 MiB of it accessible at a time: a segment, of one
// thread. The start of the range has small pages, so that a small program stays small, after a while medium ones where they are to be
// had; so has each segment's but the first few, for threads with few objects.
#include <errno.h>
#include <linux/mman.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#define HEAP_BYTES ((size_t)64 << 30)
// Somebody else may lay out so much.
#define MOST_BYTES ((size_t)256 << 30)
#define SEGMENT_BYTES ((size_t)32 << 20)
// Up to here the heap has small pages: at most one huge page in so much memory is not all in use.
#define SMALL_PAGES_BYTES ((size_t)16 << 20)
#define HUGE_PAGE_BYTES ((size_t)2 << 20)
// Up to here segments have huge pages from their start: a program with few threads may have all in them, and one with many has little else.
#define FEW_SEGMENTS_BYTES (5 * SEGMENT_BYTES)
// Up to here the smallest: objects of each size begin 64 KiB of their own, of which a small program uses little.
#define SMALLEST_PAGES_BYTES ((size_t)4 << 20)
// Requests from here on get pages of their own. What mimalloc keeps of threads is smaller.
#define LARGE_BYTES ((size_t)1 << 20)

// Where no program has memory, so that no pointer lies in a range that is not there yet: not even NULL, before the first malloc.
#define NO_HEAP ((char *)((uintptr_t)1 << 63))

static struct {
    char *start;
    // How much of it may be touched, in words of 8 bytes: beyond, no pointer is an object's. It only grows, and who was given an
    // object sees it large enough for that, so that it is read like any other number.
    size_t open_words;
    // As much, or 0 where each pointer is looked at more closely: what `free` compares with, so that this costs others nothing.
    size_t trusted_words;
} range __attribute__((aligned(4 * sizeof(size_t)))) = {NO_HEAP, 0, 0};
// How long it is.
static size_t range_bytes = HEAP_BYTES;
static bool trusts_nobody;
// Where objects may lie outside of the range. Who was given such an object sees it.
enum elsewhere {
    NOWHERE,
    // In arenas of mimalloc's and in segments, and it knows where these are.
    WHERE_MIMALLOC_KNOWS,
    // A pointer that is not ours cannot be told from one that is.
    ANYWHERE,
};
static int elsewhere = NOWHERE;
// The table of segments that are in no arena goes up to here.
#define SEGMENTS_KNOWN_TO ((uintptr_t)48 << 40)

static inline enum elsewhere objects_elsewhere(void) { return __atomic_load_n(&elsewhere, __ATOMIC_RELAXED); }

static void may_lie(enum elsewhere where) {
    int before = __atomic_load_n(&elsewhere, __ATOMIC_RELAXED);
    while (before < (int)where && !__atomic_compare_exchange_n(&elsewhere, &before, where, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

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

// What the Rust side does: the range is open to here.
extern void selfpage_heap_opened(size_t bytes) __attribute__((visibility("hidden")));

// How far into the range an address is; at least `range_bytes` if it is not in there.
static inline size_t heap_offset(const void *at) {
    return (size_t)((const char *)at - range.start);
}

// Segments whose start may be touched, a bit each. Where they are opened in parts, or by somebody else, one can be open behind one that is not.
static _Atomic(uint64_t) open_starts[MOST_BYTES / SEGMENT_BYTES / 64];

// For who finds a segment by looking for it, in a forked child. Outside of the range the kernel is asked: what was reserved alone is never
// used again there, and does no harm if it is open.
static bool may_be_read(char *segment) {
    size_t number = heap_offset(segment) / SEGMENT_BYTES;
    if (number >= range_bytes / SEGMENT_BYTES) return mprotect(segment, 4096, PROT_READ | PROT_WRITE) == 0;
    return atomic_load_explicit(&open_starts[number / 64], memory_order_relaxed) >> number % 64 & 1;
}

static void raise_to(size_t *words, size_t least) {
    size_t before = __atomic_load_n(words, __ATOMIC_RELAXED);
    while (before < least && !__atomic_compare_exchange_n(words, &before, least, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
}

static void trust_nobody(void) {
    __atomic_store_n(&trusts_nobody, true, __ATOMIC_SEQ_CST);
    __atomic_store_n(&range.trusted_words, 0, __ATOMIC_SEQ_CST);
}

// Whole segments: what mimalloc knows of one stands at its start, which is opened first.
static void opened(size_t from, size_t end) {
    size_t first = (from + SEGMENT_BYTES - 1) / SEGMENT_BYTES, segments = (end + SEGMENT_BYTES - 1) / SEGMENT_BYTES;
    for (size_t number = first; number < segments; number++)
        atomic_fetch_or_explicit(&open_starts[number / 64], (uint64_t)1 << number % 64, memory_order_relaxed);
    size_t words = segments * (SEGMENT_BYTES / 8);
    raise_to(&range.open_words, words);
    raise_to(&range.trusted_words, words);
    // Somebody may have said so meanwhile.
    if (__atomic_load_n(&trusts_nobody, __ATOMIC_SEQ_CST)) trust_nobody();
}

// Somebody has reserved the range, or is about to.
static bool is_reserved;

static void *heap_mmap(void *at, size_t len, int protection, int flags, int file, long offset) {
    if (ground != NULL) return ground_mmap(len);
    // Of threads that are all the first one has the range. The others' arenas lie elsewhere.
    if (len != HEAP_BYTES || __atomic_exchange_n(&is_reserved, true, __ATOMIC_RELAXED)) {
        void *found = mmap(at, len, protection, flags, file, offset);
        // What is reserved alone, and no less than this, is an arena.
        bool is_arena = len >= HEAP_BYTES && protection == PROT_NONE;
        if (found == MAP_FAILED) {
            // What is that short may be a part of the table, without which mimalloc goes on.
            if (len < LARGE_BYTES) may_lie(ANYWHERE);
        } else if (len >= LARGE_BYTES) {
            may_lie(is_arena || (uintptr_t)found + len <= SEGMENTS_KNOWN_TO ? WHERE_MIMALLOC_KNOWS : ANYWHERE);
        }
        return found;
    }
    int before = errno;
    char *start = mmap(NULL, len + SEGMENT_BYTES, protection, flags, file, offset);
    if (start == MAP_FAILED) {
        errno = before;
        __atomic_store_n(&is_reserved, false, __ATOMIC_RELAXED);
        return start;
    }
    range.start = (char *)(((uintptr_t)start + SEGMENT_BYTES - 1) & ~(SEGMENT_BYTES - 1));
    // A variable of mimalloc's has all of it accessible at once.
    if (protection & PROT_WRITE) opened(0, HEAP_BYTES);
    return range.start;
}

// `free` leaves errno as it is, and memory goes back in there, too. Where the kernel refuses (to drop what is locked, or to split a mapping
// where there are as many as may be) mimalloc does nothing about it: it need not be told.
static int heap_munmap(void *at, size_t len) {
    int before = errno;
    ground != NULL ? ground->unmap(at, len) : (void)munmap(at, len);
    errno = before;
    return 0;
}

// What the Rust side knows: whether 64 KiB at a time may be had, and nothing between that and a huge page. mimalloc gives back whole
// multiples of that, so none is ever split.
extern bool selfpage_heap_may_have_medium_pages(void) __attribute__((visibility("hidden")));

// The kernel gives the largest that the mapping has room for. So a page is left out on either side of each second multiple of a huge
// page: no mapping covers one. Objects never move by mremap, which would not go across.
static void ask_for_medium_pages(void) {
    if (!selfpage_heap_may_have_medium_pages()) return;
    size_t len = 2 * HUGE_PAGE_BYTES, page = 4096;
    int before = errno;
    for (size_t at = SMALLEST_PAGES_BYTES; at < SMALL_PAGES_BYTES; at += len)
        madvise(range.start + at + page, len - 2 * page, MADV_HUGEPAGE);
    errno = before;
}

// One of mimalloc's variables for it is set.
static bool opens_in_parts;

// And whether the range has blocks that had no mappings of their own.
extern bool selfpage_heap_has_blocks(void) __attribute__((visibility("hidden")));

static int heap_mprotect(void *at, size_t len, int protection) {
    size_t from = heap_offset(at), end = from + len;
    bool opens = from < range_bytes && (protection & PROT_WRITE);
    if (ground != NULL) {
        if ((protection & PROT_WRITE) && !ground->open(at, len)) {
            errno = ENOMEM;
            return -1;
        }
        if (opens) opened(from, end);
        return 0;
    }
    // Where a whole segment cannot be had mimalloc would open it in parts, and later ask for a part that cannot be had again and
    // again, instead of using what is free elsewhere.
    bool rest = opens && !opens_in_parts && from != 0 && from % SEGMENT_BYTES == 0 && len < SEGMENT_BYTES;
    if (rest) errno = ENOMEM;
    // What lies before is opened as well. Where threads open segments at once, and may not open all, the first could be the one that is
    // refused; and mimalloc, which takes the first that is free, would ask for that one from then on, and not for those behind it.
    char *start = at;
    size_t open = range.open_words * 8;
    if (opens && !opens_in_parts && open < from) {
        start -= from - open;
        from = open;
    }
    if (rest || mprotect(start, end - from, protection) != 0) return -1;
    if (opens) opened(from, end);
    if (opens && from == 0) ask_for_medium_pages();
    // A kernel without huge pages goes on with small ones.
    int before = errno;
    for (size_t next; opens && from < end && !selfpage_heap_has_blocks(); from = next) {
        next = (from / SEGMENT_BYTES + 1) * SEGMENT_BYTES;
        size_t small = next == SEGMENT_BYTES ? SMALL_PAGES_BYTES : next <= FEW_SEGMENTS_BYTES ? 0 : HUGE_PAGE_BYTES;
        if (from < next - SEGMENT_BYTES + small) from = next - SEGMENT_BYTES + small;
        if (from < end) madvise(range.start + from, (next < end ? next : end) - from, MADV_HUGEPAGE);
    }
    errno = before;
    // The first is allowed for without a word: a small program has no other.
    if (opens && end > SEGMENT_BYTES) selfpage_heap_opened(range.open_words * 8);
    return 0;
}

static int heap_madvise(void *at, size_t len, int advice) {
    bool drops = advice == MADV_DONTNEED || advice == MADV_FREE;
    if (ground != NULL) {
        if (drops) ground->drop(at, len);
        return 0;
    }
    // What has huge pages says `heap_mprotect`.
    if (advice == MADV_HUGEPAGE) return 0;
    if (!drops) return madvise(at, len, advice);
    // To drop a part of a huge page splits it, which costs more than the part is worth. Nothing relies on zeros.
    size_t from = heap_offset(at);
    if (from < range_bytes && from >= SMALL_PAGES_BYTES) {
        size_t end = (from + len) & ~(HUGE_PAGE_BYTES - 1);
        from = (from + HUGE_PAGE_BYTES - 1) & ~(HUGE_PAGE_BYTES - 1);
        if (from >= end) return 0;
        at = range.start + from;
        len = end - from;
    }
    // As in `heap_munmap`.
    int before = errno;
    madvise(at, len, advice);
    errno = before;
    return 0;
}
