// What becomes of pages whose objects were freed: all of them are dropped, but for one that is locked.
#define _GNU_SOURCE
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OBJECTS = 2000, BYTES = 8000, PAGE = 4096 };
static char *object[OBJECTS];

static int in_core(char *at) {
  unsigned char is;
  if (mincore((char *)((uintptr_t)at & ~(uintptr_t)(PAGE - 1)), PAGE, &is)) abort();
  return is & 1;
}

int main(void) {
  for (int i = 0; i < OBJECTS; i++) memset(object[i] = malloc(BYTES), 1, BYTES);
  int before = 0, after = 0, locked;
  char *middle = object[OBJECTS / 2] + BYTES / 2;
  if (mlock(middle, 1)) abort();
  for (int i = 0; i < OBJECTS; i++) before += in_core(object[i]), free(object[i]);
  malloc_trim(0);
  for (int i = 0; i < OBJECTS; i++) after += in_core(object[i]);
  locked = in_core(middle);
  // Whoever has a dropped page next finds something to write to.
  for (int i = 0; i < OBJECTS; i++) memset(object[i] = malloc(BYTES), 2, BYTES);
  for (int i = 0; i < OBJECTS; i++) for (int at = 0; at < BYTES; at++) if (object[i][at] != 2) abort();
  printf("%d %d %d\n", before, after, locked);
  return 0;
}
