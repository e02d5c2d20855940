// A program that brings its own malloc, whose next piece lies in a page that is not in core: what a forked child takes of it within
// fork() must leave the rest of that page alone.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, OTHERS = 8 << 20 };
static char *at, *end;
static pid_t parent;

void *malloc(size_t size) {
    size = (size + 31) / 16 * 16;
    // Only a child takes of the page.
    if (parent == 0 || getpid() == parent || (size_t)(end - at) < size) {
        static char *plain, *plain_end;
        if ((size_t)(plain_end - plain) < size) {
            size_t len = size > 1 << 20 ? size : 1 << 20;
            plain = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), plain_end = plain + len;
        }
        *(size_t *)plain = size, plain += size;
        return plain - size + 16;
    }
    *(size_t *)at = size, at += size;
    return at - size + 16;
}
void free(void *block) { (void)block; }
void *calloc(size_t count, size_t size) { return memset(malloc(count * size), 0, count * size); }
void *realloc(void *block, size_t size) {
    void *larger = malloc(size);
    size_t before = block == NULL ? 0 : ((size_t *)block)[-2] - 16;
    return memcpy(larger, block, before < size ? before : size);
}
void *memalign(size_t align, size_t size) { return (void *)(((uintptr_t)malloc(size + align) + align - 1) & -align); }

static volatile uint64_t *map(size_t len) {
    return mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

int main(void) {
    volatile uint64_t *page = map(64 * PAGE), *others = map(OTHERS);
    for (uint64_t i = 0; i < 64 * PAGE / 8; i++) page[i] = i + 1;
    for (int turn = 0; turn < 2; turn++) {
        for (size_t i = 0; i < OTHERS / 8; i += PAGE / 8) others[i] = i + 1;
    }
    at = (char *)page + 32 * PAGE, end = at + PAGE / 2, parent = getpid();
    pid_t child = fork();
    if (child == 0) {
        int wrong = 0;
        for (uint64_t i = 32 * PAGE / 8 + (PAGE / 2) / 8; i < 33 * PAGE / 8; i++) wrong += page[i] != i + 1;
        if (wrong > 0) dprintf(1, "%d wrong words\n", wrong);
        _exit(wrong > 0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) return 1;
    if (write(1, "done\n", 5) != 5) return 1;
    return 0;
}
