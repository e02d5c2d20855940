// Programs that lean on malloc, one for each name: see tests/torture.rs.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

struct block {
    unsigned char *at;
    size_t size;
    unsigned char fill;
};
enum { BLOCKS = 600 };

static void check(struct block *b) {
    for (size_t i = 0; i < b->size; i += i < 64 || i + 64 > b->size ? 1 : 61) CHECK(b->at[i] == b->fill);
}

static size_t any_size(uint64_t *state) {
    switch (next(state) % 64) {
    case 0: return next(state) % (8 << 20);
    case 1 ... 4: return next(state) % 300000;
    case 5 ... 20: return next(state) % 9000;
    default: return next(state) % 500;
    }
}

static void step(struct block *b, uint64_t *state) {
    size_t size = any_size(state);
    if (b->at == NULL) {
        int way = next(state) % 4;
        size_t align = (size_t)16 << next(state) % 10;
        if (way == 0) {
            b->at = calloc(1, size);
            for (size_t i = 0; i < size; i++) CHECK(b->at[i] == 0);
        } else {
            b->at = way == 1 ? aligned_alloc(align, size) : malloc(size);
            CHECK(way != 1 || (uintptr_t)b->at % align == 0);
        }
    } else {
        check(b);
        if (next(state) % 3 != 0) {
            free(b->at);
            b->at = NULL;
            return;
        }
        unsigned char *before = b->at;
        unsigned char fill = b->fill;
        size_t kept = b->size < size + 1 ? b->size : size + 1;
        b->at = realloc(before, size + 1);
        CHECK(b->at != NULL);
        for (size_t i = 0; i < kept; i++) CHECK(b->at[i] == fill);
    }
    CHECK(b->at != NULL && malloc_usable_size(b->at) >= size);
    b->size = size;
    b->fill = (unsigned char)next(state);
    memset(b->at, b->fill, size);
}

static void finish(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0) fprintf(stderr, "a child ended with %#x\n", status);
    CHECK(status == 0);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static double until;
static atomic_ulong seed, rounds, children;

static void *storm_thread(void *unused) {
    (void)unused;
    uint64_t state = atomic_fetch_add(&seed, 1) * 0x9e3779b97f4a7c15 + 1;
    struct block *blocks = calloc(BLOCKS, sizeof *blocks);
    for (unsigned long n = 0; now() < until; n++) {
        for (int i = 0; i < 200; i++) step(&blocks[next(&state) % BLOCKS], &state);
        rounds++;
        if (n % 40 == 7) {
            pid_t child = fork();
            CHECK(child >= 0);
            if (child == 0) {
                alarm(120);
                for (int i = 0; i < BLOCKS; i++) if (blocks[i].at != NULL) check(&blocks[i]);
                for (int i = 0; i < 500; i++) step(&blocks[next(&state) % BLOCKS], &state);
                _exit(0);
            }
            finish(child);
            children++;
        }
    }
    for (int i = 0; i < BLOCKS; i++) if (blocks[i].at != NULL) check(&blocks[i]), free(blocks[i].at);
    free(blocks);
    return NULL;
}

static void storm(char **arguments) {
    until = now() + atof(arguments[0]);
    seed = strtoul(arguments[1], NULL, 10);
    pthread_t other;
    CHECK(pthread_create(&other, NULL, storm_thread, NULL) == 0);
    storm_thread(NULL);
    pthread_join(other, NULL);
    printf("%lu blocks taken, resized or given back, %lu children\n", rounds * 200, children);
}

// Blocks that one thread allocates and another frees, while threads begin and end and the main thread forks.
static _Atomic(char *) ring[64];
static atomic_bool stop;

static void *give(void *unused) {
    for (uint64_t state = 5; !stop;) {
        char *block = malloc(next(&state) % 3000 + 1), *none = NULL;
        block[0] = 1;
        if (!atomic_compare_exchange_strong(&ring[next(&state) % 64], &none, block)) free(block);
    }
    return unused;
}

static void *take(void *unused) {
    for (uint64_t state = 9; !stop;) free(atomic_exchange(&ring[next(&state) % 64], NULL));
    return unused;
}

// The allocator's locks are held for longer than it would: more forks find one taken.
static atomic_bool slow;
int pthread_mutex_unlock(pthread_mutex_t *mutex) {
    static int (*_Atomic unlock)(pthread_mutex_t *);
    if (unlock == NULL) unlock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_unlock");
    if (slow) usleep(100);
    return unlock(mutex);
}

// A thread that leaves blocks when it ends.
static void *leave(void *number) {
    uint64_t state = (uintptr_t)number;
    for (int i = 0; i < 50; i++) {
        char *block = malloc(next(&state) % 3000 + 1);
        CHECK(block != NULL);
        block[0] = 1;
        free(atomic_exchange(&ring[next(&state) % 64], block));
    }
    return NULL;
}

static void *begin_and_end(void *unused) {
    for (uint64_t state = 13; !stop;) {
        pthread_t pair[2];
        for (int i = 0; i < 2; i++) CHECK(pthread_create(&pair[i], NULL, leave, (void *)next(&state)) == 0);
        for (int i = 0; i < 2; i++) pthread_join(pair[i], NULL);
    }
    return unused;
}

static void *in_a_child(void *unused) {
    for (int i = 0; i < 2000; i++) free(malloc(i * 7));
    return unused;
}

static void forks(char **arguments) {
    pthread_t giver, taker, churner;
    pthread_create(&giver, NULL, give, NULL);
    pthread_create(&taker, NULL, take, NULL);
    pthread_create(&churner, NULL, begin_and_end, NULL);
    slow = true;
    for (int n = atoi(arguments[0]); n > 0; n--) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(120);
            slow = false;
            for (int i = 0; i < 64; i++) free(atomic_exchange(&ring[i], NULL));
            in_a_child(NULL);
            pthread_t thread;
            CHECK(pthread_create(&thread, NULL, in_a_child, NULL) == 0);
            pthread_join(thread, NULL);
            CHECK(pthread_create(&thread, NULL, leave, (void *)17) == 0);
            pthread_join(thread, NULL);
            void *large = malloc(5 << 20);
            memset(large, 1, 5 << 20);
            free(realloc(large, 9 << 20));
            _exit(0);
        }
        finish(child);
    }
    stop = true;
    pthread_join(giver, NULL);
    pthread_join(taker, NULL);
    pthread_join(churner, NULL);
}

// Children of a process one of whose threads was giving memory back at that instant: they can, too.
static size_t resident(void) {
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%*u %lu", &pages) == 1);
    fclose(file);
    return pages * 4096;
}
static bool is_child, looks_at_resident;
static void take_and_give_back(void) {
    enum { PIECES = 256, PIECE = 256 << 10 };
    char *piece[PIECES];
    size_t before = resident();
    for (int i = 0; i < PIECES; i++) {
        piece[i] = malloc(PIECE);
        for (int at = 0; at < PIECE; at += 4096) piece[i][at] = 1;
    }
    size_t taken = resident();
    for (int i = 0; i < PIECES; i++) free(piece[i]);
    malloc_trim(0);
    size_t after = resident();
    // A thread of the parent's has its own at the same time: only a child can tell.
    if (is_child && looks_at_resident) CHECK(taken > before && after < taken && taken - after > (taken - before) / 2);
}
static void *keep_giving_back(void *unused) {
    (void)unused;
    while (!stop) take_and_give_back();
    return NULL;
}
static void purges(char **arguments) {
    looks_at_resident = strcmp(arguments[1], "resident") == 0;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, keep_giving_back, NULL) == 0);
    for (int n = atoi(arguments[0]); n > 0; n--) {
        usleep(n % 8 * 3000);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(120);
            is_child = true;
            take_and_give_back();
            _exit(0);
        }
        finish(child);
    }
    stop = true;
    pthread_join(thread, NULL);
}

// Threads that come and go, and whose blocks outlive them.
static void *leave_a_block(void *size) {
    char *block = malloc((size_t)size);
    memset(block, 7, (size_t)size);
    return block;
}

static void threads(char **unused) {
    (void)unused;
    for (size_t n = 1; n < 300; n++) {
        pthread_t pair[2];
        for (int i = 0; i < 2; i++) pthread_create(&pair[i], NULL, leave_a_block, (void *)(n * 37));
        for (int i = 0; i < 2; i++) {
            char *block;
            pthread_join(pair[i], (void **)&block);
            for (size_t at = 0; at < n * 37; at++) CHECK(block[at] == 7);
            free(block);
        }
    }
}

// Before main, and after it.
static char *early;
__attribute__((constructor)) static void before_main(void) {
    early = malloc(100);
    strcpy(early, "early");
}
static char *late;
static void after_main(void) {
    CHECK(strcmp(early, "early") == 0);
    free(early);
    late = realloc(late, 3 << 20);
    memset(late, 3, 3 << 20);
    free(malloc(10));
}
__attribute__((destructor)) static void at_the_end(void) {
    if (late != NULL) {
        free(late);
        free(malloc(70000));
        puts("ended");
    }
}
static void ends(char **unused) {
    (void)unused;
    late = malloc(50);
    atexit(after_main);
}

static void library(char **arguments) {
    for (int n = 0; n < 50; n++) {
        void *handle = dlopen(arguments[0], RTLD_NOW);
        CHECK(handle != NULL);
        char *(*make)(int) = (char *(*)(int))dlsym(handle, "make");
        char *block = make(n);
        dlclose(handle);
        CHECK(atoi(block) == n);
        free(block);
    }
}

static void limits(char **unused) {
    (void)unused;
    volatile size_t huge = SIZE_MAX, half = PTRDIFF_MAX, zero = 0;
    void *block, *other;
    CHECK((block = malloc(zero)) != NULL && (other = malloc(zero)) != NULL && block != other);
    free(block), free(other), free(NULL);
    for (int i = 0; i < 3; i++) {
        size_t size = (size_t[]){huge, half, huge - 4095}[i];
        errno = 0; CHECK(malloc(size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(calloc(1, size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(memalign(64, size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(aligned_alloc(64, size) == NULL && errno == ENOMEM);
        block = malloc(10); strcpy(block, "stays");
        errno = 0; CHECK(realloc(block, size) == NULL && errno == ENOMEM);
        CHECK(strcmp(block, "stays") == 0);
        errno = 0; CHECK(reallocarray(block, size, 2) == NULL && errno == ENOMEM);
        free(block);
        block = malloc(2 << 20); strcpy(block, "stays");
        errno = 0; CHECK(realloc(block, size) == NULL && errno == ENOMEM && strcmp(block, "stays") == 0);
        free(block);
        errno = 77; CHECK(posix_memalign(&block, 64, size) == ENOMEM && errno == 77);
    }
    errno = 0; CHECK(calloc(half, 3) == NULL && errno == ENOMEM);
    errno = 0; CHECK(pvalloc(huge) == NULL && errno == ENOMEM);
    CHECK(posix_memalign(&block, 3, 10) == EINVAL && posix_memalign(&block, 4, 10) == EINVAL);
    CHECK(posix_memalign(&block, 0, 10) == EINVAL);
    for (size_t align = 8; align <= 64 << 20; align *= 2) {
        for (int i = 0; i < 4; i++) {
            size_t size = (size_t[]){1, 100, 70000, 3 << 20}[i];
            CHECK(posix_memalign(&block, align, size) == 0 && (uintptr_t)block % align == 0);
            memset(block, 1, size);
            block = realloc(block, size * 2);
            CHECK(((char *)block)[size - 1] == 1);
            free(block);
        }
    }
    CHECK((uintptr_t)(block = valloc(10)) % 4096 == 0);
    free(block);
    CHECK((uintptr_t)(block = pvalloc(5000)) % 4096 == 0 && malloc_usable_size(block) >= 8192);
    free(block);
    block = NULL;
    for (int i = 0; i < 4; i++) {
        size_t count = (size_t[]){5, 1000, 200000, 3}[i], kept = (size_t[]){0, 100, 20000, 60}[i];
        CHECK((block = reallocarray(block, count, 20)) != NULL && malloc_usable_size(block) >= count * 20);
        for (size_t at = 0; at < kept; at++) CHECK(((unsigned char *)block)[at] == at % 251);
        for (size_t at = 0; at < count * 20; at++) ((unsigned char *)block)[at] = at % 251;
    }
    CHECK(reallocarray(block, 20, zero) == NULL);
    CHECK(realloc(malloc(10), zero) == NULL);
    CHECK(malloc_usable_size(NULL) == 0);
    malloc_trim(0);
}

// What is told of memory, where freed blocks keep their frames.
static void figures(char **unused) {
    (void)unused;
    enum { LARGE = 32 << 20 };
    struct mallinfo2 before = mallinfo2(), with, after, trimmed;
    char *block = malloc(LARGE);
    memset(block, 1, LARGE);
    with = mallinfo2();
    CHECK(with.uordblks >= before.uordblks + LARGE && with.uordblks < before.uordblks + LARGE + (4 << 20));
    CHECK(with.arena > 0 && with.hblkhd >= before.hblkhd + LARGE && with.uordblks == with.arena + with.hblkhd);
    free(block);
    after = mallinfo2();
    CHECK(after.uordblks <= before.uordblks);
    CHECK(after.fordblks >= before.fordblks + LARGE / 2);
    CHECK(malloc_trim(0) == 1);
    trimmed = mallinfo2();
    CHECK(trimmed.fordblks < after.fordblks - LARGE / 2 && malloc_trim(0) == 0);
}

// Alignments that no power of two is, or no address a multiple of. `memalign` rounds up, as glibc's does.
static void alignments(char **unused) {
    (void)unused;
    const volatile size_t none = 0, odd = 3, hundred = 100, far = (size_t)1 << 48, farthest = (size_t)1 << 63, all = SIZE_MAX;
    void *block;
    for (int i = 0; i < 2; i++) {
        size_t size = i == 0 ? 10 : 3 << 20;
        CHECK((block = memalign(none, size)) != NULL), free(block);
        CHECK((block = memalign(odd, size)) != NULL && (uintptr_t)block % 4 == 0), free(block);
        CHECK((block = memalign(hundred, size)) != NULL && (uintptr_t)block % 128 == 0), free(block);
        errno = 0; CHECK(memalign(far, size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(memalign(farthest, size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(memalign(all, size) == NULL && errno == EINVAL);
        errno = 0; CHECK(aligned_alloc(none, size) == NULL && errno == EINVAL);
        errno = 0; CHECK(aligned_alloc(odd, size) == NULL && errno == EINVAL);
        errno = 0; CHECK(aligned_alloc(hundred, size) == NULL && errno == EINVAL);
        errno = 0; CHECK(aligned_alloc(far, size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(aligned_alloc(farthest, size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(aligned_alloc(all, size) == NULL && errno == EINVAL);
        errno = 77; CHECK(posix_memalign(&block, none, size) == EINVAL && errno == 77);
        errno = 77; CHECK(posix_memalign(&block, odd, size) == EINVAL && errno == 77);
        errno = 77; CHECK(posix_memalign(&block, far, size) == ENOMEM && errno == 77);
        errno = 77; CHECK(posix_memalign(&block, farthest, size) == ENOMEM && errno == 77);
        errno = 77; CHECK(posix_memalign(&block, all, size) == EINVAL && errno == 77);
    }
    for (size_t align = 1; align < 16; align *= 2) {
        CHECK((block = memalign(align, 10)) != NULL), free(block);
        CHECK((block = aligned_alloc(align, 10)) != NULL), free(block);
    }
    CHECK((block = valloc(none)) != NULL && (uintptr_t)block % 4096 == 0), free(block);
    CHECK((block = pvalloc(none)) != NULL && (uintptr_t)block % 4096 == 0), free(block);
    errno = 0; CHECK(valloc(all) == NULL && errno == ENOMEM);
    errno = 0; CHECK(pvalloc(all) == NULL && errno == ENOMEM);
    errno = 0; CHECK(pvalloc(all - 4095) == NULL && errno == ENOMEM);
}

// What is locked the kernel does not take back: `free` leaves errno as it was all the same.
static void locked(char **unused) {
    (void)unused;
    enum { COUNT = 4000 };
    static void *block[COUNT];
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) {
        puts("not to be locked");
        return;
    }
    for (size_t size = 16; size < 2 << 20; size *= 5) {
        size_t count = size < 10000 ? COUNT : COUNT / 100;
        for (size_t i = 0; i < count; i++) CHECK((block[i] = malloc(size)) != NULL);
        for (size_t i = 0; i < count; i++) errno = 77, free(block[i]), CHECK(errno == 77);
    }
}

static void large_freed_twice(char **unused) {
    (void)unused;
    char *volatile block = malloc(5 << 20);
    printf("%p\n", block), fflush(stdout);
    free(block), free(block);
}

// Objects that are freed twice, in the way that the argument says.
static void *volatile freed_twice;
static void *free_it(void *unused) {
    (void)unused;
    free(freed_twice);
    return NULL;
}
static void elsewhere(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, free_it, NULL) == 0 && pthread_join(thread, NULL) == 0);
}
static void object_freed_twice(char **arguments) {
    const char *way = arguments[0];
    size_t size = strtoul(arguments[1], NULL, 10);
    enum { OTHERS = 3000 };
    static void *other[OTHERS];
    for (int i = 0; i < OTHERS; i++) {
        other[i] = strcmp(way, "aligned") == 0 ? memalign(256, size) : malloc(size);
        memset(other[i], i, size);
    }
    freed_twice = other[OTHERS / 2];
    printf("%p\n", freed_twice), fflush(stdout);
    if (strcmp(way, "by-threads") == 0) elsewhere(), elsewhere();
    else if (strcmp(way, "after-thread") == 0) elsewhere();
    else free(freed_twice);
    if (strcmp(way, "after-others") == 0)
        for (int i = 0; i < OTHERS; i++) if (i != OTHERS / 2) free(other[i]);
    if (strcmp(way, "given-back") == 0) {
        for (int i = 0; i < OTHERS; i++) if (i != OTHERS / 2) free(other[i]);
        malloc_trim(0);
    }
    if (strcmp(way, "before-thread") == 0) elsewhere();
    else if (strcmp(way, "resized") == 0) CHECK(realloc(freed_twice, 3 * size) == NULL);
    else if (strcmp(way, "measured") == 0) CHECK(malloc_usable_size(freed_twice) == 0);
    else free(freed_twice);
}
static void foreign(char **unused) {
    (void)unused;
    static char not_malloced[64];
    char *volatile block = not_malloced + 16;
    printf("%p\n", block), fflush(stdout);
    free(block);
}
static void within(char **unused) {
    (void)unused;
    char *volatile block = malloc(5 << 20);
    printf("%p\n", block + 4096), fflush(stdout);
    free(block + 4096);
}
static void askew(char **unused) {
    (void)unused;
    char *volatile block = malloc(50);
    printf("%p\n", block + 1), fflush(stdout);
    free(block + 1);
}

// Where the range of objects goes on, and there were none yet.
static void beyond(char **unused) {
    (void)unused;
    char *volatile block = malloc(50);
    printf("%p\n", block + (1 << 30)), fflush(stdout);
    free(block + (1 << 30));
}

// A program that maps for itself, in pieces: what is unmapped, protected or remapped is that piece alone.
static void maps(char **unused) {
    (void)unused;
    enum { PIECES = 100, PIECE = 1 << 20 };
    static char *piece[PIECES];
    for (int i = 0; i < PIECES; i++) {
        piece[i] = mmap(NULL, PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(piece[i] != MAP_FAILED);
        for (int at = 0; at < PIECE; at += 4096) CHECK(piece[i][at] == 0);
        memset(piece[i], i, PIECE);
    }
    for (int i = 0; i < PIECES; i += 3) CHECK(munmap(piece[i], PIECE) == 0);
    for (int i = 1; i < PIECES; i += 3) CHECK(mprotect(piece[i] + 4096, 4096, PROT_READ) == 0);
    for (int i = 2; i < PIECES; i += 3) {
        piece[i] = mremap(piece[i], PIECE, 2 * PIECE, MREMAP_MAYMOVE);
        CHECK(piece[i] != MAP_FAILED && piece[i][2 * PIECE - 1] == 0);
    }
    for (int i = 0; i < PIECES; i++)
        if (i % 3 != 0) for (int at = 0; at < PIECE; at += 4096) CHECK(piece[i][at] == (char)i);
    if (fork() == 0) {
        CHECK(mmap(NULL, PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
        _exit(piece[1][0] != 1);
    }
    int status;
    CHECK(wait(&status) > 0 && status == 0);
}

// The use of a block that was freed. Without the checked mode nobody is hurt: what is freed stays where it is.
static void used_after_free(char **arguments) {
    size_t size = strtoul(arguments[0], NULL, 0);
    volatile char *block = malloc(size);
    block[size / 2] = 1;
    free((void *)block);
    block[size / 2] = 2;
}

// Long blocks where addresses are limited, but not so few that there is no range for objects.
static void long_blocks(char **unused) {
    (void)unused;
    enum { COUNT = 16 };
    const size_t size = (size_t)300 << 20;
    static char *block[COUNT];
    for (int i = 0; i < COUNT; i++) {
        block[i] = i % 8 == 7 ? calloc(1, size) : i % 8 == 6 ? aligned_alloc(65536, size) : malloc(size);
        CHECK(block[i] != NULL && malloc_usable_size(block[i]) >= size);
        CHECK(i % 8 != 7 || block[i][size / 2] == 0);
        block[i][0] = block[i][size - 1] = (char)i;
    }
    for (int i = 1; i < COUNT; i += 8) {
        block[i] = realloc(block[i], size + (40 << 20));
        CHECK(block[i] != NULL);
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK(block[i][0] == (char)i && block[i][size - 1] == (char)i);
        free(block[i]);
    }
    CHECK((block[0] = malloc((size_t)5 << 30)) != NULL);
    free(block[0]);
    volatile size_t more_than_all = (size_t)200 << 30;
    errno = 0;
    CHECK(malloc(more_than_all) == NULL && errno == ENOMEM);
}

int main(int count, char **arguments) {
    static const struct { const char *name; void (*run)(char **); } programs[] = {
        {"storm", storm}, {"forks", forks}, {"purges", purges}, {"threads", threads}, {"ends", ends}, {"library", library},
        {"limits", limits}, {"figures", figures}, {"alignments", alignments}, {"locked", locked}, {"large-freed-twice", large_freed_twice}, {"object-freed-twice", object_freed_twice}, {"foreign", foreign}, {"within", within},
        {"askew", askew}, {"beyond", beyond}, {"maps", maps}, {"used-after-free", used_after_free}, {"long-blocks", long_blocks},
    };
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        if (count > 1 && strcmp(arguments[1], programs[i].name) == 0) {
            programs[i].run(arguments + 2);
            puts("done");
            return 0;
        }
    }
    return 2;
}
