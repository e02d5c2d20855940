// What malloc has to stand without frames, it has to stand with them.
#include "../../../malloc/tests/c/torture.c"
