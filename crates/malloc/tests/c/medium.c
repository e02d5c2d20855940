// Touches memory for the first time, and says how many faults that took, what of it is in memory, and what in huge pages (KiB).
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

static long faults(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
}

static char *map(size_t len) {
    char *piece = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (piece == MAP_FAILED) abort();
    return piece;
}

static void fill(char *block, size_t len) {
    for (size_t at = 0; at < len; at += 4 * KIB) block[at] = 1;
}

static void objects(size_t len, size_t size) {
    for (size_t had = 0; had < len; had += size) fill(malloc(size), size);
}

// Pieces of each length, side by side until they are filled; then they are remapped, which works for one mapping alone.
static void pieces(size_t len, size_t shortest, size_t longest) {
    char *piece[64];
    size_t sizes[64], count = 0;
    for (size_t had = 0, size = shortest; had < len; had += size, size = size < longest ? size * 2 : shortest) {
        sizes[count] = size;
        piece[count++] = map(size);
    }
    for (size_t at = 0; at < count; at++) fill(piece[at], sizes[at]);
    for (size_t at = 0; at < count; at++) {
        char *moved = mremap(piece[at], sizes[at], 2 * sizes[at], MREMAP_MAYMOVE);
        if (moved == MAP_FAILED || moved[sizes[at] - 4 * KIB] != 1) abort();
    }
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "";
    long before, kib = 0, huge_kib = 0;
    char line[200];
    if (strcmp(mode, "pieces") == 0 || strcmp(mode, "long-pieces") == 0) map(4 * MIB);
    free(malloc(1));
    before = faults();
    if (strcmp(mode, "small") == 0) objects(3 * MIB, 16 * KIB);
    if (strcmp(mode, "objects") == 0) objects(14 * MIB, 16 * KIB);
    if (strcmp(mode, "large-objects") == 0) objects(14 * MIB, 448 * KIB);
    if (strcmp(mode, "pieces") == 0) pieces(9 * MIB, 256 * KIB, MIB);
    if (strcmp(mode, "long-pieces") == 0) {
        // What comes next could begin just where a huge page does.
        map(MIB), map(MIB - 64 * KIB);
        pieces(7 * MIB, 2 * MIB, 2 * MIB);
    }
    before = faults() - before;
    FILE *rollup = fopen("/proc/self/smaps_rollup", "r");
    while (rollup != NULL && fgets(line, sizeof line, rollup) != NULL) {
        sscanf(line, "Anonymous: %ld", &kib);
        sscanf(line, "AnonHugePages: %ld", &huge_kib);
    }
    printf("%ld %ld %ld\n", before, kib, huge_kib);
    return 0;
}
