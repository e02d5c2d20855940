// `main` ends, and other threads go on: the process ends with the last of them, though the allocator has a thread as well.
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <threads.h>
#include <unistd.h>
#include "tasks.h"

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MIB ((size_t)1 << 20)

static pthread_t first;
static sem_t ready, ended;

static void take(size_t mib) {
    char *blocks[10];
    for (size_t i = 0; i < 10; i++) CHECK((blocks[i] = malloc(mib * MIB)) != NULL), memset(blocks[i], 1, mib * MIB);
    for (size_t i = 0; i < 10; i++) free(blocks[i]);
}

// So much at once that the keeper pays.
static void grow_up(void) { take(40); }

// In a control group of 256 MiB: memory that is no block's, of which the keeper leaves next to nothing to those.
#define OTHERS_BYTES (226 * MIB)
static char *others;

static void crowd(void) {
    malloc_trim(0);
    others = mmap(NULL, OTHERS_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(others != MAP_FAILED);
    memset(others, 1, OTHERS_BYTES);
    // It looks once a second.
    sleep(3);
    size_t before = mallinfo2().fordblks;
    take(2);
    CHECK(before < 4 * MIB && mallinfo2().fordblks < 16 * MIB);
}

// Nobody looks any more, and there is room again.
static void keep_all(void) {
    while (runs("selfpage-keeper")) usleep(20000);
    CHECK(munmap(others, OTHERS_BYTES) == 0);
    take(6);
    CHECK(mallinfo2().fordblks >= 60 * MIB);
}

static void wait_for_keeper(void) {
    for (int wait = 0; wait < 500 && !runs("selfpage-keeper"); wait++) usleep(20000);
    CHECK(runs("selfpage-keeper"));
}

static void at_exit(void) {
    // By the descriptors of the program's own threads.
    if (write(1, "done\n", 5) != 5) abort();
}

static void has_ended(void *unused) {
    (void)unused;
    sem_post(&ended);
}

// The last thread.
static void *goes_on(void *mode) {
    sem_wait(&ready);
    if (strcmp(mode, "cancelled") == 0) CHECK(pthread_cancel(first) == 0);
    if (strcmp(mode, "joined") == 0) CHECK(pthread_join(first, NULL) == 0 && !runs("selfpage-keeper"));
    else sem_wait(&ended);
    // It would be worth a thread again.
    strcmp(mode, "limited") == 0 ? keep_all() : grow_up();
    return NULL;
}

// Takes memory until the end of `main`, so that the keeper may begin at that moment.
static void *takes(void *unused) {
    (void)unused;
    grow_up();
    return NULL;
}

static void end_main(const char *mode) {
    pthread_key_t key;
    CHECK(pthread_key_create(&key, has_ended) == 0 && pthread_setspecific(key, &key) == 0);
    sem_post(&ready);
    if (strcmp(mode, "cancelled") == 0) {
        for (;;) pause();
    }
    if (strcmp(mode, "thrd") == 0) thrd_exit(0);
    pthread_exit(NULL);
}

static void begin_and_end(const char *mode) {
    pthread_t thread;
    first = pthread_self();
    sem_init(&ready, 0, 0), sem_init(&ended, 0, 0);
    atexit(at_exit);
    CHECK(pthread_create(&thread, NULL, goes_on, (void *)mode) == 0);
    if (strcmp(mode, "race") == 0) {
        for (int i = 0; i < 2; i++) CHECK(pthread_create(&thread, NULL, takes, NULL) == 0);
        usleep(1000 * (getpid() % 64));
    } else if (strcmp(mode, "limited") == 0) {
        take(6);
        wait_for_keeper();
        crowd();
    } else {
        grow_up();
        wait_for_keeper();
    }
    end_main(mode);
}

// In a child, whose first thread is another one than its parent's.
static void *forks(void *mode) {
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        begin_and_end(mode);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0) fprintf(stderr, "child: %x\n", status);
    CHECK(status == 0);
    return NULL;
}

int main(int count, char **arguments) {
    CHECK(count > 1);
    const char *mode = arguments[1];
    alarm(30);
    if (strcmp(mode, "child") == 0) {
        pthread_t thread;
        grow_up();
        wait_for_keeper();
        CHECK(pthread_create(&thread, NULL, forks, (void *)mode) == 0 && pthread_join(thread, NULL) == 0);
        return 0;
    }
    begin_and_end(mode);
}
