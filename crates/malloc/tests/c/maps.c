// Maps memory in pieces, and says what became of it: KiB in memory, and faults.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

static char *map(size_t len) {
    char *piece = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (piece == MAP_FAILED) abort();
    return piece;
}

static void say(void) {
    long kib = 0;
    char line[200];
    FILE *rollup = fopen("/proc/self/smaps_rollup", "r");
    while (rollup != NULL && fgets(line, sizeof line, rollup) != NULL) sscanf(line, "Anonymous: %ld", &kib);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("%ld %ld\n", kib, usage.ru_minflt);
}

static void sparse(int count, size_t len) {
    for (int at = 0; at < count; at++) map(len)[8000] = 1;
}

static void dense(int count) {
    for (int at = 0; at < count; at++) memset(map(2 * MIB), 1, 2 * MIB);
}

// Once the first thread has ended, which is long before this.
static void *go_on(void *unused) {
    usleep(100000);
    dense(100);
    say();
    exit(0);
    return unused;
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "";
    if (strcmp(mode, "alone") == 0) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, go_on, NULL) != 0) abort();
        pthread_exit(NULL);
    }
    if (strcmp(mode, "sparse") == 0) sparse(1000, 4 * MIB);
    if (strcmp(mode, "dense") == 0) dense(100);
    if (strcmp(mode, "zeros") == 0) {
        for (int at = 0; at < 100; at++) {
            char *piece = map(2 * MIB);
            for (int page = 0; page < 512; page++) memset(piece + page * 4096, page % 3, 4096);
        }
    }
    if (strcmp(mode, "turns") == 0) {
        for (int turn = 0; turn < 2; turn++) {
            dense(32);
            sparse(200, MIB);
        }
    }
    if (strcmp(mode, "churn") == 0) {
        for (int at = 0; at < 200; at++) {
            char *piece = map(MIB);
            memset(piece, 1, MIB);
            munmap(piece, MIB);
        }
    }
    if (strcmp(mode, "aligned") == 0) {
        for (int at = 0; at < 100; at++) {
            char *piece = map(4 * MIB), *start = (char *)(((uintptr_t)piece + 2 * MIB - 1) & ~(2 * MIB - 1));
            if (start != piece) munmap(piece, start - piece);
            munmap(start + 2 * MIB, piece + 2 * MIB - start);
            memset(start, 1, 2 * MIB);
        }
    }
    say();
    return 0;
}
