// A program whose memory has a limit: it is told so, in time, and goes on with what it has.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MOST ((size_t)2 << 30)

// Takes blocks until there are none, looks at what is in them, and gives them back. How many bytes it had.
static size_t fill_up(size_t size) {
    size_t taken = 0;
    void **last = NULL, **block;
    errno = 0;
    while (taken < MOST && (block = malloc(size)) != NULL) {
        block[0] = last, ((char *)block)[size - 1] = 7;
        last = block, taken += size;
        errno = 0;
    }
    CHECK(taken < MOST && errno == ENOMEM);
    errno = 0;
    CHECK(calloc(size, 1 + MOST / size) == NULL && errno == ENOMEM);
    if (last != NULL) {
        errno = 0;
        void **same = realloc(last, MOST);
        CHECK(same == NULL && errno == ENOMEM && ((char *)last)[size - 1] == 7);
    }
    while (last != NULL) {
        void **next = last[0];
        CHECK(((char *)last)[size - 1] == 7);
        free(last);
        last = next;
    }
    return taken;
}

static size_t data_bytes(void) {
    unsigned long kib = 0;
    char line[200];
    FILE *file = fopen("/proc/self/status", "r");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) sscanf(line, "VmData: %lu", &kib);
    fclose(file);
    return kib << 10;
}

// The size of the blocks, and how much more data the process may have from then on.
int main(int count, char **arguments) {
    CHECK(count > 1);
    size_t size = strtoul(arguments[1], NULL, 10);
    free(malloc(1)), free(malloc(3 << 20));
    if (count > 2) {
        struct rlimit limit = {data_bytes() + strtoul(arguments[2], NULL, 10), RLIM_INFINITY};
        CHECK(setrlimit(RLIMIT_DATA, &limit) == 0);
    }
    size_t first = fill_up(size), again = fill_up(size);
    if (first < 32 << 20 || again < first / 4 * 3) fprintf(stderr, "%zu, then %zu\n", first, again);
    CHECK(first >= 32 << 20 && again >= first / 4 * 3);
    char *text = malloc(100);
    CHECK(text != NULL);
    snprintf(text, 100, "done");
    puts(text);
    free(text);
    return 0;
}
