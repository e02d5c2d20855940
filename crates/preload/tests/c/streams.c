// The same as for the heap alone, with managed memory.
#include "../../../malloc/tests/c/streams.c"
