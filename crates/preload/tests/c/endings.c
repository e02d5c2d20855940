// Programs that end as few do, and are to have their record all the same: one case each.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); exit(1); } } while (0)

// In each of a hundred children one thread exits, and another ends the process a little later, at a moment of its own.
static pthread_barrier_t start;
static void *end_later(void *microseconds) {
  struct timespec begun, now;
  pthread_barrier_wait(&start);
  clock_gettime(CLOCK_MONOTONIC, &begun);
  do clock_gettime(CLOCK_MONOTONIC, &now);
  while ((now.tv_sec - begun.tv_sec) * 1000000 + (now.tv_nsec - begun.tv_nsec) / 1000 < (intptr_t)microseconds);
  _exit(0);
}
static void at_once(void) {
  CHECK(!pthread_barrier_init(&start, 0, 2));
  for (intptr_t i = 0; i < 100; i++) {
    pid_t child = fork();
    int status;
    CHECK(child >= 0);
    if (!child) {
      pthread_t thread;
      CHECK(!pthread_create(&thread, 0, end_later, (void *)(2 * i)));
      pthread_barrier_wait(&start);
      exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && !status);
  }
}

static void no_descriptors(void) {
  struct rlimit few = {64, 64};
  CHECK(!setrlimit(RLIMIT_NOFILE, &few));
  while (dup(0) >= 0) {}
  CHECK(errno == EMFILE);
  _exit(0);
}

static void another_root(void) { CHECK(!chroot("/var/tmp")); }

// Where it sees no file of the one that started it any more, and its threads that were there before may or may not.
static void another_proc(void) {
  CHECK(!unshare(CLONE_NEWNS));
  CHECK(!mount("none", "/", 0, MS_REC | MS_PRIVATE, 0));
  for (int by_number = 0; by_number < 2; by_number++) {
    pid_t child = fork();
    int status;
    CHECK(child >= 0);
    if (!child) {
      if (by_number) CHECK(!syscall(SYS_mount, "none", "/proc", "tmpfs", 0, 0));
      else CHECK(!unshare(CLONE_NEWNS) && !mount("none", "/proc", "tmpfs", 0, 0));
      CHECK(access("/proc/self", F_OK) == -1);
      _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && !status);
  }
}

static void *end_as_worker(void *unused) {
  CHECK(!prctl(PR_SET_NAME, "worker-3"));
  exit(0);
  return unused;
}
static void by_worker(void) {
  pthread_t thread;
  CHECK(!pthread_create(&thread, 0, end_as_worker, 0) && !pthread_join(thread, 0));
}

static struct { const char *name; void (*what)(void); } cases[] = {
  {"at_once", at_once}, {"no_descriptors", no_descriptors}, {"another_root", another_root}, {"another_proc", another_proc},
  {"by_worker", by_worker}};
int main(int argc, char **argv) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc == 2 && !strcmp(argv[1], cases[i].name)) { cases[i].what(); return 0; }
  return 2;
}
