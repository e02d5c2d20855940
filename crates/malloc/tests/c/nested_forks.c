// A handler of a signal that forks in the middle of a fork of its own thread's: what the allocator holds over the one, it holds over the other
// as well. The handlers of forks here come before the allocator's, so that what they do is done while it holds all that.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))

static volatile sig_atomic_t within, forks, interrupts, is_copy;

static void allocate(void) {
    for (size_t size = 1; size < 8 << 20; size *= 3) {
        char *volatile block = malloc(size);
        CHECK(block != NULL);
        block[0] = block[size - 1] = 1;
        free(block);
    }
}

static void *beside(void *unused) {
    allocate();
    return unused;
}

// What threads leave is under a lock where addresses are limited.
static void use(void) {
    static void *left[100];
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, beside, NULL) == 0 && pthread_join(thread, NULL) == 0);
    for (int at = 0; at < 100; at++) free(left[at]), CHECK((left[at] = malloc(100 * (size_t)at)) != NULL);
    allocate();
}

static void end_well(pid_t child) {
    int status;
    CHECK(child > 0);
    pid_t ended = waitpid(child, &status, 0);
    // Of who goes on behind its parent's fork this is no child.
    if (is_copy && ended == -1 && errno == ECHILD) return;
    CHECK(ended == child);
    if (status != 0) fprintf(stderr, "child ended with %d\n", status), abort();
}

static void fork_here(int signal) {
    (void)signal;
    interrupts++;
    pid_t child = fork();
    // It goes on in the middle of its parent's fork.
    if (child == 0) is_copy = 1, alarm(20);
    else end_well(child);
}

static void interrupt(void) {
    if (within || forks == 0) return;
    within = 1;
    CHECK(raise(SIGUSR1) == 0);
    within = 0;
}

static void begin(void) {
    CHECK(pthread_atfork(interrupt, interrupt, interrupt) == 0);
}

// Before any library's.
__attribute__((section(".preinit_array"), used)) static void (*const early)(void) = begin;

int main(void) {
    alarm(20);
    struct sigaction action = {.sa_handler = fork_here, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    allocate();
    pid_t own = getpid();
    forks = 1;
    pid_t child = fork();
    forks = 0;
    CHECK(child >= 0 && interrupts >= 2);
    use();
    if (child > 0) end_well(child);
    if (getpid() != own) _exit(0);
    puts("done");
    return 0;
}
