// More threads than the range of objects has parts for, all there at once, each with an object. Then a pointer that is no block is freed: its address
// comes before that.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
enum { THREADS = 2200 };
static char *object[THREADS];
static pthread_barrier_t all_have_theirs, is_looked_at;

static void *take(void *place) {
    char **object = place;
    CHECK((*object = malloc(100)) != NULL);
    memset(*object, 1, 100);
    pthread_barrier_wait(&all_have_theirs);
    pthread_barrier_wait(&is_looked_at);
    return NULL;
}

int main(int count, char **arguments) {
    static char foreign[64] __attribute__((aligned(16)));
    pthread_attr_t little;
    pthread_t thread[THREADS];
    CHECK(pthread_attr_init(&little) == 0 && pthread_attr_setstacksize(&little, 64 << 10) == 0);
    CHECK(pthread_barrier_init(&all_have_theirs, NULL, THREADS + 1) == 0);
    CHECK(pthread_barrier_init(&is_looked_at, NULL, THREADS + 1) == 0);
    for (int at = 0; at < THREADS; at++) {
        if (pthread_create(&thread[at], &little, take, &object[at]) == 0) continue;
        puts("too few threads");
        return 77;
    }
    pthread_barrier_wait(&all_have_theirs);
    if (count > 1) {
        printf("%p\n", (void *)foreign);
        fflush(stdout);
        void *volatile pointer = foreign;
        if (strcmp(arguments[1], "free") == 0) free(pointer);
        else pointer = realloc(pointer, 100);
        return 1;
    }
    // Others' objects are, wherever they lie.
    for (int at = 0; at < THREADS; at++) {
        CHECK((object[at] = realloc(object[at], 3000)) != NULL && object[at][99] == 1);
        free(object[at]);
    }
    pthread_barrier_wait(&is_looked_at);
    for (int at = 0; at < THREADS; at++) CHECK(pthread_join(thread[at], NULL) == 0);
    puts("done");
    return 0;
}
