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
// What the kernel refuses changes nothing, whatever is there.
static size_t data_bytes(void) {
  char line[200]; size_t kib = 0;
  FILE *f = fopen("/proc/self/status", "r");
  while (f && !kib && fgets(line, sizeof line, f)) sscanf(line, "VmData: %zu", &kib);
  CHECK(f && !fclose(f) && kib);
  return kib * 1024;
}
static void fixed_over_refused(void) {
  char *p = full(8 * P), *shared = p + 2 * P, *file = p + 5 * P;
  int f = open("/proc/self/exe", O_RDONLY), directory = open("/", O_RDONLY);
  CHECK(mmap(shared, 2 * P, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == shared);
  CHECK(mmap(file, P, 3, MAP_PRIVATE | MAP_FIXED, f, 0) == file);
  *(word *)shared = 98, *(word *)(shared + P) = 99, *(word *)file = 100;
  struct { int prot, flags, file, error; } kinds[] = {
    {3, MAP_SHARED, 999, EBADF}, {3, MAP_SHARED, f, EACCES}, {PROT_READ, MAP_SHARED, directory, ENODEV}, {PROT_READ, 0, f, EINVAL},
    {3, MAP_PRIVATE | MAP_ANONYMOUS, -1, ENOMEM}};
  struct rlimit data;
  CHECK(!getrlimit(RLIMIT_DATA, &data));
  for (int i = 0; i < 5; i++) {
    if (kinds[i].error == ENOMEM) CHECK(!setrlimit(RLIMIT_DATA, &(struct rlimit){P, data.rlim_max}));
    CHECK(mmap(p, 8 * P, kinds[i].prot, kinds[i].flags | MAP_FIXED, kinds[i].file, 0) == MAP_FAILED && errno == kinds[i].error);
    CHECK(mmap(shared + P, P, kinds[i].prot, kinds[i].flags | MAP_FIXED, kinds[i].file, 0) == MAP_FAILED && errno == kinds[i].error);
    CHECK(!setrlimit(RLIMIT_DATA, &data));
    CHECK(!reads(shared) && *(word *)shared == 98 && !reads(shared + P) && *(word *)(shared + P) == 99);
    CHECK(!reads(file) && *(word *)file == 100);
    same(p, 0, 2 * P), same(p, 4 * P, 5 * P), same(p, 6 * P, 8 * P);
  }
  // There is room for what nobody has access to, and none for the hole beside it as well.
  char *q = full(16 * MIB), *moved = map(16 * MIB, 3);
  CHECK(!mprotect(q, MIB, PROT_NONE) && !munmap(q + MIB, 15 * MIB));
  CHECK(!setrlimit(RLIMIT_DATA, &(struct rlimit){data_bytes() + 8 * MIB, data.rlim_max}));
  CHECK(mmap(q, 16 * MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED && errno == ENOMEM);
  CHECK(mremap(moved, 16 * MIB, 16 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, q) == MAP_FAILED && errno == ENOMEM);
  CHECK(!setrlimit(RLIMIT_DATA, &data) && !mprotect(q, MIB, 3));
  same(q, 0, MIB);
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
  // Longer than all addresses.
  size_t lengths[] = {1ul << 47, 1ul << 48, -2 * P, -P, -1};
  for (int i = 0; i < 5; i++) {
    CHECK(mremap(wall, MIB, lengths[i], 0) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(wall, MIB, lengths[i], MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL);
  }
  CHECK(mremap(wall, MIB, 1ul << 46, MREMAP_MAYMOVE) == MAP_FAILED && errno == ENOMEM);
}
// A mapping between others, so that it grows by moving.
static char *walled(size_t n) {
  char *p = full(n + P);
  CHECK(!mprotect(p + n, P, PROT_NONE));
  return p;
}
static void moved_access(void) {
  unsigned char code[] = {0xb8, 42, 0, 0, 0, 0xc3}; // mov eax, 42; ret
  char *p = walled(MIB);
  memcpy(p, code, sizeof code);
  CHECK(!mprotect(p, MIB, PROT_READ | PROT_EXEC));
  char *q = mremap(p, MIB, 2 * MIB, MREMAP_MAYMOVE);
  CHECK(q != MAP_FAILED && q != p && ((int (*)(void))q)() == 42 && writes(q) == SIGSEGV);
  CHECK(mremap(q, 2 * MIB, MIB, 0) == q && mremap(q, MIB, 2 * MIB, 0) == q);
  CHECK(reads(q + MIB) == 0 && writes(q + MIB) == SIGSEGV);
  CHECK(!mprotect(q, MIB, 7));
  memcpy(q + P, code, sizeof code);
  CHECK(!mprotect(q + MIB, MIB, 7));
  CHECK(mremap(q, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, p) == p && ((int (*)(void))(p + P))() == 42 && !writes(p));
  // A new end has the access of what it follows.
  q += MIB;
  CHECK(mremap(q, MIB, 2 * MIB, 0) == q);
  memcpy(q + MIB, code, sizeof code);
  CHECK(((int (*)(void))(q + MIB))() == 42);
  // Parts that differ cannot grow or move, whatever they differ in.
  int kinds[] = {PROT_READ, PROT_NONE, PROT_READ | PROT_EXEC};
  for (int i = 0; i < 3; i++) {
    char *m = walled(MIB);
    CHECK(!mprotect(m + MIB / 2, P, kinds[i]));
    CHECK(mremap(m, MIB, 2 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT);
    CHECK(mremap(m, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, p) == MAP_FAILED && errno == EFAULT);
    CHECK(((int (*)(void))(p + P))() == 42);
    same(m, 0, MIB / 2), same(m, MIB / 2 + P, MIB);
    CHECK(mremap(m, MIB, MIB / 2, 0) == m);
    same(m, 0, MIB / 2);
  }
  char *closed = walled(MIB);
  CHECK(!mprotect(closed, MIB, PROT_NONE));
  q = mremap(closed, MIB, 2 * MIB, MREMAP_MAYMOVE);
  CHECK(q != MAP_FAILED && reads(q) == SIGSEGV && reads(q + MIB) == SIGSEGV && !mprotect(q, 2 * MIB, 3));
  same(q, 0, MIB), zero(q, MIB, 2 * MIB);
}
static int in_core(char *p, size_t n);
static void moved_wishes(void) { // what was said of a mapping goes with it
  char *p = walled(MIB), *q;
  CHECK(!mlock(p, MIB));
  q = mremap(p, MIB, MIB + MIB / 2, MREMAP_MAYMOVE);
  CHECK(q != MAP_FAILED && q != p);
  flood();
  CHECK(in_core(q, MIB + MIB / 2) == 384);
  same(q, 0, MIB);
  CHECK(mremap(q, MIB + MIB / 2, 64 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == EAGAIN);
  // What is kept where it was is empty, and not locked.
  p = mremap(q, MIB, MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
  CHECK(p != MAP_FAILED);
  CHECK(!madvise(q, MIB, MADV_DONTNEED));
  CHECK(madvise(p, MIB, MADV_DONTNEED) == -1 && errno == EINVAL);
  zero(q, 0, MIB), same(p, 0, MIB);
  CHECK(!mlock(q, P));
  flood();
  CHECK(in_core(q, P) == 1 && in_core(p, MIB) == 256);
  // Of a part: it goes with the part.
  char *m = walled(MIB), *away;
  CHECK(!mlock(m + P, P) && !madvise(m + 4 * P, P, MADV_DONTFORK) && !madvise(m + 6 * P, P, 18 /* WIPEONFORK */));
  m = mremap(m, MIB, 2 * MIB, MREMAP_MAYMOVE);
  CHECK(m != MAP_FAILED && madvise(m + P, P, MADV_DONTNEED) == -1 && !madvise(m + 2 * P, P, MADV_DONTNEED));
  away = mremap(m, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)0x300000000000); // out of the regions
  CHECK(away != MAP_FAILED);
  pid_t child = fork();
  if (!child) {
    CHECK(reads(away + 4 * P) == SIGSEGV && *(word *)(away + 6 * P) == 0);
    CHECK(*(word *)(away + 3 * P) == 3 * P + 1 && *(word *)(away + 5 * P) == 5 * P + 1);
    _exit(5);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 5);
  CHECK(madvise(away + P, P, MADV_DONTNEED) == -1 && errno == EINVAL);
}
static void block_again(void) { // what was said of a block of malloc's ends with the block
  char *first = malloc(2 * MIB);
  for (int i = 0; i < 20; i++) {
    char *p = i ? malloc(2 * MIB) : first;
    CHECK(p == first && !madvise(p, 2 * MIB, MADV_DONTNEED));
    for (size_t at = 0; at < 2 * MIB; at += P) *(word *)(p + at) = at + 1;
    CHECK(!mlock(p, 2 * MIB));
    flood();
    CHECK(in_core(p, 2 * MIB) == 512);
    if (i % 2) p = realloc(p, MIB + P);
    free(p);
  }
  // A file that was mapped into a block is not in the next one.
  int file = memfd_create("file", 0);
  char kept[8];
  CHECK(file >= 0 && !ftruncate(file, MIB) && pwrite(file, "contents", 8, 0) == 8);
  CHECK(malloc(2 * MIB) == first && mmap(first + MIB, MIB, 3, MAP_SHARED | MAP_FIXED, file, 0) == first + MIB);
  CHECK(!memcmp(first + MIB, "contents", 8));
  free(first);
  char *p = calloc(2, MIB);
  CHECK(p == first);
  zero(p, 0, 2 * MIB);
  memset(p, 7, 2 * MIB);
  CHECK(pread(file, kept, 8, 0) == 8 && !memcmp(kept, "contents", 8));
  // Nor is it left behind by a block that moves, with another behind it.
  char *wall = malloc(2 * MIB);
  for (int i = 0; i < 20 && wall < p; i++) wall = malloc(2 * MIB);
  CHECK(mmap(p + MIB, MIB, 3, MAP_SHARED | MAP_FIXED, file, 0) == p + MIB);
  char *moved = realloc(p, 256 * MIB);
  CHECK(moved && moved != p); CHECK(moved[0] == 7 && moved[MIB - 1] == 7 && !memcmp(moved + MIB, "contents", 8));
  free(moved), free(wall);
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
  // Where nothing is: bad arguments are seen first.
  CHECK(mprotect(p, P, 3) == -1 && errno == ENOMEM && mprotect(p, P, 3 | 0x100) == -1 && errno == EINVAL);
  CHECK(pkey_mprotect(p, P, 3, 15) == -1 && errno == EINVAL);
  CHECK(madvise(p, P, MADV_DONTNEED) == -1 && errno == ENOMEM && madvise(p, P, 77) == -1 && errno == EINVAL);
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
  *(word *)(p + MIB) = 6;
  flood(); // these two stay in core
  CHECK(in_core(p, P) == 1 && in_core(p + MIB, P) == 1);
  CHECK(((int (*)(void))p)() == 43 && *(word *)(p + MIB) == 6);
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
  // Those in what the program may not write are not brought in with their neighbours.
  char *only = map(MIB, 3), *closed = map(MIB, 3);
  CHECK(!madvise(only + 40 * P, 4 * P, 102) && !madvise(closed + 40 * P, 4 * P, 102));
  CHECK(!mprotect(only, MIB, PROT_READ) && !mprotect(closed + 40 * P, MIB - 40 * P, PROT_NONE));
  zero(only, 0, 40 * P), zero(only, 44 * P, MIB), zero(closed, 0, 40 * P);
  CHECK(!mprotect(closed, MIB, 3));
  for (int i = 40; i < 44; i++) CHECK(reads(only + i * P) == SIGSEGV && reads(closed + i * P) == SIGSEGV);
  CHECK(!madvise(only, MIB, 103));
  zero(only, 0, MIB), zero(closed, 44 * P, MIB);
  // Guards move, and end with their mapping.
  CHECK(!madvise(p, 2 * P, 102));
  char *q = mremap(p, 8 * MIB, 8 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
  CHECK(q != MAP_FAILED && reads(q) == SIGSEGV && reads(q + P) == SIGSEGV);
  zero(p, 0, 8 * MIB), same(q, 2 * P, 8 * MIB);
  char *r = mremap(q, 8 * MIB, 8 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, p);
  CHECK(r == p && reads(p) == SIGSEGV && reads(p + P) == SIGSEGV);
  same(p, 2 * P, 8 * MIB);
  CHECK(!munmap(p, 8 * MIB));
  q = map(8 * MIB, 3);
  zero(q, 0, 8 * MIB);
  CHECK(!madvise(q, P, 102));
  CHECK(mmap(q, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == q);
  zero(q, 0, MIB);
  for (int i = 0; i < 3; i++) {
    char *block = aligned_alloc(P, 2 * MIB);
    zero(block, 0, 2 * MIB);
    CHECK(!madvise(block, P, 102));
    free(block);
  }
  CHECK(!mlock(q, 2 * P));
  CHECK(madvise(q, P, 102) == -1 && errno == EINVAL);
}
static void no_room(void) { // the kernel takes no more mappings
  char *p = full(MIB), *q = map(MIB, 3), limit[32] = "";
  int f = open("/proc/sys/vm/max_map_count", O_RDONLY);
  CHECK(read(f, limit, sizeof limit - 1) > 0 && !close(f));
  size_t pages = atol(limit) + 16;
  if (pages > MIB) { puts("too many"); exit(0); }
  char *filler = mmap(0, pages * P, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0), *at = filler;
  CHECK(filler != MAP_FAILED && !mlock(p + 17 * P, P));
  char *over = q + 32 * P;
  CHECK(mmap(over, 4 * P, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == over);
  *(word *)over = 99;
  while (at < filler + pages * P && !mprotect(at, P, PROT_NONE)) at += 2 * P;
  CHECK(at < filler + pages * P && errno == ENOMEM);
  errno = 0;
  CHECK(munmap(p + 8 * P, P) == -1 && errno == ENOMEM);
  CHECK(mremap(p, MIB, 8 * P, 0) == MAP_FAILED && errno == ENOMEM);
  CHECK(mmap(p + 8 * P, P, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED && errno == ENOMEM);
  CHECK(mmap(over - P, 2 * P, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED && errno == ENOMEM);
  CHECK(!reads(over) && *(word *)over == 99);
  same(p, 0, MIB);
  // Nor is anything left of a file that finds no room in the end.
  int file = memfd_create("left", 0), maps = open("/proc/self/maps", O_RDONLY);
  static char text[16 << 20];
  size_t len = 0;
  CHECK(file >= 0 && maps >= 0 && !munmap(at - 2 * P, P));
  CHECK(mmap(q + 8 * P, P, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED && errno == ENOMEM);
  for (ssize_t some; (some = read(maps, text + len, sizeof text - len)) > 0;) len += some;
  CHECK(len > 0 && len < sizeof text && !memmem(text, len, "memfd:left", 10));
  // With room for one more, for two, …: what has moved comes back where the old place cannot be closed.
  char *there = MAP_FAILED;
  for (int room = 1; there == MAP_FAILED; room++) {
    CHECK(room < 16 && !munmap(at - 2 * P * room, P));
    there = mremap(p + 16 * P, 4 * P, 8 * P, MREMAP_MAYMOVE);
    CHECK(there != MAP_FAILED || errno == ENOMEM);
    same(p, 0, there == MAP_FAILED ? MIB : 16 * P);
    // What was locked is locked still, wherever it is.
    CHECK(madvise((there == MAP_FAILED ? p + 16 * P : there) + P, P, MADV_DONTNEED) == -1 && errno == EINVAL);
  }
  same(there - 16 * P, 16 * P, 20 * P), zero(there, 4 * P, 8 * P), same(p, 20 * P, MIB);
  CHECK(mremap(there, 8 * P, 4 * P, MREMAP_MAYMOVE | MREMAP_FIXED, p + 16 * P) == p + 16 * P);
  CHECK(!munmap(filler, pages * P));
  CHECK(!munmap(p + 8 * P, P) && reads(p + 8 * P) == SIGSEGV);
  char *closed = map(P, PROT_NONE);
  CHECK(reads(closed) == SIGSEGV);
  same(p, 9 * P, MIB), zero(q, 0, 32 * P), zero(q, 36 * P, MIB);
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
  madvise(q + 2 * MIB, P, 102 /* GUARD_INSTALL */), *(word *)(q + 2 * MIB + P) = 2 * MIB + P + 1;
  pid_t child = fork();
  if (!child) {
    same(p, 0, 4 * MIB);
    CHECK(reads(q) == SIGSEGV);
    same(q, MIB, 2 * MIB), zero(q, 2 * MIB, 3 * MIB), same(q, 3 * MIB, 4 * MIB);
    _exit(5);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 5);
  madvise(q + 2 * MIB, P, 103 /* GUARD_REMOVE */), *(word *)(q + 2 * MIB) = 2 * MIB + 1;
  same(p, 0, 4 * MIB), same(q, 0, 4 * MIB);
}
static void locked(void) {
  char *p = full(2 * MIB);
  CHECK(!mlock(p, MIB));
  flood();
  CHECK(in_core(p, MIB) == 256);
  same(p, 0, 2 * MIB);
  CHECK(madvise(p, P, MADV_DONTNEED) == -1 && errno == EINVAL && madvise(p, P, MADV_FREE) == -1 && errno == EINVAL);
  same(p, 0, P);
  CHECK(!mlock(p, MIB)); // no more than once
  CHECK(!munlock(p, MIB));
  flood();
  CHECK(in_core(p, MIB) < 256);
  char *much = map(64 * MIB, 3);
  CHECK(mlock(much, 64 * MIB) == -1 && errno == ENOMEM);
  // What nobody has access to does not come in, and what is around it is locked.
  char *q = full(MIB), *closed = q + 8 * P;
  CHECK(!mprotect(closed, 8 * P, PROT_NONE));
  CHECK(mlock(q, MIB) == -1 && errno == ENOMEM && mlock(closed, P) == -1 && errno == ENOMEM);
  flood();
  CHECK(in_core(q, 8 * P) == 8 && in_core(closed, 8 * P) == 0 && in_core(q + 16 * P, MIB - 16 * P) == 240);
  CHECK(madvise(q, P, MADV_DONTNEED) == -1 && errno == EINVAL && !mprotect(closed, 8 * P, 3));
  same(q, 0, MIB);
  CHECK(!mlock(q, MIB) && in_core(q, MIB) == 256 && !munlock(q, MIB));
  same(p, 0, 2 * MIB);
}
static size_t locked_pages(char *p, size_t n) { // what takes no MADV_DONTNEED
  size_t count = 0;
  for (size_t i = 0; i < n; i += P) {
    uint64_t was = *(word *)(p + i);
    if (madvise(p + i, P, MADV_DONTNEED)) { CHECK(errno == EINVAL); count++; }
    *(word *)(p + i) = was;
  }
  return count;
}
// A block's lock, and what was said of forks, go where realloc moves it, and cover what it grows by.
static void locked_block(void) {
  for (int moves = 0; moves < 2; moves++) {
    char *p = malloc(2 * MIB), *next = moves ? malloc(2 * MIB) : 0;
    CHECK(p && (!moves || next > p));
    for (size_t i = 0; i < 2 * MIB; i += P) *(word *)(p + i) = i + 1;
    CHECK(!mlock(p, 2 * MIB) && !madvise(p + MIB, P, MADV_DONTFORK));
    char *q = realloc(p, 3 * MIB);
    CHECK(q && (q != p) == moves);
    flood();
    CHECK(in_core(q, 3 * MIB) == 768 && locked_pages(q, 3 * MIB) == 768);
    same(q, 0, 2 * MIB), zero(q, 2 * MIB, 3 * MIB);
    pid_t child = fork();
    if (!child) { CHECK(reads(q + MIB) == SIGSEGV); same(q, 0, MIB), same(q, MIB + P, 2 * MIB); _exit(5); }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 5);
    // Part of it, and more than may be locked: what was locked is, and the block grows all the same.
    CHECK(!munlock(q, MIB) && mlock(q, 4 * MIB + P) == -1);
    char *r = realloc(q, 8 * MIB);
    CHECK(r && locked_pages(r, MIB) == 0 && locked_pages(r + MIB, 2 * MIB) == 512 && locked_pages(r + 3 * MIB, 5 * MIB) == 0);
    CHECK(!mlock(r, 3 * MIB) && (r = realloc(r, 3 * MIB)) && (r = realloc(r, 40 * MIB)) && locked_pages(r, 3 * MIB) == 768);
    same(r, 0, 2 * MIB);
    free(r), free(next);
    CHECK((p = malloc(2 * MIB)) && locked_pages(p, 2 * MIB) == 0);
    CHECK(!mlock(p, 2 * MIB) && !munlock(p, 2 * MIB));
    free(p), p = full(4 * MIB);
    CHECK(!mlock(p, 4 * MIB) && !munmap(p, 4 * MIB)); // nothing is left locked
  }
}
static void lock_all(void) {
  char *p = full(4 * MIB);
  CHECK(mlockall(MCL_CURRENT) == -1 && errno == ENOMEM);
  CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == -1 && errno == ENOMEM);
  int bad[] = {0, MCL_ONFAULT, 8, -1};
  for (int i = 0; i < 4; i++) CHECK(mlockall(bad[i]) == -1 && errno == EINVAL);
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
  CHECK(mincore(p, P, &v) == -1 && errno == ENOMEM && mincore(p, SIZE_MAX, &v) == -1 && errno == ENOMEM);
}
static void drop_by_process(int self, char *p) {
  struct iovec v = {p, MIB};
  memset(p, 1, MIB), flood();
  CHECK(process_madvise(self, &v, 1, MADV_DONTNEED, 0) == MIB);
  zero(p, 0, MIB);
}
static void for_process(void) {
  char *p = full(4 * MIB), stack[P];
  memset(stack, 1, P);
  struct iovec v[2] = {{p, MIB}, {p + 2 * MIB, MIB}};
  int self = syscall(SYS_pidfd_open, getpid(), 0);
  CHECK(process_madvise(self, v, 2, MADV_DONTNEED, 0) == 2 * MIB);
  zero(p, 0, MIB), same(p, MIB, 2 * MIB), zero(p, 2 * MIB, 3 * MIB), same(p, 3 * MIB, 4 * MIB);
  CHECK(process_madvise(self, v, 2, MADV_WILLNEED, 0) == 2 * MIB);
  // With no descriptor to be had, and with no /proc.
  struct rlimit files;
  CHECK(!getrlimit(RLIMIT_NOFILE, &files) && !setrlimit(RLIMIT_NOFILE, &(struct rlimit){0, files.rlim_max}));
  drop_by_process(self, p);
  CHECK(!setrlimit(RLIMIT_NOFILE, &files));
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) {
    self = syscall(SYS_pidfd_open, getpid(), 0);
    if (chroot("/var/tmp")) puts("no chroot"), exit(5);
    drop_by_process(self, p), _exit(5);
  }
  exits(child, 5);
}
// Bits that mmap takes no notice of: one that is for mprotect, and one that there is not.
static void other_bits(void) {
  int bits[] = {PROT_GROWSDOWN, 0x100};
  for (int i = 0; i < 2; i++) {
    char *p = map(8 * MIB, 3 | bits[i]), *none = map(P, bits[i]), *only = map(P, PROT_READ | bits[i]);
    CHECK(reads(none) == SIGSEGV && !reads(only) && writes(only) == SIGSEGV);
    for (size_t at = 0; at < 8 * MIB; at += P) *(word *)(p + at) = at + 1;
    CHECK(mmap(p + MIB, MIB, 3 | bits[i], MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p + MIB);
    flood();
    CHECK(in_core(p + 2 * MIB, 6 * MIB) < 1536); // it is managed
    same(p, 0, MIB), zero(p, MIB, 2 * MIB), same(p, 2 * MIB, 8 * MIB);
    CHECK(mprotect(p, P, 3 | bits[i]) == -1 && errno == EINVAL);
  }
}
// Address 0 is a place like any other to who may have it.
static void to_address_0(void) {
  char *first = mmap(0, P, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (first == MAP_FAILED) { puts("not 0"); exit(0); }
  CHECK(!munmap(first, P));
  char *p = full(2 * P), *q = mremap(p, 2 * P, 2 * P, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)0);
  CHECK(!q && reads(p) == SIGSEGV && !reads(q));
  char there[P];
  int self = open("/proc/self/mem", O_RDONLY);
  for (size_t at = 0; at < 2 * P; at += P) CHECK(pread(self, there, P, at) == P && *(uint64_t *)there == at + 1);
}
static void kinds(void) { // what is not managed works as ever
  char *shared = mmap(0, MIB, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0), *exec = map(MIB, 7);
  char *stack = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  char *low = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
  char *down = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, 0);
  char *at = mmap((void *)0x200000000000, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  CHECK(at == (void *)0x200000000000 && (uintptr_t)low < 1ul << 32);
  char *all[] = {shared, exec, stack, low, down, at};
  for (int i = 0; i < 6; i++) {
    CHECK(all[i] != MAP_FAILED);
    memset(all[i], i, MIB);
    CHECK(!mprotect(all[i], P, PROT_READ) && writes(all[i]) == SIGSEGV && !munmap(all[i], MIB) && reads(all[i]) == SIGSEGV);
  }
  CHECK(mmap(0, 0, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EINVAL);
  CHECK(munmap((void *)1, P) == -1 && errno == EINVAL);
}
// Sealed is the middle, so that every call meets a part first that it could change.
static void sealed(void) {
  char *p = full(8 * MIB), *block = malloc(2 * MIB);
  if (seal(p + 2 * MIB, 4 * MIB, 0) && errno == ENOSYS) { puts("no mseal"); exit(0); }
  flood();
  CHECK(munmap(p, 8 * MIB) && errno == EPERM);
  CHECK(mmap(p, 4 * MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED && errno == EPERM);
  CHECK(mremap(p + 3 * MIB, MIB, 2 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == EPERM);
  CHECK(mremap(p, 8 * MIB, MIB, 0) == MAP_FAILED && errno == EPERM);
  CHECK(mprotect(p, 4 * MIB, PROT_READ) && errno == EPERM && !mprotect(p, 2 * MIB, 3));
  same(p, 0, 8 * MIB);
  CHECK(!madvise(p + 2 * MIB, MIB, MADV_DONTNEED) && !mprotect(p, 2 * MIB, PROT_READ));
  zero(p, 2 * MIB, 3 * MIB), same(p, 3 * MIB, 8 * MIB);
  // What nobody may write nobody may drop.
  char *only = full(MIB);
  CHECK(!mprotect(only, MIB, PROT_READ) && !seal(only, MIB, 0));
  CHECK(madvise(only, MIB, MADV_DONTNEED) && errno == EPERM);
  flood(), same(only, 0, MIB);
  // The kernel neither: so it stays in core, which no more than half of the frames may.
  flood();
  CHECK(in_core(only, MIB) == 256);
  CHECK(!mlock(only, MIB) && !munlock(only, MIB) && !seal(only, MIB, 0));
  char *more = full(4 * MIB);
  CHECK(!mprotect(more, 4 * MIB, PROT_READ) && seal(more, 4 * MIB, 0) && errno == ENOMEM);
  flood(), same(more, 0, 4 * MIB);
  CHECK(!munmap(more, 4 * MIB));
  for (int i = 0; i < 2; i++) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) { same(only, 0, MIB), flood(), same(only, 0, MIB), same(p, 3 * MIB, 8 * MIB); _exit(5); }
    exits(child, 5), flood(), same(only, 0, MIB), same(p, 3 * MIB, 8 * MIB);
  }
  CHECK(!munmap(p, 2 * MIB) && seal(p, 4 * MIB, 0) && errno == ENOMEM);
  // What nobody may read stays where it is: in core what is there.
  char *none = full(6 * MIB), *reserved = map(64 * MIB, PROT_NONE);
  CHECK(!seal(reserved, 64 * MIB, 0) && !mprotect(none, 6 * MIB, PROT_NONE) && seal(none, 6 * MIB, 0) && errno == ENOMEM);
  flood();
  CHECK(!seal(none, 6 * MIB, 0));
  // It counts beside what is locked.
  char *two = full(2 * MIB), *lock = full(4 * MIB);
  CHECK(!mprotect(two, 2 * MIB, PROT_READ) && !mlock(lock, 4 * MIB) && seal(two, 2 * MIB, 0) && errno == ENOMEM);
  CHECK(!munlock(lock, 4 * MIB) && !seal(two, 2 * MIB, 0) && mlock(lock, 4 * MIB) && errno == ENOMEM && !mlock(lock, 2 * MIB));
  flood(), same(two, 0, 2 * MIB), same(lock, 0, 4 * MIB);
  // A block of the heap's: freed, its addresses are nobody's, and others are found.
  CHECK(!seal(block, 2 * MIB, 0));
  free(block);
  for (int i = 0; i < 4; i++) { char *other = malloc(2 * MIB); CHECK(other && other != block); memset(other, 1, 2 * MIB); }
}
static struct row rows[] = {
  {"partial_munmap", partial_munmap}, {"fixed_over", fixed_over}, {"fixed_over_refused", fixed_over_refused},
  {"mremap", moving}, {"to_address_0", to_address_0}, {"other_bits", other_bits},
  {"read_only", read_only},
  {"moved_access", moved_access}, {"moved_wishes", moved_wishes}, {"block_again", block_again}, {"no_room", no_room},
  {"no_access", no_access}, {"reserve_then_commit", reserve_then_commit}, {"executable", executable},
  {"dontneed", dontneed}, {"free", advise_free}, {"guard", guard}, {"huge_page", huge_page},
  {"dont_fork", dont_fork}, {"mlock", locked}, {"locked_block", locked_block}, {"mlockall", lock_all}, {"mincore", core_map},
  {"process_madvise", for_process}, {"kinds", kinds}, {"mseal", sealed}};
int main(int argc, char **argv) { return run(rows, sizeof rows / sizeof *rows, argc == 2 ? argv[1] : ""); }
