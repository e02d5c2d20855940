/* Preloaded: the collector is not told of one in SELFPAGE_LIE of the pages that were written. Tests of whether objects are lost must
   notice. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static void (*tell)(const void *page);
static unsigned long every, told;

/* Called with the collector's lock held. */
static void tell_most(const void *page) {
    if (++told % every) tell(page);
}

/* Found in place of the C library's, whose oldest version is this one. */
void *dlsym(void *handle, const char *name) {
    void *(*find)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *found = find(handle, name);
    const char *lie = getenv("SELFPAGE_LIE");
    if (!found || !lie || strcmp(name, "GC_end_stubborn_change")) return found;
    tell = (void (*)(const void *))found;
    every = strtoul(lie, 0, 10);
    return (void *)tell_most;
}
