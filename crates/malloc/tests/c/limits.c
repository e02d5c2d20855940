// Near the limit of a control group: large blocks are freed, and small objects come.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

// From now on a file that is opened ends the process.
static void open_nothing(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_open, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) abort();
}

int main(int count, char **arguments) {
    if (count > 2 && strcmp(arguments[1], "opens-nothing") == 0) {
        // The first block looks whether there are huge pages.
        char *first = malloc(MIB);
        open_nothing();
        for (int at = 0; at < 20000; at++) memset(malloc(1000), 1, 1000);
        for (int at = 0; at < 100; at++) free(malloc(MIB));
        char *block = malloc((size_t)atoi(arguments[2]) * MIB);
        first[0] = block[0] = 1;
        free(block);
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
