// Memory that a program locks stays locked where blocks grow and shrink, with its neighbours, and counts as that no longer than it is.
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MIB ((size_t)1 << 20)

static long locked_kib(void) {
    long kib = -1;
    char line[200];
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status) != NULL) sscanf(line, "VmLck: %ld", &kib);
    fclose(status);
    return kib;
}

static bool is_locked(char *from, size_t len) {
    for (char *page = from; page < from + len; page += 16 * 4096)
        if (msync(page, 4096, MS_ASYNC | MS_INVALIDATE) == 0 || errno != EBUSY) return false;
    return true;
}

static char *written(size_t len) {
    char *block = malloc(len);
    CHECK(block != NULL);
    return memset(block, 7, len);
}

// As much as everybody may lock.
static void lock_blocks(void) {
    char *first = written(6 * MIB);
    CHECK(mlock(first, 6 * MIB) == 0);
    free(first);
    malloc_trim(0);
    CHECK(locked_kib() == 0);
    for (int round = 0; round < 12; round++) {
        char *block = written(7 * MIB);
        CHECK(mlock(block, 7 * MIB) == 0);
        block = realloc(block, 3 * MIB);
        CHECK(is_locked(block, 3 * MIB) && locked_kib() == 3 << 10);
        CHECK(munlock(block, 3 * MIB) == 0 && locked_kib() == 0);
        free(block);
    }
    char *block = written(6 * MIB);
    CHECK(mlock(block, 6 * MIB) == 0);
    char *moved = realloc(block, 200 * MIB);
    CHECK(moved != block && moved[6 * MIB - 1] == 7);
    CHECK(is_locked(moved, 6 * MIB) && locked_kib() == 6 << 10);
    free(moved);
    malloc_trim(0);
    CHECK(locked_kib() == 0);
}

static void lock_all(void) {
    char *blocks[6];
    // Who may lock only so much has no memory from then on: the kernel counts addresses.
    void *volatile some = mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) == 0 ? malloc(MIB) : NULL;
    if (some == NULL) exit(puts("may not") < 0);
    for (int at = 0; at < 6; at++) blocks[at] = written(MIB);
    blocks[0] = realloc(blocks[0], 20 * MIB);
    for (int at = 0; at < 6; at++) CHECK(is_locked(blocks[at], MIB));
    long before_kib = locked_kib();
    for (int round = 0; round < 12; round++) {
        // Of what the one has lost comes the other.
        char *block = realloc(written(20 * MIB), 5 * MIB), *next = written(10 * MIB);
        char *moved = realloc(next, 80 * MIB);
        CHECK(is_locked(block, 5 * MIB) && is_locked(moved, 80 * MIB));
        free(block), free(moved);
    }
    CHECK(labs(locked_kib() - before_kib) < 64 << 10);
}

int main(int count, char **arguments) {
    (void)arguments;
    count > 1 ? lock_all() : lock_blocks();
    puts("done");
    return 0;
}
