// Near the limit of a control group: large blocks are freed, and small objects come.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

// Frees `large` MiB in four blocks, and then has `small` MiB in objects.
static void use(size_t large, size_t small) {
    char *blocks[4];
    for (int at = 0; at < 4; at++) memset(blocks[at] = malloc(large / 4 * MIB), 1, large / 4 * MIB);
    for (int at = 0; at < 4; at++) free(blocks[at]);
    for (size_t at = 0; at < small * MIB / 1000; at++) memset(malloc(1000), 1, 1000);
}

static void filter_calls(struct sock_filter *filter, size_t bytes) {
    struct sock_fprog program = {bytes / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) abort();
}

// From now on a file that is opened ends the process.
static void open_nothing(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_open, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    filter_calls(filter, sizeof filter);
}

// And so does all but calls for memory, writing, and the end, and what of these calls comes before `more`.
static void call_for_memory_and(int more) {
    int calls[] = {SYS_mmap, SYS_munmap, SYS_mprotect, SYS_mremap, SYS_madvise, SYS_futex, SYS_write, SYS_exit_group,
                   SYS_prlimit64, SYS_msync, SYS_munlock, SYS_mlock2, SYS_mincore, SYS_sysinfo, SYS_open, SYS_read, SYS_close};
    enum { ALL = sizeof calls / sizeof *calls };
    int count = 8;
    while (count < ALL && calls[count] != more) count++;
    struct sock_filter filter[ALL + 3] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    for (int at = 0; at < count; at++)
        filter[at + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[at], count - at, 0);
    filter[count + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    filter[count + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter_calls(filter, (count + 3) * sizeof *filter);
}

// Blocks of many lengths come, grow, move and go.
static void use_many(void) {
    for (int at = 0; at < 20000; at++) memset(malloc(1000), 1, 1000);
    for (size_t kib = 100; kib < 10 << 10; kib = kib * 3 / 2) {
        char *blocks[4];
        for (int at = 0; at < 4; at++) memset(blocks[at] = at % 2 ? malloc(kib << 10) : calloc(kib, 1 << 10), 1, kib << 10);
        for (int at = 0; at < 3; at++) memset(blocks[at] = realloc(blocks[at], kib << (10 + 2 * at)), 2, kib << (10 + 2 * at));
        for (int at = 0; at < 4; at++) free(blocks[at]);
    }
    char *block = calloc(1, 100 * MIB);
    memset(block, 1, 50 * MIB);
    free(block);
    block = calloc(1, 100 * MIB);
    if (block == NULL || block[0] != 0) abort();
    free(block);
}

// Has /proc at `place` too, for this process alone.
static void show_proc(char *place) {
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) abort();
    if (mount("/proc", place, NULL, MS_BIND | MS_REC, NULL) != 0) abort();
}

int main(int count, char **arguments) {
    if (count > 3 && strcmp(arguments[1], "opens-nothing") == 0) {
        // What it takes before.
        char *first = malloc((size_t)atoi(arguments[3]) * MIB + 1);
        open_nothing();
        for (int at = 0; at < 20000; at++) memset(malloc(1000), 1, 1000);
        for (int at = 0; at < 100; at++) free(malloc(MIB));
        // Its end may be in a huge page.
        char *block = malloc((size_t)atoi(arguments[2]) * MIB + MIB / 2 + 1);
        first[0] = block[0] = 1;
        free(block);
    } else if (count > 1 && strcmp(arguments[1], "memory-alone") == 0) {
        call_for_memory_and(SYS_prlimit64);
        use_many();
        if (malloc((size_t)1 << 60) != NULL || malloc(PTRDIFF_MAX) != NULL) abort();
        // Not by way of a stream, which would ask what it writes to.
        if (write(1, "done\n", 5) == 5) _exit(0);
    } else if (count > 3 && strcmp(arguments[1], "listed") == 0) {
        // The look at the limit comes before.
        free(malloc(5 * MIB));
        call_for_memory_and(strcmp(arguments[3], "usual") == 0 ? SYS_sysinfo : strcmp(arguments[3], "long") == 0 ? SYS_open : -1);
        use_many();
        if (strcmp(arguments[2], "long") == 0) {
            char *block = malloc(1536 * MIB);
            if (block == NULL) abort();
            block[0] = 1;
            free(block);
        }
        if (strcmp(arguments[2], "longer") == 0 && malloc((size_t)1 << 60) != NULL) abort();
        if (write(1, "done\n", 5) == 5) _exit(0);
    } else if (count > 2 && strcmp(arguments[1], "child") == 0) {
        // The parent has looked for its limit. The child comes to be in a group with a lower one.
        free(malloc(8 * MIB));
        pid_t child = fork();
        if (child == 0) {
            char file[500], own[20];
            snprintf(file, sizeof file, "%s/cgroup.procs", arguments[2]);
            int procs = open(file, O_WRONLY), len = snprintf(own, sizeof own, "%d", getpid());
            if (write(procs, own, len) != len) abort();
            use(80, 50);
            _exit(0);
        }
        int status = 0;
        if (waitpid(child, &status, 0) != child || status != 0) return 1;
    } else if (count > 2 && strcmp(arguments[1], "sees-nothing") == 0) {
        // The parent has looked for its limit. The child sees no groups, and what the kernel says of itself if a place for that is named.
        free(malloc(48 * MIB));
        pid_t child = fork();
        if (child == 0) {
            if (count > 3) show_proc(arguments[3]);
            if (chroot(arguments[2]) != 0) abort();
            use(200, 100);
            _exit(0);
        }
        int status = 0;
        if (waitpid(child, &status, 0) != child || status != 0) return 1;
    } else if (count > 1 && strcmp(arguments[1], "threads") == 0) {
        // The one block that it ever has: what is freed of it stays.
        free(malloc(48 * MIB));
        int threads = 0;
        for (int wait = 0; wait < 600 && threads < 2; wait++) {
            char line[200];
            FILE *status = fopen("/proc/self/status", "r");
            while (status != NULL && fgets(line, sizeof line, status) != NULL) sscanf(line, "Threads: %d", &threads);
            if (status != NULL) fclose(status);
            usleep(100000);
        }
        if (threads < 2) return 1;
    } else if (count > 1 && strcmp(arguments[1], "maps") == 0) {
        use(200, 0);
        for (int at = 0; at < 100; at++) {
            char *piece = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            memset(piece, 1, MIB);
        }
    } else {
        use(200, 100);
    }
    puts("done");
    return 0;
}
