// A mark that each thread can have, in its own block (-ftls-model=initial-exec). What Rust keeps for a thread is looked up by a call of the
// loader's, which asks for memory where a library was loaded meanwhile; asked in an allocator, it asks for ever (glibc 2.39).
#include <stdbool.h>

static __thread bool mark;

void selfpage_mark_thread(void) { mark = true; }
bool selfpage_is_thread_marked(void) { return mark; }
