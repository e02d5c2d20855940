// What forks in a handler have to stand without frames, they have to stand with them.
#include "../../../malloc/tests/c/handler_forks.c"
