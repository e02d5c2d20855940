// realloc and mremap where no frame can be had, because the store is full, or where pages cannot be read.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define P 4096ul
#define MIB (1ul << 20)
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); _exit(1); } } while (0)
typedef volatile uint64_t word;
enum { RW = PROT_READ | PROT_WRITE, RWX = RW | PROT_EXEC, LEN = 4 * MIB, HALF = LEN / 2 };

static sigjmp_buf out;
static volatile sig_atomic_t expected; // whether an access may fail
static void on_sigbus(int s) {
  if (!expected) { printf("SIGBUS\n"); _exit(99); }
  siglongjmp(out, s);
}
static char *map(size_t n, int prot, int flags) {
  char *p = mmap(0, n, prot, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  CHECK(p != MAP_FAILED);
  return p;
}
// Each time a page is another one than in the store.
static void fill(char *p, size_t from, size_t to) {
  for (size_t i = from; i < to; i += P) *(word *)(p + i) = *(word *)(p + i + P - 8) = i + 1, ++*(word *)(p + i + 64);
}
static void same(char *p, size_t from, size_t to) {
  for (size_t i = from; i < to; i += P) CHECK(*(word *)(p + i) == i + 1 && *(word *)(p + i + P - 8) == i + 1);
}
static size_t in_core(char *p, size_t n) {
  unsigned char vector[LEN / P];
  size_t count = 0;
  CHECK(!mincore(p, n, vector));
  for (size_t i = 0; i < n / P; i++) count += vector[i] & 1;
  return count;
}

// Another thread, which changes a mapping all the time, and has a page of its own.
static volatile int done;
static volatile unsigned long rounds;
static void *go_on(void *unused) {
  char own[P], *mapping = map(P, PROT_NONE, 0);
  (void)unused;
  for (; !done; rounds++) {
    memset(own, rounds, P);
    CHECK(!mprotect(mapping, P, rounds % 2 ? PROT_NONE : PROT_READ));
    for (size_t i = 0; i < P; i++) CHECK(own[i] == (char)rounds);
  }
  return 0;
}
static pthread_t other;
static void others_go_on(void) {
  for (unsigned long before = rounds; rounds < before + 10;) usleep(1000);
}

static char *ballast;
static size_t reached; // of it, the first page that could not be had
// No frame can be had, whatever has given some back. The second half of `p`, if there is one, stays in core.
static void use_up(char *p) {
  expected = 1;
  if (!sigsetjmp(out, 1)) for (;; reached += P) {
    *(word *)(ballast + reached) = 1;
    if (p && reached % (64 * P) == 0) fill(p, HALF, LEN);
  }
  expected = 0;
}
// From here on no frame can be had: a part of `p` is in the store, and the rest in core and cannot be saved.
static void fill_up(char *p) {
  ballast = map(64 * MIB, RW, 0);
  fill(p, 0, LEN);
  CHECK(!madvise(p, HALF, MADV_PAGEOUT));
  use_up(p);
  size_t there = in_core(p, LEN);
  CHECK(there > 64 && there < LEN / P - 64);
}
// The pages that can be had.
static void same_in_core(char *p) {
  unsigned char vector[LEN / P];
  CHECK(!mincore(p, LEN, vector));
  for (size_t i = 0; i < LEN; i += P) if (vector[i / P] & 1) same(p, i, i + P);
}
static void make_room(void) { CHECK(!munmap(ballast, 64 * MIB)); }
// All is there that was, at `p`; and where `p` is used again, frames come and go.
static void all_right(char *p) {
  same_in_core(p);
  others_go_on();
  make_room();
  same(p, 0, LEN);
  char *more = map(6 * MIB, RW, 0);
  fill(more, 0, 6 * MIB), same(more, 0, 6 * MIB), same(p, 0, LEN), fill(more, 0, 6 * MIB), same(more, 0, 6 * MIB);
}
// Gone: what was there is mapped by nobody.
static void nobodys(char *p, size_t n) {
  unsigned char vector[LEN / P];
  CHECK(mincore(p, n, vector) == -1 && errno == ENOMEM);
}

static void larger(void) {
  char *p = map(LEN, RW, 0), *behind = map(P, RW, 0);
  fill_up(p);
  char *q = mremap(p, LEN, LEN + MIB, MREMAP_MAYMOVE);
  CHECK(q != MAP_FAILED && (behind < p || q != p));
  nobodys(p, LEN);
  all_right(q);
  for (size_t i = 0; i < MIB; i += P) CHECK(!*(word *)(q + LEN + i));
}
static void smaller(void) {
  char *p = map(LEN + MIB, RW, 0);
  fill_up(p);
  CHECK(mremap(p, LEN + MIB, LEN, 0) == p);
  all_right(p);
}
static void to_a_place(int prot, int flags) {
  char *p = map(LEN, RW, 0), *there = map(LEN, PROT_NONE, 0);
  fill_up(p);
  CHECK(!mprotect(p, LEN, prot));
  CHECK(mremap(p, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED | flags, there) == there);
  CHECK(!mprotect(there, LEN, RW));
  if (!flags) nobodys(p, LEN);
  all_right(there);
  if (!flags) return;
  CHECK(!mprotect(p, LEN, RW));
  for (size_t i = 0; i < LEN; i += P) CHECK(!*(word *)(p + i));
}
static void fixed(void) { to_a_place(RW, 0); }
static void read_only(void) { to_a_place(PROT_READ, 0); }
static void no_access(void) { to_a_place(PROT_NONE, 0); }
static void stays_empty(void) { to_a_place(RW, MREMAP_DONTUNMAP); }
static void a_part(void) {
  char *p = map(LEN, RW, 0), *there = map(LEN, PROT_NONE, 0);
  fill_up(p);
  CHECK(mremap(p + MIB, 2 * MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, there + MIB) == there + MIB);
  CHECK(mremap(there + MIB, 2 * MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, p + MIB) == p + MIB);
  all_right(p);
}
static char *first_in_core(char *p) {
  while (!in_core(p, P)) p += P;
  return p;
}
// What has to be copied takes frames: all of it is as it was, and moves once there are some.
static void fails(char *p, int prot, int flags, char *there) {
  if (flags & MREMAP_FIXED) CHECK(mremap(p, LEN, LEN, flags, there) == MAP_FAILED && errno == ENOMEM);
  else CHECK(mremap(p, LEN, LEN + MIB, flags) == MAP_FAILED && errno == ENOMEM);
  // It can be used as before, and no more.
  FILE *f = fopen("/proc/self/maps", "r");
  char line[256], wanted[64], rights[5];
  int found = 0;
  for (unsigned long start, end; f && fgets(line, sizeof line, f);)
    if (sscanf(line, "%lx-%lx %4s", &start, &end, rights) == 3 && start <= (unsigned long)p && (unsigned long)p < end) found = 1, strcpy(wanted, rights);
  CHECK(found && (wanted[0] == 'r') == !!(prot & PROT_READ) && (wanted[1] == 'w') == !!(prot & PROT_WRITE) && (wanted[2] == 'x') == !!(prot & PROT_EXEC));
  fclose(f);
}
static void executable(void) {
  char *p = map(LEN, RW, 0), *there = map(LEN, PROT_NONE, 0);
  fill_up(p);
  CHECK(!mprotect(p, LEN, RWX));
  if (there == p + LEN) fails(p, RWX, MREMAP_MAYMOVE, 0);
  fails(p, RWX, MREMAP_MAYMOVE | MREMAP_FIXED, there);
  fails(p, RWX, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, there);
  same_in_core(p);
  others_go_on();
  make_room();
  CHECK(mremap(p, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
  same(there, 0, LEN);
}
// What lies before a guard has moved when the rest cannot.
static void guarded(void) {
  char *p = map(LEN, RW, 0), *there = map(LEN, PROT_NONE, 0), *guard = p + HALF / 2;
  fill_up(p);
  if (madvise(guard, P, 102)) { puts("no guards"); _exit(0); }
  reached += P, use_up(0); // with the guard's place in the store one page more could go, and the rest be copied page by page
  CHECK(!mprotect(p, LEN, RWX));
  fails(p, RWX, MREMAP_MAYMOVE | MREMAP_FIXED, there);
  make_room();
  CHECK(read(open("/dev/zero", O_RDONLY), guard, 1) == -1 && errno == EFAULT && !madvise(guard, P, 103));
  fill(p, HALF / 2, HALF / 2 + P);
  same(p, 0, LEN);
}
static char *outside_of_all(void) { return map(LEN, PROT_NONE, MAP_STACK); }
static void outside(int prot) {
  char *p = map(LEN, RW, 0), *there = outside_of_all();
  fill_up(p);
  char *locked = first_in_core(p);
  CHECK(!mlock(locked, P) && !mprotect(p, LEN, prot));
  fails(p, prot, MREMAP_MAYMOVE | MREMAP_FIXED, there);
  if (prot & PROT_READ) same_in_core(p);
  others_go_on();
  make_room();
  // It stayed where it was, and is locked no more than once.
  (void)madvise(locked, P, MADV_PAGEOUT);
  CHECK(in_core(locked, P));
  CHECK(!munlock(locked, P) && !madvise(locked, P, MADV_PAGEOUT) && !in_core(locked, P));
  CHECK(mremap(p, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
  nobodys(p, LEN);
  CHECK(!mprotect(there, LEN, PROT_READ));
  same(there, 0, LEN);
}
static void copied_outside(void) { outside(RW); }
static void read_only_outside(void) { outside(PROT_READ); }
static void no_access_outside(void) { outside(PROT_NONE); }

static void block(void) {
  char *p = malloc(LEN), *behind = malloc(MIB);
  CHECK(p && behind);
  fill_up(p);
  char *q = p;
  // Its room is used up first.
  for (size_t n = LEN; q == p; n *= 2) CHECK(q = realloc(q, n));
  all_right(q);
}
// All of it comes back, and what was locked is locked.
static void block_that_cannot_move(void) {
  char *p = malloc(LEN), *behind = malloc(MIB);
  CHECK(p && behind && !((uintptr_t)p % P));
  fill_up(p);
  char *locked = first_in_core(p + HALF);
  CHECK(locked < p + LEN - MIB && !mlock(locked, P) && !mprotect(p + LEN - MIB, MIB, RWX));
  CHECK(!realloc(p, 64 * MIB) && errno == ENOMEM);
  same_in_core(p);
  CHECK(!mprotect(p, LEN, RW));
  all_right(p);
  CHECK(in_core(locked, P) && !munlock(locked, P));
  char *q = realloc(p, 64 * MIB);
  CHECK(q && q != p);
  same(q, 0, LEN);
}

static const char *store;
// Not full, but cut: what is in the store is lost, and nothing else is.
static void cut(void) {
  char *p = map(LEN, RW, 0), *there = map(LEN, PROT_NONE, 0), *far = outside_of_all();
  fill(p, 0, LEN);
  char *more = map(12 * MIB, RW, 0);
  fill(more, 0, 12 * MIB), fill(p, HALF, LEN);
  CHECK(in_core(p, HALF) == 0 && in_core(p + HALF, HALF) > 64);
  CHECK(!truncate(store, P));
  fails(p, RW, MREMAP_MAYMOVE | MREMAP_FIXED, far);
  same_in_core(p);
  others_go_on();
  CHECK(mremap(p, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
  same_in_core(there);
  int s = sigsetjmp(out, expected = 1);
  if (!s) (void)*(word *)there;
  expected = 0;
  CHECK(s == SIGBUS);
  others_go_on();
}

static struct { const char *name; void (*what)(void); } cases[] = {
  {"larger", larger}, {"smaller", smaller}, {"fixed", fixed}, {"read_only", read_only}, {"no_access", no_access},
  {"stays_empty", stays_empty}, {"a_part", a_part}, {"executable", executable}, {"guarded", guarded}, {"copied_outside", copied_outside},
  {"read_only_outside", read_only_outside}, {"no_access_outside", no_access_outside}, {"block", block},
  {"block_that_cannot_move", block_that_cannot_move}, {"cut", cut}};
int main(int argc, char **argv) {
  setvbuf(stdout, 0, _IONBF, 0);
  struct sigaction a = {.sa_handler = on_sigbus};
  sigaction(SIGBUS, &a, 0);
  store = argv[2];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc > 1 && !strcmp(argv[1], cases[i].name)) {
      CHECK(!pthread_create(&other, 0, go_on, 0));
      cases[i].what();
      done = 1;
      CHECK(!pthread_join(other, 0));
      puts("ok");
      return 0;
    }
  return 2;
}
