// Programs that end as few do, and are to have their record all the same: one case each.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
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

// By an instruction of its own nobody hears of it.
static void as_another_user(void) {
  long result;
  __asm__ volatile("syscall" : "=a"(result) : "a"(SYS_setresuid), "D"(65534), "S"(65534), "d"(65534) : "rcx", "r11", "memory");
  CHECK(!result && getuid() == 65534);
}
// This thread may no longer look at the one that started it.
static void after_landlock(void) {
  enum { CREATE_RULES = 444, RESTRICT = 446 };
  const uint64_t reading = 1 << 2;
  if (syscall(CREATE_RULES, 0, 0, 1) < 0) { puts("no landlock"); exit(0); }
  int rules = syscall(CREATE_RULES, &reading, sizeof reading, 0);
  CHECK(rules >= 0 && !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !syscall(RESTRICT, rules, 0));
  CHECK(open("/proc/self/status", O_RDONLY) == -1 && errno == EACCES);
}

static struct { const char *name; void (*what)(void); } cases[] = {
  {"at_once", at_once}, {"no_descriptors", no_descriptors}, {"another_root", another_root}, {"another_proc", another_proc},
  {"by_worker", by_worker}, {"as_another_user", as_another_user}, {"after_landlock", after_landlock}};
int main(int argc, char **argv) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc == 2 && !strcmp(argv[1], cases[i].name)) { cases[i].what(); return 0; }
  return 2;
}
