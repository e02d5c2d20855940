// Pointers that no object begins at, given to a call of the allocator's in the checked mode. Each program writes the line that it expects.
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))

static const char *name_of(const char *call) { return strncmp(call, "realloc", 7) == 0 ? "realloc" : call; }

static void pass_to(const char *call, void *volatile pointer, size_t size) {
    fflush(stdout);
    if (strcmp(call, "free") == 0) free(pointer);
    if (strcmp(call, "realloc-less") == 0) CHECK(realloc(pointer, size / 2 + 1) == NULL);
    if (strcmp(call, "realloc-more") == 0) CHECK(realloc(pointer, 3 * size) == NULL);
    if (strcmp(call, "malloc_usable_size") == 0) CHECK(malloc_usable_size(pointer) == 0);
}

enum { OBJECTS = 30 };
static char *object[OBJECTS];
static pthread_barrier_t made;

static void *make(void *size) {
    for (int i = 0; i < OBJECTS; i++) {
        CHECK((object[i] = malloc((size_t)size)) != NULL);
        // As the marks and links of freed objects never are.
        memset(object[i], 0x5a, (size_t)size);
    }
    return NULL;
}

static void *make_and_stay(void *size) {
    make(size);
    pthread_barrier_wait(&made);
    pause();
    return NULL;
}

static void expect_inside(const char *call, char *pointer, char *block, size_t len) {
    printf("%s(%p): inside of the block at %p, which is %zu bytes long\n", name_of(call), pointer, block, len);
}

// CALL own|anothers|left SIZE BY: objects of this thread, of one that lives, or of one that has ended.
static void inside(char **arguments) {
    size_t size = strtoul(arguments[2], NULL, 10), by = strtoul(arguments[3], NULL, 10);
    pthread_t thread;
    if (strcmp(arguments[1], "own") == 0) {
        make((void *)size);
    } else if (strcmp(arguments[1], "left") == 0) {
        CHECK(pthread_create(&thread, NULL, make, (void *)size) == 0 && pthread_join(thread, NULL) == 0);
    } else {
        CHECK(pthread_barrier_init(&made, NULL, 2) == 0);
        CHECK(pthread_create(&thread, NULL, make_and_stay, (void *)size) == 0);
        pthread_barrier_wait(&made);
    }
    char *block = object[OBJECTS / 2];
    expect_inside(arguments[0], block + by, block, malloc_usable_size(block));
    pass_to(arguments[0], block + by, size);
}

static void *take_back(void *unused) {
    for (int i = 0; i < OBJECTS; i++) free(object[i]);
    return unused;
}

// Objects that begin within their blocks, beside others of the same pages, and the calls that they are for.
static void aligned(char **unused) {
    (void)unused;
    for (size_t align = 32; align <= 64 << 10; align *= 2) {
        for (size_t size = 1; size < 1 << 20; size = size * 7 + 1) {
            for (int i = 0; i < OBJECTS; i++) {
                void *out = NULL;
                if (i % 3 == 0) object[i] = malloc(size + align - 1);
                else if (i % 3 == 1) object[i] = memalign(align, size);
                else CHECK(posix_memalign(&out, align, size) == 0 && (object[i] = out) != NULL);
                CHECK(object[i] != NULL && malloc_usable_size(object[i]) >= size);
                CHECK(i % 3 == 0 || (uintptr_t)object[i] % align == 0);
                memset(object[i], i, size);
                if (i % 5 == 0) CHECK((object[i] = realloc(object[i], size * 2)) != NULL && object[i][size - 1] == i);
            }
            pthread_t thread;
            if (size % 2 == 0) take_back(NULL);
            else CHECK(pthread_create(&thread, NULL, take_back, NULL) == 0 && pthread_join(thread, NULL) == 0);
        }
    }
    puts("done");
}

// In a page with such objects some pointers are known to be none all the same.
static void inside_aligned(char **unused) {
    (void)unused;
    // So much longer are their blocks.
    size_t len = malloc_usable_size(malloc(48 + 63));
    for (int i = 0; i < OBJECTS; i++) CHECK((object[i] = memalign(64, 48)) != NULL);
    int at = 0;
    while (at < OBJECTS && malloc_usable_size(object[at]) == len) at++;
    CHECK(at < OBJECTS);
    char *one = object[at];
    expect_inside("free", one + 8, one - (len - malloc_usable_size(one)), len);
    pass_to("free", one + 8, 1);
}

// CALL PLACE: addresses of the objects' range that no page of objects has.
static void nowhere(char **arguments) {
    enum { SEGMENT = 32 << 20 };
    make((void *)(size_t)100);
    char *start = object[0] - (uintptr_t)object[0] % SEGMENT, *pointer = start;
    const char *what = "no block of this allocator";
    // Where nothing was ever, it looks as what was given back does.
    if (strcmp(arguments[1], "unused") == 0) pointer = start + (20 << 20), what = "a block that was freed already";
    if (strcmp(arguments[1], "stray") == 0) pointer = start + (20 << 20), memset(pointer, 0x5a, 64);
    // Of a page that has begun, where objects of its size are yet to come.
    if (strcmp(arguments[1], "behind") == 0) pointer = object[0] - (uintptr_t)object[0] % 65536 + 60000, memset(pointer, 0x5a, 64);
    // Inside of one that addresses are too few for elsewhere: what it holds stands where what is known of objects would.
    if (strcmp(arguments[1], "long") == 0) {
        size_t size = (size_t)300 << 20;
        while (pointer != NULL && (pointer == start || (size_t)(pointer - start) >= (size_t)64 << 30)) pointer = malloc(size);
        CHECK(pointer != NULL);
        pointer += size / 2;
        pointer -= (uintptr_t)pointer % SEGMENT;
        memset(pointer, 0x5a, 1 << 20);
        pointer += 400000;
    }
    printf("%s(%p): %s\n", name_of(arguments[0]), pointer, what);
    pass_to(arguments[0], pointer, 100);
}

// CALL WHAT: what is no block, where objects come from the kernel since addresses are limited.
static void beside(char **arguments) {
    enum { BYTES = 3 << 20 };
    make((void *)(size_t)100);
    char *block = malloc(BYTES), *pointer = block;
    CHECK(block != NULL);
    memset(block, 0x5a, BYTES);
    if (strcmp(arguments[1], "within") == 0) {
        pointer += 4096;
        expect_inside(arguments[0], pointer, block, malloc_usable_size(block));
    } else if (strcmp(arguments[1], "freed") == 0) {
        free(block);
        printf("%s(%p): a block that was freed already\n", name_of(arguments[0]), pointer);
    } else {
        pointer = object[0] + 4;
        printf("%s(%p): no block of this allocator\n", name_of(arguments[0]), pointer);
    }
    pass_to(arguments[0], pointer, BYTES);
}

int main(int count, char **arguments) {
    static const struct { const char *name; int count; void (*run)(char **); } programs[] = {
        {"inside", 4, inside}, {"aligned", 0, aligned}, {"inside-aligned", 0, inside_aligned}, {"nowhere", 2, nowhere},
        {"beside", 2, beside},
    };
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        if (count > 1 && count == programs[i].count + 2 && strcmp(arguments[1], programs[i].name) == 0) {
            programs[i].run(arguments + 2);
            return 0;
        }
    }
    return 2;
}
