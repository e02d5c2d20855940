// Has a plugin work, which was written in Rust and has a heap of its own.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **arguments) {
    void *volatile before = malloc(5 << 20);
    void *plugin = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    size_t (*work)(void) = plugin != NULL ? (size_t (*)(void))dlsym(plugin, "selfpage_test_work") : NULL;
    if (work == NULL) return puts(dlerror()), 1;
    size_t bytes = work();
    free(before);
    // Its heap's addresses would be nobody's, and those of the next as many again.
    dlclose(plugin);
    if (dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD) == NULL) return puts("it was unloaded"), 1;
    printf("%zu\n", bytes);
    return 0;
}
