// What the rows of the table in docs/run.md are tried with. With -DRAW the calls are made by number.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef RAW
#define mmap(...) ((void *)syscall(SYS_mmap, __VA_ARGS__))
#define munmap(...) syscall(SYS_munmap, __VA_ARGS__)
#define mprotect(...) syscall(SYS_mprotect, __VA_ARGS__)
#define mremap(...) ((void *)syscall(SYS_mremap, __VA_ARGS__))
#define madvise(...) syscall(SYS_madvise, __VA_ARGS__)
#define mlock(...) syscall(SYS_mlock, __VA_ARGS__)
#define munlock(...) syscall(SYS_munlock, __VA_ARGS__)
#define mlockall(...) syscall(SYS_mlockall, __VA_ARGS__)
#define mincore(...) syscall(SYS_mincore, __VA_ARGS__)
#define process_madvise(...) syscall(SYS_process_madvise, __VA_ARGS__)
#define mlock2(...) syscall(SYS_mlock2, __VA_ARGS__)
#define munlockall(...) syscall(SYS_munlockall)
#define msync(...) syscall(SYS_msync, __VA_ARGS__)
#define execve(...) syscall(SYS_execve, __VA_ARGS__)
#define pkey_mprotect(...) syscall(SYS_pkey_mprotect, __VA_ARGS__)
#endif
#ifndef SYS_mseal
#define SYS_mseal 462
#endif
#ifdef RAW
#define seal(...) syscall(SYS_mseal, __VA_ARGS__)
#else // by name, which C libraries before 2.40 do not have
#define seal(...) ((int (*)(void *, size_t, unsigned long))dlsym(RTLD_DEFAULT, "mseal"))(__VA_ARGS__)
#endif
#define P 4096ul
#define MIB (1ul << 20)
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); exit(1); } } while (0)
typedef volatile uint64_t word;

static sigjmp_buf out;
static volatile sig_atomic_t expected; // whether an access may fail
static void *where;
static void on_segv(int s, siginfo_t *i, void *c) {
  where = i->si_addr;
  if (!expected) _exit(99);
  siglongjmp(out, s);
}
// The signal that an access gets, 0 for none.
__attribute__((unused)) static int reads(void *p) { int s = sigsetjmp(out, expected = 1); if (!s) (void)*(volatile char *)p; expected = 0; return s; }
__attribute__((unused)) static int writes(void *p) { int s = sigsetjmp(out, expected = 1); if (!s) *(volatile char *)p = 7; expected = 0; return s; }
static char *map(size_t n, int prot) {
  char *p = mmap(0, n, prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(p != MAP_FAILED);
  return p;
}
static char *full(size_t n) {
  char *p = map(n, PROT_READ | PROT_WRITE);
  for (size_t i = 0; i < n; i += P) *(word *)(p + i) = i + 1;
  return p;
}
static void same(char *p, size_t from, size_t to) {
  for (size_t i = from; i < to; i += P) CHECK(*(word *)(p + i) == i + 1);
}
__attribute__((unused)) static void zero(char *p, size_t from, size_t to) {
  for (size_t i = from; i < to; i += P) CHECK(*(word *)(p + i) == 0);
}
// Has everything else go out of core.
__attribute__((unused)) static void flood(void) { char *p = full(24 * MIB); same(p, 0, 24 * MIB); CHECK(!munmap(p, 24 * MIB)); }
__attribute__((unused)) static int in_core(char *p, size_t n) {
  unsigned char v[4096];
  int count = 0;
  CHECK(n / P <= sizeof v && !mincore(p, n, v));
  for (size_t i = 0; i < n / P; i++) count += v[i] & 1;
  return count;
}
// Used by some of the programs alone.
__attribute__((unused)) static void exits(pid_t child, int code) {
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == code);
}
struct row { const char *name; void (*row)(void); };
// Runs the row of this name.
static int run(const struct row *rows, size_t count, const char *name) {
  struct sigaction a = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &a, 0), sigaction(SIGBUS, &a, 0);
  for (size_t i = 0; i < count; i++)
    if (!strcmp(name, rows[i].name)) { rows[i].row(); puts("ok"); return 0; }
  return 2;
}
