// Many larger blocks at a time, of which each takes some of the mappings that a process may have. Says how many it has when they are freed.
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
enum { MOST = 40000, SIZE = 1100000 };

static char *blocks[MOST];

static void *nothing(void *unused) { return unused; }

static void begin_a_thread(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, nothing, NULL) == 0 && pthread_join(thread, NULL) == 0);
}

static int mappings(void) {
    static char text[1 << 16];
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    int lines = 0;
    for (size_t got; (got = fread(text, 1, sizeof text, maps)) != 0;)
        for (size_t at = 0; at < got; at++) lines += text[at] == '\n';
    fclose(maps);
    return lines;
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    int many = atoi(arguments[1]);
    CHECK(many <= MOST);
    for (int at = 0; at < many; at++) {
        CHECK((blocks[at] = malloc(SIZE)) != NULL);
        blocks[at][SIZE - 1] = (char)at;
    }
    begin_a_thread();
    for (int at = 0; at < many; at++) {
        CHECK(blocks[at][SIZE - 1] == (char)at);
        // Of some more is needed: where there are no mappings they are copied.
        if (at % 1000 == 0) CHECK((blocks[at] = realloc(blocks[at], 3 * SIZE)) != NULL && blocks[at][SIZE - 1] == (char)at);
    }
    for (int at = 0; at < many; at++) free(blocks[at]);
    if (strcmp(arguments[2], "trim") == 0) malloc_trim(0);
    begin_a_thread();
    printf("%d\n", mappings());
    return 0;
}
