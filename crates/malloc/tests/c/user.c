// Changes the user while the allocator's keeper runs: every thread has to follow, and the C library waits until each has.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
enum { BLOCKS = 6, SIZE = 64 << 20 };

// Whether a thread of this name runs.
static bool runs(const char *name) {
    char path[300], is[16];
    bool found = false;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; !found && (task = readdir(tasks)) != NULL;) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        int file = open(path, O_RDONLY);
        ssize_t len = file < 0 ? 0 : read(file, is, sizeof is);
        if (file >= 0) close(file);
        found = len > 0 && strncmp(is, name, strlen(name)) == 0;
    }
    closedir(tasks);
    return found;
}

int main(void) {
    alarm(30);
    // The keeper comes with large blocks.
    char *block[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        block[i] = malloc(SIZE);
        for (size_t at = 0; at < SIZE; at += 4096) block[i][at] = 1;
    }
    CHECK(runs("selfpage-keeper"));
    if (getuid() == 0) CHECK(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0);
    CHECK(setresuid(getuid() ? -1 : 65534, -1, -1) == 0);
    for (int i = 0; i < BLOCKS; i++) free(block[i]);
    puts("done");
}
