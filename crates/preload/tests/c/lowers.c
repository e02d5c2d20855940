/* A library that is preloaded behind ours, and begins first: it takes from the program what it needs, as the tool cannot know. */
#include <stdlib.h>
#include <sys/resource.h>

__attribute__((constructor)) static void lower(void) {
    struct rlimit limit = {1 << 30, 1 << 30};
    if (getenv("SELFPAGE_RUN"))
        setrlimit(RLIMIT_AS, &limit);
}
