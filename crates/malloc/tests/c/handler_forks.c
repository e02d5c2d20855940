// A handler of a signal that forks, at any moment of the main thread's mallocs and frees of larger blocks. The child goes on where its
// parent was interrupted.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MIB ((size_t)1 << 20)
enum { BLOCKS = 6, FORKS = 60, ROUNDS_OF_CHILD = 50 };

static volatile sig_atomic_t forks, is_child, is_due, stop;

static void fork_here(int signal) {
    (void)signal;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60);
        is_child = 1;
        return;
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0) fprintf(stderr, "child %d ended with %d\n", (int)forks, status), abort();
    forks++, is_due = 0;
}

struct block { unsigned char *start; size_t size; unsigned char mark; };

static void look(const struct block *block) {
    if (block->start != NULL) CHECK(block->start[0] == block->mark && block->start[block->size - 1] == block->mark);
}

// Little is touched: most of the time goes by in the allocator.
static void turn(struct block *blocks, unsigned round) {
    struct block *block = &blocks[round % BLOCKS];
    look(block);
    size_t size = MIB + round * 7919 % 8 * 100 * 4096;
    if (round % 4 == 1) {
        block->start = realloc(block->start, size);
        CHECK(block->start != NULL && (block->size == 0 || block->start[0] == block->mark));
    } else {
        free(block->start);
        CHECK((block->start = malloc(size)) != NULL);
    }
    block->size = size, block->mark = (unsigned char)round;
    block->start[0] = block->start[size - 1] = block->mark;
}

static void *beside(void *unused) {
    static struct block blocks[BLOCKS];
    for (unsigned round = 0; !stop; round++) turn(blocks, round);
    return unused;
}

// How many threads do the same beside the main one.
int main(int count, char **arguments) {
    static struct block blocks[BLOCKS];
    CHECK(count == 2);
    alarm(200);
    sigset_t interrupts;
    sigemptyset(&interrupts), sigaddset(&interrupts, SIGVTALRM);
    CHECK(pthread_sigmask(SIG_BLOCK, &interrupts, NULL) == 0);
    pthread_t other;
    int threads = atoi(arguments[1]);
    if (threads == 2) CHECK(pthread_create(&other, NULL, beside, NULL) == 0);
    struct sigaction action = {.sa_handler = fork_here, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGVTALRM, &action, NULL) == 0);
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGVTALRM};
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    CHECK(pthread_sigmask(SIG_UNBLOCK, &interrupts, NULL) == 0);
    for (unsigned round = 0, last = 0; forks < FORKS && last < ROUNDS_OF_CHILD; round++) {
        if (!is_child && !is_due) {
            // Somewhere in the next few turns.
            struct itimerspec soon = {{0, 0}, {0, 1000 + round * 7919 % 97 * 1000}};
            is_due = 1;
            CHECK(timer_settime(timer, 0, &soon, NULL) == 0);
        }
        turn(blocks, round);
        if (is_child) last++;
    }
    if (is_child) {
        // It can fork in its turn, and so can its child.
        for (int at = 0; at < 2; at++) {
            pid_t child = fork();
            CHECK(child >= 0);
            if (child > 0) {
                int status;
                CHECK(waitpid(child, &status, 0) == child && status == 0);
                break;
            }
            alarm(60);
            for (unsigned round = 0; round < ROUNDS_OF_CHILD; round++) turn(blocks, round);
        }
        _exit(0);
    }
    stop = 1;
    if (threads == 2) pthread_join(other, NULL);
    puts("done");
    return 0;
}
