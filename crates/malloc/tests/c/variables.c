// What is kept of freed blocks and of objects, whoever frees them, and handlers of a fork that were registered before the first block.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1 << 20)

static void handler(void) {
    alarm(120);
    char *block = malloc(2 * MIB);
    memset(block, 1, 2 * MIB);
    block = realloc(block, 9 * MIB);
    memset(block, 2, 9 * MIB);
    free(block);
    free(calloc(1, 5 * MIB));
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void lock(void) { pthread_mutex_lock(&mutex); }

static void unlock(void) { pthread_mutex_unlock(&mutex); }

// Before any library's own functions.
static void register_first(void) {
    pthread_atfork(handler, handler, handler);
    pthread_atfork(lock, unlock, unlock);
}
__attribute__((section(".preinit_array"), used)) static void (*first)(void) = register_first;

static long resident_mib(void) {
    long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (statm == NULL || fscanf(statm, "%*d %ld", &pages) != 1) abort();
    fclose(statm);
    return pages * 4096 / MIB;
}

// What objects had that are freed goes back to the kernel as the program goes on, in MiB: with all of them, and in the end.
static void objects(void) {
    enum { SIZE = 200, COUNT = 256 * MIB / SIZE };
    static char *object[COUNT];
    memset(object, 1, sizeof object);
    long before = resident_mib();
    for (int at = 0; at < COUNT; at++) memset(object[at] = malloc(SIZE), 1, SIZE);
    long with_all = resident_mib() - before, left = with_all;
    for (int at = 0; at < COUNT; at++) free(object[at]);
    for (int wait = 0; wait < 600 && left > with_all / 8; wait++) {
        usleep(100000);
        for (int at = 0; at < 1000; at++) object[at] = malloc(at);
        for (int at = 0; at < 1000; at++) free(object[at]);
        left = resident_mib() - before;
    }
    printf("%ld %ld\n", with_all, left);
}

static void *free_all(void *objects) {
    for (char **object = objects; *object != NULL; object++) free(*object);
    return NULL;
}

// The same where another thread frees them, and this one always has the object again that it has just freed.
static void freed_elsewhere(void) {
    enum { SIZE = 200, COUNT = 256 * MIB / SIZE };
    static char *object[COUNT + 1];
    memset(object, 1, sizeof object);
    long before = resident_mib();
    for (int at = 0; at < COUNT; at++) memset(object[at] = malloc(SIZE), 1, SIZE);
    object[COUNT] = NULL;
    long with_all = resident_mib() - before, left = with_all;
    char *volatile again;
    pthread_t other;
    if (pthread_create(&other, NULL, free_all, object) != 0 || pthread_join(other, NULL) != 0) abort();
    for (int wait = 0; wait < 1000 && left > with_all / 8; wait++) {
        for (int at = 0; at < 1000000; at++) free(again = malloc(100));
        left = resident_mib() - before;
    }
    printf("%ld %ld\n", with_all, left);
}

// More than has the keeper started, where the environment cannot be read any more.
static void no_environment(void) {
    environ = (char **)16;
    for (int at = 0; at < 10; at++) free(malloc((size_t)(40 + at * 40) * MIB));
    for (int wait = 0; wait < 600; wait++) {
        int threads = 0;
        char line[200];
        FILE *status = fopen("/proc/self/status", "r");
        while (status != NULL && fgets(line, sizeof line, status) != NULL) sscanf(line, "Threads: %d", &threads);
        if (status != NULL) fclose(status);
        if (threads == 2) {
            puts("done");
            return;
        }
        usleep(100000);
    }
}

static pthread_barrier_t locked;

static void *allocates_under_lock(void *unused) {
    lock();
    pthread_barrier_wait(&locked);
    usleep(100000);
    free(malloc(2 * MIB));
    unlock();
    return unused;
}

// Forks while another thread has the mutex, and is about to allocate.
static void forks_and_locks(void) {
    alarm(60);
    pthread_t other;
    int status = 0;
    if (pthread_barrier_init(&locked, NULL, 2) != 0 || pthread_create(&other, NULL, allocates_under_lock, NULL) != 0) abort();
    pthread_barrier_wait(&locked);
    pid_t child = fork();
    if (child == 0) _exit(0);
    if (waitpid(child, &status, 0) != child || status != 0 || pthread_join(other, NULL) != 0) abort();
    puts("done");
}

int main(int count, char **arguments) {
    if (count > 1 && strcmp(arguments[1], "no-environment") == 0) {
        no_environment();
        return 0;
    }
    if (count > 1 && strcmp(arguments[1], "objects") == 0) {
        objects();
        return 0;
    }
    if (count > 1 && strcmp(arguments[1], "freed-elsewhere") == 0) {
        freed_elsewhere();
        return 0;
    }
    if (count > 1 && strcmp(arguments[1], "locks") == 0) {
        forks_and_locks();
        return 0;
    }
    if (count > 1 && strcmp(arguments[1], "forks") == 0) {
        for (int round = 0; round < 20; round++) {
            int status = 0;
            pid_t child = fork();
            if (child == 0) {
                handler();
                _exit(0);
            }
            if (waitpid(child, &status, 0) != child || status != 0) abort();
        }
        puts("done");
        return 0;
    }
    long before = resident_mib();
    char *blocks[4];
    for (int at = 0; at < 4; at++) {
        blocks[at] = malloc(32 * MIB);
        memset(blocks[at], 1, 32 * MIB);
    }
    for (int at = 0; at < 4; at++) free(blocks[at]);
    printf("%ld\n", resident_mib() - before);
    return 0;
}
