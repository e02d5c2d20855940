// A program that has the C library's functions by its handle, as foreign-function interfaces have them. With -DINNER and -DOUTER libraries
// for it, of which OUTER needs INNER. Arguments: OUTER, INNER, the library that is preloaded, and what that exports.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef INNER
int which(void) { return 1; }
int of_inner(void) { return 2; }
void *valloc(size_t size) { return (void *)size; }
#elif defined OUTER
int of_inner(void);
int which(void) { return 3; }
void *next_which(void) { return dlsym(RTLD_NEXT, "which"); }
void *by_default(void) { return dlsym(RTLD_DEFAULT, "of_inner"); }
int need(void) { return of_inner(); }
#else
#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
int which(void) { return 0; }
// One of its own, under a name of the C library's and of ours.
void *pvalloc(size_t size) { return aligned_alloc(4096, size); }

int main(int count, char **arguments) {
    CHECK(count > 3);
    // A program that is not position-independent has an address of its own for this, and all others see that one.
    const char *(*volatile version)(void) = gnu_get_libc_version;
    CHECK(version() != NULL);
    void *c = dlopen("libc.so.6", RTLD_NOW), *outer = dlopen(arguments[1], RTLD_NOW), *inner = dlopen(arguments[2], RTLD_NOW);
    CHECK(c != NULL && outer != NULL && inner != NULL);

    // The first look-up of all finds nothing.
    CHECK(dlsym(c, "no_such_function") == NULL);
    const char *why = dlerror();
    CHECK(why != NULL && strstr(why, "no_such_function") != NULL && dlerror() == NULL);
    CHECK(dlsym(c, "no_such_function") == NULL && dlsym(c, "strdup") != NULL && dlerror() == NULL);
    CHECK(dlsym(c, "no_such_function") == NULL && dlsym(c, "madvise") != NULL && dlerror() == NULL);
    CHECK(dlsym(RTLD_NEXT, "no_such_function") == NULL && dlerror() != NULL && dlerror() == NULL);

    char *(*copy)(const char *) = (char *(*)(const char *))dlsym(c, "strdup");
    void (*give)(void *) = (void (*)(void *))dlsym(c, "free");
    void *(*take)(size_t) = (void *(*)(size_t))dlsym(c, "malloc");
    for (size_t size = 1; size < 4 << 20; size *= 3) {
        char *text = memset(malloc(size + 1), 'x', size);
        text[size] = 0;
        give(copy(text));
        free(take(size));
        give(text);
    }

    enum { PAGE = 4096, PAGES = 4096 };
    int (*advise)(void *, size_t, int) = (int (*)(void *, size_t, int))dlsym(c, "madvise");
    char *pages = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < PAGES; i++) pages[i * PAGE] = 1;
    CHECK(advise(pages, PAGES * PAGE, MADV_DONTNEED) == 0);
    int stale = 0;
    for (int i = 0; i < PAGES; i++) stale += pages[i * PAGE];
    CHECK(stale == 0);

    // Who asks counts, and a library's own stays its own.
    int (*found)(void) = (int (*)(void))((void *(*)(void))dlsym(outer, "next_which"))();
    CHECK(found != NULL && found() == 1);
    found = (int (*)(void))((void *(*)(void))dlsym(outer, "by_default"))();
    CHECK(found != NULL && found() == 2);
    found = (int (*)(void))dlsym(outer, "which");
    CHECK(found != NULL && found() == 3);
    found = (int (*)(void))dlsym(RTLD_DEFAULT, "which");
    CHECK(found == which);
    void *(*theirs)(size_t) = (void *(*)(size_t))dlsym(inner, "valloc");
    CHECK(theirs != NULL && theirs(5) == (void *)5);

    void *ours = dlopen(arguments[3], RTLD_NOW | RTLD_NOLOAD);
    CHECK(ours != NULL);
    void *(*find)(void *, const char *) = (void *(*)(void *, const char *))dlsym(c, "dlsym");
    for (int i = 4; i < count; i++) {
        void *one = find(c, arguments[i]);
        // The C library may not have it yet.
        if (one != NULL && one != find(ours, arguments[i])) printf("%s is another\n", arguments[i]);
    }
    printf("done\n");
    return 0;
}
#endif
