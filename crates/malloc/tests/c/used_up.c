// What the library begins to look for, or starts, as a program grows: where there is no memory left for it, and with errno as it was.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define MIB ((size_t)1 << 20)

static char *touched(size_t size) {
    char *volatile block = malloc(size);
    if (block == NULL) abort();
    memset(block, 1, size);
    return block;
}

// Blocks of any size, until there are none.
static void use_up(size_t most) {
    static void *volatile last;
    for (size_t size = most; size >= 16; size /= 2) {
        for (void **block; (block = malloc(size)) != NULL;) {
            *block = last;
            last = block;
        }
    }
    if (errno != ENOMEM) abort();
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "";
    if (strcmp(mode, "errno") == 0) {
        errno = 77;
        free(malloc(100));
        if (errno != 77) return 1;
        // By the second one the limit has been looked for; by the fourth call a thread would pay, for which there is no memory.
        touched(5 * MIB);
        touched(5 * MIB);
        char *block = malloc(300 * MIB);
        struct rlimit little = {MIB, MIB};
        if (block == NULL || setrlimit(RLIMIT_DATA, &little) != 0) abort();
        errno = 77;
        block = realloc(block, 200 * MIB);
        if (block == NULL || errno != 77) return 2;
    } else if (strncmp(mode, "again", 5) == 0) {
        char *block = touched(5 * MIB);
        use_up(mode[5] ? 5 * MIB : 900000);
        free(block);
        block = touched(MIB);
        // And the other way round, but for what objects have taken meanwhile.
        free(block);
        free(touched(4 * MIB));
    } else {
        char *block = touched(5 * MIB), *other = NULL;
        // What is not touched has no part in what is left, but counts for the keeper.
        if (strcmp(mode, "keeper") == 0) {
            other = touched(5 * MIB);
            if (malloc(300 * MIB) == NULL) abort();
        }
        use_up(900000);
        // The first one looks, whichever it is.
        if (strcmp(mode, "keeper") == 0) other = realloc(other, 6 * MIB);
        free(block);
        free(other);
    }
    puts("done");
    return 0;
}
