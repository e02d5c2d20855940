// Large blocks that grow.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MIB = 1 << 20, BLOCKS = 4 };

// Blocks that grow in turns, a MiB at a time: how often one had to move.
static int turns(void) {
  char *block[BLOCKS];
  int moves = 0;
  for (int i = 0; i < BLOCKS; i++) block[i] = malloc(MIB);
  for (size_t len = 2; len <= 64; len++) {
    for (int i = 0; i < BLOCKS; i++) {
      char *grown = realloc(block[i], len * MIB);
      if (!grown) return 1;
      moves += grown != block[i];
      block[i] = grown;
    }
  }
  printf("%d\n", moves);
  return 0;
}

// All addresses that there are, in MiB, where blocks that have grown keep as many free behind themselves.
static int all_of_it(void) {
  enum { LARGE = 2048 };
  long all = 0;
  for (int i = 0; i < 4; i++) {
    char *block = malloc(MIB);
    // The block is not to grow in place.
    if (!malloc(MIB) || !realloc(block, (size_t)LARGE * MIB)) return 1;
    all += LARGE + 1;
  }
  for (size_t len = LARGE; len; len /= 2) {
    while (malloc(len * MIB)) all += len;
  }
  printf("%ld\n", all);
  return 0;
}

int main(int argc, char **argv) {
  (void)argc;
  if (!strcmp(argv[1], "turns")) return turns();
  if (!strcmp(argv[1], "all_of_it")) return all_of_it();
  return 2;
}
