/* A child by fork that has closed all descriptors: the tracker opens its own there. It may do so while all threads run, and not when they are
   stopped, as one of them may be in malloc. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* As in gc.h, which need not be there. */
extern void GC_init(void);
extern void *GC_malloc(size_t);
extern void GC_enable_incremental(void);
extern int GC_is_incremental_mode(void);
extern void GC_gcollect(void);
extern void GC_set_handle_fork(int);
extern void GC_set_on_collection_event(void (*)(int));
extern int selfpage_collector_prepare(void);

enum { MARK_START = 1, PRE_STOP_WORLD = 6, NODES = 200000 };

struct node {
    struct node *next;
    long value;
};

static struct node *list;
static int first_look = 1, open_before_stop, open_at_mark;

static int descriptors(void) {
    int count = 0;
    for (int number = 3; number < 4096; number++) count += fcntl(number, F_GETFD) >= 0;
    return count;
}

/* The library tells its own of an event first. */
static void on_event(int event) {
    if (!first_look) return;
    if (event == PRE_STOP_WORLD) open_before_stop = descriptors();
    if (event == MARK_START) open_at_mark = descriptors(), first_look = 0;
}

static void grow(void) {
    for (long i = 0; i < NODES; i++) {
        struct node *node = GC_malloc(sizeof *node);
        *node = (struct node){list, list ? list->value + 1 : 0};
        list = node;
    }
}

static int whole(long count) {
    for (struct node *node = list; node; node = node->next)
        if (node->value != --count) return 0;
    return count == 0;
}

int main(void) {
    alarm(120);
    GC_set_handle_fork(1);
    GC_set_on_collection_event(on_event);
    if (selfpage_collector_prepare() != 0) return 3;
    GC_init();
    GC_enable_incremental();
    if (!GC_is_incremental_mode()) return 4;
    grow();
    GC_gcollect();
    pid_t child = fork();
    if (child == 0) {
        close_range(3, ~0U, 0);
        first_look = 1;
        GC_gcollect();
        if (open_before_stop == 0 || open_at_mark != open_before_stop) {
            fprintf(stderr, "%d descriptors before the stop, %d in it\n", open_before_stop, open_at_mark);
            _exit(1);
        }
        grow();
        GC_gcollect();
        _exit(whole(2 * NODES) ? 0 : 2);
    }
    int status;
    if (waitpid(child, &status, 0) != child) return 5;
    grow();
    GC_gcollect();
    if (!whole(2 * NODES)) return 6;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 7;
}
