// Changes the user while the allocator's keeper runs: every thread has to follow, and the C library waits until each has.
#define _GNU_SOURCE
#include <grp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "tasks.h"

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
enum { BLOCKS = 6, SIZE = 64 << 20 };

int main(void) {
    alarm(30);
    // The keeper comes with large blocks.
    char *block[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        block[i] = malloc(SIZE);
        for (size_t at = 0; at < SIZE; at += 4096) block[i][at] = 1;
    }
    CHECK(runs("selfpage-keeper"));
    if (getuid() == 0) CHECK(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0);
    CHECK(setresuid(getuid() ? -1 : 65534, -1, -1) == 0);
    for (int i = 0; i < BLOCKS; i++) free(block[i]);
    puts("done");
}
