// Arrays that grow, for who has the whole of `malloc` but for `reallocarray`.
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))

int main(void) {
    for (size_t count = 1; count < 1 << 18; count *= 5) {
        char *first = malloc(20), *array = reallocarray(NULL, count, 20), *grown;
        CHECK(first != NULL && array != NULL);
        memset(first, 1, 20), memset(array, 2, count * 20);
        CHECK((first = reallocarray(first, count + 1, 20)) != NULL && first[19] == 1);
        CHECK((grown = realloc(array, count * 40)) != NULL && grown[count * 20 - 1] == 2);
        free(first), free(grown);
    }
    errno = 0;
    CHECK(reallocarray(NULL, SIZE_MAX, 2) == NULL && errno == ENOMEM);
    puts("done");
    return 0;
}
