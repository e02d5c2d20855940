// One row of the table in docs/run.md each. With -DRAW the calls are made by number.
#include "mappings.h"

static void partial_munmap(void) {
  char *p = full(8 * MIB);
  CHECK(!munmap(p + 2 * MIB, 3 * MIB));
  CHECK(reads(p + 2 * MIB) == SIGSEGV && where == p + 2 * MIB);
  CHECK(writes(p + 5 * MIB - 1) == SIGSEGV);
  flood();
  same(p, 0, 2 * MIB), same(p, 5 * MIB, 8 * MIB);
  CHECK(!munmap(p, 8 * MIB));
  CHECK(reads(p) == SIGSEGV);
  char *q = map(8 * MIB, PROT_READ | PROT_WRITE);
  zero(q, 0, 8 * MIB);
}
static void fixed_over(void) {
  char *p = full(8 * MIB);
  CHECK(mmap(p + MIB, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p + MIB);
  zero(p, MIB, 2 * MIB);
  int f = open("/proc/self/exe", O_RDONLY);
  CHECK(mmap(p + 3 * MIB, P, PROT_READ, MAP_PRIVATE | MAP_FIXED, f, 0) == p + 3 * MIB);
  CHECK(!memcmp(p + 3 * MIB, "\177ELF", 4));
  CHECK(mmap(p + 4 * MIB, MIB, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p + 4 * MIB);
  zero(p, 4 * MIB, 5 * MIB);
  *(word *)(p + 4 * MIB) = 99;
  flood();
  CHECK(*(word *)(p + 4 * MIB) == 99 && !memcmp(p + 3 * MIB, "\177ELF", 4));
  same(p, 0, MIB), same(p, 2 * MIB, 3 * MIB), same(p, 3 * MIB + P, 4 * MIB), same(p, 5 * MIB, 8 * MIB);
  // And back again.
  CHECK(mmap(p + 3 * MIB, 2 * MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p + 3 * MIB);
  zero(p, 3 * MIB, 5 * MIB);
  CHECK(!munmap(p, 8 * MIB));
  CHECK(reads(p + 4 * MIB) == SIGSEGV);
}
static void moving(void) {
  char *p = full(4 * MIB);
  char *q = mremap(p, 4 * MIB, 9 * MIB, MREMAP_MAYMOVE);
  CHECK(q != MAP_FAILED);
  same(q, 0, 4 * MIB), zero(q, 4 * MIB, 9 * MIB);
  CHECK(mremap(q, 9 * MIB, 3 * MIB, 0) == q);
  CHECK(reads(q + 3 * MIB) == SIGSEGV);
  char *wall = map(MIB, 3);
  char *r = mremap(q, 3 * MIB, 64 * MIB, MREMAP_MAYMOVE);
  same(r, 0, 3 * MIB);
  char *to = map(3 * MIB, 3);
  CHECK(mremap(r, 3 * MIB, 3 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
  same(to, 0, 3 * MIB);
  CHECK(reads(r) == SIGSEGV);
  char *kept = mremap(to, 3 * MIB, 3 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
  CHECK(kept != MAP_FAILED && kept != to);
  same(kept, 0, 3 * MIB), zero(to, 0, 3 * MIB);
  CHECK(!mprotect(kept, 3 * MIB, PROT_READ));
  char *only = mremap(kept, 3 * MIB, 6 * MIB, MREMAP_MAYMOVE);
  same(only, 0, 3 * MIB);
  CHECK(writes(only) == SIGSEGV && writes(only + 5 * MIB) == SIGSEGV);
  CHECK(mremap(wall, MIB, 0, 0) == MAP_FAILED && errno == EINVAL);
}
static void read_only(void) {
  char *p = full(8 * MIB);
  CHECK(!mprotect(p, 4 * MIB, PROT_READ));
  CHECK(writes(p + MIB) == SIGSEGV);
  flood();
  same(p, 0, 8 * MIB);
  CHECK(writes(p) == SIGSEGV);
  CHECK(!mprotect(p, 4 * MIB, 3) && !writes(p + 8));
  same(p, P, 8 * MIB);
}
static void no_access(void) {
  char *p = full(8 * MIB);
  CHECK(!mprotect(p, 4 * MIB, PROT_NONE));
  CHECK(reads(p) == SIGSEGV);
  flood();
  CHECK(reads(p + MIB) == SIGSEGV);
  CHECK(!mprotect(p, 4 * MIB, 3));
  same(p, 0, 8 * MIB);
  CHECK(!munmap(p, 8 * MIB));
  CHECK(mprotect(p, P, 3) == -1 && errno == ENOMEM);
}
static void reserve_then_commit(void) {
  char *p = map(1ul << 30, PROT_NONE);
  CHECK(reads(p + MIB) == SIGSEGV);
  CHECK(!mprotect(p + MIB, 12 * MIB, 3));
  for (size_t i = MIB; i < 13 * MIB; i += P) *(word *)(p + i) = i + 1;
  CHECK(mmap(p + 20 * MIB, 4 * MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p + 20 * MIB);
  for (size_t i = 20 * MIB; i < 24 * MIB; i += P) *(word *)(p + i) = i + 1;
  same(p, MIB, 13 * MIB), same(p, 20 * MIB, 24 * MIB);
  CHECK(reads(p) == SIGSEGV && reads(p + 13 * MIB) == SIGSEGV && reads(p + 24 * MIB) == SIGSEGV);
}
static void executable(void) {
  unsigned char code[] = {0xb8, 42, 0, 0, 0, 0xc3}; // mov eax, 42; ret
  char *p = map(2 * MIB, 3);
  memcpy(p, code, sizeof code);
  *(word *)(p + MIB) = 5;
  CHECK(!mprotect(p, 2 * MIB, PROT_READ | PROT_EXEC));
  flood();
  CHECK(((int (*)(void))p)() == 42 && *(word *)(p + MIB) == 5);
  CHECK(writes(p) == SIGSEGV);
  CHECK(!mprotect(p, 2 * MIB, 7));
  p[1] = 43;
  flood();
  CHECK(((int (*)(void))p)() == 43);
  char *q = map(P, 7); // not managed from the beginning
  memcpy(q, code, sizeof code);
  CHECK(((int (*)(void))q)() == 42);
}
static void dropped(int advice) {
  char *p = full(8 * MIB);
  flood();
  CHECK(!madvise(p + 2 * MIB, 2 * MIB, advice));
  flood();
  same(p, 0, 2 * MIB), zero(p, 2 * MIB, 4 * MIB), same(p, 4 * MIB, 8 * MIB);
  for (int i = 0; i < 300; i++) {
    *(word *)(p + 6 * MIB) = i + 1;
    CHECK(!madvise(p + 6 * MIB, P, advice));
    CHECK(*(word *)(p + 6 * MIB) == 0);
  }
}
static void dontneed(void) { dropped(MADV_DONTNEED); }
static void advise_free(void) { dropped(MADV_FREE); }
static void guard(void) {
  char *p = full(8 * MIB), *kernels = mmap(0, P, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  int known = madvise(kernels, P, 102); // from Linux 6.13 on
  CHECK(madvise(p, P, 102) == known);
  if (known) return;
  flood();
  CHECK(reads(p) == SIGSEGV);
  same(p, P, 8 * MIB);
  CHECK(!madvise(p, P, 103));
  zero(p, 0, P);
}
static void huge_page(void) {
  char *p = full(8 * MIB);
  CHECK(!madvise(p, 8 * MIB, MADV_HUGEPAGE));
  CHECK(madvise(p, 8 * MIB, 25 /* COLLAPSE */) == -1 && errno == EINVAL);
  flood();
  same(p, 0, 8 * MIB);
}
static void dont_fork(void) {
  char *p = full(4 * MIB), *q = full(4 * MIB);
  CHECK(!madvise(q, MIB, MADV_DONTFORK));
  CHECK(!madvise(q + 2 * MIB, MIB, 18 /* WIPEONFORK */));
  pid_t child = fork();
  if (!child) {
    same(p, 0, 4 * MIB);
    CHECK(reads(q) == SIGSEGV);
    same(q, MIB, 2 * MIB), zero(q, 2 * MIB, 3 * MIB), same(q, 3 * MIB, 4 * MIB);
    _exit(5);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 5);
  same(p, 0, 4 * MIB), same(q, 0, 4 * MIB);
}
static void locked(void) {
  char *p = full(2 * MIB);
  CHECK(!mlock(p, MIB));
  flood();
  CHECK(in_core(p, MIB) == 256);
  same(p, 0, 2 * MIB);
  CHECK(madvise(p, P, MADV_DONTNEED) == -1 && errno == EINVAL);
  CHECK(!mlock(p, MIB)); // no more than once
  CHECK(!munlock(p, MIB));
  flood();
  CHECK(in_core(p, MIB) < 256);
  char *much = map(64 * MIB, 3);
  CHECK(mlock(much, 64 * MIB) == -1 && errno == ENOMEM);
  same(p, 0, 2 * MIB);
}
static void lock_all(void) {
  char *p = full(4 * MIB);
  CHECK(mlockall(MCL_CURRENT) == -1 && errno == ENOMEM);
  CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == -1 && errno == ENOMEM);
  flood();
  same(p, 0, 4 * MIB);
}
static void core_map(void) {
  char *p = map(16 * MIB, 3);
  CHECK(in_core(p + 8 * MIB, MIB) == 0);
  for (size_t i = 0; i < MIB; i += P) *(word *)(p + i) = 1;
  CHECK(in_core(p, MIB) == 256);
  flood();
  CHECK(in_core(p, MIB) < 256);
  CHECK(!munmap(p, 16 * MIB));
  unsigned char v;
  CHECK(mincore(p, P, &v) == -1 && errno == ENOMEM);
}
static void for_process(void) {
  char *p = full(4 * MIB), stack[P];
  memset(stack, 1, P);
  struct iovec v[2] = {{p, MIB}, {p + 2 * MIB, MIB}};
  int self = syscall(SYS_pidfd_open, getpid(), 0);
  CHECK(process_madvise(self, v, 2, MADV_DONTNEED, 0) == 2 * MIB);
  zero(p, 0, MIB), same(p, MIB, 2 * MIB), zero(p, 2 * MIB, 3 * MIB), same(p, 3 * MIB, 4 * MIB);
  CHECK(process_madvise(self, v, 2, MADV_WILLNEED, 0) == 2 * MIB);
}
static void kinds(void) { // what is not managed works as ever
  char *shared = mmap(0, MIB, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0), *exec = map(MIB, 7);
  char *stack = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  char *low = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
  char *at = mmap((void *)0x200000000000, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  CHECK(at == (void *)0x200000000000 && (uintptr_t)low < 1ul << 32);
  char *all[] = {shared, exec, stack, low, at};
  for (int i = 0; i < 5; i++) {
    memset(all[i], i, MIB);
    CHECK(!mprotect(all[i], P, PROT_READ) && writes(all[i]) == SIGSEGV && !munmap(all[i], MIB) && reads(all[i]) == SIGSEGV);
  }
  CHECK(mmap(0, 0, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EINVAL);
  CHECK(munmap((void *)1, P) == -1 && errno == EINVAL);
}
static struct { const char *name; void (*row)(void); } rows[] = {
  {"partial_munmap", partial_munmap}, {"fixed_over", fixed_over}, {"mremap", moving}, {"read_only", read_only},
  {"no_access", no_access}, {"reserve_then_commit", reserve_then_commit}, {"executable", executable},
  {"dontneed", dontneed}, {"free", advise_free}, {"guard", guard}, {"huge_page", huge_page},
  {"dont_fork", dont_fork}, {"mlock", locked}, {"mlockall", lock_all}, {"mincore", core_map},
  {"process_madvise", for_process}, {"kinds", kinds}};
int main(int argc, char **argv) {
  struct sigaction a = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &a, 0), sigaction(SIGBUS, &a, 0);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    if (argc == 2 && !strcmp(argv[1], rows[i].name)) { rows[i].row(); puts("ok"); return 0; }
  return 2;
}
