// A program that brings its own malloc, as those do that have one linked in: pieces of sizes of powers of two, out of mappings.
// None of it may come from, or go to, any other.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAPPED = 1 << 20, LEAST_LOG = 5, LOGS = 48 };
struct head { uint64_t mark; uint32_t log, shift; struct head *next; uint64_t unused; };
#define MARK 0x6f776e206d616c6cull
static struct head *spare[LOGS];
static char *at, *end;
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
static atomic_ulong taken, given;

static void die(const char *why) {
    if (write(2, why, strlen(why)) < 0) _exit(2);
    abort();
}
static void *map(size_t size) {
    void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}
static struct head *piece(int log) {
    if (log >= 18) return map((size_t)1 << log);
    if (spare[log] != NULL) {
        struct head *found = spare[log];
        spare[log] = found->next;
        return found;
    }
    if (end - at < 1 << log) at = map(MAPPED), end = at + MAPPED;
    at += 1 << log;
    return (struct head *)(at - (1 << log));
}
void *malloc(size_t size) {
    if (size > PTRDIFF_MAX / 2) return errno = ENOMEM, NULL;
    int log = LEAST_LOG + 1;
    while (((size_t)1 << log) - sizeof(struct head) < size) log++;
    pthread_mutex_lock(&busy);
    struct head *found = piece(log);
    pthread_mutex_unlock(&busy);
    if (found == NULL) return errno = ENOMEM, NULL;
    found->mark = MARK, found->log = log, found->shift = 0;
    taken++;
    return found + 1;
}
static struct head *head_of(void *block) {
    struct head *head = (struct head *)block - 1;
    if (head->mark != MARK) die("a block of somebody else's\n");
    return (struct head *)((char *)head - head->shift);
}
void free(void *block) {
    if (block == NULL) return;
    struct head *head = head_of(block);
    given++;
    if (head->log >= 18) {
        munmap(head, (size_t)1 << head->log);
        return;
    }
    head->mark = 0;
    pthread_mutex_lock(&busy);
    head->next = spare[head->log], spare[head->log] = head;
    pthread_mutex_unlock(&busy);
}
void *calloc(size_t count, size_t size) {
    void *block = malloc(count * size);
    return block == NULL ? NULL : memset(block, 0, count * size);
}
size_t malloc_usable_size(void *block) {
    struct head *head = head_of(block);
    return ((size_t)1 << head->log) - sizeof *head - head->shift;
}
void *realloc(void *block, size_t size) {
    if (block == NULL) return malloc(size);
    if (size <= malloc_usable_size(block)) return block;
    void *larger = malloc(size);
    if (larger != NULL) memcpy(larger, block, malloc_usable_size(block)), free(block);
    return larger;
}
void *memalign(size_t align, size_t size) {
    char *block = malloc(size + align);
    size_t shift = (align - (uintptr_t)block % align) % align;
    struct head *head = (struct head *)block - 1, copy = *head;
    copy.shift = shift;
    memcpy((char *)head + shift, &copy, sizeof copy);
    return block + shift;
}
void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }
int posix_memalign(void **out, size_t align, size_t size) { return (*out = memalign(align, size)) ? 0 : ENOMEM; }

// Where all that work have all that they keep, however the threads were scheduled.
static pthread_barrier_t all_have_theirs;

static void *work(void *number) {
    char *block[256] = {0};
    for (uintptr_t n = 0, state = (uintptr_t)number + 7; n < 4000; n++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        char **place = &block[state >> 33 & 255];
        if (*place != NULL && **place != (char)((uintptr_t)place >> 3)) die("somebody else wrote there\n");
        size_t size = n % 500 == 0 ? 200000 : state >> 40 & 8191;
        *place = realloc(*place, size + 1);
        memset(*place, (char)((uintptr_t)place >> 3), size + 1);
        if (n % 3 == 0) free(*place), *place = NULL;
    }
    pthread_barrier_wait(&all_have_theirs);
    for (int i = 0; i < 256; i++) free(block[i]);
    return strdup("a thread's");
}

// The C library's functions that are made of those above go by the program's.
static void go_by_ours(void) {
    unsigned long before = given;
    char *array = reallocarray(NULL, 30, 10);
    if (array == NULL || head_of(array)->mark != MARK) die("an array is another's\n");
    memset(array, 7, 300);
    array = reallocarray(array, 3000, 10);
    if (array == NULL || head_of(array)->mark != MARK || array[299] != 7) die("an array has become another's\n");
    free(array);
    // The compiler is not to see it.
    size_t volatile most = SIZE_MAX;
    if (reallocarray(NULL, most, 2) != NULL || errno != ENOMEM) die("a product that overflows\n");
    // Of C23: not every C library has them.
    void (*sized)(void *, size_t) = (void (*)(void *, size_t))dlsym(RTLD_DEFAULT, "free_sized");
    void (*aligned)(void *, size_t, size_t) = (void (*)(void *, size_t, size_t))dlsym(RTLD_DEFAULT, "free_aligned_sized");
    sized != NULL ? sized(malloc(100), 100) : free(malloc(100));
    aligned != NULL ? aligned(aligned_alloc(64, 128), 64, 128) : free(aligned_alloc(64, 128));
    if (given - before < 4) die("somebody else was given a block\n");
}

// With "fork" a child does the same.
int main(int count, char **arguments) {
    pthread_t thread[4];
    unsigned long before = taken;
    go_by_ours();
    pthread_barrier_init(&all_have_theirs, NULL, 4);
    for (uintptr_t i = 0; i < 4; i++) if (pthread_create(&thread[i], NULL, work, (void *)i)) die("no thread\n");
    for (int i = 0; i < 4; i++) {
        char *said;
        pthread_join(thread[i], (void **)&said);
        if (strcmp(said, "a thread's") || head_of(said)->mark != MARK) die("the C library's own is another's\n");
        free(said);
    }
    if (taken - before < 5000 || given < 5000) die("others serve the program\n");
    if (count > 1 && strcmp(arguments[1], "fork") == 0) {
        pid_t child = fork();
        if (child == 0) {
            pthread_barrier_init(&all_have_theirs, NULL, 1);
            free(work(NULL));
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status != 0) die("the child failed\n");
    }
    printf("done\n");
    return 0;
}
