// What breaks pagers, one case each.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#define P 4096ul
#define MIB (1ul << 20)
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)
typedef volatile uint64_t word;
static char *full(size_t n, uint64_t seed) {
  char *p = malloc(n);
  CHECK(p);
  for (size_t i = 0; i + 8 <= n; i += P) *(word *)(p + i) = i + seed;
  return p;
}
static void same(char *p, size_t n, uint64_t seed) {
  for (size_t i = 0; i + 8 <= n; i += P) CHECK(*(word *)(p + i) == i + seed);
}
static void flood(void) { char *p = full(24 * MIB, 1); same(p, 24 * MIB, 1); free(p); }
static void wait_ok(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Blocks of all sizes come and go, with what belongs in them known from their place in a table.
static void storm_of(unsigned seed, int turns, size_t slots) {
  struct block { unsigned char *at; size_t len; unsigned char mark; } *b = calloc(slots, sizeof *b);
  for (int t = 0; t < turns; t++) {
    size_t i = rand_r(&seed) % slots, len = 1 + rand_r(&seed) % (t % 64 ? 3000 : t % 1024 ? 90000 : 2500000);
    if (b[i].at) {
      CHECK(malloc_usable_size(b[i].at) >= b[i].len);
      for (size_t k = 0; k < b[i].len; k += 997) CHECK(b[i].at[k] == b[i].mark);
      CHECK(b[i].at[b[i].len - 1] == b[i].mark);
    }
    switch (rand_r(&seed) % 4) {
    case 0: free(b[i].at), b[i].at = 0; continue;
    case 1: {
      unsigned char *new = realloc(b[i].at, len);
      size_t kept = b[i].at ? (len < b[i].len ? len : b[i].len) : 0;
      for (size_t k = 0; k < kept; k += 1 + kept / 50) CHECK(new[k] == b[i].mark);
      b[i].at = new;
      break;
    }
    case 2: {
      size_t align = 16ul << rand_r(&seed) % 10;
      free(b[i].at);
      CHECK(!posix_memalign((void **)&b[i].at, align, len) && (uintptr_t)b[i].at % align == 0);
      break;
    }
    default:
      free(b[i].at);
      b[i].at = calloc(1, len);
      for (size_t k = 0; k < len; k += 61) CHECK(!b[i].at[k]);
    }
    b[i].len = len, b[i].mark = t;
    memset(b[i].at, b[i].mark, len);
  }
  for (size_t i = 0; i < slots; i++) free(b[i].at);
  free(b);
}
static void storm(void) {
  storm_of(1, 30000, 8000);
  volatile size_t much = SIZE_MAX / 2;
  CHECK(!malloc(much) && errno == ENOMEM && !calloc(much, 4) && !reallocarray(0, much, 4));
  void *p;
  CHECK(posix_memalign(&p, 24, 8) == EINVAL);
  free(strdup("x"));
}
static void *stormy(void *n) { storm_of((uintptr_t)n, 8000, 2000); return 0; }
static void threads(void) {
  pthread_t t[4];
  for (int round = 0; round < 3; round++) {
    for (uintptr_t i = 0; i < 4; i++) CHECK(!pthread_create(&t[i], 0, stormy, (void *)(i + 1)));
    for (int i = 0; i < 4; i++) CHECK(!pthread_join(t[i], 0));
  }
}
static void fork_and_go_on(void) {
  char *p = full(24 * MIB, 1);
  for (int kind = 0; kind < 4; kind++) {
    pid_t child = kind == 0 ? fork() : kind == 1 ? _Fork() : kind == 2 ? syscall(SYS_fork) : syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    CHECK(child >= 0);
    if (!child) {
      same(p, 24 * MIB, 1);
      for (size_t i = 0; i < 24 * MIB; i += P) *(word *)(p + i) = i + 77;
      char *q = full(8 * MIB, 3);
      same(q, 8 * MIB, 3), same(p, 24 * MIB, 77);
      pid_t grandchild = fork();
      if (!grandchild) { same(p, 24 * MIB, 77); exit(0); }
      wait_ok(grandchild);
      exit(0);
    }
    same(p, 24 * MIB, 1);
    char *q = full(8 * MIB, 5);
    wait_ok(child);
    same(q, 8 * MIB, 5), same(p, 24 * MIB, 1), free(q);
  }
}
static volatile int stop;
static void *churn(void *n) {
  unsigned seed = (uintptr_t)n;
  while (!stop) { size_t len = 1 + rand_r(&seed) % 200000; char *p = malloc(len); memset(p, 1, len); free(p); void *m = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); *(char *)m = 1; munmap(m, MIB); }
  return 0;
}
// Forks while other threads are inside malloc and mmap.
static void fork_amid(void) {
  pthread_t t[2];
  char *p = full(12 * MIB, 9);
  for (uintptr_t i = 0; i < 2; i++) CHECK(!pthread_create(&t[i], 0, churn, (void *)(i + 1)));
  for (int i = 0; i < 15; i++) {
    pid_t child = fork();
    if (!child) { free(malloc(100000)); same(p, 12 * MIB, 9); _exit(0); }
    wait_ok(child);
  }
  stop = 1;
  for (int i = 0; i < 2; i++) pthread_join(t[i], 0);
}
static void *fork_here(void *p) { pid_t child = fork(); if (!child) { same(p, 24 * MIB, 2); free(strdup("x")); exit(0); } wait_ok(child); return 0; }
static void *churn_small(void *n) { while (!stop) free(malloc(100)), free(strdup("x")); return 0; }
// The same, as often as it takes to meet every lock in use.
static void fork_often(void) {
  pthread_t t[3];
  for (int i = 0; i < 3; i++) CHECK(!pthread_create(&t[i], 0, churn_small, 0));
  for (int i = 0; i < 300; i++) {
    pid_t child = fork();
    if (!child) { free(malloc(100)); free(strdup("x")); _exit(0); }
    wait_ok(child);
  }
  stop = 1;
  for (int i = 0; i < 3; i++) pthread_join(t[i], 0);
}
static void fork_from_thread(void) {
  char *p = full(24 * MIB, 2);
  pthread_t t;
  for (int i = 0; i < 3; i++) CHECK(!pthread_create(&t, 0, fork_here, p) && !pthread_join(t, 0));
}
extern char **environ;
// As a search through PATH: the child, in our memory, tries two programs that are not there before it ends or finds one.
static void vfork_search(void) {
  char *p = full(16 * MIB, 4), *args[] = {"true", 0};
  for (int found = 0; found < 2; found++) {
    pid_t child = vfork();
    if (!child) {
      execve("/nonexistent/true", args, environ), execv("/nonexistent/too/true", args);
      if (found) execvp(args[0], args);
      _exit(found ? 9 : 0);
    }
    wait_ok(child);
  }
  same(p, 16 * MIB, 4);
}
static void fork_exec(void) {
  char *p = full(16 * MIB, 4);
  char *args[] = {"/bin/sh", "-c", "x=$(echo in; /bin/echo out); test \"$x\" = 'in\nout' -o -n \"$x\"", 0};
  pid_t child = fork();
  if (!child) { execv(args[0], args); _exit(9); }
  wait_ok(child);
  if (!(child = fork())) { char *e[] = {"GREETING=8", 0}; execle("/bin/sh", "sh", "-c", "test $GREETING$1$2$3$4$5 = 812345", "0", "1", "2", "3", "4", "5", (char *)0, e); _exit(9); }
  wait_ok(child);
  if (!(child = vfork())) { execve(args[0], args, environ); _exit(9); }
  wait_ok(child);
  CHECK(!posix_spawn(&child, args[0], 0, 0, args, environ));
  wait_ok(child);
  CHECK(!system("exit 0"));
  if (!(child = fork())) { CHECK(execl("/nonexistent", "1", "2", "3", "4", "5", "6", "7", (char *)0) == -1 && errno == ENOENT); same(p, 16 * MIB, 4); exit(0); }
  wait_ok(child);
  same(p, 16 * MIB, 4);
}
static void exec_at(void) { // by descriptor of a directory, through libc and by number
  char *p = full(16 * MIB, 4), *args[] = {"true", 0};
  for (int raw = 0; raw < 2; raw++) {
    pid_t child = fork();
    if (!child) {
      CHECK(execveat(AT_FDCWD, "/nonexistent", args, environ, 0) == -1 && errno == ENOENT);
      if (raw) syscall(SYS_execveat, AT_FDCWD, "/bin/true", args, environ, 0);
      else execveat(AT_FDCWD, "/bin/true", args, environ, 0);
      _exit(9);
    }
    wait_ok(child);
  }
  same(p, 16 * MIB, 4);
}
static void *use_library(void *library) {
  int *(*slot)(void) = dlsym(library, "slot");
  CHECK(slot && slot()[0] == 5 && slot()[30000] == 0);
  slot()[30000] = 1;
  return 0;
}
static void dlopen_tls(void) {
  char *p = full(24 * MIB, 1);
  for (int i = 0; i < 3; i++) {
    void *library = dlopen(getenv("SELFPAGE_TEST_LIBRARY"), RTLD_NOW);
    CHECK(library);
    pthread_t t;
    for (int k = 0; k < 5; k++) { CHECK(!pthread_create(&t, 0, use_library, library)); flood(); pthread_join(t, 0); }
    use_library(library);
    dlclose(library);
  }
  same(p, 24 * MIB, 1);
}
static sem_t held;
static void *hold_library(void *library) {
  use_library(library);
  sem_post(&held);
  for (;;) pause();
  return 0;
}
static void fork_with_libraries(void) { // what a child has of threads that it does not have knows less of storage than there is by now
  char *p = full(8 * MIB, 1);
  void *library = dlopen(getenv("SELFPAGE_TEST_LIBRARY"), RTLD_NOW);
  CHECK(library && !sem_init(&held, 0, 0));
  pthread_t t;
  for (int k = 0; k < 8; k++) { CHECK(!pthread_create(&t, 0, hold_library, library)); sem_wait(&held); }
  for (int k = 0; k < 40; k++) { // each copy is one more library
    char name[64];
    int from = open(getenv("SELFPAGE_TEST_LIBRARY"), O_RDONLY), to = memfd_create("copy", 0);
    struct stat s;
    CHECK(from >= 0 && to >= 0 && !fstat(from, &s) && sendfile(to, from, 0, s.st_size) == s.st_size);
    sprintf(name, "/proc/self/fd/%d", to);
    use_library(dlopen(name, RTLD_NOW));
    close(from); // and the copy stays: a library of that name is open already
  }
  for (int k = 0; k < 3; k++) {
    pid_t child = fork();
    if (!child) {
      flood();
      for (int j = 0; j < 12; j++) CHECK(!pthread_create(&t, 0, use_library, library) && !pthread_join(t, 0));
      same(p, 8 * MIB, 1);
      _exit(5);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 5);
  }
  flood();
  same(p, 8 * MIB, 1);
}
static volatile int *bug;
static void own_segv(void) { // ends by SIGSEGV, as without us
  flood();
  *bug = 1;
}
static void beyond_the_heap(void) {
  volatile char *p = malloc(4 * MIB);
  p[64 * MIB * 16] = 1;
}
static void *handled_at;
static char *guarded;
static void on_segv(int s, siginfo_t *i, void *c) { handled_at = i->si_addr; mprotect(guarded, P, 3); }
static void own_handler(void) { // as a collector's write barrier
  struct sigaction a = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &a, 0);
  guarded = aligned_alloc(P, 8 * MIB);
  memset(guarded, 3, 8 * MIB);
  for (int i = 0; i < 200; i++) {
    CHECK(!mprotect(guarded, P, PROT_READ));
    if (i % 50 == 0) flood();
    guarded[9] = i;
    CHECK(handled_at == guarded + 9 && guarded[9] == (char)i && guarded[10] == 3);
  }
}
static void close_all(void) {
  char *p = full(24 * MIB, 6);
  CHECK(!close_range(3, ~0u, 0));
  same(p, 24 * MIB, 6);
  for (size_t i = 0; i < 24 * MIB; i += P) *(word *)(p + i) = i + 8;
  same(p, 24 * MIB, 8);
  pid_t child = fork();
  if (!child) { same(p, 24 * MIB, 8); _exit(0); }
  wait_ok(child);
}
// The kernel holds more of this process's pages at once, for another, than there are frames.
static void read_by_another(void) {
  char *p = full(8 * MIB, 1);
  pid_t child = fork();
  if (!child) {
    struct iovec to = {malloc(4 * MIB), 4 * MIB}, from = {p, 4 * MIB};
    ssize_t got = process_vm_readv(getppid(), &to, 1, &from, 1, 0);
    _exit(got > 0 && got < (ssize_t)(4 * MIB) ? 0 : 1);
  }
  wait_ok(child);
  usleep(1000000);
  same(p, 8 * MIB, 1);
}
static void calls_on_absent_pages(void) {
  char name[] = "/var/tmp/selfpage-absent-XXXXXX", *p = full(16 * MIB, 2);
  int file = mkstemp(name);
  CHECK(file >= 0 && !unlink(name));
  for (size_t at = 0; at < 16 * MIB;) { ssize_t n = write(file, p + at, 16 * MIB - at); CHECK(n > 0); at += n; }
  char *q = malloc(16 * MIB);
  for (size_t at = 0; at < 16 * MIB;) { ssize_t n = pread(file, q + at, 16 * MIB - at, at); CHECK(n > 0); at += n; }
  same(p, 16 * MIB, 2);
  CHECK(!memcmp(p, q, 16 * MIB));
  int pipes[2];
  CHECK(!pipe(pipes) && write(pipes[1], p + 8 * MIB, 100) == 100 && read(pipes[0], q + 4 * MIB, 100) == 100);
  CHECK(!memcmp(p + 8 * MIB, q + 4 * MIB, 100));
}
struct shared { pthread_mutex_t lock; char room[P]; };
static void *die_with_lock(void *lock) { pthread_mutex_lock(lock); flood(); return 0; }
static void robust(void) {
  struct shared *s = malloc(sizeof *s);
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a), pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
  CHECK(!pthread_mutex_init(&s->lock, &a));
  for (int i = 0; i < 5; i++) {
    pthread_t t;
    CHECK(!pthread_create(&t, 0, die_with_lock, &s->lock) && !pthread_join(t, 0));
    flood();
    CHECK(pthread_mutex_lock(&s->lock) == EOWNERDEAD && !pthread_mutex_consistent(&s->lock) && !pthread_mutex_unlock(&s->lock));
  }
}
// A block is freed with a robust mutex in it, and the next one lies where it lay.
static void robust_again(void) {
  char *first = malloc(2 * MIB);
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a), pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
  for (int i = 0; i < 4; i++) {
    char *p = i ? malloc(2 * MIB) : first;
    CHECK(p == first);
    pthread_mutex_t *in_tail = (pthread_mutex_t *)(p + MIB + MIB / 2), *lock = i < 3 ? (pthread_mutex_t *)p : in_tail;
    // The end of the block is cut off, with a mutex in it: the last time one lies there again.
    if (i == 2) CHECK(!pthread_mutex_init(in_tail, &a) && realloc(p, MIB + P) == p);
    CHECK(!pthread_mutex_init(lock, &a));
    flood();
    pthread_t t;
    CHECK(!pthread_create(&t, 0, die_with_lock, lock) && !pthread_join(t, 0));
    flood();
    CHECK(pthread_mutex_trylock(lock) == EOWNERDEAD && !pthread_mutex_consistent(lock) && !pthread_mutex_unlock(lock));
    free(p);
  }
}
static void *die_and_send_out(void *lock) {
  pthread_mutex_lock(lock);
  madvise((void *)((uintptr_t)lock & -P), P, MADV_PAGEOUT);
  return 0;
}
static void owner_dies(pthread_mutex_t *lock) {
  pthread_t t;
  CHECK(!pthread_create(&t, 0, die_and_send_out, lock) && !pthread_join(t, 0));
  CHECK(pthread_mutex_trylock(lock) == EOWNERDEAD && !pthread_mutex_consistent(lock) && !pthread_mutex_unlock(lock));
}
// What the kernel will touch stays in core, whatever the program locks, unlocks or drops.
static void robust_unlocked(void) {
  flood();
  char *m = mmap(0, 2 * P, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *half = mmap(0, 4 * MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  unsigned char in;
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a), pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_t *lock = (void *)(m + 64);
  CHECK(!mlock(half, 4 * MIB)); // as much as may be
  CHECK(!pthread_mutex_init(lock, &a));
  owner_dies(lock);
  CHECK(!munlockall() && !mlock(half, 4 * MIB) && !munlock(half, 4 * MIB));
  owner_dies(lock);
  CHECK(!mlock(m, 2 * P) && madvise(m, P, MADV_DONTNEED) == -1 && errno == EINVAL && !munlock(m, 2 * P));
  owner_dies(lock);
  pid_t child = fork();
  if (!child) { owner_dies(lock); CHECK(!munlock(m, P)); owner_dies(lock), _exit(0); }
  wait_ok(child);
  lock = (void *)mremap(m, 2 * P, 4 * P, MREMAP_MAYMOVE | MREMAP_FIXED, half) + 64;
  CHECK((char *)lock == half + 64 && !munlockall());
  owner_dies(lock);
  half[1] = 1;
  CHECK(!madvise(half, P, MADV_DONTNEED) && !half[1] && !half[64] && !madvise(half, P, MADV_PAGEOUT) && !mincore(half, P, &in) && in);
  CHECK(!mlock(half, P) && !madvise(half, P, 24 /* DONTNEED_LOCKED */) && !munlock(half, P) && !madvise(half, P, MADV_PAGEOUT) && !mincore(half, P, &in) && in);
  CHECK(!madvise(half, P, 102 /* GUARD_INSTALL */) && !madvise(half, P, 103 /* GUARD_REMOVE */) && !half[64]);
  CHECK(!madvise(half, P, MADV_PAGEOUT) && !mincore(half, P, &in) && !in); // what a guard was put in place of is nobody's
}
static void *small_stack(void *n) { char here[20000]; memset(here, 1, sizeof here); flood(); for (int i = 0; i < 20; i++) free(malloc(3 * MIB)); return here[77] == 1 ? n : 0; }
static void own_stacks(void) { // stacks in managed memory, and calls made from there
  for (int i = 0; i < 6; i++) {
    size_t len = 256 << 10;
    void *stack = i % 2 ? mmap(0, len, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : aligned_alloc(P, len), *result;
    pthread_attr_t a;
    pthread_t t;
    CHECK(!pthread_attr_init(&a) && !pthread_attr_setstack(&a, stack, len));
    CHECK(!pthread_create(&t, &a, small_stack, stack) && !pthread_join(t, &result) && result == stack);
    if (i % 2) munmap(stack, len); else free(stack);
  }
}
static volatile long ticks;
static char *seen_by_handler;
static void on_tick(int s) { ticks++; (void)*(word *)(seen_by_handler + ticks * P * 7 % (16 * MIB)); void *m = mmap(0, P, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); *(char *)m = 1; munmap(m, P); }
static void signals(void) { // the handler runs on a managed stack, reads absent pages, and maps
  stack_t stack = {.ss_sp = malloc(1 * MIB), .ss_size = 1 * MIB};
  CHECK(!sigaltstack(&stack, 0));
  seen_by_handler = full(16 * MIB, 1);
  struct sigaction a = {.sa_handler = on_tick, .sa_flags = SA_ONSTACK | SA_RESTART};
  sigaction(SIGALRM, &a, 0);
  struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
  timer_t timer;
  struct itimerspec often = {{0, 300000}, {0, 300000}};
  CHECK(!timer_create(CLOCK_MONOTONIC, &e, &timer) && !timer_settime(timer, 0, &often, 0));
  storm_of(3, 8000, 3000);
  flood();
  timer_delete(timer);
  CHECK(ticks > 20);
  same(seen_by_handler, 16 * MIB, 1);
}
static void map_here(int s) { ticks++; void *m = mmap(0, P, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); *(char *)m = 1; munmap(m, P); }
static void fork_amid_signals(void) { // whose handler maps
  char *p = full(16 * MIB, 1);
  struct sigaction a = {.sa_handler = map_here, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &a, 0);
  struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
  timer_t timer;
  struct itimerspec often = {{0, 2000000}, {0, 2000000}};
  CHECK(!timer_create(CLOCK_MONOTONIC, &e, &timer) && !timer_settime(timer, 0, &often, 0));
  for (int i = 0; i < 20; i++) {
    pid_t child = fork();
    if (!child) { same(p + MIB, MIB, MIB + 1); _exit(0); }
    wait_ok(child);
  }
  timer_delete(timer);
  same(p, 16 * MIB, 1);
}
static void *last(void *n) { flood(); usleep(100000); puts("ok"); return 0; }
static void main_ends_first(void) {
  pthread_t t;
  CHECK(!pthread_create(&t, 0, last, 0) && !pthread_detach(t));
  pthread_exit(0);
}
// Cancelled and at no point of cancellation any more, the last thread ends the process as others do.
static void *last_and_cancelled(void *n) { last(n), fflush(stdout); CHECK(!pthread_cancel(pthread_self())); return 0; }
static void last_is_cancelled(void) {
  pthread_t t;
  CHECK(!pthread_create(&t, 0, last_and_cancelled, 0) && !pthread_detach(t));
  pthread_exit(0);
}
static volatile int first_ends;
static void exit_by_number(void) { flood(); first_ends = 1; syscall(SYS_exit, 7); }
static void *ends_by_number(void *n) {
  while (!first_ends) usleep(1000);
  flood(), usleep(100000), syscall(SYS_exit, 3);
  return 0;
}
static void both_exit_by_number(void) { // what the last thread ends with is the status
  pthread_t t;
  CHECK(!pthread_create(&t, 0, ends_by_number, 0) && !pthread_detach(t));
  exit_by_number();
}
static pthread_barrier_t all_there;
static void *ends(void *n) { pthread_barrier_wait(&all_there); return 0; }
static void all_end_at_once(void) { // whichever is the last, the process ends
  flood();
  for (int i = 0; i < 20; i++) {
    pid_t child = fork();
    if (!child) {
      pthread_t t;
      pthread_barrier_init(&all_there, 0, 4);
      for (int i = 0; i < 3; i++) CHECK(!pthread_create(&t, 0, ends, 0) && !pthread_detach(t));
      pthread_barrier_wait(&all_there);
      pthread_exit(0);
    }
    wait_ok(child);
  }
}
static void change_user(void) { // every thread has to follow, pager threads too
  flood();
  CHECK(!setgroups(0, 0) && !setresgid(65534, 65534, 65534) && !setresuid(65534, 65534, 65534));
  flood();
}
// A socket sends what was there at the call, whatever became of the page: also where the program asked for no copy.
static void zero_copy(void) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof a;
  int listener = socket(AF_INET, SOCK_STREAM, 0), small = P, large = 8 * MIB, one = 1, off = 0, is;
  CHECK(!setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, 4) && !bind(listener, (void *)&a, len));
  CHECK(!getsockname(listener, (void *)&a, &len) && !listen(listener, 1));
  for (int raw = 0; raw < 2; raw++) {
#define SET(...) (raw ? syscall(SYS_setsockopt, __VA_ARGS__) : setsockopt(__VA_ARGS__))
    int c = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!SET(c, SOL_SOCKET, SO_SNDBUF, &large, 4) && !connect(c, (void *)&a, sizeof a));
    CHECK(SET(c, SOL_SOCKET, SO_ZEROCOPY, &one, 4) == -1 && errno == EOPNOTSUPP);
    CHECK(SET(c, SOL_SOCKET, SO_ZEROCOPY, (void *)8, 4) == -1 && errno == EFAULT);
    CHECK(SET(c, SOL_SOCKET, SO_ZEROCOPY, &one, 3) == -1 && errno == EINVAL && SET(-1, SOL_SOCKET, SO_ZEROCOPY, &one, 4) == -1 && errno == EBADF);
    CHECK(!SET(c, SOL_SOCKET, SO_ZEROCOPY, &off, 4));
    len = 4;
    CHECK(!getsockopt(c, SOL_SOCKET, SO_ZEROCOPY, &is, &len) && !is && !SET(c, SOL_SOCKET, SO_KEEPALIVE, &one, 4));
    int s = accept(listener, 0, 0);
    char *b = full(MIB, 5), *got = malloc(MIB);
    ssize_t sent = send(c, b, MIB, MSG_ZEROCOPY | MSG_DONTWAIT), at = 0;
    CHECK(sent > 0);
    flood();
    for (ssize_t n; at < sent; at += n) CHECK((n = read(s, got + at, sent - at)) > 0);
    CHECK(!memcmp(b, got, sent) && !close(c) && !close(s));
  }
}
static void *read_soon(void *end) { usleep(100000); char *b = malloc(MIB); CHECK(read((intptr_t)end, b, MIB) > 0); free(b); return 0; }
// So does a pipe.
static void lend_to_pipe(void) {
  char name[] = "/var/tmp/selfpage-fifo-XXXXXX";
  CHECK(mkdtemp(name));
  for (int turn = 0; turn < 4; turn++) {
    int raw = turn % 2, p[2], full_size = 256 << 10;
#define LEND(...) (raw ? syscall(SYS_vmsplice, __VA_ARGS__) : vmsplice(__VA_ARGS__))
    if (turn < 2) CHECK(!pipe(p));
    else CHECK(!chdir(name) && !mkfifo("fifo", 0600) && (p[0] = open("fifo", O_RDONLY | O_NONBLOCK)) >= 0 && (p[1] = open("fifo", O_WRONLY)) >= 0 && !unlink("fifo"));
    CHECK(fcntl(p[1], F_SETPIPE_SZ, full_size) == full_size);
    char *b = aligned_alloc(P, MIB), *got = malloc(MIB);
    for (size_t i = 0; i < MIB; i += P) *(word *)(b + i) = i + turn;
    struct iovec v[2] = {{b, P}, {b + P, MIB - P}}, bad = {(void *)8, 9}, none = {0, 0};
    CHECK(LEND(p[1], &bad, 1, 0) == -1 && errno == EFAULT && LEND(p[1], (void *)8, 1, 0) == -1 && errno == EFAULT);
    CHECK(LEND(p[1], v, 2, 16) == -1 && errno == EINVAL && LEND(-1, v, 2, 0) == -1 && errno == EBADF);
    CHECK(LEND(p[1], v, 2, SPLICE_F_GIFT) == full_size); // what there is room for, and no more is waited for
    CHECK(LEND(p[1], v, 2, SPLICE_F_NONBLOCK) == -1 && errno == EAGAIN && !LEND(p[1], &none, 1, 0));
    flood();
    for (ssize_t n, at = 0; at < full_size; at += n) CHECK((n = read(p[0], got + at, full_size - at)) > 0);
    CHECK(!memcmp(b, got, full_size) && LEND(p[1], v, 2, 0) == full_size);
    pthread_t t;
    CHECK(!pthread_create(&t, 0, read_soon, (void *)(intptr_t)p[0]) && LEND(p[1], v, 1, 0) == P && !pthread_join(t, 0));
    CHECK(read(p[0], got, MIB) == P && !memcmp(b, got, P));
    CHECK(write(p[1], "from", 4) == 4 && LEND(p[0], &(struct iovec){got, 4}, 1, 0) == 4 && !memcmp(got, "from", 4));
    int file = memfd_create("file", 0); // no pipe
    CHECK(LEND(file, v, 2, 0) == -1 && errno == EBADF && lseek(file, 0, SEEK_END) == 0);
    signal(SIGPIPE, SIG_IGN);
    CHECK(!close(p[0]) && LEND(p[1], v, 2, 0) == -1 && errno == EPIPE && !close(p[1]) && !close(file));
    CHECK((p[0] = dup(0)) < 8); // nothing is left open
    close(p[0]), free(b), free(got);
  }
  CHECK(!rmdir(name));
}
static pid_t parent;
static void end_early(int s) { if (getpid() != parent) _exit(7); }
static void fork_end_early(void) { // a handler ends the child, at the first moment that one may run there
  flood();
  parent = getpid();
  signal(SIGUSR1, end_early);
  for (int i = 0; i < 10; i++) {
    int status;
    pid_t child = fork();
    if (!child) for (;;) pause();
    CHECK(child > 0 && !kill(child, SIGUSR1));
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
  }
}
static void quick(void) { flood(); puts("ok"); fflush(stdout); quick_exit(0); }
static void become(void) { full(16 * MIB, 1); flood(); fflush(stdout); execlp("echo", "echo", "ok", (char *)0); }
static void wait_for_end(void) { full(16 * MIB, 1); puts("up"); fflush(stdout); pause(); }
static void serve(void) { // as a daemon, until a file is there, which it removes
  char *p = full(16 * MIB, 1);
  CHECK(!daemon(0, 0));
  for (int turns = 0; turns < 900; turns++) {
    same(p, 16 * MIB, 1);
    if (!unlink(getenv("SELFPAGE_TEST_END"))) return;
    usleep(100000);
  }
}
static void status_seven(void) { flood(); exit(7); }
static struct { const char *name; void (*what)(void); } cases[] = {
  {"storm", storm}, {"threads", threads}, {"fork_and_go_on", fork_and_go_on}, {"fork_amid", fork_amid}, {"fork_often", fork_often}, {"fork_amid_signals", fork_amid_signals}, {"fork_from_thread", fork_from_thread}, {"fork_exec", fork_exec}, {"exec_at", exec_at}, {"fork_end_early", fork_end_early},
  {"dlopen_tls", dlopen_tls}, {"fork_with_libraries", fork_with_libraries}, {"own_segv", own_segv}, {"beyond_the_heap", beyond_the_heap}, {"own_handler", own_handler},
  {"close_all", close_all}, {"calls_on_absent_pages", calls_on_absent_pages}, {"read_by_another", read_by_another},
  {"zero_copy", zero_copy}, {"lend_to_pipe", lend_to_pipe},
  {"vfork_search", vfork_search}, {"robust_again", robust_again},
  {"robust", robust}, {"robust_unlocked", robust_unlocked}, {"own_stacks", own_stacks},
  {"signals", signals}, {"main_ends_first", main_ends_first}, {"last_is_cancelled", last_is_cancelled}, {"all_end_at_once", all_end_at_once}, {"quick", quick}, {"exit_by_number", exit_by_number}, {"both_exit_by_number", both_exit_by_number}, {"change_user", change_user}, {"become", become},
  {"wait_for_end", wait_for_end}, {"serve", serve}, {"status_seven", status_seven}};
int main(int argc, char **argv) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc == 2 && !strcmp(argv[1], cases[i].name)) { cases[i].what(); puts("ok"); return 0; }
  return 2;
}
