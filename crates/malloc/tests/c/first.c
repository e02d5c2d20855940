// What may come before the first malloc.
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <sys/sysinfo.h>

// It is refused, and nothing comes from elsewhere, which pointers that are nobody's could not be told from.
static void ask_for_too_much(void) {
    struct sysinfo machine;
    sysinfo(&machine);
    void *volatile block = malloc((machine.totalram + machine.totalswap) * machine.mem_unit + ((size_t)1 << 30));
    if (block != NULL || errno != ENOMEM) exit(3);
    _Alignas(16) char on_stack[16];
    void *volatile foreign = on_stack;
    free(foreign);
}

int main(int count, char **arguments) {
    (void)arguments;
    if (count > 1) ask_for_too_much();
    void *volatile nothing = NULL;
    free(nothing);
    if (malloc_usable_size(nothing) != 0) return 1;
    malloc_trim(0);
    free(nothing);
    void *volatile block = realloc(nothing, 10);
    free(block);
    return block == NULL;
}
