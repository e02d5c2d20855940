// An allocator that looks up its threads' variables by the loader's call: where a library was loaded meanwhile, that call asks for memory.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static void *(*of_loader)(void *);
static __thread volatile int looked_up; // malloc, which the compiler knows, changes it as well

void *__tls_get_addr(void *which) { // in front of the loader's
  if (!of_loader) of_loader = (void *(*)(void *))dlsym(RTLD_NEXT, "__tls_get_addr");
  looked_up++;
  return of_loader(which);
}

static void use(size_t len) {
  void *volatile p = malloc(len);
  memset(p, 1, len);
  p = realloc(p, len * 3);
  free(p);
  p = memalign(256, len);
  free(p);
  p = calloc(1, len);
  free(p);
}

int main(int argc, char **argv) {
  if (argc > 1) __tls_get_addr((size_t[2]){1, 0}); // the check itself: one is seen
  int before = looked_up - (argc > 1);
  for (int round = 0; round < 20; round++)
    for (size_t len = 16; len < 24 << 20; len *= 3) use(len);
  printf("%d\n", looked_up - before);
}
