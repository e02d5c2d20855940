// One thread allocates objects of 256 KiB to 1 MiB, or smaller ones at a large alignment, another frees them; at most 16 of them live. Says how many bytes were resident at most.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 16, OBJECTS = 20000 };
static _Atomic(char *) slot[SLOTS];

static void *take(void *unused) {
    for (int i = 0; i < OBJECTS; i++) {
        char *object;
        while ((object = slot[i % SLOTS]) == NULL) sched_yield();
        slot[i % SLOTS] = NULL;
        free(object);
    }
    return unused;
}

int main(int count, char **arguments) {
    const char *way = count > 1 ? arguments[1] : "malloc";
    int zeroed = strcmp(way, "calloc") == 0, aligned = strcmp(way, "aligned") == 0, far = strcmp(way, "aligned_by_far") == 0;
    pthread_t taker;
    if (pthread_create(&taker, NULL, take, NULL)) abort();
    uint64_t state = 88172645463325252u;
    for (int i = 0; i < OBJECTS; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        size_t size = far ? 16 << 10 : (256 << 10) + state % (767 << 10);
        char *object = zeroed ? calloc(1, size) : aligned || far ? aligned_alloc(far ? 512 << 10 : 64, size) : malloc(size);
        if (object == NULL) abort();
        object[0] = object[size - 1] = 1;
        while (slot[i % SLOTS] != NULL) sched_yield();
        slot[i % SLOTS] = object;
    }
    pthread_join(taker, NULL);
    char line[200];
    long kib = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (kib < 0 && status != NULL && fgets(line, sizeof line, status)) sscanf(line, "VmHWM: %ld", &kib);
    printf("%ld\n", kib * 1024);
    return 0;
}
