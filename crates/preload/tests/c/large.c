// Large blocks, and mappings, that move.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MIB = 1 << 20, PAGE = 4096, BLOCKS = 4, PAGES = 12 * MIB / PAGE };

static int moves;

// Blocks that grow in turns, a MiB at a time: how often one had to move.
static int turns(void) {
  char *block[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) block[i] = malloc(MIB);
  for (size_t len = 2; len <= 64; len++) {
    for (int i = 0; i < BLOCKS; i++) {
      char *grown = realloc(block[i], len * MIB);
      if (!grown) return 1;
      moves += grown != block[i];
      block[i] = grown;
    }
  }
  printf("%d\n", moves);
  return 0;
}

// All addresses that there are, in MiB, where blocks that have grown keep as many free behind themselves.
static int all_of_it(void) {
  enum { LARGE = 2048 };
  long all = 0;
  for (int i = 0; i < 4; i++) {
    char *block = malloc(MIB);
    // The block is not to grow in place.
    if (!malloc(MIB) || !realloc(block, (size_t)LARGE * MIB)) return 1;
    all += LARGE + 1;
  }
  for (size_t len = LARGE; len; len /= 2) {
    while (malloc(len * MIB)) all += len;
  }
  printf("%ld\n", all);
  return 0;
}

static uint64_t *page_of(char *block, size_t page) { return (uint64_t *)(block + page * PAGE); }

// Something on every page but each eighth.
static void fill(char *block, size_t pages, uint64_t salt) {
  for (size_t page = 0; page < pages; page++) {
    if (page % 8) page_of(block, page)[page % 512] = salt + page;
  }
}

static void check(char *block, size_t pages, uint64_t salt) {
  for (size_t page = 0; page < pages; page++) {
    uint64_t want = page % 8 ? salt + page : 0;
    if (page_of(block, page)[page % 512] != want || page_of(block, page)[(page + 1) % 512]) {
      fprintf(stderr, "page %zu is wrong\n", page);
      abort();
    }
  }
}

// Two blocks of three times as much as there are frames, which outgrow their room in turns.
static size_t len;

static void begin(char *block[2], uint64_t salt) {
  len = PAGES * PAGE;
  for (int i = 0; i < 2; i++) fill(block[i] = malloc(len), PAGES, salt + i);
}

static void outgrow(char *block[2], int rounds) {
  for (int round = 0; round < rounds; round++) {
    len = (len * 21 / 10 + PAGE - 1) / PAGE * PAGE;
    for (int i = 0; i < 2; i++) {
      char *grown = realloc(block[i], len);
      if (!grown) abort();
      moves += grown != block[i];
      block[i] = grown;
      // What has come is zero.
      if (*(uint64_t *)(grown + len - PAGE)) abort();
    }
  }
}

static void all_right(char *block[2], uint64_t salt) {
  for (int i = 0; i < 2; i++) check(block[i], PAGES, salt + i);
}

static int moved(int rounds) {
  char *block[2];
  begin(block, 1);
  outgrow(block, rounds);
  all_right(block, 1);
  printf("%d\n", moves);
  return 0;
}

// A block with a guard in it, as the C library's mremap moves one: whether one of the kernel's has moved.
static int with_a_guard(void) {
  enum { INSTALL = 102, LEN = 8 * MIB, GUARD = 3 };
  char *block = malloc(LEN), *behind = malloc(LEN);
  fill(block, LEN / PAGE, 1);
  char *guard = (char *)(((uintptr_t)block + PAGE - 1) / PAGE * PAGE) + GUARD * PAGE;
  if (madvise(guard, PAGE, INSTALL)) return puts("0"), 0; // from Linux 6.13 on
  char *grown = realloc(block, 64 * LEN);
  if (!grown || grown == block || !behind) return 1;
  for (size_t page = GUARD + 2; page < LEN / PAGE; page++) {
    if (*(page_of(grown, page) + page % 512) != (page % 8 ? 1 + page : 0)) return 1;
  }
  int pipes[2];
  if (pipe(pipes)) return 1;
  // The kernel reads no guard.
  if (write(pipes[1], grown + (guard - block), 1) >= 0) return 1;
  // Nor does anybody where the block becomes short, or a little longer again, nor what has no access.
  enum { CLOSED = 7, SHORT = 500000, LONGER = 700000 };
  if (mprotect(grown + CLOSED * PAGE, PAGE, PROT_NONE)) return 1;
  for (int round = 0; round < 2; round++) {
    grown = realloc(grown, round ? LONGER : SHORT);
    if (!grown || write(pipes[1], grown + GUARD * PAGE, 1) >= 0) return 1;
    if (write(pipes[1], grown + CLOSED * PAGE, 1) >= 0) return 1;
    for (size_t page = CLOSED + 1; page < SHORT / PAGE; page++) {
      if (*(page_of(grown, page) + page % 512) != (page % 8 ? 1 + page : 0)) return 1;
    }
  }
  if (mprotect(grown + CLOSED * PAGE, PAGE, PROT_READ) || page_of(grown, CLOSED)[CLOSED] != 1 + CLOSED) return 1;
  free(grown), free(behind);
  // And none stays behind.
  block = malloc(LEN);
  memset(block, 1, LEN);
  puts("1");
  return 0;
}

static volatile int done;

// Somebody else's block, used all the time.
static void *use(void *salt) {
  enum { FEW = 256 };
  char *block = malloc(FEW * PAGE);
  fill(block, FEW, (uintptr_t)salt);
  while (!done) check(block, FEW, (uintptr_t)salt);
  free(block);
  return NULL;
}

// While others use theirs; and a child has what its parent has, and moves it as well.
static int beside(void) {
  pthread_t others[2];
  for (uintptr_t i = 0; i < 2; i++) pthread_create(&others[i], NULL, use, (void *)(100 * (i + 1)));
  char *block[2];
  begin(block, 1);
  outgrow(block, 3);
  pid_t child = fork();
  if (!child) {
    all_right(block, 1);
    for (int i = 0; i < 2; i++) fill(block[i], PAGES, 1000 + i);
    outgrow(block, 2);
    all_right(block, 1000);
    _exit(0);
  }
  outgrow(block, 2);
  all_right(block, 1);
  int status;
  if (waitpid(child, &status, 0) != child || status) return 1;
  all_right(block, 1);
  done = 1;
  for (int i = 0; i < 2; i++) pthread_join(others[i], NULL);
  return 0;
}

// The same of a mapping that mremap moves.
static int remapped(int rounds) {
  size_t whole = 2 * PAGES * PAGE;
  char *at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  fill(at, 2 * PAGES, 1);
  for (int round = 0; round < rounds; round++) {
    char *there = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mremap(at, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED, there) != there) return 1;
    at = there;
    moves++;
  }
  check(at, 2 * PAGES, 1);
  printf("%d\n", moves);
  return 0;
}

static long kernels(long number, long a, long b, long c) {
  long result;
  __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return result;
}

// Of this thread alone: others may have the CPU meanwhile.
static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// Address space of the kernel's of which every other page is in use, as nearly as many as there may be mappings.
enum { USED = 26000 };

static char *in_stretches(void) {
  char *at = mmap(NULL, 2l * USED * PAGE, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (long i = 0; i < USED; i++) {
    if (mprotect(at + 2 * i * PAGE, PAGE, PROT_READ | PROT_WRITE)) abort();
  }
  return at;
}

// How many times as long its end, and its opening, take as in the kernel alone, at best.
static int stretches(void) {
  double best[4] = {1e9, 1e9, 1e9, 1e9};
  for (int i = 0; i < 20; i++) {
    char *at = in_stretches();
    size_t all = 2l * USED * PAGE;
    double begun = seconds();
    switch (i % 4) {
    case 0: if (munmap(at, all)) return 1; break;
    case 1: if (kernels(SYS_munmap, (long)at, all, 0)) return 1; break;
    case 2: if (mprotect(at, all, PROT_READ | PROT_WRITE)) return 1; break;
    case 3: if (kernels(SYS_mprotect, (long)at, all, PROT_READ | PROT_WRITE)) return 1; break;
    }
    double took = seconds() - begun;
    if (took < best[i % 4]) best[i % 4] = took;
    if (i % 4 > 1 && munmap(at, all)) return 1;
  }
  double ends = best[0] / best[1], opens = best[2] / best[3];
  printf("%d\n", (int)(ends > opens ? ends : opens));
  return 0;
}

int main(int argc, char **argv) {
  (void)argc;
  if (!strcmp(argv[1], "turns")) return turns();
  if (!strcmp(argv[1], "all_of_it")) return all_of_it();
  if (!strcmp(argv[1], "moved")) return moved(7);
  if (!strcmp(argv[1], "still")) return moved(0);
  if (!strcmp(argv[1], "once")) return moved(1);
  if (!strcmp(argv[1], "beside")) return beside();
  if (!strcmp(argv[1], "with_a_guard")) return with_a_guard();
  if (!strcmp(argv[1], "remapped")) return remapped(8);
  if (!strcmp(argv[1], "mapped")) return remapped(0);
  if (!strcmp(argv[1], "stretches")) return stretches();
  return 2;
}
