// Pages that a device holds, which move meanwhile: it writes where it said it would, and into nobody else's memory.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#define P 4096ul
#define MIB (1ul << 20)
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)
enum { pages = 64, from_file = 0x77 };

static char *map(size_t n) { char *p = mmap(0, n, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); CHECK(p != MAP_FAILED); return p; }
static void fill(char *p, size_t n, uint64_t seed) { for (size_t i = 0; i < n; i += 8) *(volatile uint64_t *)(p + i) = i + seed; }
static void same(char *p, size_t n, uint64_t seed) { for (size_t i = 0; i < n; i += 8) CHECK(*(volatile uint64_t *)(p + i) == i + seed); }
static void flood(uint64_t seed) { char *p = map(24 * MIB); fill(p, 24 * MIB, seed), same(p, 24 * MIB, seed); CHECK(!munmap(p, 24 * MIB)); }

static int ring, file;
static struct io_uring_params about;
static char *queue, *results;
static struct io_uring_sqe *entries;
static void begin(void) {
  char name[] = "/var/tmp/selfpage-device-XXXXXX", *text = map(pages * P);
  file = mkostemp(name, O_DIRECT);
  CHECK(file >= 0 && !unlink(name));
  memset(text, from_file, pages * P);
  CHECK(write(file, text, pages * P) == pages * P && !munmap(text, pages * P));
  ring = syscall(SYS_io_uring_setup, pages, &about);
  if (ring < 0) { puts("no io_uring"); exit(0); }
  size_t len = about.sq_off.array + about.sq_entries * 4;
  queue = mmap(0, len, 3, MAP_SHARED, ring, IORING_OFF_SQ_RING);
  results = mmap(0, about.cq_off.cqes + about.cq_entries * sizeof(struct io_uring_cqe), 3, MAP_SHARED, ring, IORING_OFF_CQ_RING);
  entries = mmap(0, about.sq_entries * sizeof *entries, 3, MAP_SHARED, ring, IORING_OFF_SQES);
  CHECK(queue != MAP_FAILED && results != MAP_FAILED && entries != MAP_FAILED);
}
// Has `count` pages read to `to`.
static void ask(int operation, char *to, int count) {
  unsigned *tail = (unsigned *)(queue + about.sq_off.tail), mask = *(unsigned *)(queue + about.sq_off.ring_mask);
  for (int i = 0; i < count; i++) {
    unsigned at = (*tail + i) & mask;
    entries[at] = (struct io_uring_sqe){.opcode = operation, .fd = file, .addr = (uintptr_t)to + i * P, .len = P, .off = i * P};
    ((unsigned *)(queue + about.sq_off.array))[at] = at;
  }
  __atomic_store_n(tail, *tail + count, __ATOMIC_RELEASE);
  CHECK(syscall(SYS_io_uring_enter, ring, count, 0, 0, 0, 0) == count);
}
static void wait_for(int count) {
  CHECK(syscall(SYS_io_uring_enter, ring, 0, count, IORING_ENTER_GETEVENTS, 0, 0) >= 0);
  unsigned *head = (unsigned *)(results + about.cq_off.head), mask = *(unsigned *)(results + about.cq_off.ring_mask);
  for (int i = 0; i < count; i++) CHECK(((struct io_uring_cqe *)(results + about.cq_off.cqes))[(*head + i) & mask].res == P);
  __atomic_store_n(head, *head + count, __ATOMIC_RELEASE);
}

// A buffer stays registered while its mapping moves, by itself or as a block, and is read into afterwards.
static void registered(void) {
  char *others = map(4 * MIB);
  fill(others, 4 * MIB, 9);
  for (int turn = 0; turn < 6; turn++) {
    char *p = turn % 2 ? malloc(2 * MIB) : map(2 * MIB), *beside = turn % 2 ? malloc(2 * MIB) : 0, *q;
    fill(p, 2 * MIB, turn);
    struct iovec buffer = {p + MIB, pages * P};
    CHECK(!syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1));
    flood(turn);
    q = turn % 2 ? realloc(p, 6 * MIB) : mremap(p, 2 * MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
    CHECK(q != MAP_FAILED && q && q != p);
    same(q, 2 * MIB, turn);
    // Whoever gets the frames now must not find the file in them.
    char *next = map(2 * MIB);
    fill(next, 2 * MIB, 5), flood(3);
    ask(IORING_OP_READ_FIXED, p + MIB, pages), wait_for(pages);
    same(next, 2 * MIB, 5), same(others, 4 * MIB, 9), same(q, MIB, turn), same(q + MIB + pages * P, MIB - pages * P, turn + MIB + pages * P);
    CHECK(!syscall(SYS_io_uring_register, ring, IORING_UNREGISTER_BUFFERS, 0, 0));
    flood(1), same(others, 4 * MIB, 9), same(next, 2 * MIB, 5);
    if (turn % 2) free(q), free(beside);
    else CHECK(!munmap(q, 2 * MIB) && !munmap(p, 2 * MIB));
    CHECK(!munmap(next, 2 * MIB));
  }
}
// Reads past the page cache are on their way while what they read to moves.
static void in_flight(void) {
  char *others = map(4 * MIB);
  fill(others, 4 * MIB, 9);
  for (int turn = 0; turn < 60; turn++) {
    char *p = map(MIB);
    fill(p, MIB, turn);
    if (turn % 3 == 0) flood(turn);
    ask(IORING_OP_READ, p, pages);
    char *q = mremap(p, MIB, MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
    CHECK(q != MAP_FAILED);
    char *next = map(MIB);
    fill(next, MIB, 5);
    wait_for(pages);
    same(next, MIB, 5), same(others, 4 * MIB, 9), same(q + pages * P, MIB - pages * P, turn + pages * P);
    // Each word is the one or the other.
    for (size_t i = 0; i < pages * P; i += 8) CHECK(*(uint64_t *)(q + i) == i + turn || *(uint64_t *)(q + i) == from_file * 0x0101010101010101ul);
    CHECK(!munmap(q, MIB) && !munmap(p, MIB) && !munmap(next, MIB));
  }
}

// Sevens are moved over sevens while a device holds one of them: but for that one, nothing else is seen at the new place, and there no more than
// zero for a moment.
enum { held = 5 };
static char *volatile over;
static volatile int stop;
static volatile long others_seen;
static void *see_others(void *unused) {
  while (!stop) for (int k = held; k < pages; k++) {
    char c = *(volatile char *)(over + k * P + 9);
    if (c != 7 && (c || k > held)) others_seen++;
  }
  return unused;
}
static void moved_over(void) {
  pthread_t other;
  over = memset(map(pages * P), 7, pages * P);
  CHECK(!pthread_create(&other, 0, see_others, 0));
  for (int turn = 0; turn < 400; turn++) {
    char *p = memset(map(pages * P), 7, pages * P);
    struct iovec buffer = {p + held * P, P};
    CHECK(!syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1));
    CHECK(mremap(p, pages * P, pages * P, MREMAP_MAYMOVE | MREMAP_FIXED, over) == over);
    CHECK(!syscall(SYS_io_uring_register, ring, IORING_UNREGISTER_BUFFERS, 0, 0));
  }
  stop = 1;
  CHECK(!pthread_join(other, 0) && !others_seen);
}
static struct { const char *name; void (*what)(void); } cases[] = {{"registered", registered}, {"in_flight", in_flight}, {"moved_over", moved_over}};
int main(int argc, char **argv) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc == 2 && !strcmp(argv[1], cases[i].name)) { begin(), cases[i].what(); puts("ok"); return 0; }
  return 2;
}
