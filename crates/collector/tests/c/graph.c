/* Threads that change graphs of collected objects, each beside a copy of its own that the collector does not know. An object that
   was freed too early is found: its words are another's, or the mark of a freed one. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As in gc.h, which need not be there. */
extern void GC_init(void);
extern void *GC_malloc(size_t);
extern void GC_enable_incremental(void);
extern int GC_is_incremental_mode(void);
extern void GC_set_time_limit(unsigned long);
extern size_t GC_get_gc_no(void);
extern int GC_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
extern int GC_pthread_join(pthread_t, void **);
extern int selfpage_collector_prepare(void);

enum { THREADS = 3, ROWS = 64, ROW = 512, LEAVES = 4 };

struct leaf {
    uint64_t value;
    uint64_t check;
    struct leaf *next;
};

/* A row is a page, and old after a while: what it points to lives by that page alone. */
struct row {
    struct leaf *leaves[ROW];
};

struct graph {
    struct row *rows[ROWS];
};

static long steps;
static _Atomic int failed;

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static uint64_t check_of(uint64_t value) { return value * 0x9e3779b97f4a7c15u + 1; }

static struct leaf *chain(uint64_t value) {
    struct leaf *head = 0;
    for (int i = LEAVES; i > 0; i--) {
        struct leaf *leaf = GC_malloc(sizeof *leaf);
        *leaf = (struct leaf){value + i, check_of(value + i), head};
        head = leaf;
    }
    return head;
}

/* Whether a chain is what was put there. */
static int whole(const struct leaf *leaf, uint64_t value) {
    for (int i = 1; i <= LEAVES; i++, leaf = leaf->next)
        if (!leaf || leaf->value != value + i || leaf->check != check_of(value + i)) return 0;
    return leaf == 0;
}

static void *change(void *argument) {
    uint64_t state = (uint64_t)(uintptr_t)argument * 0x2545f4914f6cdd1du + 88172645463325252u;
    /* The copy: not the collector's, and without pointers. */
    uint64_t (*values)[ROW] = calloc(ROWS, sizeof *values);
    struct graph *graph = GC_malloc(sizeof *graph);
    for (int row = 0; row < ROWS; row++) graph->rows[row] = GC_malloc(sizeof(struct row));
    for (long step = 1; step <= steps && !failed; step++) {
        uint64_t random = next_random(&state);
        int row = random % ROWS, at = (random >> 8) % ROW, kind = (random >> 32) % 16;
        struct leaf **place = &graph->rows[row]->leaves[at];
        if (values[row][at] && !whole(*place, values[row][at])) {
            fprintf(stderr, "row %d, chain %d is gone at step %ld\n", row, at, step);
            failed = 1;
        } else if (kind < 9) {
            values[row][at] = random | 1;
            *place = chain(random | 1);
        } else if (kind < 12) {
            /* Moved to another page, for a moment on the stack alone. */
            int to = (random >> 40) % ROW;
            struct leaf *moved = *place;
            uint64_t value = values[row][at];
            *place = 0;
            values[row][at] = 0;
            graph->rows[(row + 1) % ROWS]->leaves[to] = moved;
            values[(row + 1) % ROWS][to] = value;
        } else if (kind == 12) {
            *place = 0;
            values[row][at] = 0;
        } else {
            /* Garbage, to be made of what was freed wrongly. */
            for (int i = 0; i < 8; i++) memset(GC_malloc(sizeof(struct leaf)), 0xa5, sizeof(struct leaf) - 8);
        }
        if (step % 50000 == 0) {
            struct row *copy = GC_malloc(sizeof *copy);
            *copy = *graph->rows[row];
            graph->rows[row] = copy;
        }
    }
    for (int row = 0; row < ROWS && !failed; row++)
        for (int at = 0; at < ROW; at++)
            if (values[row][at] && !whole(graph->rows[row]->leaves[at], values[row][at])) {
                fprintf(stderr, "row %d, chain %d is gone in the end\n", row, at);
                failed = 1;
            }
    free(values);
    return 0;
}

int main(int count, char **arguments) {
    steps = count > 1 ? atol(arguments[1]) : 100000;
    alarm(300);
    if (selfpage_collector_prepare() != 0) return 3;
    GC_init();
    GC_enable_incremental();
    if (!GC_is_incremental_mode()) return 4;
    /* Milliseconds after which a collection lets threads run, and goes on beside them; without it they wait for its end. */
    if (count > 2) GC_set_time_limit(strtoul(arguments[2], 0, 10));
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) GC_pthread_create(&threads[i], 0, change, (void *)(i + 1));
    change(0);
    for (int i = 0; i < THREADS; i++) GC_pthread_join(threads[i], 0);
    printf("%zu collections\n", GC_get_gc_no());
    return failed ? 1 : 0;
}
