// Moves to places outside of managed memory. With -DRAW the calls are made by number.
#include "mappings.h"

static char *place(size_t n) {
  char *p = mmap(0, n, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(p != MAP_FAILED);
  return p;
}
// Where the kernel would have put a mapping itself, or one that has a part in common with that, with and without something there.
static void out_to_a_free_place(void) {
  size_t from[] = {0, MIB / 2, MIB, MIB + MIB / 2, 2 * MIB - P, 2 * MIB};
  char *first = place(3 * MIB);
  while (place(MIB) > first); // from now on it is the highest place of that length
  CHECK(!munmap(first, 3 * MIB));
  for (int i = 0; i < 12; i++) {
    char *p = full(MIB), *whole = place(3 * MIB), *there = whole + from[i / 2];
    CHECK(!munmap(whole, i & 1 ? (size_t)(there - whole) + MIB / 2 : 3 * MIB));
    CHECK(mremap(p, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
    same(there, 0, MIB);
    CHECK(reads(p) == SIGSEGV && !munmap(whole, 3 * MIB));
  }
}
static struct row rows[] = {{"out_to_a_free_place", out_to_a_free_place}};
int main(int argc, char **argv) { return run(rows, sizeof rows / sizeof *rows, argc == 2 ? argv[1] : ""); }
