// The kernel waits, in a call on what is not managed, for a thread of the program's that maps memory meanwhile; and a call that waits for the
// store. With -DRAW the calls are made by number.
#include "mappings.h"
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>

static int faults;
static void *serve(void *unused) {
  for (struct uffd_msg m; read(faults, &m, sizeof m) == sizeof m;) {
    char *page = memset(map(P, 3), 7, P);
    struct uffdio_copy copy = {.dst = m.arg.pagefault.address & -P, .src = (uintptr_t)page, .len = P};
    CHECK(!ioctl(faults, UFFDIO_COPY, &copy) && !munmap(page, P));
  }
  return unused;
}
// Memory of the kernel's at some place, or over managed memory, whose faults the other thread answers.
static char *served(size_t n, int over) {
  char *p = mmap(over ? map(n, 3) : 0, n, 3, MAP_SHARED | MAP_ANONYMOUS | (over ? MAP_FIXED : 0), -1, 0);
  struct uffdio_register all = {.range = {(uintptr_t)p, n}, .mode = UFFDIO_REGISTER_MODE_MISSING};
  CHECK(p != MAP_FAILED && !ioctl(faults, UFFDIO_REGISTER, &all));
  return p;
}
static void begin_with(int flags, int features, void *(*answer)(void *)) {
  faults = syscall(SYS_userfaultfd, O_CLOEXEC | flags);
  if (faults < 0) { puts("no faults of the kernel's"); exit(0); }
  struct uffdio_api api = {.api = UFFD_API, .features = features};
  pthread_t other;
  CHECK(!ioctl(faults, UFFDIO_API, &api) && !pthread_create(&other, 0, answer, 0));
}
static void begin(void) { begin_with(0, 0, serve); }

static void locked_by_faults(void) {
  begin();
  for (int over = 0; over < 2; over++) {
    char *p = served(16 * P, over);
    CHECK(!mlock(p, 16 * P));
    for (int i = 0; i < 16; i++) CHECK(p[i * P] == 7);
    CHECK(!munmap(p, 16 * P));
  }
}
static void grown_by_faults(void) {
  begin();
  char *p = served(32 * P, 0);
  CHECK(!munmap(p + 16 * P, 16 * P) && !mlock(p, 16 * P) && mremap(p, 16 * P, 32 * P, 0) == p);
}

// Where a mapping was, another thread has one by the time that mremap is back.
static char *place;
static void *maps_there(void *unused) {
  struct pollfd event = {faults, POLLIN, 0};
  struct uffd_msg m;
  CHECK(poll(&event, 1, -1) == 1);
  CHECK(mmap(place, 16 * P, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == place);
  memset(place, 7, 16 * P);
  CHECK(read(faults, &m, sizeof m) == sizeof m && m.event == UFFD_EVENT_REMAP);
  return unused;
}
static void left_to_others(void) {
  begin_with(O_NONBLOCK, UFFD_FEATURE_EVENT_REMAP, maps_there);
  place = served(16 * P, 1);
  char *moved = mremap(place, 16 * P, 32 * P, MREMAP_MAYMOVE);
  CHECK(moved != MAP_FAILED && moved != place);
  for (int i = 0; i < 16; i++) CHECK(place[i * P] == 7);
  CHECK(!munmap(place, 16 * P) && reads(place) == SIGSEGV);
  char *again = mmap(place, 16 * P, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  CHECK(again == place);
  zero(again, 0, 16 * P);
}

// A thread that is told what becomes of memory, and maps some before it hears of it.
static void *maps_first(void *unused) {
  for (struct pollfd event = {faults, POLLIN, 0}; poll(&event, 1, -1) == 1;) {
    struct uffd_msg m;
    CHECK(!munmap(map(P, 3), P) && read(faults, &m, sizeof m) == sizeof m);
  }
  return unused;
}
static void told_of_its_end(void) {
  begin_with(O_NONBLOCK, UFFD_FEATURE_EVENT_UNMAP, maps_first);
  char *p = served(16 * P, 0), *there = served(4 * P, 0);
  CHECK(mremap(p, 16 * P, 8 * P, 0) == p && mremap(p, 8 * P, 4 * P, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
  CHECK(mmap(there, P, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == there);
  CHECK(!munmap(served(16 * P, 0), 16 * P));
}
static void told_of_advice(void) {
  begin_with(O_NONBLOCK, UFFD_FEATURE_EVENT_REMOVE, maps_first);
  for (int over = 0; over < 2; over++) CHECK(!madvise(served(16 * P, over), 16 * P, MADV_DONTNEED));
  CHECK(!madvise(served(16 * P, 0), 16 * P, MADV_REMOVE));
}

// Another thread's calls come back while pages go out. Which of them are there the kernel says, past our lock.
#define GOING (4 * MIB)
static char *going;
static volatile int are_out;
static void *sends_out(void *unused) {
  CHECK(!madvise(going, GOING, MADV_PAGEOUT));
  are_out = 1;
  return unused;
}
static int is_there(char *p) {
  static int pages;
  uint64_t page;
  CHECK((pages || (pages = open("/proc/self/pagemap", O_RDONLY)) > 0) && pread(pages, &page, 8, (uintptr_t)p / P * 8) == 8);
  return page >> 63;
}
static int are_going(void) { return !is_there(going) && is_there(going + GOING - P); }
static void paged_out_meanwhile(void) {
  char *other = map(P, 3);
  int seen = 0;
  going = map(GOING, 3);
  for (int turn = 0; turn < 1000 && !seen; turn++) {
    pthread_t t;
    memset(going, 7, GOING), are_out = 0;
    if (!is_there(going)) continue;
    CHECK(!pthread_create(&t, 0, sends_out, 0));
    while (!are_out && !seen) seen = are_going() && !madvise(other, P, MADV_NORMAL) && are_going();
    CHECK(!pthread_join(t, 0));
  }
  CHECK(seen);
}

static struct row rows[] = {{"locked_by_faults", locked_by_faults}, {"grown_by_faults", grown_by_faults}, {"left_to_others", left_to_others},
  {"told_of_its_end", told_of_its_end}, {"told_of_advice", told_of_advice},
  {"paged_out_meanwhile", paged_out_meanwhile}};
int main(int argc, char **argv) { return run(rows, sizeof rows / sizeof *rows, argc == 2 ? argv[1] : ""); }
