// Memory that a program locks stays locked where blocks grow and shrink, with its neighbours, and counts as that no longer than it is.
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

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

// What a block has lost, too little for others, goes back while it is there.
static void lose_an_end(void) {
    char *block = written(7 * MIB);
    CHECK(mlock(block, 7 * MIB) == 0);
    block = realloc(block, 5 * MIB + MIB / 2);
    malloc_trim(0);
    CHECK(is_locked(block, 5 * MIB + MIB / 2));
    CHECK(munlock(block, 5 * MIB + MIB / 2) == 0);
    free(block);
    malloc_trim(0);
    CHECK(locked_kib() == 0);
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

static void lose_the_right(void) {
    char *block = written(6 * MIB);
    CHECK(mlock(block, 6 * MIB) == 0);
    CHECK(setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){64 << 10, 64 << 10}) == 0);
    // Of root's rights one is to lock all the same.
    CHECK(geteuid() != 0 || setuid(65534) == 0);
    char *moved = realloc(block, 200 * MIB);
    CHECK(moved != block && moved[6 * MIB - 1] == 7);
    CHECK(is_locked(moved, 6 * MIB));
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
    CHECK(munlockall() == 0 && locked_kib() == 0);
}

// What is mapped in pieces: no more is locked than is mapped.
static void map_pieces(void) {
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) exit(puts("may not") < 0);
    long before_kib = locked_kib();
    for (int at = 0; at < 40; at++) {
        CHECK(mmap(NULL, MIB / 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
        long kib = locked_kib();
        CHECK(kib - before_kib <= 1024);
        before_kib = kib;
    }
}

int main(int count, char **arguments) {
    const char *how = count > 1 ? arguments[1] : "blocks";
    if (strcmp(how, "blocks") == 0) lose_an_end(), lock_blocks();
    if (strcmp(how, "lost") == 0) lose_the_right();
    if (strcmp(how, "all") == 0) lock_all();
    if (strcmp(how, "pieces") == 0) map_pieces();
    puts("done");
    return 0;
}
