// Alignments that no power of two is, or that no address is a multiple of: what glibc says of them.
#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))

int main(void) {
    const volatile size_t none = 0, odd = 3, far = (size_t)1 << 48, farthest = (size_t)1 << 63, all = SIZE_MAX;
    void *block;
    for (int i = 0; i < 2; i++) {
        size_t size = i == 0 ? 10 : 3 << 20;
        // memalign takes the next power of two.
        CHECK((block = memalign(none, size)) != NULL), free(block);
        CHECK((block = memalign(odd, size)) != NULL && (uintptr_t)block % 4 == 0), free(block);
        errno = 0; CHECK(memalign(far, size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(memalign(farthest, size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(memalign(all, size) == NULL && errno == EINVAL);
        errno = 0; CHECK(aligned_alloc(none, size) == NULL && errno == EINVAL);
        errno = 0; CHECK(aligned_alloc(odd, size) == NULL && errno == EINVAL);
        errno = 0; CHECK(aligned_alloc(far, size) == NULL && errno == ENOMEM);
        errno = 0; CHECK(aligned_alloc(all, size) == NULL && errno == EINVAL);
        errno = 77; CHECK(posix_memalign(&block, none, size) == EINVAL && errno == 77);
        errno = 77; CHECK(posix_memalign(&block, odd, size) == EINVAL && errno == 77);
        errno = 77; CHECK(posix_memalign(&block, far, size) == ENOMEM && errno == 77);
        errno = 77; CHECK(posix_memalign(&block, all, size) == EINVAL && errno == 77);
    }
    CHECK((block = valloc(none)) != NULL && (uintptr_t)block % 4096 == 0), free(block);
    CHECK((block = pvalloc(none)) != NULL && (uintptr_t)block % 4096 == 0), free(block);
    errno = 0; CHECK(valloc(all) == NULL && errno == ENOMEM);
    errno = 0; CHECK(pvalloc(all) == NULL && errno == ENOMEM);
    puts("done");
    return 0;
}
