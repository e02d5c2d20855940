// Closes a plugin that has a heap of its own with a thread, which was not linked to stay.
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

static int threads(void) {
    int count = 0;
    char line[200];
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status) != NULL) sscanf(line, "Threads: %d", &count);
    fclose(status);
    return count;
}

int main(int count, char **arguments) {
    void *plugin = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    void (*keep)(void) = plugin != NULL ? (void (*)(void))dlsym(plugin, "selfpage_test_keep") : NULL;
    if (keep == NULL) return puts(dlerror()), 1;
    keep();
    if (dlerror() != NULL || threads() != 2) return puts("no keeper, or an error left"), 1;
    dlclose(plugin);
    // It looks around each second.
    sleep(2);
    puts("done");
    return 0;
}
