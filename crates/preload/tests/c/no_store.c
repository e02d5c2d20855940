// Programs in frames from which no page can go: told in time that there is no more, and they go on. FRAMES is how many bytes they have.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#define P 4096ul
#define MIB (1ul << 20)
#define FRAMES (16 * MIB)
#define CHECK(x) do { if (!(x)) { printf("line %d: %s (errno %d)\n", __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)
#define READ_WRITE (PROT_READ | PROT_WRITE)

// Blocks, known by their place in a table that is not managed.
enum { MOST = 1 << 18 };
struct table { unsigned char *at[MOST]; size_t count; };
static struct table first, second;

static void fill(unsigned char *block, size_t size, unsigned mark) {
  for (size_t i = 0; i < size; i += P) block[i] = mark + i / P;
  block[size - 1] = mark;
}
static void same(unsigned char *block, size_t size, unsigned mark) {
  for (size_t i = 0; i + 1 < size; i += P) CHECK(block[i] == (unsigned char)(mark + i / P));
  CHECK(block[size - 1] == (unsigned char)mark);
}
// Takes blocks until there are no more, and uses every page of each.
static size_t take(struct table *table, size_t size) {
  for (table->count = 0; table->count < MOST; table->count++) {
    errno = 0;
    unsigned char *block = malloc(size);
    if (!block) {
      CHECK(errno == ENOMEM);
      return table->count * size;
    }
    fill(block, size, table->count);
    table->at[table->count] = block;
  }
  CHECK(!"there is no end");
  return 0;
}
static void all_same(struct table *table, size_t size, size_t from, size_t step) {
  for (size_t i = from; i < table->count; i += step) same(table->at[i], size, i);
}
static void give(struct table *table, size_t from, size_t step) {
  for (size_t i = from; i < table->count; i += step) free(table->at[i]);
}

// All of the frames but a part is to be had, and what is freed is to be had again.
static void blocks_of(size_t size) {
  size_t taken = take(&first, size);
  CHECK(taken >= FRAMES / 2 && taken < FRAMES);
  all_same(&first, size, 0, 1);
  give(&first, 0, 2); // every other one
  size_t again = take(&second, size);
  if (again < taken / 2 / 4 * 3) printf("%zu bytes each: %zu, then %zu\n", size, taken, again);
  CHECK(again >= taken / 2 / 4 * 3 && again < FRAMES);
  all_same(&first, size, 1, 2), all_same(&second, size, 0, 1);
  give(&first, 1, 2), give(&second, 0, 1);
  CHECK(take(&first, size) >= taken / 4 * 3);
  size_t count = first.count;
  first.count /= 2; // what lies together
  give(&first, 0, 1);
  again = take(&second, size);
  CHECK(again >= taken / 2 / 4 * 3);
  for (size_t i = count / 2; i < count; i++) same(first.at[i], size, i);
  all_same(&second, size, 0, 1);
  first.count = count;
  give(&first, count / 2, 1), give(&second, 0, 1);
}
static void blocks(void) {
  for (int i = 0; i < 4; i++) blocks_of((size_t[]){100, 5000, 300000, 1500000}[i]);
}

// What small blocks had is there for large ones, and for mappings once the heap has dropped it; and the other way round.
static void kinds(void) {
  for (int turn = 0; turn < 3; turn++) {
    size_t taken = take(&first, turn == 1 ? 20000 : 200);
    CHECK(taken >= FRAMES / 2);
    errno = 0;
    CHECK(malloc(8 * MIB) == NULL && errno == ENOMEM);
    give(&first, 0, 1);
    unsigned char *large = malloc(8 * MIB);
    CHECK(large != NULL);
    fill(large, 8 * MIB, turn);
    errno = 0;
    CHECK(realloc(large, 64 * MIB) == NULL && errno == ENOMEM && calloc(9, MIB) == NULL);
    same(large, 8 * MIB, turn);
    free(large);
    CHECK((large = calloc(8, MIB)) != NULL && large[5 * MIB] == 0);
    fill(large, 8 * MIB, turn);
    free(large);
  }
  unsigned char *map = mmap(NULL, 10 * MIB, READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(map != MAP_FAILED);
  fill(map, 10 * MIB, 1);
  errno = 0;
  CHECK(malloc(8 * MIB) == NULL && errno == ENOMEM);
  same(map, 10 * MIB, 1);
  CHECK(!munmap(map, 10 * MIB));
  free(malloc(8 * MIB));
}

// A block that grows is told when there is no more, and is as it was.
static void growth(void) {
  for (size_t step = 3000; step <= 3 * MIB; step *= 1000) {
    unsigned char *block = NULL;
    size_t size = 0;
    for (;;) {
      errno = 0;
      unsigned char *more = realloc(block, size + step);
      if (!more) break;
      block = more;
      if (size) same(block, size, 3);
      size += step;
      fill(block, size, 3);
    }
    CHECK(errno == ENOMEM && size >= FRAMES / 4 && size < FRAMES);
    same(block, size, 3);
    free(block);
  }
}

static unsigned char *map(size_t len, int prot) {
  errno = 0;
  return mmap(NULL, len, prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}
static void maps(void) {
  // What nobody has access to costs nothing.
  unsigned char *reserved = map(1024 * MIB, PROT_NONE), *parts[64];
  CHECK(reserved != MAP_FAILED);
  errno = 0;
  CHECK(mprotect(reserved, 64 * MIB, READ_WRITE) == -1 && errno == ENOMEM);
  CHECK(!mprotect(reserved + 64 * MIB, MIB, READ_WRITE));
  fill(reserved + 64 * MIB, MIB, 9);
  size_t count = 0;
  while ((parts[count] = map(MIB, READ_WRITE)) != MAP_FAILED) fill(parts[count], MIB, count), count++;
  CHECK(errno == ENOMEM && count >= 8 && count < 16);
  errno = 0;
  CHECK(mremap(parts[0], MIB, 8 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == ENOMEM);
  errno = 0;
  CHECK(mmap(reserved, 8 * MIB, READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED && errno == ENOMEM);
  errno = 0;
  CHECK(mprotect(reserved, 4 * MIB, PROT_READ) == -1 && errno == ENOMEM);
  for (size_t i = 0; i < count; i++) same(parts[i], MIB, i);
  // Nor is anything left at a place that nothing has come to.
  CHECK(!mprotect(parts[0], MIB, PROT_NONE));
  errno = 0;
  CHECK(mremap(parts[0], MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, reserved + 128 * MIB) == MAP_FAILED && errno == ENOMEM);
  CHECK(!mprotect(parts[0], MIB, READ_WRITE));
  same(parts[0], MIB, 0);
  CHECK(!munmap(parts[--count], MIB) && !munmap(parts[--count], MIB));
  for (size_t end = count + 2; count < end; count++) {
    CHECK((parts[count] = map(MIB, READ_WRITE)) != MAP_FAILED);
    fill(parts[count], MIB, count);
  }
  // What has no access any more keeps its frames; what is mapped over does not.
  CHECK(!mprotect(parts[0], MIB, PROT_NONE));
  CHECK(map(2 * MIB, READ_WRITE) == MAP_FAILED);
  CHECK(!mprotect(parts[0], MIB, READ_WRITE));
  same(parts[0], MIB, 0);
  for (size_t i = 1; i < count; i += 2) {
    int over = i % 4 == 1;
    CHECK(!over || mmap(parts[i], MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == parts[i]);
    CHECK(over || !munmap(parts[i], MIB));
  }
  unsigned char *more = map(2 * MIB, READ_WRITE);
  CHECK(more != MAP_FAILED);
  fill(more, 2 * MIB, 77);
  unsigned char *moved = mremap(more, 2 * MIB, 3 * MIB, MREMAP_MAYMOVE);
  CHECK(moved != MAP_FAILED);
  same(moved, 2 * MIB, 77);
  fill(moved, 3 * MIB, 78);
  for (size_t i = 0; i < count; i += 2) same(parts[i], MIB, i);
  unsigned char *rest = map(2 * MIB, READ_WRITE);
  CHECK(rest != MAP_FAILED);
  fill(rest, 2 * MIB, 80);
  same(moved, 3 * MIB, 78), same(rest, 2 * MIB, 80), same(reserved + 64 * MIB, MIB, 9);
}

// How much the program may have to write to, beyond what it has.
static void allow(long more) {
  struct rlimit data;
  char line[200];
  long kib = 0;
  FILE *status = more < 0 ? NULL : fopen("/proc/self/status", "r");
  while (status && fgets(line, sizeof line, status)) sscanf(line, "VmData: %ld", &kib);
  if (status) fclose(status);
  CHECK(!getrlimit(RLIMIT_DATA, &data));
  data.rlim_cur = more < 0 ? data.rlim_max : (rlim_t)kib * 1024 + more;
  CHECK(!setrlimit(RLIMIT_DATA, &data));
}
static void is_all_free(void) {
  unsigned char *all = malloc(12 * MIB);
  CHECK(all != NULL);
  fill(all, 12 * MIB, 5);
  free(all);
}
static int is_closed(unsigned char *page) {
  int ends[2], closed;
  CHECK(!pipe(ends));
  errno = 0;
  closed = write(ends[1], page, 1) == -1 && errno == EFAULT;
  close(ends[0]), close(ends[1]);
  return closed;
}

// A call that fails keeps no frames from others, and gives away none of what is there.
static void failures(void) {
  is_all_free();
  unsigned char *reserved = map(1024 * MIB, PROT_NONE);
  CHECK(reserved != MAP_FAILED);
  for (int i = 0; i < 100; i++) {
    errno = 0;
    CHECK(mprotect(reserved, 8 * MIB, PROT_READ | 0x100) == -1 && errno == EINVAL);
  }
  is_all_free();
  allow(MIB);
  CHECK(mprotect(reserved, 8 * MIB, READ_WRITE) == -1 && errno == ENOMEM);
  CHECK(map(8 * MIB, READ_WRITE) == MAP_FAILED && errno == ENOMEM);
  allow(-1);
  is_all_free();
  // Over something of the kernel's, and over what is reserved.
  CHECK(mmap(reserved, MIB, PROT_READ, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == reserved);
  allow(MIB);
  CHECK(mmap(reserved, 8 * MIB, READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED && errno == ENOMEM);
  allow(-1);
  is_all_free();
  // A part is open by then.
  unsigned char *parts = reserved + 64 * MIB;
  CHECK(!mprotect(parts + MIB, MIB, READ_WRITE));
  fill(parts + MIB, MIB, 6);
  CHECK(!mprotect(parts + MIB, MIB, PROT_READ));
  allow(3 * MIB);
  CHECK(mprotect(parts, 9 * MIB, READ_WRITE) == -1 && errno == ENOMEM);
  allow(-1);
  CHECK(is_closed(parts) && is_closed(parts + 2 * MIB) && !is_closed(parts + MIB));
  is_all_free();
  same(parts + MIB, MIB, 6);
  CHECK(!mprotect(parts, 9 * MIB, READ_WRITE));
  fill(parts, 9 * MIB, 7);
  CHECK(!malloc(8 * MIB) && !mprotect(parts, 9 * MIB, PROT_NONE) && !malloc(8 * MIB));
}

// What nobody has access to moves with what was once in it, and costs no more for that.
static void moves(void) {
  unsigned char *reserved = map(512 * MIB, PROT_NONE), *behind = map(MIB, PROT_NONE);
  CHECK(reserved != MAP_FAILED && behind != MAP_FAILED);
  unsigned char *moved = mremap(reserved, 512 * MIB, 1024 * MIB, MREMAP_MAYMOVE);
  CHECK(moved != MAP_FAILED && moved != reserved && is_closed(moved));
  is_all_free();
  // Both places have it for a moment.
  CHECK(!mprotect(moved + 7 * P, 2 * MIB, READ_WRITE) && !mprotect(moved + 600 * MIB, MIB, READ_WRITE));
  fill(moved + 7 * P, 2 * MIB, 1), fill(moved + 600 * MIB, MIB, 2);
  CHECK(!mprotect(moved, 1024 * MIB, PROT_NONE));
  unsigned char *other = malloc(8 * MIB), *place = map(2048 * MIB, PROT_NONE);
  CHECK(other != NULL && place != MAP_FAILED);
  fill(other, 8 * MIB, 3);
  for (size_t i = 0; i < 3; i++) {
    size_t len = 1024 * MIB;
    unsigned char *to = place + (i % 2) * len;
    CHECK(mremap(moved, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
    moved = to;
  }
  // Outside of the region.
  unsigned char *outside = mmap(NULL, 2048 * MIB, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(outside != MAP_FAILED);
  free(other);
  // What has moved away counts there no more.
  CHECK((other = malloc(11 * MIB)) != NULL && !malloc(2 * MIB));
  free(other);
  CHECK(mremap(moved, 1024 * MIB, 1024 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, outside) == outside && is_closed(outside));
  CHECK(!mprotect(outside, 1024 * MIB, READ_WRITE));
  same(outside + 7 * P, 2 * MIB, 1), same(outside + 600 * MIB, MIB, 2);
  CHECK(outside[0] == 0 && outside[2 * MIB + 7 * P] == 0);
  is_all_free();
}

// What the regions have no addresses for is the kernel's, as long as nobody has access: no frame is there for it.
static void beyond(void) {
  unsigned char *reserved[6];
  for (int i = 0; i < 6; i++) CHECK((reserved[i] = map(12288 * MIB, PROT_NONE)) != MAP_FAILED);
  CHECK(map(4096 * MIB, PROT_NONE) != MAP_FAILED);
  CHECK(map(MIB, READ_WRITE) == MAP_FAILED && errno == ENOMEM);
  CHECK(!mprotect(reserved[5], 32 * MIB, READ_WRITE));
  fill(reserved[5], 32 * MIB, 4);
  is_all_free();
  same(reserved[5], 32 * MIB, 4);
  CHECK(mprotect(reserved[4], 32 * MIB, READ_WRITE) == -1 && errno == ENOMEM);
  CHECK(!munmap(reserved[0], MIB) && map(MIB, READ_WRITE) == reserved[0]);
}

// Pages that are brought in ahead of need are none of those that nobody has access to: their frames would be missing.
static void holes(void) {
  enum { PIECE = 32, OPEN = 20 };
  size_t len = 20 * MIB, open = 0;
  unsigned char *start = map(len, PROT_NONE);
  CHECK(start != MAP_FAILED);
  for (size_t at = 0; at < len / P; at += PIECE, open += OPEN) CHECK(!mprotect(start + at * P, OPEN * P, READ_WRITE));
  for (size_t page = 0; page < len / P / 2; page++) // forwards
    if (page % PIECE < OPEN) start[page * P] = page;
  for (size_t page = len / P; page-- > len / P / 2;) // backwards
    if (page % PIECE < OPEN) start[page * P] = page;
  for (size_t page = 0; page < len / P; page++)
    if (page % PIECE < OPEN) CHECK(start[page * P] == (unsigned char)page);
  size_t parts = 0;
  for (unsigned char *part; (part = map(64 * P, READ_WRITE)) != MAP_FAILED; parts++) fill(part, 64 * P, parts);
  CHECK((open + parts * 64) * P > FRAMES / 4 * 3);
}

static void wait_ok(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
// Parent and child each have as many frames.
static void forks(void) {
  size_t size = 40000, taken = take(&first, size);
  for (int i = 0; i < 3; i++) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      all_same(&first, size, 0, 1);
      CHECK(malloc(8 * MIB) == NULL);
      give(&first, 0, 2);
      CHECK(take(&second, size) >= taken / 2 / 4 * 3);
      all_same(&first, size, 1, 2), all_same(&second, size, 0, 1);
      give(&first, 1, 2), give(&second, 0, 1);
      unsigned char *map_of_child = map(8 * MIB, READ_WRITE);
      CHECK(map_of_child != MAP_FAILED || malloc(8 * MIB) != NULL);
      _exit(0);
    }
    all_same(&first, size, 0, 1);
    CHECK(malloc(8 * MIB) == NULL);
    wait_ok(child);
  }
  give(&first, 0, 1);
  CHECK(take(&first, size) >= taken / 4 * 3);
}

// Threads that run out at once.
static pthread_barrier_t all_there;
static void *run_out(void *number) {
  size_t size = (uintptr_t)number % 2 ? 3000 : 70000, most = 2 * FRAMES / size;
  unsigned char **at = mmap(NULL, most * sizeof *at, READ_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(at != MAP_FAILED);
  for (int turn = 0; turn < 5; turn++) {
    size_t count = 0;
    pthread_barrier_wait(&all_there);
    for (; count < most; count++) {
      errno = 0;
      if (!(at[count] = malloc(size))) break;
      fill(at[count], size, count);
    }
    CHECK(count < most && errno == ENOMEM);
    pthread_barrier_wait(&all_there);
    for (size_t i = 0; i < count; i++) same(at[i], size, i), free(at[i]);
  }
  return NULL;
}
static void threads(void) {
  pthread_t others[4];
  pthread_barrier_init(&all_there, NULL, 4);
  for (uintptr_t i = 0; i < 4; i++) CHECK(!pthread_create(&others[i], NULL, run_out, (void *)i));
  for (int i = 0; i < 4; i++) pthread_join(others[i], NULL);
  CHECK(take(&first, 100000) > 0);
}

// What shrinks stays where it is, if nothing smaller is to be had.
static void shrinking(void) {
  size_t sizes[] = {600000, 2 * MIB};
  unsigned char *shrunk[2];
  for (int i = 0; i < 2; i++) {
    CHECK(shrunk[i] = malloc(sizes[i]));
    fill(shrunk[i], sizes[i], i);
  }
  for (int i = 0; i < 5; i++) take(&first, (size_t[]){1500000, 500000, 70000, 50000, 5000}[i]);
  for (int i = 0; i < 2; i++) {
    shrunk[i][69999] = i;
    CHECK(shrunk[i] = realloc(shrunk[i], 70000));
    same(shrunk[i], 70000, i);
    CHECK(!realloc(shrunk[i], 4 * MIB) && errno == ENOMEM);
  }
}

static struct { const char *name; void (*what)(void); } cases[] = {
  {"blocks", blocks}, {"kinds", kinds}, {"growth", growth}, {"maps", maps}, {"failures", failures}, {"moves", moves}, {"beyond", beyond},
  {"holes", holes}, {"forks", forks}, {"threads", threads}, {"shrinking", shrinking},
};
int main(int argc, char **argv) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc == 2 && !strcmp(argv[1], cases[i].name)) { cases[i].what(); puts("ok"); return 0; }
  return 2;
}
