// What the kernel does to a mapping in one step is one step for the threads that use it meanwhile. With -DRAW the calls are made by number.
#include "mappings.h"
#include <pthread.h>
enum { N = 64, LEN = N * 4096 };
static char *volatile p;
static volatile int stop;
static pthread_t other;
static void start(void *(*what)(void *)) { stop = 0; CHECK(!pthread_create(&other, 0, what, 0)); }
static void end(void) { stop = 1; CHECK(!pthread_join(other, 0)); }
static void pause_a_little(void) { for (volatile int i = 0; i < 20000; i++); }
static char *sevens(int flags) {
  char *q = mmap(0, LEN, 3, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  CHECK(q != MAP_FAILED);
  return memset(q, 7, LEN);
}
// A place in managed memory, or out of it.
static char *place(int outside) { return sevens(outside ? MAP_STACK : 0); }

// What the other thread may do, and what came of it.
static __thread sigjmp_buf trap;
static volatile long trapped, went;
static void on_trap(int s) { siglongjmp(trap, 1); }
static void count_traps(void) {
  struct sigaction a = {.sa_handler = on_trap, .sa_flags = SA_NODEFER};
  sigaction(SIGSEGV, &a, 0), sigaction(SIGBUS, &a, 0);
  trapped = went = 0;
}

static unsigned long added, taken;
static void *count(void *unused) {
  for (unsigned k = 0; !stop; k = (k * 5 + 1) % N) __atomic_fetch_add((unsigned long *)(p + k * P), 1, __ATOMIC_RELAXED), added++;
  return unused;
}
static void take(char *q) { for (int k = 0; k < N; k++) taken += *(word *)(q + k * P); }
// No count is lost: it is in what is taken, or in what stays.
static void taken_away(void) {
  for (int kind = 0; kind < 3; kind++) {
    p = map(LEN, 3), added = taken = 0;
    if (kind == 2) madvise(p + 9 * P, P, MADV_PAGEOUT);
    start(count);
    for (int i = 0; i < 300; i++) {
      int flags = MREMAP_MAYMOVE | MREMAP_DONTUNMAP | (kind ? MREMAP_FIXED : 0);
      char *there = kind ? place(kind == 2) : 0, *q = mremap(p, LEN, LEN, flags, there);
      CHECK(q != MAP_FAILED && (!there || q == there));
      pause_a_little();
      take(q);
      CHECK(!munmap(q, LEN));
    }
    end();
    take(p);
    CHECK(added == taken);
  }
}

static volatile int writing;
static void *try(void *unused) {
  for (volatile unsigned k = 0; !stop; k = (k + 1) % N) {
    if (sigsetjmp(trap, 1)) { trapped++; continue; }
    if (writing) p[k * P] = 9; else (void)*(volatile char *)(p + k * P);
    went++;
  }
  return unused;
}
// What may not be accessed, or not written, is so on its way too.
static void closed_on_its_way(void) {
  count_traps();
  for (int kind = 0; kind < 4; kind++) {
    int outside = kind & 1, prot = (writing = kind >> 1) ? PROT_READ : PROT_NONE;
    char *a = place(0), *b = place(outside);
    CHECK(!mprotect(a, LEN, prot) && !mprotect(b, LEN, prot));
    // From the beginning where it goes to, whichever that is.
    for (int i = 0; i < 200; i++) {
      p = i & 1 ? b : a;
      start(try);
      CHECK(mremap(a, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, b) == b);
      end();
      char *was = a;
      if (outside) CHECK(!mprotect(a, LEN, 3) && memset(a, 7, LEN) && !mprotect(a, LEN, prot));
      else a = b, b = was;
    }
    CHECK(went == 0 && trapped > 0 && !mprotect(a, LEN, 3));
    for (size_t i = 0; i < LEN; i++) CHECK(a[i] == 7);
  }
}

static volatile long others;
static void *read_back(void *unused) {
  if (sigsetjmp(trap, 1)) { trapped++; return unused; }
  for (word k = 1; !stop; k++) {
    *(word *)p = k;
    if (*(word *)p != k) others++;
  }
  return unused;
}
// A mapping of a file is mapped over: no access fails, and what is written is there, but for what was at the moment of the change.
static void mapped_over_a_file(void) {
  count_traps();
  int file = memfd_create("file", 0), over = memfd_create("over", 0);
  CHECK(file >= 0 && over >= 0 && !ftruncate(file, 16 * P) && !ftruncate(over, 16 * P));
  for (int i = 0; i < 900; i++) {
    p = map(16 * P, 3);
    if (i % 3) CHECK(mmap(p, 16 * P, 3, MAP_SHARED | MAP_FIXED, file, 0) == p);
    others = 0;
    start(read_back);
    usleep(200);
    if (i % 3 == 1) CHECK(mmap(p, 16 * P, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
    else CHECK(mmap(p, 16 * P, 3, MAP_SHARED | MAP_FIXED, over, 0) == p);
    usleep(100);
    end();
    CHECK(trapped == 0 && others <= 1);
    // It is paged, where it is the domain's again.
    if (i % 3 == 1 && i % 100 == 1) {
      *(word *)p = 99, *(word *)(p + P) = 98;
      flood();
      CHECK(!in_core(p, 2 * P) && *(word *)p == 99 && *(word *)(p + P) == 98);
    }
    CHECK(!munmap(p, 16 * P));
  }
}

static void *use_first(void *unused) {
  for (time_t until = time(0) + 60; !stop; *(word *)p = 9) if (time(0) > until) stop = 1;
  return unused;
}
// Something else is mapped over much of which another thread uses the first page: it does not take until that thread leaves off.
static void mapped_over_what_is_used(void) {
  size_t much = 15000 * MIB;
  p = mmap(0, much, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(p != MAP_FAILED);
  start(use_first);
  usleep(100000);
  CHECK(mmap(p, much, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == p && !stop);
  end();
}

static void *watch(void *unused) {
  for (volatile unsigned k = 0; !stop; k = (k + 1) % N) {
    if (sigsetjmp(trap, 1)) { trapped++; continue; }
    if (p[k * P] == 7) went++;
  }
  return unused;
}
// Where nobody had access, what was there is not seen.
static void mapped_over_what_is_closed(void) {
  count_traps();
  for (int i = 0; i < 300; i++) {
    p = sevens(0);
    CHECK(!mprotect(p, LEN, PROT_NONE));
    start(watch);
    pause_a_little(), pause_a_little();
    CHECK(mmap(p, LEN, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
    end();
    zero(p, 0, LEN);
    CHECK(!munmap(p, LEN));
  }
  CHECK(went == 0);
}

static void *see_others(void *unused) {
  while (!stop) for (int k = 0; k < N; k++) if (*(volatile char *)(p + k * P + 9) != 7) others++;
  return unused;
}
// Sevens are moved over sevens: nothing else is seen there.
static void moved_over(void) {
  for (int outside = 0; outside < 2; outside++) {
    p = place(outside), others = 0;
    start(see_others);
    for (int i = 0; i < 400; i++) {
      char *q = sevens(0);
      CHECK(mremap(q, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, p) == p);
    }
    end();
    CHECK(others == 0 && !munmap(p, LEN));
  }
}
static void *see_others_than_zero(void *unused) {
  while (!stop) for (int k = 0; k < N; k++) {
    char c = *(volatile char *)(p + k * P + 9);
    if (c && c != 7) others++;
  }
  return unused;
}
// Where each page has to be copied, since what can be written and executed does not move, zeros are, for a moment; and nothing fails.
static void moved_over_by_copies(void) {
  p = sevens(0), others = 0;
  start(see_others_than_zero);
  for (int i = 0; i < 400; i++) {
    char *q = sevens(0);
    CHECK(!mprotect(q, LEN, 7) && mremap(q, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, p) == p);
  }
  end();
  CHECK(others == 0);
}
// Nor what was there where nobody had access, nor in what it grows by.
static void moved_over_what_is_closed(void) {
  count_traps();
  for (int i = 0; i < 200; i++) {
    p = sevens(0);
    char *q = map(LEN / 2, 3);
    CHECK(!mprotect(p, LEN, PROT_NONE));
    start(watch);
    CHECK(mremap(q, LEN / 2, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, p) == p);
    end();
    zero(p, 0, LEN);
    CHECK(!munmap(p, LEN));
  }
  CHECK(went == 0);
}
// Nor where nobody could write, and what is written there since then stays.
static volatile char wrote[N];
static void *see_and_write(void *unused) {
  for (volatile int k = 0; !stop; k = (k + 1) % N) {
    if (sigsetjmp(trap, 1)) { trapped++; continue; }
    if (*(volatile char *)(p + k * P + 9) != 7) others++;
    p[k * P] = 8, wrote[k] = 1;
  }
  return unused;
}
static void moved_over_what_is_protected(void) {
  int prots[] = {PROT_READ, PROT_READ | PROT_EXEC};
  count_traps();
  for (int i = 0; i < 300; i++) {
    p = sevens(0), others = 0, memset((char *)wrote, 0, N);
    char *q = sevens(0);
    CHECK(!mprotect(p + (i & 1) * P, LEN - (i & 1) * P, prots[i / 2 & 1]));
    start(see_and_write);
    CHECK(mremap(q, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, p) == p);
    end();
    CHECK(others == 0);
    for (int k = i & 1; k < N; k++) CHECK(p[k * P] == (wrote[k] ? 8 : 7));
    CHECK(!munmap(p, LEN));
  }
}

static struct row rows[] = {
  {"taken_away", taken_away}, {"closed_on_its_way", closed_on_its_way}, {"mapped_over_a_file", mapped_over_a_file},
  {"mapped_over_what_is_closed", mapped_over_what_is_closed}, {"mapped_over_what_is_used", mapped_over_what_is_used},
  {"moved_over", moved_over}, {"moved_over_by_copies", moved_over_by_copies},
  {"moved_over_what_is_closed", moved_over_what_is_closed},
  {"moved_over_what_is_protected", moved_over_what_is_protected}};
int main(int argc, char **argv) { return run(rows, sizeof rows / sizeof *rows, argc == 2 ? argv[1] : ""); }
