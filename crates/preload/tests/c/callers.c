// Memory that a program maps through the C library and drops by an instruction of its own, as Go's runtime does where there is C in a program.
// -DNOTE: with the note that Go's linker writes; -DSYMBOL: with the function that it exports, as all that a program without a build ID has.
// As a library it is opened and called by itself without either.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define PAGE 4096L
#define BYTES (16L << 20)
#define CHECK(ok) do { if (!(ok)) { printf("line %d: %s\n", __LINE__, #ok); return 1; } } while (0)

#ifdef NOTE
__asm__(".pushsection .note.go.buildid, \"a\", @note\n"
        ".balign 4\n.long 4, 4, 4\n.ascii \"Go\\0\\0\"\n.ascii \"none\"\n"
        ".popsection");
#endif
#ifdef SYMBOL
void _cgo_topofstack(void) {}
#endif

static long advise_past_the_library(char *at, long len, int advice) {
    long result = SYS_madvise;
    __asm__ volatile("syscall" : "+a"(result) : "D"(at), "S"(len), "d"((long)advice) : "rcx", "r11", "memory");
    return result;
}

static void fill(char *at, long len, char with) {
    for (long i = 0; i < len; i += PAGE) memset(at + i, with + i / PAGE % 50, 64);
}

static long wrong(char *at, long len, char with) {
    long count = 0;
    for (long i = 0; i < len; i += PAGE) count += at[i] != (char)(with + i / PAGE % 50);
    return count;
}

int maps_and_drops(void) {
    // As Go does: addresses first, then memory over them.
    char *reserved = mmap(NULL, 2 * BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(reserved != MAP_FAILED);
    char *at = mmap(reserved, BYTES, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at == reserved);
    fill(at, BYTES, 1);
    CHECK(wrong(at, BYTES, 1) == 0);
    CHECK(advise_past_the_library(at, BYTES, MADV_DONTNEED) == 0);
    long old = 0;
    for (long i = 0; i < BYTES; i++) old += at[i] != 0;
    if (old) { printf("%ld bytes of old contents\n", old); return 1; }

    // The other calls on it.
    fill(at, BYTES, 2);
    CHECK(mprotect(at, BYTES / 2, PROT_READ) == 0);
    CHECK(mprotect(at, BYTES / 2, PROT_READ | PROT_WRITE) == 0);
    char *moved = mremap(at, BYTES, BYTES + PAGE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED && wrong(moved, BYTES, 2) == 0);
    CHECK(mmap(moved, BYTES / 2, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == moved);
    for (long i = BYTES / 2; i < BYTES; i += PAGE) CHECK(moved[i] == (char)(2 + i / PAGE % 50));
    CHECK(munmap(moved, BYTES + PAGE) == 0);
    unsigned char vector[1];
    CHECK(mincore(moved, PAGE, vector) == -1 && errno == ENOMEM);
    return 0;
}

// What malloc gives is paged in any case, also by way of the C library, which has `realloc` tell who asks.
static int allocates(void) {
    char *blocks[4];
    for (int i = 0; i < 4; i++) {
        CHECK((blocks[i] = i % 2 ? malloc(BYTES / 4) : reallocarray(NULL, BYTES / 16, 4)) != NULL);
        fill(blocks[i], BYTES / 4, i);
    }
    for (int i = 0; i < 4; i++) CHECK(wrong(blocks[i], BYTES / 4, i) == 0);
    return 0;
}

int main(int count, char **arguments) {
    int (*drops)(void) = maps_and_drops;
    if (count > 1) {
        void *library = dlopen(arguments[1], RTLD_NOW);
        CHECK(library);
        drops = (int (*)(void))dlsym(library, "maps_and_drops");
    }
    if (drops() || allocates()) return 1;
    if (count > 1) {
        // What the program itself maps beside such a library is paged.
        char *at = mmap(NULL, 2 * BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(at != MAP_FAILED);
        fill(at, 2 * BYTES, 3);
        CHECK(wrong(at, 2 * BYTES, 3) == 0);
    }
    puts("ok");
    return 0;
}
