// What a program gets under a limit on addresses (`ulimit -v`): threads, and memory beside the first larger block.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MIB ((size_t)1 << 20)
enum { THREADS = 50 };
static pthread_barrier_t all_are_there;

static void *be_there(void *unused) {
    pthread_barrier_wait(&all_are_there);
    return unused;
}

int main(void) {
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY);
    char *first = malloc(2 * MIB);
    CHECK(first != NULL);
    memset(first, 1, 2 * MIB);

    pthread_t thread[THREADS];
    CHECK(pthread_barrier_init(&all_are_there, NULL, THREADS + 1) == 0);
    for (int at = 0; at < THREADS; at++) CHECK(pthread_create(&thread[at], NULL, be_there, NULL) == 0);
    pthread_barrier_wait(&all_are_there);
    for (int at = 0; at < THREADS; at++) CHECK(pthread_join(thread[at], NULL) == 0);

    // A part in objects, of a length that little is left over of, and the rest in larger blocks, until there is neither.
    size_t taken[2] = {0, 2 * MIB};
    for (int is_used_up = 0; is_used_up != 3;) {
        int larger = is_used_up == 1 || (is_used_up == 0 && taken[1] < 3 * taken[0]);
        size_t size = larger ? 2 * MIB : 50000;
        if (malloc(size) != NULL) taken[larger] += size;
        else is_used_up |= 1 << larger;
    }
    size_t mib = (taken[0] + taken[1]) / MIB, most_mib = limit.rlim_cur / MIB;
    if (mib < most_mib / 4 * 3) {
        fprintf(stderr, "%zu MiB of %zu\n", mib, most_mib);
        return 1;
    }
    CHECK(first[2 * MIB - 1] == 1);
    if (write(1, "done\n", 5) == 5) _exit(0);
    return 1;
}
