// A program with BYTES of variables that each thread has its own of, which the C library lays into the thread's stack. It takes enough memory
// for the keeper to come.
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static __thread volatile char own[BYTES];

static int threads(void) {
    DIR *tasks = opendir("/proc/self/task");
    int count = 0;
    while (tasks != NULL && readdir(tasks) != NULL) count++;
    closedir(tasks);
    return count - 2;
}

int main(void) {
    own[0] = 1;
    static void *volatile blocks[10];
    for (int at = 0; at < 10; at++) blocks[at] = malloc(40 << 20);
    for (int at = 0; at < 200 && threads() < 2; at++) usleep(10000);
    // It looks around at first, and once a second.
    usleep(200000);
    puts(threads() == 2 ? "done" : "no keeper");
    return 0;
}
