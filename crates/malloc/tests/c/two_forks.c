// Forks of several threads at once: of the main one, and by the handler of a signal on threads whose larger blocks come and go, and go back to
// the kernel. Whom a fork waits for may be in such a handler, and wait for that fork.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MIB ((size_t)1 << 20)
enum { BUSY = 2, ROUNDS = 150 };

static _Atomic int handled, stop;

static void fork_and_wait(void) {
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) _exit(0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void fork_here(int signal) {
    (void)signal;
    fork_and_wait();
    handled++;
}

static void *be_busy(void *unused) {
    while (!stop) {
        char *volatile block = malloc(64 * MIB);
        CHECK(block != NULL);
        memset(block, 1, 64 * MIB);
        free(block);
    }
    return unused;
}

int main(void) {
    // Who waits for ever is ended.
    alarm(40);
    struct sigaction action = {.sa_handler = fork_here, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    pthread_t busy[BUSY];
    for (int at = 0; at < BUSY; at++) CHECK(pthread_create(&busy[at], NULL, be_busy, NULL) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        // Each at another moment.
        usleep((useconds_t)(round * 7919 % 997));
        int before = handled;
        for (int at = 0; at < BUSY; at++) CHECK(pthread_kill(busy[at], SIGUSR1) == 0);
        fork_and_wait();
        while (handled != before + BUSY) usleep(100);
    }
    stop = 1;
    for (int at = 0; at < BUSY; at++) pthread_join(busy[at], NULL);
    puts("done");
    return 0;
}
