// Blocks that move where the kernel moves nothing, and where there is no /proc to say so.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
#define MIB ((size_t)1 << 20)

// From now on these calls fail: `open` and `openat` as if there were nothing, and `mremap` if it is to.
static void refuse(int moves) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_open, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, moves ? SYS_mremap : SYS_open, 2, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOENT),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

// Whether nothing may be mapped any more.
static void limit(void) {
    struct rlimit little = {MIB, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &little) == 0);
}

// A page in three is written.
static void fill(char *block, size_t size) {
    for (size_t at = 0; at < size; at += 3 * 4096) memset(block + at, 1 + at / 4096 % 100, 4096);
}

static void check(const char *block, size_t size) {
    for (size_t at = 0; at < size; at += 3 * 4096)
        CHECK(block[at] == (char)(1 + at / 4096 % 100) && block[at + 4095] == block[at]);
}

int main(int count, char **arguments) {
    // There is room in the range of each of the lengths to come.
    for (size_t size = 5; size <= 200; size *= 2) free(malloc(size * MIB));
    char *block = calloc(1, 5 * MIB);
    CHECK(block != NULL);
    fill(block, 5 * MIB);
    CHECK(count > 1);
    if (strcmp(arguments[1], "locked") == 0) CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    refuse(strcmp(arguments[1], "limit") != 0);
    if (strcmp(arguments[1], "limit") == 0) limit();
    char *before = block;
    block = realloc(block, 100 * MIB);
    CHECK(block != NULL && block != before);
    check(block, 5 * MIB);
    fill(block, 100 * MIB);
    // Where it was, another block of its length is, so that it cannot go back.
    char *other = malloc(5 * MIB);
    CHECK(other != NULL);
    memset(other, 7, 5 * MIB);
    check(block, 100 * MIB);
    block = realloc(block, 10 * MIB);
    CHECK(block != NULL);
    check(block, 10 * MIB);
    free(block);
    free(other);
    puts("done");
    return 0;
}
