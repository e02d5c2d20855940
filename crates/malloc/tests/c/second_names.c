// The C library's second names of its allocator's functions, which its headers do not declare. With -DCOUNTS the program has its own `malloc`
// and `free` over them, as those do that count what they allocate; else it takes a block under one name and gives it back under the other.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t),
    *__libc_valloc(size_t), *__libc_pvalloc(size_t);
extern void __libc_free(void *);

#ifdef COUNTS
static _Atomic long taken, given;
void *malloc(size_t size) {
  taken++;
  return __libc_malloc(size);
}
void free(void *block) {
  if (block != NULL) given++;
  __libc_free(block);
}
static void *work(void *unused) {
  for (size_t size = 1; size < 4 << 20; size *= 3) {
    char *text = memset(calloc(size + 1, 1), 'x', size), *copy = strdup(text), *grown = realloc(text, 2 * size + 2);
    CHECK(copy != NULL && strlen(copy) == size && grown != NULL && strlen(grown) == size);
    free(copy), free(grown);
  }
  return unused;
}
static void run(void) {
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, work, NULL) == 0 && pthread_join(thread, NULL) == 0);
  char *line = NULL;
  size_t room = 0;
  FILE *file = fopen("/proc/self/status", "r");
  CHECK(file != NULL && getline(&line, &room, file) > 0 && fclose(file) == 0);
  free(line), work(NULL);
  pid_t child = fork();
  if (child == 0) work(NULL), _exit(0);
  int status;
  CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
  CHECK(taken > 20 && given > 40);
}
#else
// Under a name that only old programs have; not there for others without us.
static void (*old_free)(void *);

static void mixed(size_t size) {
  void *(*takes[])(size_t) = {malloc, __libc_malloc, valloc, __libc_valloc, pvalloc, __libc_pvalloc};
  void (*gives[])(void *) = {free, __libc_free, old_free != NULL ? old_free : free};
  void *(*resizes[])(void *, size_t) = {realloc, __libc_realloc};
  for (int take = 0; take < 6; take++)
    for (int give = 0; give < 3; give++)
      for (int resize = 0; resize < 2; resize++) {
        char *block = takes[take](size);
        CHECK(block != NULL && (take < 2 || (uintptr_t)block % 4096 == 0));
        memset(block, 7, size);
        block = resizes[resize](block, 3 * size);
        CHECK(block != NULL && block[size - 1] == 7);
        gives[give](block);
      }
  char *zeros = __libc_calloc(size, 3), *aligned = __libc_memalign(256, size);
  CHECK(zeros != NULL && zeros[3 * size - 1] == 0 && aligned != NULL && (uintptr_t)aligned % 256 == 0);
  memset(aligned, 1, size);
  free(zeros), free(aligned), __libc_free(calloc(3, size)), __libc_free(aligned_alloc(64, 64 * size)), __libc_free(NULL);
}
static void run(void) {
  old_free = (void (*)(void *))dlsym(RTLD_DEFAULT, "cfree");
  for (size_t size = 1; size < 6 << 20; size *= 5) mixed(size);
}
#endif

int main(void) {
  run();
  puts("done");
  return 0;
}
