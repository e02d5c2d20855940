// A thread that is to be cancelled allocates: that is no place where it may be, whatever is looked for meanwhile.
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)
enum { BLOCKS = 12 };

static bool came_through;

static void *takes(void *unused) {
    (void)unused;
    pthread_cancel(pthread_self());
    char *blocks[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        // The limit is looked for, huge pages are asked about, and the keeper is started.
        blocks[i] = malloc((40 + i) * MIB);
        if (blocks[i] == NULL) abort();
        memset(blocks[i], 1, MIB);
        blocks[i] = realloc(blocks[i], (80 + i) * MIB);
        if (blocks[i] == NULL) abort();
        free(malloc(1000 * i));
    }
    for (size_t i = 0; i < BLOCKS; i++) free(blocks[i]);
    came_through = true;
    pthread_testcancel();
    return NULL;
}

int main(void) {
    pthread_t thread;
    void *result;
    if (pthread_create(&thread, NULL, takes, NULL) != 0 || pthread_join(thread, &result) != 0) abort();
    if (!came_through || result != PTHREAD_CANCELED) return 1;
    puts("done");
}
