// Objects that one thread fills and another looks at and frees: crossing SEED. In both directions at once, and where who filled them has ended.
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

struct filled {
    unsigned char *at;
    size_t size;
    uint64_t with;
};

static unsigned char byte(const struct filled *one, size_t at) { return (unsigned char)(one->with >> at % 8 * 8) + (unsigned char)(at >> 3); }

static struct filled fill(uint64_t *state) {
    size_t below = (size_t[]){200, 200, 200, 200, 3000, 3000, 40000, 600000}[next(state) % 8];
    struct filled one = {.size = next(state) % (next(state) % 200 == 0 ? 3 << 20 : below) + 1, .with = next(state)};
    int way = next(state) % 8;
    one.at = way == 0 ? aligned_alloc(64, one.size) : way == 1 ? calloc(one.size, 1) : malloc(one.size);
    CHECK(one.at != NULL && malloc_usable_size(one.at) >= one.size);
    for (size_t at = 0; at < one.size; at++) one.at[at] = byte(&one, at);
    return one;
}

// Some grow first.
static void look_and_free(struct filled one, uint64_t *state) {
    if (next(state) % 4 == 0) CHECK((one.at = realloc(one.at, one.size + next(state) % 1000)) != NULL);
    for (size_t at = 0; at < one.size; at++) CHECK(one.at[at] == byte(&one, at));
    free(one.at);
}

enum { ROOM = 200, OBJECTS = 6000 };
struct way {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct filled waiting[ROOM];
    int count;
};
static struct way ways[2] = {{PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}, {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}};
static uint64_t seed;

static void give(struct way *way, struct filled one) {
    pthread_mutex_lock(&way->lock);
    while (way->count == ROOM) pthread_cond_wait(&way->changed, &way->lock);
    way->waiting[way->count++] = one;
    pthread_cond_broadcast(&way->changed);
    pthread_mutex_unlock(&way->lock);
}

// Any of them: not in the order in which they came.
static struct filled take(struct way *way, uint64_t *state) {
    pthread_mutex_lock(&way->lock);
    while (way->count == 0) pthread_cond_wait(&way->changed, &way->lock);
    int at = next(state) % way->count;
    struct filled one = way->waiting[at];
    way->waiting[at] = way->waiting[--way->count];
    pthread_cond_broadcast(&way->changed);
    pthread_mutex_unlock(&way->lock);
    return one;
}

// Fills for the other as many as it frees of the other's, always so many ahead that neither waits for the other to begin.
static void *give_and_take(void *number) {
    size_t own = (size_t)number;
    uint64_t state = seed * 0x9e3779b97f4a7c15 + own + 1;
    for (int i = 0; i < OBJECTS + ROOM / 2; i++) {
        if (i < OBJECTS) give(&ways[own], fill(&state));
        if (i >= ROOM / 2) look_and_free(take(&ways[1 - own], &state), &state);
    }
    return NULL;
}

static void both_ways(void) {
    pthread_t other;
    CHECK(pthread_create(&other, NULL, give_and_take, (void *)1) == 0);
    give_and_take(NULL);
    pthread_join(other, NULL);
    CHECK(ways[0].count == 0 && ways[1].count == 0);
}

static struct filled left[ROOM];

static void *fill_and_end(void *number) {
    uint64_t state = seed + (size_t)number + 3;
    for (int i = 0; i < ROOM; i++) left[i] = fill(&state);
    return NULL;
}

static void *free_what_is_left(void *number) {
    uint64_t state = seed + (size_t)number + 5;
    for (int i = ROOM - 1; i >= 0; i--) look_and_free(left[i], &state);
    return NULL;
}

static void in_a_thread(void *(*run)(void *), size_t number) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, run, (void *)number) == 0 && pthread_join(thread, NULL) == 0);
}

static void ended(void) {
    for (size_t round = 0; round < 20; round++) {
        in_a_thread(fill_and_end, round);
        // By the main thread, or by one that may have the other's stack, and number.
        if (round % 2 == 0) free_what_is_left((void *)round);
        else in_a_thread(free_what_is_left, round);
    }
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    seed = strtoul(arguments[1], NULL, 10);
    alarm(120);
    both_ways();
    ended();
    puts("done");
    return 0;
}
