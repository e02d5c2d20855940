// Forks at moments and in places where a pager is easily caught, one case each.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#define P 4096ul
#define MIB (1ul << 20)
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)

static void wait_ok(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static volatile int forks;
static void fork_here(int signal) {
  (void)signal;
  int before = errno;
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) _exit(0);
  wait_ok(child);
  forks++, errno = before;
}

// In the middle of what the library keeps of large blocks, and of the C library's own.
static void in_a_handler(void) {
  struct sigaction a = {.sa_handler = fork_here, .sa_flags = SA_RESTART};
  CHECK(!sigaction(SIGVTALRM, &a, 0));
  struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGVTALRM};
  struct itimerspec often = {{0, 3000000}, {0, 3000000}};
  timer_t timer;
  CHECK(!timer_create(CLOCK_MONOTONIC, &e, &timer) && !timer_settime(timer, 0, &often, 0));
  while (forks < 200) {
    for (int i = 0; i < 50; i++) free(strdup("x"));
    free(malloc(2 * MIB));
  }
  timer_delete(timer);
}

// Everything else goes out.
static void flood(void) {
  char *p = malloc(24 * MIB);
  CHECK(p);
  for (size_t i = 0; i < 24 * MIB; i += P) *(volatile char *)(p + i) = 1;
  free(p);
}

static ucontext_t outside, inside;
enum { STACK = 256 << 10, ROUNDS = 24 };
static int fork_below(size_t bytes) {
  volatile char above[bytes + 1];
  above[0] = above[bytes] = 5;
  // What lies further down the stack is out, and so may be what lies above.
  swapcontext(&inside, &outside);
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) {
    volatile char below[64 << 10];
    for (size_t i = 0; i < sizeof below; i += 1000) below[i] = 7;
    free(malloc(100)), flood();
    _exit(above[0] != 5 || above[bytes] != 5 || below[1000] != 7);
  }
  wait_ok(child);
  return above[0];
}
static void coroutine(void) {
  for (size_t round = 0; round < ROUNDS; round++) CHECK(fork_below(round * 7919 % 30 * 4096 + round * 509 % P) == 5);
}

// On a stack in managed memory, of which pages are out.
static void on_a_coroutine(void) {
  char *stack = malloc(STACK);
  CHECK(stack && !getcontext(&inside));
  memset(stack, 3, STACK);
  inside.uc_stack.ss_sp = stack, inside.uc_stack.ss_size = STACK, inside.uc_link = &outside;
  makecontext(&inside, coroutine, 0);
  for (int round = 0; round <= ROUNDS; round++) {
    CHECK(!swapcontext(&outside, &inside));
    flood();
  }
}

// The same on an alternate stack for signals.
static void fork_deep(int signal) {
  size_t bytes = forks * 7919 % 30 * P + forks * 509 % P;
  volatile char above[bytes + 1];
  above[0] = above[bytes] = 5;
  fork_here(signal);
  CHECK(above[0] == 5 && above[bytes] == 5);
}
static void on_a_signal_stack(void) {
  stack_t stack = {.ss_sp = malloc(STACK), .ss_size = STACK};
  struct sigaction a = {.sa_handler = fork_deep, .sa_flags = SA_ONSTACK};
  CHECK(stack.ss_sp && !sigaltstack(&stack, 0) && !sigaction(SIGUSR1, &a, 0));
  memset(stack.ss_sp, 3, STACK);
  while (forks < ROUNDS) flood(), raise(SIGUSR1);
}

// A fork is no point of cancellation.
static void *fork_cancelled(void *child) {
  CHECK(!pthread_cancel(pthread_self()));
  *(pid_t *)child = fork();
  if (!*(pid_t *)child) _exit(0);
  pthread_testcancel();
  return 0;
}
static void cancelled(void) {
  for (int i = 0; i < 10; i++) {
    pid_t child = -1;
    pthread_t thread;
    void *result;
    flood();
    CHECK(!pthread_create(&thread, 0, fork_cancelled, &child) && !pthread_join(thread, &result));
    CHECK(result == PTHREAD_CANCELED && child > 0);
    wait_ok(child);
  }
}

// The first handler of the child's finds empty what is to be empty in a child.
static volatile char *empty;
static pid_t parent;
static void look(int signal) {
  (void)signal;
  if (getpid() != parent) _exit(empty[0] || empty[MIB]);
}
static void wiped_before_handlers(void) {
  empty = mmap(0, 2 * MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(empty != MAP_FAILED && !madvise((void *)empty, 2 * MIB, MADV_WIPEONFORK));
  parent = getpid(), signal(SIGUSR1, look);
  for (int i = 0; i < 20; i++) {
    empty[0] = empty[MIB] = 1;
    pid_t child = fork();
    if (!child) for (;;) pause();
    CHECK(child > 0 && !kill(child, SIGUSR1));
    wait_ok(child);
    CHECK(empty[0] == 1 && empty[MIB] == 1);
  }
}

// Neither the parent's errno nor the child's is another after a fork.
static void errno_is_kept(void) {
  for (int i = 0; i < 5; i++) {
    errno = 77;
    pid_t child = fork();
    int after = errno;
    if (!child) _exit(after != 77);
    CHECK(child > 0 && after == 77);
    wait_ok(child);
  }
}
static void errno_without_a_child(void) { // it says why there is none
  struct rlimit none = {0, 0};
  // It keeps the right that a child needs, so it is the kernel that says no.
  struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  struct __user_cap_data_struct sets[2] = {{1 << CAP_SYS_PTRACE, 1 << CAP_SYS_PTRACE, 0}};
  CHECK(!setrlimit(RLIMIT_NPROC, &none) && !prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) && !setresuid(65534, 65534, 65534));
  CHECK(!syscall(SYS_capset, &header, sets) && !prctl(PR_SET_DUMPABLE, 1, 0, 0, 0));
  errno = 77;
  CHECK(fork() == -1 && errno == EAGAIN);
}

// At whatever limit, a fork fails or its child has all its memory, and the parent goes on.
static int fork_at_limit(char *p) {
  pid_t child = fork();
  int why = errno;
  if (!child) { for (size_t i = 0; i < 12 * MIB; i += P) if (p[i] != 7) _exit(1); _exit(0); }
  if (child > 0) wait_ok(child);
  for (size_t i = 0; i < 12 * MIB; i += P) CHECK(p[i] == 7);
  return child > 0 ? 0 : why;
}
static void at_limits(void) {
  struct rlimit files, few, addresses;
  char *p = malloc(12 * MIB);
  memset(p, 7, 12 * MIB);
  // What is inherited besides would stand in the program's table alone, and hide a limit that is too low for the pager threads' table.
  CHECK(!getrlimit(RLIMIT_NOFILE, &files) && !getrlimit(RLIMIT_AS, &addresses) && !syscall(SYS_close_range, 3, ~0U, 0));
  for (int closed = 0; closed < 2; closed++) {
    int could = 0, could_not = 0, least = closed ? 10 : 0, end = closed ? 18 : 24;
    CHECK(!closed || !close(0));
    for (int most = least; most < end; most++) {
      few = (struct rlimit){most, files.rlim_max};
      CHECK(!setrlimit(RLIMIT_NOFILE, &few));
      int why = fork_at_limit(p);
      CHECK(!why || why == EAGAIN);
      could += !why, could_not += !!why;
    }
    CHECK(!setrlimit(RLIMIT_NOFILE, &files) && could > (end - least) / 3 && could_not > (end - least) / 3);
  }
  few = (struct rlimit){64 * MIB, addresses.rlim_max};
  CHECK(!setrlimit(RLIMIT_AS, &few) && fork_at_limit(p) == ENOMEM && !setrlimit(RLIMIT_AS, &addresses) && !fork_at_limit(p));
}

// The same at the one that this program was started under, while pager threads have all that they open.
static void *fill_block(void *unused) {
  char *block = malloc(4 * MIB);
  for (int value = 0; value < 8; value++) memset(block, value, 4 * MIB);
  free(block);
  return unused;
}
static void at_this_limit(void) {
  pthread_t threads[3];
  char *p = malloc(12 * MIB);
  memset(p, 7, 12 * MIB);
  for (int i = 0; i < 3; i++) CHECK(!pthread_create(threads + i, 0, fill_block, 0));
  for (int forks = 0; forks < 3; forks++) {
    int why = fork_at_limit(p);
    CHECK(!why || why == EAGAIN);
  }
  for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], 0));
}

// The same at limits on data: from less than there is to more than a child needs.
static size_t data_kib(void) {
  char line[256];
  size_t kib = 0;
  FILE *status = fopen("/proc/self/status", "r");
  CHECK(status);
  while (fgets(line, sizeof line, status)) sscanf(line, "VmData: %zu", &kib);
  fclose(status);
  return kib;
}
static void at_data_limits(void) {
  struct rlimit data;
  char *p = malloc(12 * MIB);
  int could = 0, could_not = 0;
  memset(p, 7, 12 * MIB);
  CHECK(!getrlimit(RLIMIT_DATA, &data) && !fork_at_limit(p));
  for (long more = -24; more < 72; more++) {
    struct rlimit few = {(data_kib() << 10) + more * 8 * P, data.rlim_max};
    CHECK(!setrlimit(RLIMIT_DATA, &few));
    int why = fork_at_limit(p);
    CHECK(!why || why == ENOMEM);
    could += !why, could_not += !!why;
    CHECK(!setrlimit(RLIMIT_DATA, &data));
  }
  CHECK(could > 8 && could_not > 8);
}

// Nothing much is opened before a fork: another thread may be about to open something itself, or to fork.
static volatile int forked, most;
static void *watch_numbers(void *first) {
  while (!forked) {
    int open = 0;
    for (int n = *(int *)first; n < *(int *)first + 9; n++) open += fcntl(n, F_GETFD) >= 0;
    if (open > most) most = open;
  }
  return 0;
}
static void opens_little(void) {
  pthread_t thread;
  int first = dup(0);
  CHECK(first >= 0 && !close(first) && !pthread_create(&thread, 0, watch_numbers, &first));
  for (int i = 0; i < 200; i++) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) _exit(0);
    wait_ok(child);
  }
  forked = 1;
  CHECK(!pthread_join(thread, 0) && most < 4);
}

// By number, with a descriptor of the child: QProcess, as Qt makes it.
struct arguments { uint64_t flags, pidfd, child, parent, signal, rest[6]; };
static pid_t by_clone(int *pidfd) { return syscall(SYS_clone, CLONE_PIDFD | SIGCHLD, 0, pidfd, 0, 0); }
static pid_t by_clone3(int *pidfd) {
  struct arguments a = {.flags = CLONE_PIDFD, .pidfd = (uintptr_t)pidfd, .signal = SIGCHLD};
  return syscall(SYS_clone3, &a, sizeof a);
}
static useconds_t parents_nap;
static void nap(void) { usleep(parents_nap); }
static void use_pidfd(pid_t (*make)(int *), int *pidfd) {
  char *p = malloc(12 * MIB);
  struct rlimit files, none;
  volatile int *may_end = mmap(0, P, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(p && memset(p, 7, 12 * MIB) && !getrlimit(RLIMIT_NOFILE, &files) && may_end != MAP_FAILED);
  for (int i = 0; i < 3; i++) {
    *pidfd = -1, *may_end = 0;
    pid_t child = make(pidfd);
    CHECK(child >= 0);
    if (!child) {
      for (size_t at = 0; at < 12 * MIB; at += P) if (p[at] != 7) _exit(1);
      p[0] = 8;
      for (int n = 3; n < 64; n++) if (fcntl(n, F_GETFD) >= 0) _exit(2);
      for (int n = 0; !*may_end && n < 30000; n++) usleep(1000); // not for ever, where the parent fails
      _exit(3);
    }
    struct pollfd ended = {*pidfd, POLLIN, 0};
    siginfo_t about;
    CHECK(fcntl(*pidfd, F_GETFD) == FD_CLOEXEC && !poll(&ended, 1, 0));
    *may_end = 1;
    CHECK(poll(&ended, 1, -1) == 1);
    CHECK(!waitid(P_PIDFD, *pidfd, &about, WEXITED) && about.si_pid == child && about.si_status == 3 && !close(*pidfd));
  }
  // One that ends at once, for which nobody waits, while the parent takes its time.
  CHECK(signal(SIGCHLD, SIG_IGN) != SIG_ERR);
  parents_nap = 100000;
  for (int i = 0; i < 3; i++) {
    pid_t child = make(pidfd);
    CHECK(child >= 0);
    if (!child) _exit(0);
    struct pollfd ended = {*pidfd, POLLIN, 0};
    CHECK(poll(&ended, 1, -1) == 1 && ended.revents & POLLIN && !close(*pidfd));
  }
  CHECK(signal(SIGCHLD, SIG_DFL) != SIG_ERR);
  parents_nap = 0;
  // What the kernel refuses, before there is a child.
  CHECK(make((int *)8) == -1 && errno == EFAULT && fcntl(3, F_GETFD) == -1);
  none = (struct rlimit){3, files.rlim_max};
  CHECK(!setrlimit(RLIMIT_NOFILE, &none) && make(pidfd) == -1 && errno == EMFILE && !setrlimit(RLIMIT_NOFILE, &files));
  CHECK(waitpid(-1, 0, 0) == -1 && errno == ECHILD && p[0] == 7);
  free(p), munmap((void *)may_end, P);
}
static void with_pidfd(void) {
  int *pidfd = malloc(MIB), one;
  CHECK(pidfd && !pthread_atfork(0, nap, 0));
  close_range(3, 63, 0);
  use_pidfd(by_clone, pidfd), use_pidfd(by_clone3, pidfd);
  struct arguments a = {CLONE_PIDFD | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID, (uintptr_t)pidfd, (uintptr_t)&one, (uintptr_t)&one, SIGCHLD, {0}};
  for (size_t len = 64; len <= sizeof a; len += 8) {
    pid_t child = syscall(SYS_clone3, &a, len);
    CHECK(child >= 0);
    if (!child) pidfd[0] = -1, _exit(one != getpid());
    wait_ok(child);
    CHECK(one == child && !close(*pidfd));
  }
  // One place is not for both.
  a.parent = a.pidfd;
  CHECK(syscall(SYS_clone3, &a, sizeof a) == -1 && errno == EINVAL);
  CHECK(syscall(SYS_clone, CLONE_PIDFD | CLONE_PARENT_SETTID | SIGCHLD, 0, pidfd, 0, 0) == -1 && errno == EINVAL);
  CHECK(syscall(SYS_clone3, 8ul, sizeof a) == -1 && errno == EFAULT);
}

// A thread that has limited itself (Landlock) to these directories, or to none: a fork fails, or the child has all its memory.
enum { READ = 4, WRITE = 2, CREATE_RULES = 444, ADD_RULE = 445, RESTRICT = 446 };
static void *limited_to(void *directories) {
  uint64_t handled = READ | WRITE;
  int rules = syscall(CREATE_RULES, &handled, sizeof handled, 0);
  CHECK(rules >= 0);
  for (const char **name = directories; *name; name++) {
    struct { uint64_t access; int parent; } __attribute__((packed)) rule = {READ | WRITE, open(*name, O_PATH | O_CLOEXEC)};
    CHECK(!syscall(ADD_RULE, rules, 1, &rule, 0) && !close(rule.parent));
  }
  CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !syscall(RESTRICT, rules, 0) && !close(rules));
  char *p = malloc(12 * MIB);
  CHECK(p && memset(p, 7, 12 * MIB));
  intptr_t why = fork_at_limit(p);
  free(p);
  return (void *)why;
}
static void after_landlock(void) {
  if (syscall(CREATE_RULES, 0, 0, 1) < 0) { puts("no landlock"); exit(0); }
  const char *sets[][3] = {{0}, {"/proc", 0}, {"/var/tmp", 0}, {"/proc", "/var/tmp", 0}};
  for (int i = 0; i < 4; i++) {
    pthread_t thread;
    void *why;
    CHECK(!pthread_create(&thread, 0, limited_to, sets[i]) && !pthread_join(thread, &why));
    CHECK((intptr_t)why == (i < 3 ? EPERM : 0));
  }
  // The others have not.
  char *p = malloc(12 * MIB);
  CHECK(p && memset(p, 7, 12 * MIB) && !fork_at_limit(p));
}

// As many children at a time as a server or a shell may have, each with all its memory.
enum { CHILDREN = 300 };
static void many_children(void) {
  char *p = malloc(12 * MIB);
  int go[2];
  static pid_t children[CHILDREN];
  CHECK(p && memset(p, 7, 12 * MIB) && !pipe(go));
  for (int i = 0; i < CHILDREN; i++) {
    children[i] = fork();
    CHECK(children[i] >= 0);
    if (children[i]) continue;
    char end;
    p[i * P] = 8;
    CHECK(!close(go[1]) && !read(go[0], &end, 1));
    for (size_t at = i % 10 * MIB; at < (i % 10 + 2) * MIB; at += P) if (p[at] != 7 + (at == i * P)) _exit(1);
    _exit(0);
  }
  CHECK(!close(go[1]));
  for (int i = 0; i < CHILDREN; i++) wait_ok(children[i]);
}

// Where the store has as many processes as it can, here by their locks alone, a fork fails, and works again when there are fewer.
static const char *store;
static void in_a_full_family(void) {
  char *p = malloc(12 * MIB);
  int file = open(store, O_RDWR | O_CLOEXEC);
  struct flock all = {.l_type = F_WRLCK, .l_start = (1l << 40) + 1, .l_len = 1 << 20};
  CHECK(p && memset(p, 7, 12 * MIB) && file >= 0 && !fork_at_limit(p) && !fcntl(file, F_OFD_SETLK, &all));
  for (int i = 0; i < 3; i++) CHECK(fork_at_limit(p) == EAGAIN);
  CHECK(!close(file) && !fork_at_limit(p));
}

// As a program that starts others may, so that they are no children of its own.
static void between_vfork_and_exec(void) {
  char *volatile p = malloc(12 * MIB);
  CHECK(p && memset(p, 7, 12 * MIB));
  pid_t child = vfork();
  CHECK(child >= 0);
  if (!child) {
    pid_t own = fork();
    if (!own) {
      for (size_t at = 0; at < 12 * MIB; at += P) if (p[at] != 7) _exit(2);
      _exit(0);
    }
    int status;
    _exit(own < 0 || waitpid(own, &status, 0) != own || status);
  }
  wait_ok(child);
  for (size_t at = 0; at < 12 * MIB; at += P) CHECK(p[at] == 7);
}

static struct { const char *name; void (*what)(void); } cases[] = {
  {"in_a_handler", in_a_handler}, {"on_a_coroutine", on_a_coroutine}, {"on_a_signal_stack", on_a_signal_stack}, {"cancelled", cancelled},
  {"wiped_before_handlers", wiped_before_handlers}, {"errno_is_kept", errno_is_kept}, {"errno_without_a_child", errno_without_a_child}, {"at_limits", at_limits}, {"at_this_limit", at_this_limit},
  {"at_data_limits", at_data_limits}, {"opens_little", opens_little}, {"with_pidfd", with_pidfd},
  {"after_landlock", after_landlock}, {"many_children", many_children}, {"in_a_full_family", in_a_full_family},
  {"between_vfork_and_exec", between_vfork_and_exec}};
int main(int argc, char **argv) {
  // Where it hangs it ends, with its children.
  alarm(60);
  store = argv[2];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc > 1 && !strcmp(argv[1], cases[i].name)) { cases[i].what(); puts("ok"); return 0; }
  return 2;
}
