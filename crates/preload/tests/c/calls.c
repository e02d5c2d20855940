// Further rows of the table in docs/run.md, as in mappings.c.
#include "mappings.h"
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/ioctl.h>

static void fixed_noreplace(void) {
  int anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
  char *p = full(8 * MIB), *free_place = (char *)0x200000000000;
  int f = open("/proc/self/exe", O_RDONLY);
  CHECK(!munmap(p + 4 * MIB, MIB)); // the program's no more, and still in the region
  for (size_t at = 0; at < 5 * MIB; at += 2 * MIB) {
    CHECK(mmap(p + at, P, 3, anonymous, -1, 0) == MAP_FAILED && errno == EEXIST);
    CHECK(mmap(p + at, P, PROT_READ, MAP_PRIVATE | MAP_FIXED_NOREPLACE, f, 0) == MAP_FAILED && errno == EEXIST);
  }
  CHECK(reads(p + 4 * MIB) == SIGSEGV);
  flood();
  same(p, 0, 4 * MIB), same(p, 5 * MIB, 8 * MIB);
  CHECK(mmap(free_place, P, 3, anonymous, -1, 0) == free_place && !writes(free_place));
  CHECK(mmap(free_place, P, 3, anonymous, -1, 0) == MAP_FAILED && errno == EEXIST);
}
// The number of an error that a call gives on memory that is not managed, 0 for none.
static int in_kernel_memory(int prot, int (*does)(char *)) {
  char *p = mmap(0, MIB, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  CHECK(p != MAP_FAILED);
  int result = does(p) ? errno : 0;
  CHECK(!munmap(p, MIB));
  return result;
}
static int key;
static int with_key(char *p) { return pkey_mprotect(p, MIB, 3, key); }
static void protection_key(void) {
  char *p = full(4 * MIB);
  CHECK(!pkey_mprotect(p, MIB, PROT_READ, -1) && writes(p) == SIGSEGV); // as mprotect
  CHECK(!pkey_mprotect(p, MIB, 3, -1) && !writes(p + 8));
  for (key = 0; key < 17; key++) { // keys that nobody allocated, or that there are none of
    int expected = in_kernel_memory(3, with_key);
    CHECK((with_key(p + MIB) ? errno : 0) == expected);
  }
  key = syscall(SYS_pkey_alloc, 0, 0);
  if (key >= 0) {
    CHECK(!with_key(p + 2 * MIB) && !pkey_set(key, PKEY_DISABLE_ACCESS));
    CHECK(reads(p + 2 * MIB) == SIGSEGV && !pkey_set(key, 0));
    flood();
    *(word *)(p + 2 * MIB) = 2 * MIB + 1;
    // It ends with the mapping, or the block.
    CHECK(!with_key(p + 2 * MIB) && !pkey_set(key, PKEY_DISABLE_ACCESS) && !munmap(p + 2 * MIB, MIB));
    CHECK(map(MIB, 3) == p + 2 * MIB && !writes(p + 2 * MIB));
    CHECK(!with_key(p + 2 * MIB) && reads(p + 2 * MIB) == SIGSEGV);
    CHECK(mmap(p + 2 * MIB, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p + 2 * MIB && !writes(p + 2 * MIB));
    char *block = malloc(2 * MIB), *next;
    CHECK(!with_key(block) && reads(block) == SIGSEGV);
    uintptr_t there = (uintptr_t)block;
    free(block), next = malloc(2 * MIB);
    CHECK((uintptr_t)next == there && !writes(next) && !pkey_set(key, 0));
    for (size_t i = 2 * MIB; i < 3 * MIB; i += P) *(word *)(p + i) = i + 1;
  }
  flood();
  same(p, 0, 4 * MIB);
}
static void posix_advice(void) { // a call of the C library's alone
  char *p = full(4 * MIB);
  flood();
  int core = in_core(p, MIB);
  CHECK(!posix_madvise(p, 4 * MIB, POSIX_MADV_DONTNEED) && in_core(p, MIB) == core);
  int known[] = {POSIX_MADV_NORMAL, POSIX_MADV_RANDOM, POSIX_MADV_SEQUENTIAL, POSIX_MADV_WILLNEED};
  for (int i = 0; i < 4; i++) CHECK(!posix_madvise(p, 4 * MIB, known[i]));
  same(p, 0, 4 * MIB);
  errno = 0;
  CHECK(posix_madvise(p, 4 * MIB, 77) == EINVAL && posix_madvise(p + 1, P, POSIX_MADV_WILLNEED) == EINVAL && !errno);
  CHECK(!munmap(p, 4 * MIB));
  CHECK(posix_madvise(p, 4 * MIB, POSIX_MADV_WILLNEED) == ENOMEM);
}
static void on_fault(void) { // MLOCK_ONFAULT too brings pages in
  for (unsigned flags = 0; flags <= 1; flags++) {
    char *p = full(2 * MIB);
    flood();
    CHECK(in_core(p, MIB) < 256);
    CHECK(!mlock2(p, MIB, flags) && in_core(p, MIB) == 256);
    flood();
    CHECK(in_core(p, MIB) == 256);
    same(p, 0, 2 * MIB);
    CHECK(!munlock(p, MIB));
  }
  char *p = full(P);
  CHECK(mlock2(p, P, 2) == -1 && errno == EINVAL);
  CHECK(!mprotect(p, P, PROT_NONE) && !mlock2(p, P, 1) && !munlock(p, P));
}
static void unlock_all(void) {
  char *p = full(8 * MIB);
  CHECK(!mlock(p, 2 * MIB) && !mlock(p + 4 * MIB, 2 * MIB));
  CHECK(mlock(p + 6 * MIB, MIB) == -1 && errno == ENOMEM);
  flood();
  CHECK(in_core(p, 2 * MIB) == 512 && in_core(p + 4 * MIB, 2 * MIB) == 512);
  CHECK(!munlockall());
  CHECK(!madvise(p, P, MADV_DONTNEED)); // which no locked page takes
  *(word *)p = 1;
  flood();
  CHECK(in_core(p, 2 * MIB) < 512 && in_core(p + 4 * MIB, 2 * MIB) < 512);
  CHECK(!mlock(p + 6 * MIB, MIB));
  same(p, 0, 8 * MIB);
}
// What was locked where something is moved to ends with what was there: nobody could unlock it.
static void moved_over_locked(void) {
  char *p = full(MIB), *q = full(MIB);
  CHECK(!mlock(p, MIB) && in_core(q, MIB) == 256);
  CHECK(mremap(q, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, p) == p);
  CHECK(!munlockall() && !madvise(p, MIB, MADV_PAGEOUT) && in_core(p, MIB) == 0);
  same(p, 0, MIB);
}
static void lock_and_fork(void) { // a child has no locks
  char *p = full(8 * MIB);
  CHECK(!mlock(p, 3 * MIB));
  pid_t child = fork();
  if (!child) {
    CHECK(!madvise(p, MIB, MADV_DONTNEED));
    zero(p, 0, MIB), same(p, MIB, 8 * MIB);
    flood();
    CHECK(in_core(p + MIB, 2 * MIB) < 512);
    CHECK(!mlock(p + 4 * MIB, 4 * MIB) && madvise(p + 4 * MIB, P, MADV_DONTNEED) == -1 && errno == EINVAL);
    same(p, MIB, 8 * MIB);
    _exit(5);
  }
  exits(child, 5);
  flood();
  CHECK(in_core(p, 3 * MIB) == 768 && madvise(p, P, MADV_DONTNEED) == -1 && errno == EINVAL);
  same(p, 0, 8 * MIB);
}
#define READ 22
#define WRITE 23
static int to_read(char *p) { return madvise(p, MIB, READ); }
static int to_write(char *p) { return madvise(p, MIB, WRITE); }
static void populate(void) {
  char *p = map(4 * MIB, 3);
  CHECK(!to_read(p) && in_core(p, MIB) == 256);
  CHECK(!to_write(p + 2 * MIB) && in_core(p + 2 * MIB, MIB) == 256);
  zero(p, 0, 4 * MIB);
  char *q = full(4 * MIB);
  flood();
  CHECK(in_core(q, MIB) < 256 && !to_read(q) && in_core(q, MIB) == 256);
  flood();
  CHECK(!to_write(q) && in_core(q, MIB) == 256);
  char *much = map(24 * MIB, 3); // more than there are frames: the first go for the last
  CHECK(!madvise(much, 24 * MIB, WRITE));
  same(q, 0, 4 * MIB), zero(much, 0, 24 * MIB);
  int access[] = {PROT_READ, PROT_NONE};
  for (int i = 0; i < 2; i++) {
    char *closed = map(MIB, access[i]);
    int reading = in_kernel_memory(access[i], to_read), writing = in_kernel_memory(access[i], to_write);
    CHECK((to_read(closed) ? errno : 0) == reading && (to_write(closed) ? errno : 0) == writing && writing);
  }
  CHECK(!munmap(q + 2 * MIB, MIB));
  CHECK(madvise(q, 4 * MIB, READ) == -1 && errno == ENOMEM && madvise(q + 2 * MIB, P, WRITE) == -1 && errno == ENOMEM);
}
// Whether the kernel has that flag for the mapping at p.
static int has_flag(char *p, const char *flag) {
  FILE *f = fopen("/proc/self/smaps", "r");
  char line[4096];
  uintptr_t from, to;
  int inside = 0, has = -1;
  while (has < 0 && fgets(line, sizeof line, f)) {
    if (sscanf(line, "%lx-%lx ", &from, &to) == 2) inside = from <= (uintptr_t)p && (uintptr_t)p < to;
    else if (inside && !strncmp(line, "VmFlags:", 8)) has = !!strstr(line, flag);
  }
  fclose(f);
  return has;
}
static void dump(void) {
  char *p = full(4 * MIB);
  CHECK(!madvise(p + MIB, MIB, MADV_DONTDUMP));
  CHECK(has_flag(p + MIB, " dd") == 1 && has_flag(p + 2 * MIB - P, " dd") == 1);
  CHECK(has_flag(p, " dd") == 0 && has_flag(p + 2 * MIB, " dd") == 0);
  flood();
  same(p, 0, 4 * MIB);
  CHECK(!madvise(p, 4 * MIB, MADV_DODUMP) && has_flag(p + MIB, " dd") == 0);
  flood();
  same(p, 0, 4 * MIB);
}
static void fork_again(void) { // what was said of forks, taken back; and what a child's child gets
  char *p = full(4 * MIB), *q = full(4 * MIB);
  CHECK(!madvise(p, 4 * MIB, MADV_DONTFORK) && !madvise(p + MIB, 2 * MIB, MADV_DOFORK));
  CHECK(!madvise(q, 4 * MIB, MADV_WIPEONFORK) && !madvise(q + MIB, 2 * MIB, MADV_KEEPONFORK));
  pid_t child = fork();
  if (!child) {
    CHECK(reads(p) == SIGSEGV && reads(p + 3 * MIB) == SIGSEGV);
    same(p, MIB, 3 * MIB), zero(q, 0, MIB), same(q, MIB, 3 * MIB), zero(q, 3 * MIB, 4 * MIB);
    *(word *)q = 9; // the child's too is wiped
    pid_t grandchild = fork();
    if (!grandchild) { same(p, MIB, 3 * MIB), zero(q, 0, MIB), same(q, MIB, 3 * MIB); _exit(6); }
    exits(grandchild, 6);
    CHECK(*(word *)q == 9);
    _exit(5);
  }
  exits(child, 5);
  flood();
  same(p, 0, 4 * MIB), same(q, 0, 4 * MIB);
}
static void will_need(void) {
  char *p = full(4 * MIB);
  flood();
  CHECK(in_core(p, 2 * MIB) < 256);
  CHECK(!madvise(p, 2 * MIB, MADV_WILLNEED));
  for (int turns = 0; in_core(p, 2 * MIB) < 512; turns++) { CHECK(turns < 6000); usleep(10000); }
  same(p, 0, 4 * MIB);
}
static void hints(void) {
  char *p = full(4 * MIB);
  int known[] = {MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_MERGEABLE, MADV_UNMERGEABLE, MADV_HUGEPAGE, MADV_NOHUGEPAGE};
  for (int i = 0; i < 7; i++) CHECK(!madvise(p, 2 * MIB, known[i]));
  same(p, 0, 4 * MIB);
  flood();
  same(p, 0, 4 * MIB);
}
// LuaJIT asks for 64 KiB that its code can jump to, by hints, and takes nothing else.
static void near_the_program(void) {
  uintptr_t program = (uintptr_t)&near_the_program & -65536ul, near = program + 512 * MIB, far = near + (1ul << 40);
  char *p = mmap((void *)near, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK((uintptr_t)p == near);
  p[0] = 1;
  CHECK(!mprotect(p, 65536, PROT_READ | PROT_EXEC));
  // Where something is, it is elsewhere, and managed.
  char *q = mmap((void *)near, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(q != MAP_FAILED && q != p && p[0] == 1);
  char *large = mmap((void *)near, 65 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *there = mmap((void *)far, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK((uintptr_t)large != near && large != MAP_FAILED && (uintptr_t)there != far && there != MAP_FAILED);
  CHECK(!munmap(p, 65536) && !munmap(q, 65536) && !munmap(large, 65 * MIB) && !munmap(there, 65536));
}
#define COLD 20
#define PAGEOUT 21
#define DONTNEED_LOCKED 24
static int by_process; // the advice is given through process_madvise
static int advise(char *p, size_t n, int advice) {
  if (!by_process) return madvise(p, n, advice);
  struct iovec v = {p, n};
  int self = syscall(SYS_pidfd_open, getpid(), 0), done = process_madvise(self, &v, 1, advice, 0), failure = errno;
  close(self);
  errno = failure;
  return done == (int)n ? 0 : -1;
}
static void both_ways(void (*row)(void)) {
  for (by_process = 0; by_process < 2; by_process++) row();
}
// What is being saved just then stays.
static void all_out(char *p, size_t n) {
  for (int turns = 0; turns == 0 || in_core(p, n); turns++) {
    CHECK(turns < 6000 && !advise(p, n, PAGEOUT));
    usleep(10000);
  }
}
static void may_go(void) {
  char *p = full(4 * MIB);
  same(p, 0, MIB);
  int core = in_core(p, MIB);
  CHECK(!advise(p, MIB, COLD) && in_core(p, MIB) == core);
  all_out(p, 2 * MIB);
  same(p, 0, 4 * MIB);
  CHECK(!mlock(p, MIB));
  for (int advice = COLD; advice <= PAGEOUT; advice++) CHECK(advise(p, 2 * MIB, advice) == -1 && errno == EINVAL);
  CHECK(in_core(p, MIB) == 256 && !munlock(p, MIB));
  all_out(p, MIB);
  CHECK(!mprotect(p, MIB, PROT_NONE) && !advise(p, 2 * MIB, PAGEOUT) && !mprotect(p, MIB, 3));
  same(p, 0, 4 * MIB);
}
static void pageout(void) { both_ways(may_go); }
static void dropped_though_locked(void) {
  char *p = full(4 * MIB);
  CHECK(!mlock(p, MIB));
  CHECK(!advise(p, 2 * MIB, DONTNEED_LOCKED));
  CHECK(in_core(p, MIB) == 256);
  zero(p, 0, 2 * MIB), same(p, 2 * MIB, 4 * MIB);
  for (size_t i = 0; i < 2 * MIB; i += P) *(word *)(p + i) = i + 1;
  flood();
  CHECK(in_core(p, MIB) == 256);
  same(p, 0, 4 * MIB);
  CHECK(advise(p, P, MADV_DONTNEED) == -1 && errno == EINVAL && !munlock(p, MIB));
}
static void dontneed_locked(void) { both_ways(dropped_though_locked); }
static void other_advice(void) {
  char *p = full(2 * MIB);
  int unknown[] = {5, 7, 9 /* REMOVE: of shared memory */, 26, 77, 1000, -1};
  for (int i = 0; i < 7; i++)
    for (size_t len = 0; len <= 2 * MIB; len += MIB) // asking about nothing tells what the kernel knows
      CHECK((len || unknown[i] != 9) ? madvise(p, len, unknown[i]) == -1 && errno == EINVAL : 1);
  CHECK(madvise(p + 1, P, MADV_DONTNEED) == -1 && errno == EINVAL && !madvise(p, 0, MADV_DONTNEED));
  flood();
  same(p, 0, 2 * MIB);
  CHECK(!munmap(p + MIB, P));
  CHECK(madvise(p, 2 * MIB, MADV_DONTNEED) == -1 && errno == ENOMEM); // the rest is advised all the same
  zero(p, 0, MIB), zero(p, MIB + P, 2 * MIB);
  // So it is where a file was mapped and has moved away.
  char *q = full(2 * MIB);
  int f = open("/proc/self/exe", O_RDONLY);
  CHECK(mmap(q + MIB, P, PROT_READ, MAP_PRIVATE | MAP_FIXED, f, 0) == q + MIB);
  CHECK(mremap(q + MIB, P, 2 * P, MREMAP_MAYMOVE) != MAP_FAILED);
  CHECK(madvise(q, 2 * MIB, MADV_DONTNEED) == -1 && errno == ENOMEM);
  zero(q, 0, MIB), zero(q, MIB + P, 2 * MIB);
}
static void differs(char *p, size_t len) {
  CHECK(mremap(p, len, 2 * len, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT);
}
static int mapped(char *at) {
  FILE *maps = fopen("/proc/self/maps", "r");
  size_t start, end;
  int found = 0;
  for (char line[512]; fgets(line, sizeof line, maps);)
    if (sscanf(line, "%zx-%zx", &start, &end) == 2) found |= start <= (size_t)at && (size_t)at < end;
  fclose(maps);
  return found;
}
static void mremap_over_differing(void) {
  int f = open("/proc/self/exe", O_RDONLY);
  char *p = full(4 * MIB), *q = full(4 * MIB);
  CHECK(mmap(p + MIB, P, PROT_READ, MAP_PRIVATE | MAP_FIXED, f, 0) == p + MIB);
  differs(p, 4 * MIB);
  CHECK(!munmap(q + MIB, P));
  differs(q, 4 * MIB), differs(q + MIB, MIB);
  flood();
  same(p, 0, MIB), same(p, MIB + P, 4 * MIB), same(q, 0, MIB), same(q, MIB + P, 4 * MIB);
  CHECK(!memcmp(p + MIB, "\177ELF", 4) && reads(q + MIB) == SIGSEGV);
  char *shared = mmap(0, MIB, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(mremap(shared, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, p) == MAP_FAILED && errno == EINVAL);
  *(word *)shared = 1, same(p, 0, MIB);
  // What leaves a region leaves no addresses there that the kernel could give to others.
  char *t = full(4 * MIB);
  CHECK(mmap(t + MIB, MIB, PROT_READ, MAP_PRIVATE | MAP_FIXED, f, 0) == t + MIB);
  CHECK(mremap(t + MIB, P, P, MREMAP_MAYMOVE | MREMAP_FIXED, shared) == shared && !memcmp(shared, "\177ELF", 4));
  CHECK(mremap(t + MIB + P, 4 * P, 2 * P, 0) == t + MIB + P);
  CHECK(mapped(t + MIB) && reads(t + MIB) == SIGSEGV && mapped(t + MIB + 4 * P) && reads(t + MIB + 4 * P) == SIGSEGV);
  same(t, 0, MIB), same(t, 2 * MIB, 4 * MIB);
}
static void mremap_smaller_over(void) { // whatever is in the part that goes
  int f = open("/proc/self/exe", O_RDONLY);
  char *p = full(4 * MIB), *q = full(4 * MIB), *r = full(4 * MIB);
  CHECK(mmap(p, MIB, PROT_READ, MAP_PRIVATE | MAP_FIXED, f, 0) == p);
  CHECK(mmap(q + 2 * MIB, MIB, PROT_READ, MAP_PRIVATE | MAP_FIXED, f, 0) == q + 2 * MIB);
  CHECK(!munmap(r + 2 * MIB, MIB));
  char *each[] = {p, q, r};
  for (int i = 0; i < 3; i++) {
    char *at = each[i];
    CHECK(mremap(at, 3 * MIB, MIB / 2, i % 2 * MREMAP_MAYMOVE) == at);
    CHECK(reads(at + MIB / 2) == SIGSEGV && reads(at + MIB) == SIGSEGV && reads(at + 3 * MIB - P) == SIGSEGV);
    same(at, 3 * MIB, 4 * MIB), same(at, 0, i ? MIB / 2 : 0);
    // And there is room for others again.
    CHECK(mmap(at + MIB, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at + MIB);
    zero(at, MIB, 2 * MIB);
    for (size_t k = MIB; k < 2 * MIB; k += P) *(word *)(at + k) = k + 1;
    flood();
    same(at, MIB, 2 * MIB), same(at, 3 * MIB, 4 * MIB);
    CHECK(!munmap(at, 4 * MIB) && reads(at) == SIGSEGV);
  }
  p = full(MIB);
  CHECK(munmap(p, (1ul << 47) - (uintptr_t)p) && errno == EINVAL); // beyond the end of all addresses
  CHECK(mremap(p, 0, P, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL);
  CHECK(mremap(p, P, P, MREMAP_MAYMOVE | MREMAP_FIXED, (char *)-P) == MAP_FAILED && errno == EINVAL);
  same(p, 0, MIB);
}
static int without_managed_memory(void *p) {
  // What it asks for itself it has.
  char *own = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *block = malloc(2 * MIB);
  if (own == MAP_FAILED || !block || writes(own) || writes(block) || mprotect(own, P, PROT_READ) || munmap(own, MIB)) return 2;
  pid_t child = fork(); // which has all but managed memory, too
  if (!child) _exit(!writes(block) && (block = malloc(MIB)) && !writes(block) && reads(p) == SIGSEGV ? 5 : 6);
  exits(child, 5), free(block);
  return reads(p) == SIGSEGV && where == p && writes((char *)p + MIB) == SIGSEGV ? 4 : 1;
}
static void other_clone(void) { // a process of its own that is no plain fork
  static char stack[64 << 10] __attribute__((aligned(16)));
  char *p = full(4 * MIB);
  pid_t child;
#ifdef RAW
  (void)stack;
  child = syscall(SYS_clone, CLONE_FS | SIGCHLD, 0, 0, 0, 0);
  if (!child) syscall(SYS_exit, without_managed_memory(p));
#else
  child = clone(without_managed_memory, stack + sizeof stack, CLONE_FS | SIGCHLD, p);
#endif
  exits(child, 4);
  flood();
  same(p, 0, 4 * MIB);
}
static size_t most_mappings(void) {
  char limit[32] = "";
  int f = open("/proc/sys/vm/max_map_count", O_RDONLY);
  CHECK(read(f, limit, sizeof limit - 1) > 0 && !close(f));
  if (atol(limit) > 100000) { puts("too many"); exit(0); }
  return atol(limit);
}
static void leave_mappings(size_t left) { // a program's own, until the kernel takes so many more
  size_t others = most_mappings() - left;
  int file = memfd_create("others", 0);
  char *p = mmap(0, others * P, PROT_READ, MAP_SHARED, file, 0);
  CHECK(file >= 0 && p != MAP_FAILED && !close(file));
  for (size_t i = 0; i < others; i += 2) CHECK(!mprotect(p + i * P, P, PROT_NONE));
}
enum { most = 8192 }; // mappings that are left to fill with single pages
static void pages_until_full(int odd, int even) { // none is like its neighbours, until the kernel takes no more mappings
  size_t count = 0;
  static char *pages[most]; // not beside them
  while (count < most) {
    char *p = mmap(0, P, count % 2 ? odd : even, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) break;
    if ((count % 2 ? odd : even) == 3) *(word *)p = count + 1;
    pages[count++] = p;
  }
  CHECK(count > most / 2 && count < most && errno == ENOMEM);
  // Nor is there anything beyond the frames, in the kernel's own mappings beside others.
  for (int i = 0; i < 64; i++) CHECK(mmap(0, P, count % 2 ? odd : even, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == ENOMEM);
  CHECK(!malloc(2 * MIB) && errno == ENOMEM);
  for (size_t i = 0; i < count; i++) CHECK(*(word *)pages[i] == ((i % 2 ? odd : even) == 3 ? i + 1 : 0));
  for (size_t i = 0; i < count; i++) CHECK(!munmap(pages[i], P));
  char *block = malloc(2 * MIB);
  CHECK(block);
  memset(block, 1, 2 * MIB), free(block);
}
static void single_pages(void) { leave_mappings(most), pages_until_full(PROT_READ, 3), pages_until_full(3, PROT_READ); }
static void many_wishes(void) { // the kernel is not asked about these: the room is ours
  size_t n = 2048 * MIB;
  char *p = map(n, 3);
  size_t said = 0;
  while (said < n && !madvise(p + said, P, 18)) said += 2 * P; // MADV_WIPEONFORK
  CHECK(said > n / 4 && said < n && errno == EAGAIN);
  CHECK(mmap(0, P, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == ENOMEM);
  *(word *)p = *(word *)(p + P) = 3;
  exits(fork() ?: (_exit(*(word *)p + *(word *)(p + P) + 1), 0), 4);
  CHECK(!munmap(p, n / 2) && !munmap(p + n / 2, n / 2));
  p = full(MIB), same(p, 0, MIB);
  // On the way they are there twice, and nothing else is.
  char *q = map(n = 110000 * P, 3), *there = map(n, 3);
  for (said = 0; said < n; said += 2 * P) CHECK(!madvise(q + said, P, 18));
  CHECK(mremap(q, n, n, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
  *(word *)there = *(word *)(there + P) = 3;
  exits(fork() ?: (_exit(*(word *)there + *(word *)(there + P) + 1), 0), 4);
}
// What an access may not do a system call may not do in its place, whether the page is in core or not.
static void in_system_calls(void) {
  char *p = full(8 * MIB), byte;
  int from = open("/dev/zero", O_RDONLY), to = memfd_create("to", 0);
  CHECK(from >= 0 && to >= 0);
  CHECK(!mprotect(p, 2 * MIB, PROT_READ) && !mprotect(p + 2 * MIB, 2 * MIB, PROT_NONE) && !munmap(p + 4 * MIB, 2 * MIB));
  flood();
  for (int in = 0; in < 2; in++) { // the second time the page that is only read is in core
    CHECK(read(from, p + P, 1) == -1 && errno == EFAULT && write(to, p + P, 1) == 1);
    CHECK(pread(to, &byte, 1, in) == 1 && byte == (char)(P + 1));
    CHECK(in_core(p + P, P) == 1);
  }
  for (size_t at = 2 * MIB; at < 6 * MIB; at += 2 * MIB) {
    CHECK(read(from, p + at, 1) == -1 && errno == EFAULT);
    CHECK(write(to, p + at, 1) == -1 && errno == EFAULT);
  }
  CHECK(read(from, p + 6 * MIB, 1) == 1 && !mprotect(p, 4 * MIB, 3));
  same(p, 0, 4 * MIB), same(p, 6 * MIB + P, 8 * MIB);
  CHECK(*p == 1 && !p[6 * MIB]);
}
static void own_userfaultfd(void) {
  char *p = full(8 * MIB), *kernels = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  int own = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
  CHECK(own >= 0);
  struct uffdio_api api = {.api = UFFD_API};
  CHECK(!ioctl(own, UFFDIO_API, &api));
  struct uffdio_register managed = {.range = {(uintptr_t)p, MIB}, .mode = UFFDIO_REGISTER_MODE_MISSING};
  struct uffdio_register others = {.range = {(uintptr_t)kernels, MIB}, .mode = UFFDIO_REGISTER_MODE_MISSING};
  CHECK(ioctl(own, UFFDIO_REGISTER, &managed) == -1 && errno == EBUSY);
  CHECK(!ioctl(own, UFFDIO_REGISTER, &others));
  flood(), same(p, 0, 8 * MIB), close(own);
}
static void own_namespace(void) { // only for a process that has one thread
  char *p = full(8 * MIB);
  CHECK(unshare(CLONE_NEWUSER) == -1 && errno == EINVAL);
  int f = open("/proc/self/ns/user", O_RDONLY);
  CHECK(f >= 0 && setns(f, CLONE_NEWUSER) == -1 && errno == EINVAL);
  same(p, 0, 8 * MIB);
}
#ifndef RAW
static void *cancelled_in_msync(void *p) { pthread_cancel(pthread_self()), msync(p, P, MS_ASYNC); return 0; }
#endif
static void synced(void) {
  char name[] = "/var/tmp/selfpage-msync-XXXXXX", *p = full(4 * MIB), *q = full(4 * MIB), *all[] = {p, q};
  int file = mkstemp(name), unlinked = unlink(name);
  CHECK(file >= 0 && !unlinked && !ftruncate(file, P) && mmap(q + P, P, 3, MAP_SHARED | MAP_FIXED, file, 0) == q + P);
  q[P] = 5;
  for (int i = 0; i < 2; i++) {
    CHECK(!msync(all[i], 4 * MIB, MS_SYNC) && !msync(all[i], 4 * MIB, MS_ASYNC | MS_INVALIDATE) && !msync(all[i], 0, MS_SYNC));
    CHECK(!munmap(all[i] + 2 * MIB, MIB));
    CHECK(msync(all[i], 4 * MIB, MS_SYNC) == -1 && errno == ENOMEM && msync(all[i] + 2 * MIB, P, MS_ASYNC) == -1 && errno == ENOMEM);
    CHECK(!msync(all[i], 2 * MIB, MS_SYNC) && !msync(all[i] + 3 * MIB, MIB, MS_SYNC));
    CHECK(msync(all[i] + 1, P, MS_SYNC) == -1 && errno == EINVAL && msync(all[i], 4 * MIB, 64) == -1 && errno == EINVAL);
    CHECK(msync(all[i], 4 * MIB, MS_SYNC | MS_ASYNC) == -1 && errno == EINVAL);
  }
  char byte;
  CHECK(pread(file, &byte, 1, 0) == 1 && byte == 5);
  CHECK(!mlock(p + MIB, P) && msync(p, 2 * MIB, MS_SYNC | MS_INVALIDATE) == -1 && errno == EBUSY && !msync(p, 2 * MIB, MS_SYNC));
  same(p, 0, 2 * MIB), same(p, 3 * MIB, 4 * MIB);
#ifndef RAW
  pthread_t t;
  void *result;
  CHECK(!pthread_create(&t, 0, cancelled_in_msync, p) && !pthread_join(t, &result) && result == PTHREAD_CANCELED);
#endif
}
// Pointers to nowhere: EFAULT, as the kernel has it, and no signal.
static void bad_pointers(void) {
  char *p = full(4 * MIB), *only = map(P, PROT_READ), *edge = map(2 * P, 3);
  int self = syscall(SYS_pidfd_open, getpid(), 0);
  CHECK(!mprotect(edge + P, P, PROT_NONE));
  void *nowhere[] = {0, (void *)8, (void *)-P, (void *)(1ul << 62), only, edge + P - 1, edge + P};
  for (int i = 0; i < 7; i++) {
    void *bad = nowhere[i];
    CHECK(mincore(p, MIB, bad) == -1 && errno == EFAULT);
    if (bad != only) {
      for (int count = 1; count < 3; count++) CHECK(process_madvise(self, bad, count, MADV_COLD, 0) == -1 && errno == EFAULT);
      char *args[] = {"x", 0};
      memset(edge, 'x', P);
      CHECK(execve(bad, args, environ) == -1 && errno == EFAULT);
      if (i) CHECK(execve("/bin/true", bad, environ) == -1 && errno == EFAULT);
#ifndef RAW
      pid_t child;
      CHECK(execv(bad, args) == -1 && errno == EFAULT && posix_spawn(&child, bad, 0, 0, args, environ) == EFAULT);
#endif
    }
#ifdef RAW
    // The kernel does not say that it could not put the number there.
    pid_t child = syscall(SYS_clone, CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD, 0, bad, bad, 0);
    if (!child) _exit(5);
    exits(child, 5);
#endif
  }
  struct iovec v[2] = {{p, MIB}, {(void *)(1ul << 62), MIB}}, much = {p, -1};
  CHECK(process_madvise(self, v, 2, MADV_DONTNEED, 0) == -1 && errno == EFAULT);
  CHECK(process_madvise(self, &much, 1, MADV_DONTNEED, 0) == -1 && errno == EINVAL);
  CHECK(process_madvise(self, v, 2000, MADV_DONTNEED, 0) == -1 && errno == EINVAL);
  same(p, 0, 4 * MIB), zero(only, 0, P);
  flood();
  // Of a vector that is absent, or lies in the kernel's memory, all is seen.
  unsigned char *vector = (void *)map(P, 3), in[256];
  madvise(vector, P, PAGEOUT);
  CHECK(!mincore(p, MIB, vector) && !mincore(p, MIB, in) && !memcmp(vector, in, 256));
}
static void *allocates(void *n) { return memset(malloc((size_t)n), 7, (size_t)n); }
// What may be said of mappings, each at once, and memory of each kind.
static void all_wishes(void) {
  pthread_t t;
  void *object;
  CHECK(!pthread_create(&t, 0, allocates, (void *)100) && !pthread_join(t, &object) && *(char *)object == 7);
  char *p = full(8 * MIB), *block = malloc(2 * MIB);
  pthread_mutexattr_t robust;
  CHECK(mmap(p, P, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
  CHECK(!mprotect(p + P, P, PROT_NONE) && !mprotect(p + 2 * P, P, PROT_READ) && !mprotect(p + 3 * P, P, PROT_READ | PROT_EXEC));
  madvise(p + 4 * P, P, 102 /* GUARD_INSTALL */);
  CHECK(!mlock(p + 5 * P, P) && !madvise(p + 6 * P, P, MADV_DONTFORK) && !madvise(p + 7 * P, P, MADV_WIPEONFORK));
  CHECK(!pthread_mutexattr_init(&robust) && !pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST));
  CHECK(!pthread_mutex_init((pthread_mutex_t *)(p + 8 * P), &robust));
  char *reserved = map(1ul << 40, PROT_NONE);
  seal(p + 9 * P, P, 0);
  memset(block, 7, 2 * MIB), flood();
  CHECK(block[2 * MIB - 1] == 7 && !*p && reads(p + P) && !reads(p + 2 * P) && writes(p + 3 * P) && in_core(p + 5 * P, P) == 1);
  same(p, 9 * P, 8 * MIB);
  CHECK(!munmap(reserved, 1ul << 40));
  free(block);
}
// The kernel rounds a hint, and forgets one that there is no room at.
static void rounded_hints(void) {
  void *hints[] = {(void *)1, (void *)0x12345678901, (void *)-P, (void *)-1};
  for (int i = 0; i < 4; i++) {
    char *p = mmap(hints[i], 4 * MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED && (uintptr_t)p % P == 0);
    for (size_t at = 0; at < 4 * MIB; at += P) *(word *)(p + at) = at + 1;
    flood();
    CHECK(in_core(p, 4 * MIB) < 1024); // it is paged
    same(p, 0, 4 * MIB);
    CHECK(mmap(p + 1, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED && errno == EINVAL);
    CHECK(mmap((void *)-P, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(!munmap(p, 4 * MIB));
  }
  CHECK(mmap((void *)1, -P + 1, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == ENOMEM);
}
static void map_locked(void) {
  char *p = full(4 * MIB), *q = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0);
  CHECK(q != MAP_FAILED && mmap(p, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_LOCKED, -1, 0) == p);
  for (int i = 0; i < 2; i++) {
    CHECK(in_core(p, MIB) == 256 && in_core(q, MIB) == 256);
    flood();
  }
  CHECK(madvise(p, MIB, MADV_DONTNEED) == -1 && errno == EINVAL && in_core(p + MIB, 3 * MIB) < 768);
  zero(p, 0, MIB), zero(q, 0, MIB), same(p, MIB, 4 * MIB);
  // Mapped anew it is locked no more.
  CHECK(mmap(p, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p && !in_core(p, MIB));
}
static struct row rows[] = {
  {"all_wishes", all_wishes}, {"rounded_hints", rounded_hints}, {"map_locked", map_locked},
  {"msync", synced}, {"bad_pointers", bad_pointers},
  {"in_system_calls", in_system_calls}, {"own_userfaultfd", own_userfaultfd}, {"own_namespace", own_namespace},
  {"single_pages", single_pages}, {"many_wishes", many_wishes},
  {"fixed_noreplace", fixed_noreplace},
  {"protection_key", protection_key}, {"posix_madvise", posix_advice}, {"mlock2", on_fault}, {"munlockall", unlock_all}, {"moved_over_locked", moved_over_locked}, {"lock_and_fork", lock_and_fork},
  {"populate", populate}, {"dump", dump}, {"fork_again", fork_again}, {"will_need", will_need},
  {"hints", hints}, {"near_the_program", near_the_program}, {"pageout", pageout}, {"dontneed_locked", dontneed_locked},
  {"other_advice", other_advice}, {"mremap_over_differing", mremap_over_differing},
  {"mremap_smaller_over", mremap_smaller_over}, {"other_clone", other_clone}};
int main(int argc, char **argv) { return run(rows, sizeof rows / sizeof *rows, argc == 2 ? argv[1] : ""); }
