// `main` ends, and other threads go on: the process ends with the last of them, though the allocator has a thread as well.
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <threads.h>
#include <unistd.h>
#include "tasks.h"

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MIB ((size_t)1 << 20)

static pthread_t first;
static sem_t ready, ended;

// So much at once that the keeper pays.
static void grow_up(void) {
    char *blocks[10];
    for (size_t i = 0; i < 10; i++) CHECK((blocks[i] = malloc(40 * MIB)) != NULL), memset(blocks[i], 1, 40 * MIB);
    for (size_t i = 0; i < 10; i++) free(blocks[i]);
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
    grow_up();
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
