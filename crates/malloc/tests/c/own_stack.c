// A thread on a stack that the program made: what it had of variables of its own the C library frees under a lock that it wants to start a
// thread, too. With -DLIBRARY a library that has some; the program is given its path, and how long a block it has before, in MiB. One that
// the keeper pays for is freed at once.
#define _GNU_SOURCE
#include <stdio.h>

#ifdef LIBRARY
static __thread volatile char own[2 << 20];
void touch(void) { own[1 << 20] = 1; }
#else
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "tasks.h"

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MIB ((size_t)1 << 20)

static void (*touch)(void);

static void *touches(void *unused) {
    touch();
    return unused;
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    alarm(60);
    void *library = dlopen(arguments[1], RTLD_NOW);
    CHECK(library != NULL && (touch = (void (*)(void))dlsym(library, "touch")) != NULL);
    char *volatile block = malloc(atoi(arguments[2]) * MIB);
    if (atoi(arguments[2]) >= 256) free(block);
    pthread_attr_t attributes;
    pthread_t thread;
    void *stack = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(stack != MAP_FAILED && pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, MIB) == 0);
    CHECK(pthread_create(&thread, &attributes, touches, NULL) == 0 && pthread_join(thread, NULL) == 0);
    // It comes with what the program allocates next, of whatever size.
    for (int wait = 0; wait < 1000 && !runs("selfpage-keeper"); wait++) {
        free(malloc(2000));
        usleep(20000);
    }
    CHECK(runs("selfpage-keeper"));
    puts("done");
    return 0;
}
#endif
