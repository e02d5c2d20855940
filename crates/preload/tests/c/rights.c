// Programs that give up their rights, one way each, in frames fewer than they touch.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cases.h"
#define NOBODY 65534u
int capset(struct __user_cap_header_struct *, const struct __user_cap_data_struct *);
static volatile int stop;

// What the kernel says of a thread's rights.
static void rights(const char *thread, char *said, size_t room) {
  char path[64], line[512];
  snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
  FILE *f = fopen(path, "r");
  CHECK(f);
  for (*said = 0; fgets(line, sizeof line, f);) {
    int of_the_kernel = !strncmp(line, "Name:\tiou-", 10);
    if (of_the_kernel) { *said = 0; break; }
    if (!strncmp(line, "Uid", 3) || !strncmp(line, "Gid", 3) || !strncmp(line, "Groups", 6) || !strncmp(line, "Cap", 3))
      strncat(said, line, room - strlen(said) - 1);
  }
  fclose(f);
}
static void all_threads_have_the_same(void) {
  char own[2048], others[2048], number[16];
  snprintf(number, sizeof number, "%d", getpid());
  rights(number, own, sizeof own);
  DIR *tasks = opendir("/proc/self/task");
  CHECK(tasks);
  int count = 0;
  for (struct dirent *d; (d = readdir(tasks));) {
    if (*d->d_name == '.') continue;
    rights(d->d_name, others, sizeof others);
    if (!*others) continue;
    if (strcmp(own, others)) { printf("%s\n%s\n%s\n", own, d->d_name, others); fflush(stdout); _exit(1); }
    count++;
  }
  closedir(tasks);
  CHECK(count > 1 || !getenv("SELFPAGE_RUN"));
}
// As setpriv(1) does: what one may do goes along to another user, and is given up when the groups are gone.
static void kept(void) {
  struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, (int)syscall(SYS_gettid)};
  struct __user_cap_data_struct *sets = calloc(2, sizeof *sets);
  CHECK(!prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) && !setresuid(NOBODY, NOBODY, NOBODY));
  sets[0].effective = sets[0].permitted = 1 << CAP_SETGID | 1 << CAP_SETUID;
  CHECK(!capset(&header, sets));
  all_threads_have_the_same();
  same();
  gid_t groups[] = {NOBODY, 1};
  CHECK(!setgroups(2, groups) && !setresgid(NOBODY, NOBODY, NOBODY) && !setgroups(0, 0));
  memset(sets, 0, 2 * sizeof *sets);
  CHECK(!syscall(SYS_capset, &header, sets) && setuid(0) && errno == EPERM);
  all_threads_have_the_same();
}
// By number, past what the C library has every thread do.
static void by_number(void) {
  gid_t *groups = malloc(2 * sizeof *groups);
  groups[0] = NOBODY, groups[1] = 1;
  CHECK(!syscall(SYS_setgroups, 2ul, groups) && !syscall(SYS_setresgid, NOBODY, NOBODY, NOBODY));
  all_threads_have_the_same();
  CHECK(!syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY));
  all_threads_have_the_same();
  CHECK(setuid(0) && errno == EPERM && setgroups(0, 0) && errno == EPERM);
}
static void by_the_library(void) {
  CHECK(!setgroups(0, 0) && !setresgid(NOBODY, NOBODY, NOBODY) && !setresuid(NOBODY, NOBODY, NOBODY));
  all_threads_have_the_same();
}
static void *touch(void *of) { while (!stop) same(); return of; }
static void amid_faults(void) {
  pthread_t threads[3];
  for (int i = 0; i < 3; i++) CHECK(!pthread_create(threads + i, 0, touch, 0));
  for (int i = 0; i < 50; i++) CHECK(!seteuid(NOBODY) && !seteuid(0));
  by_the_library();
  stop = 1;
  for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], 0));
}
static void *give_up(void *of) { CHECK(!syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY)); return of; }
// What a thread does to itself is no other's affair: the rest may change their user afterwards.
static void another_threads_own(void) {
  pthread_t thread;
  CHECK(!pthread_create(&thread, 0, give_up, 0) && !pthread_join(thread, 0));
  by_the_library();
}
static void fork_and_say(void) {
  pid_t child = fork();
  if (!child) { same(); fill(); same(); _exit(0); }
  int status;
  if (child < 0 && errno == EPERM) { puts("no fork"); return; }
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  if (WIFEXITED(status) && !WEXITSTATUS(status)) puts("the child went on");
  else if (WIFSIGNALED(status)) printf("signal %d\n", WTERMSIG(status));
  else CHECK(!"the child found something else");
}
static void then_fork(void) { kept(), fork_and_say(); }
// It may open its own memory again, and so may a child; what is refused is only what a capability was for.
static void dumpable_then_fork(void) {
  kept();
  CHECK(!prctl(PR_SET_DUMPABLE, 1, 0, 0, 0));
  fork_and_say();
}
// Each call is made by each of our threads: nobody waits for longer than that takes.
static void often(void) {
  for (int i = 0; i < 1000; i++) CHECK(!prctl(PR_SET_KEEPCAPS, i % 2, 0, 0, 0));
  all_threads_have_the_same();
}
// A filter that forbids nothing: from then on there is a thread of ours more, which is to follow too.
static void filtered(void) {
  struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  struct sock_fprog program = {1, &allow};
  CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0));
  kept();
}
static volatile pid_t mapper;
static void *map_and_unmap(void *of) {
  for (mapper = gettid(); !stop;) {
    char *some = mmap(0, 16 * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(some != MAP_FAILED && !munmap(some, 16 * P));
  }
  return of;
}
static uint64_t blocked(pid_t thread) {
  char path[64], line[512];
  unsigned long set = 0;
  snprintf(path, sizeof path, "/proc/self/task/%d/status", thread);
  FILE *f = fopen(path, "r");
  CHECK(f);
  while (fgets(line, sizeof line, f) && !sscanf(line, "SigBlk: %lx", &set));
  fclose(f);
  return set;
}
// Whoever changes memory has signals blocked meanwhile, but for the one by which setuid(3) has each thread follow, and waits for that.
static void never_blocked(void) {
  const uint64_t usual = 1ul << (SIGUSR1 - 1), setuids = 1ul << (33 - 1);
  pthread_t thread;
  CHECK(!pthread_create(&thread, 0, map_and_unmap, 0));
  while (!mapper);
  int seen = 0;
  for (int i = 0; i < 100000 && seen < 100; i++) {
    uint64_t now = blocked(mapper);
    seen += (now & usual) != 0;
    CHECK(!(now & setuids));
  }
  CHECK(seen || !getenv("SELFPAGE_RUN"));
  stop = 1;
  CHECK(!pthread_join(thread, 0));
}
static const struct one_case cases[] = {
  CASE(kept), CASE(by_number), CASE(by_the_library), CASE(amid_faults), CASE(often), CASE(another_threads_own), CASE(then_fork),
  CASE(dumpable_then_fork),  CASE(filtered), CASE(never_blocked)};
int main(int argc, char **argv) {
  if (!has_done(cases, sizeof cases / sizeof *cases, argc, argv)) return 2;
  same();
  fill();
  same();
  puts("ok");
  return 0;
}
