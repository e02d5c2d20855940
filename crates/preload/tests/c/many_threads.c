// As many threads at once as the argument says, each with an object: each has its own part of the heap.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_barrier_t all;
static atomic_int without, wrong;

static void *work(void *unused) {
  char *object = malloc(100);
  if (object == NULL) without++;
  else memset(object, 7, 100);
  pthread_barrier_wait(&all);
  for (int at = 0; object != NULL && at < 100; at++) wrong += object[at] != 7;
  free(object);
  return unused;
}

int main(int argc, char **argv) {
  int count = argc > 1 ? atoi(argv[1]) : 1;
  pthread_t *thread = calloc(count, sizeof *thread);
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 64 << 10);
  pthread_barrier_init(&all, NULL, count + 1);
  for (int i = 0; i < count; i++) {
    int error = pthread_create(&thread[i], &small, work, NULL);
    if (error) return printf("thread %d: %s\n", i, strerror(error)), 2;
  }
  pthread_barrier_wait(&all);
  for (int i = 0; i < count; i++) pthread_join(thread[i], NULL);
  printf("%d without, %d wrong\n", without, wrong);
  return 0;
}
