// The threads of a process by their names.
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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
