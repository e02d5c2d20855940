#include <stdio.h>
#include <stdlib.h>

static char *kept;
__attribute__((constructor)) static void loaded(void) { kept = malloc(3000); }
__attribute__((destructor)) static void unloaded(void) { free(kept); }

char *make(int number) {
    char *text = malloc(20);
    snprintf(text, 20, "%d", number);
    return text;
}
