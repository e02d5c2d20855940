// Programs with more pages than frames, for what `selfpage run` is told, counts, and does when its store fails.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#define P 4096ul
#define MIB (1ul << 20)
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)
typedef volatile uint64_t word;
static const char *told;
static char *map(size_t n, int prot, int flags, int file) {
  char *p = mmap(0, n, prot, flags, file, 0);
  CHECK(p != MAP_FAILED);
  return p;
}
static char *managed(size_t n) { return map(n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1); }
// Every page has a word of its own and a text that a store can be searched for.
static void fill(char *p, size_t n, uint64_t seed) {
  for (size_t i = 0; i < n; i += P) *(word *)(p + i) = i + seed, strcpy(p + i + 8, "selfpage keeps this page");
}
static void same(char *p, size_t n, uint64_t seed) {
  for (size_t i = 0; i < n; i += P) CHECK(*(word *)(p + i) == i + seed && !strcmp(p + i + 8, "selfpage keeps this page"));
}
static long of_line(const char *file, const char *key) {
  FILE *f = fopen(file, "r");
  char line[256];
  long number = -1;
  while (f && number < 0 && fgets(line, sizeof line, f)) if (!strncmp(line, key, strlen(key))) number = atol(line + strlen(key));
  CHECK(f && !fclose(f));
  return number;
}

// Blocks and mappings three times the frames, forwards, backwards, and a part again and again.
static void work(void) {
  char *block = malloc(12 * MIB), *mapping = managed(12 * MIB);
  fill(block, 12 * MIB, 1), fill(mapping, 12 * MIB, 2);
  for (uint64_t turn = 0; turn < 3; turn++) {
    same(block, 12 * MIB, 1 + turn), same(mapping, 12 * MIB, 2);
    for (size_t i = 12 * MIB; i; i -= P) *(word *)(block + i - P) += 1;
    for (int again = 0; again < 3; again++) same(mapping, 2 * MIB, 2);
  }
  free(block);
}
// A third more than the frames, again and again: what was used last is what should go.
static void cycle(void) {
  char *p = managed(11 * MIB);
  fill(p, 11 * MIB, 1);
  for (int turn = 0; turn < 16; turn++) same(p, 11 * MIB, 1);
}
static void work_and_say_what_was_written(void) {
  work();
  printf("%ld\n", of_line("/proc/self/io", "write_bytes:"));
}
// Works, and then looks at everything again when it is told to.
static void work_twice(void) {
  char *p = managed(24 * MIB), line[8];
  fill(p, 24 * MIB, 5);
  same(p, 24 * MIB, 5);
  puts("up"), fflush(stdout);
  CHECK(fgets(line, sizeof line, stdin));
  same(p, 24 * MIB, 5);
}
// No thread can be started any more, by the program or by the kernel for it, before anything has gone to the store. For root there is no
// such limit.
static void *never(void *of) { return of; }
static void work_without_threads(void) {
  pthread_t thread;
  CHECK(geteuid() || !setresuid(65534, 65534, 65534));
  CHECK(!setrlimit(RLIMIT_NPROC, &(struct rlimit){1, 1}) && pthread_create(&thread, 0, never, 0) == EAGAIN);
  work();
}
static void fill_much(void) { fill(managed(24 * MIB), 24 * MIB, 1); }
// Takes what is left of the disk that the store is on, and only then needs the store.
static void fill_the_disk(void) {
  static char ballast[MIB];
  int file = open(told, O_WRONLY | O_CREAT, 0600);
  CHECK(file >= 0);
  while (write(file, ballast, MIB) > 0);
  CHECK(errno == ENOSPC);
  fill_much();
}
// The store's file may not grow any more from here on.
static void limit_files(void) {
  signal(SIGXFSZ, SIG_IGN);
  CHECK(!setrlimit(RLIMIT_FSIZE, &(struct rlimit){MIB, MIB}));
  fill_much();
}
static sigjmp_buf out;
static void on_sigbus(int s) { siglongjmp(out, s); }
// A program that handles SIGBUS goes on, and what it has is right.
static void catch_sigbus(void) {
  volatile size_t reached = 0;
  struct sigaction a = {.sa_handler = on_sigbus};
  sigaction(SIGBUS, &a, 0);
  char *p = managed(24 * MIB);
  if (!sigsetjmp(out, 1)) for (; reached < 24 * MIB; reached += P) fill(p + reached, P, reached + 1);
  CHECK(reached >= 8 * MIB && reached < 24 * MIB);
  char *failed = p + reached;
  int zeros = open("/dev/zero", O_RDONLY);
  CHECK(read(zeros, failed, 8) == -1 && errno == EFAULT); // a system call is told of it too
  signal(SIGBUS, SIG_DFL);
  CHECK(!munmap(p, 4 * MIB)); // makes room
  for (size_t i = 4 * MIB; i < reached; i += P) same(p + i, P, i + 1);
  fill(p + 20 * MIB, MIB, 3), same(p + 20 * MIB, MIB, 3);
}

#define COUNTED (16 * MIB)
static int private = MAP_PRIVATE | MAP_ANONYMOUS;
static void nothing(void) { fill(managed(COUNTED), COUNTED, 1); }
static void shared(void) { map(COUNTED, 3, MAP_SHARED | MAP_ANONYMOUS, -1); }
static void stack(void) { map(COUNTED, 3, private | MAP_STACK, -1); }
static void low(void) { map(COUNTED, 3, private | MAP_32BIT, -1); }
static void executable(void) { map(COUNTED, 7, private, -1); }
static void made_executable(void) { CHECK(!mprotect(managed(COUNTED), COUNTED, 7)); }
static void fixed(void) { CHECK(mmap((void *)0x200000000000, COUNTED, 3, private | MAP_FIXED, -1, 0) == (void *)0x200000000000); }
static void over_a_region(void) { CHECK(mmap(managed(COUNTED), COUNTED, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED); }
static void committed(void) { // a reservation counts from when it can be accessed, as far as it can
  char *p = map(64 * MIB, PROT_NONE, private | MAP_STACK, -1);
  CHECK(!mprotect(p + MIB, COUNTED, 3));
}
static void committed_in_parts(void) { // one call makes many reservations accessible
  char *p = map(COUNTED, PROT_NONE, private | MAP_STACK, -1);
  for (size_t i = 0; i < 64; i++) CHECK(!mprotect(p + i * COUNTED / 64, COUNTED / 128, 3));
  CHECK(!mprotect(p, COUNTED, 3));
}
static void given_up(void) { // what cannot be accessed any more counts no more
  for (int i = 0; i < 4; i++) CHECK(!mprotect(map(COUNTED, 3, private | MAP_STACK, -1), COUNTED, PROT_NONE));
}
static void one_at_a_time(void) { // the most at once is told, not the sum
  for (int i = 0; i < 4; i++) CHECK(!munmap(map(COUNTED, 3, private | MAP_STACK, -1), COUNTED));
}
static void grown(void) {
  char *p = map(MIB, 3, private | MAP_STACK, -1);
  CHECK(mremap(p, MIB, COUNTED, MREMAP_MAYMOVE) != MAP_FAILED);
}
static void reserved(void) { map(COUNTED, PROT_NONE, private | MAP_STACK, -1); }
// What a mapping replaces counts no more, and one that nobody may access does not on its way either.
static void moved_out(int prot) {
  char *there = map(COUNTED, prot, private | MAP_STACK, -1), *p = map(COUNTED, prot, private, -1);
  CHECK(mremap(p, COUNTED, COUNTED, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
}
static void moved_out_to_use(void) { moved_out(3); }
static void moved_out_reserved(void) { moved_out(PROT_NONE); }
static char *reservation(void) { return map(COUNTED, PROT_NONE, private | MAP_STACK, -1); }
static void reserved_moved(void) { // and used then
  char *p = mremap(reservation(), COUNTED, COUNTED, MREMAP_MAYMOVE | MREMAP_FIXED, 0x200000000000);
  CHECK(p != MAP_FAILED && !mprotect(p, COUNTED, 3));
}
static void reserved_grown(void) {
  char *p = mremap(map(MIB, PROT_NONE, private | MAP_STACK, -1), MIB, COUNTED, MREMAP_MAYMOVE);
  CHECK(p != MAP_FAILED && !mprotect(p, COUNTED, 3));
}
// What moves is not in two places.
static void executable_moved_to(char *there) {
  char *p = managed(COUNTED);
  CHECK(!mprotect(p, COUNTED, 7) && mremap(p, COUNTED, COUNTED, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
}
static void executable_moved(void) { executable_moved_to(managed(COUNTED)); }
static void executable_moved_out(void) { executable_moved_to(reservation()); }
static void executable_stays(void) { // and its new place is one more
  char *p = managed(COUNTED / 2);
  CHECK(!mprotect(p, COUNTED / 2, 7) && mremap(p, COUNTED / 2, COUNTED / 2, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0) != MAP_FAILED);
}
// A reservation of which a part is used counts as it did, whatever becomes of a call that would move it or takes its end.
static char *half_used(void) {
  char *p = map(4 * COUNTED, PROT_NONE, private | MAP_STACK, -1);
  CHECK(!mprotect(p, COUNTED / 4, 3) && !mprotect(p + COUNTED, COUNTED / 4, 3));
  return p;
}
static void refused(void) {
  CHECK(mremap(half_used(), 4 * COUNTED, 8 * COUNTED, MREMAP_MAYMOVE) == MAP_FAILED);
  map(COUNTED / 2, 3, private | MAP_STACK, -1);
}
static void refused_from_within(void) {
  char *p = half_used();
  CHECK(mremap(p + COUNTED / 8, COUNTED, 4 * COUNTED, MREMAP_MAYMOVE) == MAP_FAILED);
  char *more = map(COUNTED / 2, 3, private | MAP_STACK, -1);
  CHECK(!mprotect(p, 4 * COUNTED, PROT_NONE) && !munmap(more, COUNTED / 2));
  map(COUNTED, 3, private | MAP_STACK, -1);
}
static void shrunk(void) {
  char *p = half_used();
  CHECK(mremap(p, 4 * COUNTED, COUNTED, 0) == p && !mprotect(p, COUNTED / 2, 3));
  map(COUNTED / 2, 3, private | MAP_STACK, -1);
}
// Before mremap is back another thread has had a mapping of its own where the one was that moves.
static int events;
static char *left;
static void *uses_the_place(void *of) {
  struct pollfd event = {events, POLLIN, 0};
  struct uffd_msg m;
  CHECK(poll(&event, 1, -1) == 1);
  CHECK(mmap(left, COUNTED / 4, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == left && !munmap(left, COUNTED / 4));
  CHECK(read(events, &m, sizeof m) == sizeof m && m.event == UFFD_EVENT_REMAP);
  return of;
}
static void moved_as_its_place_is_used(void) {
  struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_EVENT_REMAP};
  pthread_t other;
  left = map(COUNTED / 4, 3, MAP_SHARED | MAP_ANONYMOUS, -1);
  struct uffdio_register all = {.range = {(uintptr_t)left, COUNTED / 4}, .mode = UFFDIO_REGISTER_MODE_MISSING};
  events = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
  if (events < 0) { puts("none"); return; }
  CHECK(!ioctl(events, UFFDIO_API, &api) && !ioctl(events, UFFDIO_REGISTER, &all));
  CHECK(!pthread_create(&other, 0, uses_the_place, 0));
  CHECK(mremap(left, COUNTED / 4, COUNTED / 4, MREMAP_MAYMOVE | MREMAP_FIXED, 0x200000000000) != MAP_FAILED);
  CHECK(!pthread_join(other, 0));
  map(COUNTED * 3 / 4, 3, private | MAP_STACK, -1);
}
static void reserved_over_a_region(void) {
  CHECK(mmap(managed(COUNTED), COUNTED, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
}
static void committed_over_a_region(void) {
  char *p = mmap(managed(COUNTED), COUNTED, PROT_NONE, private | MAP_STACK | MAP_FIXED, -1, 0);
  CHECK(p != MAP_FAILED && !mprotect(p, COUNTED, 3));
}
static void moved_over_counted(void) { // what a file is moved over counts no more
  int file = memfd_create("file", 0);
  CHECK(file >= 0 && !ftruncate(file, COUNTED));
  char *p = map(COUNTED, 3, MAP_SHARED, file), *there = map(COUNTED, 3, private | MAP_STACK, -1);
  CHECK(mremap(p, COUNTED, COUNTED, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
  map(COUNTED, 3, private | MAP_STACK, -1);
}
static void file(void) {
  int file = memfd_create("file", 0);
  CHECK(file >= 0 && !ftruncate(file, COUNTED));
  memset(map(COUNTED, 3, MAP_SHARED, file), 1, COUNTED), map(COUNTED, 3, MAP_PRIVATE, file);
}
// At most what is managed, and a page more.
static void largest(size_t n) {
  char *p = map(n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  fill(p, MIB, 1), fill(p + n - 12 * MIB, 12 * MIB, 2), same(p, MIB, 1), same(p + n - 12 * MIB, 12 * MIB, 2);
  CHECK(!munmap(p, n));
}
static void most_managed(void) { largest(16384 * MIB); }
static void beyond_managed(void) { largest(16384 * MIB + P); }
static void huge(void) { // of which there are whole ones
  char *p = mmap(0, COUNTED - 2 * MIB + P, 3, private | MAP_HUGETLB | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) puts("none");
}

// The child touches little of what its parent has, and writes less.
static void small_child(void) {
  char *p = managed(32 * MIB);
  fill(p, 32 * MIB, 1);
  pid_t child = fork();
  if (!child) {
    same(p + MIB, MIB, MIB + 1);
    fill(p, 64 * P, 2), fill(managed(64 * P), 64 * P, 3);
    printf("%d %ld\n", getpid(), of_line("/proc/self/smaps_rollup", "Private_Dirty:"));
    exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && !status);
  same(p, 32 * MIB, 1);
}
static struct { const char *name; void (*what)(void); } cases[] = {
  {"work", work}, {"cycle", cycle}, {"work_and_say_what_was_written", work_and_say_what_was_written}, {"work_twice", work_twice},
  {"work_without_threads", work_without_threads}, {"fill_much", fill_much}, {"fill_the_disk", fill_the_disk}, {"limit_files", limit_files}, {"catch_sigbus", catch_sigbus},
  {"nothing", nothing}, {"shared", shared}, {"stack", stack}, {"low", low}, {"executable", executable},
  {"made_executable", made_executable}, {"fixed", fixed}, {"over_a_region", over_a_region}, {"committed", committed},
  {"committed_in_parts", committed_in_parts}, {"given_up", given_up},
  {"one_at_a_time", one_at_a_time}, {"grown", grown}, {"reserved", reserved}, {"moved_out_to_use", moved_out_to_use}, {"moved_out_reserved", moved_out_reserved},
  {"refused", refused}, {"refused_from_within", refused_from_within}, {"moved_as_its_place_is_used", moved_as_its_place_is_used},
  {"shrunk", shrunk}, {"reserved_moved", reserved_moved}, {"reserved_grown", reserved_grown}, {"executable_moved", executable_moved},
  {"executable_moved_out", executable_moved_out}, {"executable_stays", executable_stays}, {"reserved_over_a_region", reserved_over_a_region},
  {"committed_over_a_region", committed_over_a_region}, {"moved_over_counted", moved_over_counted},
  {"file", file}, {"huge", huge},
  {"most_managed", most_managed}, {"beyond_managed", beyond_managed},
  {"small_child", small_child}};
int main(int argc, char **argv) {
  told = argv[2];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc > 1 && !strcmp(argv[1], cases[i].name)) {
      cases[i].what();
      if (cases[i].what != small_child) puts("ok");
      return 0;
    }
  return 2;
}
