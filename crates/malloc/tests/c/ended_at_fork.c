// A fork while another thread ends, in the middle of leaving what it has of the heap. The child starts a thread, which gets that one's stack, and
// with it its number, and frees what it left.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
// One object is left of each page of the heap's: who frees it, frees the page. They lie in one part of the heap, of 32 MiB.
enum { PAGES = 440, OF_PAGE = 16, SIZE = 4000, PAGE = 4096 };
#define PART ((uintptr_t)32 << 20)

static char *left[PAGES];
static pthread_t ends;
static _Atomic int is_stopped, may_go_on;

// What is known of pages stands at the part's start. To leave, the thread goes through them twice, and writes of each: two places of that
// are closed. The second to be met opens the first again for the second time through, which is where the thread is to stop.
static char *closed[2];
static int met;

static void close_or_open(char *at, int protection) { CHECK(mprotect(at, PAGE, protection) == 0); }

static void meet(int signal, siginfo_t *info, void *unused) {
    (void)signal, (void)unused;
    static char *first;
    char *at = (char *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));
    if (at != closed[0] && at != closed[1]) _exit(99);
    close_or_open(at, PROT_READ | PROT_WRITE);
    if (++met == 1) first = at;
    if (met == 2) close_or_open(first, PROT_READ);
    if (met < 3) return;
    is_stopped = 1;
    while (!may_go_on) usleep(1000);
}

static void *leave(void *unused) {
    static char *objects[PAGES * OF_PAGE];
    for (int at = 0; at < PAGES * OF_PAGE; at++) CHECK((objects[at] = malloc(SIZE)) != NULL), *objects[at] = 1;
    for (int at = 0; at < PAGES * OF_PAGE; at++) {
        if (at % OF_PAGE == 0) left[at / OF_PAGE] = objects[at];
        else free(objects[at]);
    }
    uintptr_t part = (uintptr_t)left[PAGES / 2] & ~(PART - 1);
    closed[0] = (char *)part + 4 * PAGE, closed[1] = (char *)part + 8 * PAGE;
    for (int at = 0; at < 2; at++) close_or_open(closed[at], PROT_READ);
    return unused;
}

static void *free_all(void *in_child) {
    if (in_child != NULL) CHECK(pthread_equal(pthread_self(), ends));
    for (int page = 0; page < PAGES; page++) CHECK(*left[page] == 1), free(left[page]);
    for (int at = 0; at < PAGES; at++) CHECK((left[at] = calloc(1, (size_t)at * 17 + 1)) != NULL);
    for (int at = 0; at < PAGES; at++) free(left[at]);
    return NULL;
}

int main(void) {
    alarm(20);
    struct sigaction action = {.sa_sigaction = meet, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    CHECK(pthread_create(&ends, NULL, leave, NULL) == 0);
    while (!is_stopped) usleep(1000);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);
        signal(SIGSEGV, SIG_DFL);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, free_all, &ends) == 0 && pthread_join(thread, NULL) == 0);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0) fprintf(stderr, "child ended with %d\n", status), abort();
    may_go_on = 1;
    CHECK(pthread_join(ends, NULL) == 0);
    free_all(NULL);
    puts("done");
    return 0;
}
