// A program with few addresses: what the kernel refused the allocator, which then got less, is no error of the program's, and what is served
// some other way comes back when it is freed.
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MIB ((size_t)1 << 20)
enum { BEFORE = 77 };

static void *free_it(void *block) {
    free(block);
    return NULL;
}

// More often than there are addresses for it.
static void at_large_alignments(size_t align, size_t size) {
    for (int i = 0; i < 100; i++) {
        char *block = memalign(align, size);
        CHECK(block != NULL && (size_t)block % align == 0 && malloc_usable_size(block) >= size);
        memset(block, i, size);
        if (i % 10 == 1) {
            pthread_t other;
            CHECK(pthread_create(&other, NULL, free_it, block) == 0 && pthread_join(other, NULL) == 0);
            continue;
        }
        if (i % 10 == 2) {
            block = realloc(block, size * 2);
            CHECK(block != NULL && block[0] == i && block[size - 1] == i);
        }
        free(block);
    }
}

int main(void) {
    errno = BEFORE;
    char *object = malloc(10);
    CHECK(object != NULL && errno == BEFORE);
    at_large_alignments(32 * MIB, 100);
    at_large_alignments(64 * MIB, 3 * MIB / 2);

    errno = BEFORE;
    size_t served = 0;
    for (char *block; (block = malloc(3 * MIB)) != NULL; served++) CHECK(errno == BEFORE && (block[0] = 1));
    CHECK(served > 20 && errno == ENOMEM);

    // What is left is less than a stock at some time.
    errno = BEFORE;
    size_t mapped = 0;
    for (; mmap(NULL, MIB / 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED; mapped++) CHECK(errno == BEFORE);
    CHECK(mapped > 8 && errno == ENOMEM);
    puts("done");
    return 0;
}
