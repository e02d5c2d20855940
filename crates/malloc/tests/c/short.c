// A program whose memory has a limit: it is told so, in time, on all of its threads, and goes on with what it has.
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MOST ((size_t)2 << 30)
enum { MOST_THREADS = 16 };

static size_t size;
static int threads = 1;
// Nobody takes anything before all are there, and nobody gives back before all have been refused.
static pthread_barrier_t together;

// Takes blocks until there are none, looks at what is in them, and gives them back. Writes down how many bytes it had.
static void *fill_up(void *bytes) {
    size_t taken = 0;
    void **last = NULL, **block;
    pthread_barrier_wait(&together);
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
    pthread_barrier_wait(&together);
    while (last != NULL) {
        void **next = last[0];
        CHECK(((char *)last)[size - 1] == 7);
        free(last);
        last = next;
    }
    *(size_t *)bytes = taken;
    return NULL;
}

// On all threads at once. How many bytes they had together.
static size_t fill_up_together(void) {
    pthread_t others[MOST_THREADS];
    size_t bytes[MOST_THREADS], all = 0;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    for (int i = 1; i < threads; i++) CHECK(pthread_create(&others[i], &small, fill_up, &bytes[i]) == 0);
    fill_up(&bytes[0]);
    for (int i = 1; i < threads; i++) CHECK(pthread_join(others[i], NULL) == 0);
    for (int i = 0; i < threads; i++) all += bytes[i];
    return all;
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

// The size of the blocks; how much more data the process may have from then on, or 0; and how many threads it has, or one.
int main(int count, char **arguments) {
    CHECK(count > 1);
    size = strtoul(arguments[1], NULL, 10);
    size_t more = count > 2 ? strtoul(arguments[2], NULL, 10) : 0;
    if (count > 3) threads = atoi(arguments[3]);
    CHECK(threads >= 1 && threads <= MOST_THREADS);
    pthread_barrier_init(&together, NULL, threads);
    alarm(300);
    free(malloc(1)), free(malloc(3 << 20));
    if (more != 0) {
        struct rlimit limit = {data_bytes() + more, RLIM_INFINITY};
        CHECK(setrlimit(RLIMIT_DATA, &limit) == 0);
    }
    size_t first = fill_up_together();
    CHECK(first >= 32 << 20);
    // What one thread leaves behind that was refused is in another's way later: threads get more chances to.
    for (int round = 0; round < (threads > 1 ? 8 : 1); round++) {
        size_t again = fill_up_together();
        if (again < first / 4 * 3) fprintf(stderr, "%zu, then %zu\n", first, again);
        CHECK(again >= first / 4 * 3);
    }
    char *text = malloc(100);
    CHECK(text != NULL);
    snprintf(text, 100, "done");
    puts(text);
    free(text);
    return 0;
}
