// What may come before the first malloc.
#include <malloc.h>
#include <stdlib.h>

int main(void) {
    void *volatile nothing = NULL;
    free(nothing);
    if (malloc_usable_size(nothing) != 0) return 1;
    malloc_trim(0);
    free(nothing);
    void *volatile block = realloc(nothing, 10);
    free(block);
    return block == NULL;
}
