// A program that loads an allocator of its own and uses both, side by side.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
enum { BLOCKS = 3000 };
static void *(*theirs)(size_t);
static void (*theirs_free)(void *);

static void work(void) {
    static char *own[BLOCKS], *other[BLOCKS];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            size_t size = i % 200 == 0 ? 3 << 19 : i * 7 % 5000 + 1;
            CHECK((own[i] = malloc(size)) != NULL && (other[i] = theirs(size)) != NULL);
            memset(own[i], 1, size), memset(other[i], 2, size);
            own[i][size - 1] = 3, other[i][size - 1] = 4;
        }
        for (int i = 0; i < BLOCKS; i++) {
            size_t size = i % 200 == 0 ? 3 << 19 : i * 7 % 5000 + 1;
            CHECK(own[i][size - 1] == 3 && other[i][size - 1] == 4 && (size == 1 || (own[i][0] == 1 && other[i][0] == 2)));
            free(own[i]), theirs_free(other[i]);
        }
    }
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        printf("%s\n", dlerror());
        return 77;
    }
    theirs = (void *(*)(size_t))dlsym(library, "malloc");
    theirs_free = (void (*)(void *))dlsym(library, "free");
    CHECK(theirs != NULL && theirs != malloc && theirs_free != NULL);
    work();
    pid_t child = fork();
    if (child == 0) {
        work();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    printf("done\n");
    return 0;
}
