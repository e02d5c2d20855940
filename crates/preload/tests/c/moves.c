// Moves that become smaller on the way, and moves to places outside of managed memory. With -DRAW the calls are made by number.
#include "mappings.h"
#include <pthread.h>
#include <stddef.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

static char *place(size_t n) {
  char *p = mmap(0, n, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(p != MAP_FAILED);
  return p;
}
// Where the kernel would have put a mapping itself, or one that has a part in common with that, with and without something there.
static void out_to_a_free_place(void) {
  size_t from[] = {0, MIB / 2, MIB, MIB + MIB / 2, 2 * MIB - P, 2 * MIB};
  char *first = place(3 * MIB);
  while (place(MIB) > first); // from now on it is the highest place of that length
  CHECK(!munmap(first, 3 * MIB));
  for (int i = 0; i < 12; i++) {
    char *p = full(MIB), *whole = place(3 * MIB), *there = whole + from[i / 2];
    CHECK(!munmap(whole, i & 1 ? (size_t)(there - whole) + MIB / 2 : 3 * MIB));
    CHECK(mremap(p, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
    same(there, 0, MIB);
    CHECK(reads(p) == SIGSEGV && !munmap(whole, 3 * MIB));
  }
}
// What is cut off may have another access than what moves, be the program's own, or a hole.
static void smaller_on_the_way(void) {
  for (int kind = 0; kind < 6; kind++) {
    char *p = full(4 * MIB), *cut = p + 2 * MIB, *there = kind & 1 ? place(MIB) : map(MIB, 3);
    if (kind / 2 == 0) CHECK(!mprotect(cut, MIB, PROT_READ));
    if (kind / 2 == 1) CHECK(mmap(cut, MIB, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == cut);
    if (kind / 2 == 2) CHECK(!munmap(cut, MIB));
    CHECK(mremap(p, 4 * MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
    same(there, 0, MIB);
    for (int i = 0; i < 4; i++) CHECK(reads(p + i * MIB) == SIGSEGV);
    // One that differs in what moves stays.
    char *q = full(2 * MIB);
    CHECK(!mprotect(q, P, PROT_READ));
    CHECK(mremap(q, 2 * MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, there) == MAP_FAILED && errno == EFAULT);
    same(q, 0, 2 * MIB);
    CHECK(!munmap(there, MIB) && !munmap(q, 2 * MIB));
  }
}
// The part that moves may be the program's own, and what is cut off managed. It does not move into managed memory.
static void not_managed_and_smaller_on_the_way(void) {
  for (int kind = 0; kind < 3; kind++) {
    char *p = full(4 * MIB), *there = kind == 2 ? map(MIB, 3) : place(MIB);
    CHECK(mmap(p, MIB, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
    for (size_t i = 0; i < MIB; i += P) *(word *)(p + i) = i + 1;
    if (kind == 1) CHECK(mremap(p, 4 * MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, p + 2 * MIB) == MAP_FAILED && errno == EINVAL);
    char *moved = mremap(p, 4 * MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, there);
    if (kind == 2) { CHECK(moved == MAP_FAILED && errno == EINVAL); same(p, 0, 4 * MIB), zero(there, 0, MIB); continue; }
    CHECK(moved == there);
    same(there, 0, MIB);
    for (int i = 0; i < 4; i++) CHECK(reads(p + i * MIB) == SIGSEGV);
    // And there is room for others again.
    CHECK(mmap(p, 4 * MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
    zero(p, 0, 4 * MIB);
    CHECK(!munmap(there, MIB) && !munmap(p, 4 * MIB));
  }
}
// What leaves its old place empty keeps its length, wherever what is behind it is; that may be less than whole pages.
static void as_long_where_it_stays(void) {
  for (int kind = 0; kind < 3; kind++) {
    char *p = full(4 * MIB);
    if (kind) CHECK(mmap(p, 2 * MIB, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
    for (size_t i = 0; i < 2 * MIB; i += P) *(word *)(p + i) = i + 1;
    size_t len = kind == 2 ? 2 * MIB : 4 * MIB;
    CHECK(mremap(p, len, MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(p, len, MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP | MREMAP_FIXED, place(MIB)) == MAP_FAILED && errno == EINVAL);
    same(p, 0, 4 * MIB);
    char *moved = mremap(p, 100, 100, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
    CHECK(moved != MAP_FAILED && moved != p && !munmap(moved, P));
    same(p, P, 4 * MIB);
    CHECK(!munmap(p, 4 * MIB));
  }
}
static size_t resident_bytes(void) {
  size_t pages = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  CHECK(f && fscanf(f, "%*u %zu", &pages) == 1 && !fclose(f));
  return pages * P;
}
// What nobody has touched takes no memory at the new place, and makes nothing else go.
static void out_untouched(void) {
  for (int kind = 0; kind < 2; kind++) {
    int prot = kind ? 3 : PROT_NONE;
    char *p = map(512 * MIB, 3), *there = mmap(0, 512 * MIB, 0, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    // A few that are: in core, and out of it.
    size_t touched[] = {0, P, 100 * MIB, 300 * MIB + P, 512 * MIB - P};
    CHECK(there != MAP_FAILED);
    for (int i = 0; i < 5; i++) *(word *)(p + touched[i]) = i + 1;
    CHECK(!madvise(p + touched[2], P, MADV_PAGEOUT) && !mprotect(p, 512 * MIB, prot));
    char *others = full(2 * MIB);
    size_t before = resident_bytes();
    CHECK(mremap(p, 512 * MIB, 512 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
    CHECK(resident_bytes() < before + 8 * MIB && in_core(others, 2 * MIB) == 2 * MIB / P);
    CHECK(!mprotect(there, 512 * MIB, 3));
    for (int i = 0; i < 5; i++) CHECK(*(word *)(there + touched[i]) == i + 1);
    CHECK(!there[2 * P] && !there[200 * MIB] && !munmap(there, 512 * MIB) && !munmap(others, 2 * MIB));
  }
}
// Of huge pages whole ones come, where they may lie, however long the range is that was asked for.
static void huge_pages_over(void) {
  const size_t huge = 2 * MIB;
  const int of_2_mib = 21 << MAP_HUGE_SHIFT;
  for (int kind = 0; kind < 2; kind++) {
    int file = kind ? memfd_create("huge", MFD_HUGETLB | of_2_mib) : -1;
    int flags = MAP_FIXED | (kind ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | of_2_mib);
    char *p = full(8 * MIB), *at = (char *)(((uintptr_t)p + huge - 1) & -huge);
    if ((kind && file < 0) || (mmap(at, P, 3, flags, file, 0) == MAP_FAILED && errno == ENOMEM)) { puts("no huge pages"); exit(0); }
    for (int again = 0; again < 2; again++) {
      CHECK(mmap(at, huge + P, 3, flags, file, 0) == at);
      zero(at, 0, 2 * huge), same(p, 0, at - p), same(p, at + 2 * huge - p, 8 * MIB);
      CHECK(mmap(at + 2 * huge + P, P, 3, flags, file, 0) == MAP_FAILED && errno == EINVAL);
      same(p, at + 2 * huge - p, 8 * MIB), flood();
    }
    CHECK(!munmap(at, 2 * huge) && reads(at) == SIGSEGV && reads(at + 2 * huge - P) == SIGSEGV);
    same(p, 0, at - p), same(p, at + 2 * huge - p, 8 * MIB);
    CHECK(!munmap(p, 8 * MIB) && (!kind || !close(file)));
  }
}
static void over_and_around(int file, int type, int may) { // nothing beside what is mapped goes, whether it may be or not
  char *p = full(8 * MIB), *at = (char *)(((uintptr_t)p + 2 * MIB - 1) & -(2 * MIB));
  const int is_over = mmap(at, P, 3, MAP_FIXED | type, file, 0) == at, error = errno;
  const size_t after = at - p + (is_over ? P : 0);
  same(p, 0, at - p), same(p, after, 8 * MIB), flood(), same(p, after, 8 * MIB);
  CHECK((may ? is_over : !is_over && error == EINVAL) && !munmap(p, 8 * MIB));
}
static void huge_files_over(void (*before)(void)) {
  int huge = memfd_create("huge", MFD_HUGETLB | 21 << MAP_HUGE_SHIFT), other = memfd_create("other", 0);
  void *can = huge < 0 ? MAP_FAILED : mmap(0, 2 * MIB, 3, MAP_SHARED, huge, 0);
  if (can == MAP_FAILED) { puts("no huge pages"); exit(0); }
  CHECK(!munmap(can, 2 * MIB) && other >= 0 && !ftruncate(other, 2 * MIB));
  before();
  for (int type = MAP_SHARED; type <= MAP_SHARED_VALIDATE; type++) over_and_around(other, type, 1), over_and_around(huge, type, 0);
}
static void filter(int call, unsigned action) {
  struct sock_filter one[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
    BPF_STMT(BPF_RET | BPF_K, action), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  struct sock_fprog program = {4, one};
  CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0));
}
static void allow_all(void) { filter(-1, SECCOMP_RET_ALLOW); }
static void nothing(void) {}
static void huge_files_over_under_a_filter(void) { huge_files_over(allow_all); } // nobody may ask how long their pages are
static void huge_files_over_unasked(void) { huge_files_over(nothing); }
static void executed_under(unsigned action) { // who asks gets no answer
  filter(SYS_fstatfs, action);
  execl("/proc/self/exe", "moves", "huge_files_over_unasked", (char *)0);
}
static void huge_files_over_under_a_filter_from_before(void) { executed_under(SECCOMP_RET_ERRNO | EPERM); }
static void huge_files_over_under_a_filter_that_says_nothing(void) { executed_under(SECCOMP_RET_ERRNO | 0); }
// What the driver of a file refuses leaves what is there, and what other threads map meanwhile.
static volatile int is_over;
static void *maps_as_much(void *of) {
  while (!is_over) {
    char *p = place(64 * MIB);
    CHECK(!writes(p) && !writes(p + 64 * MIB - P) && !munmap(p, 64 * MIB));
  }
  return of;
}
static void refused_by_a_driver_under_a_filter(void) {
  const int file = open("/proc/cpuinfo", O_RDONLY);
  char *p = full(8 * MIB), *over = map(64 * MIB, 3);
  pthread_t other;
  allow_all();
  CHECK(file >= 0 && !pthread_create(&other, 0, maps_as_much, 0));
  for (int i = 0; i < 20000; i++) CHECK(mmap(over, 64 * MIB, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED && errno == EIO);
  CHECK(mmap(p + MIB, MIB, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED && errno == EIO);
  is_over = 1;
  CHECK(!pthread_join(other, 0) && !munmap(over, 64 * MIB));
  same(p, 0, 8 * MIB);
}
static struct row rows[] = {{"refused_by_a_driver_under_a_filter", refused_by_a_driver_under_a_filter}, {"huge_pages_over", huge_pages_over}, {"huge_files_over_under_a_filter", huge_files_over_under_a_filter}, {"huge_files_over_unasked", huge_files_over_unasked},
  {"huge_files_over_under_a_filter_from_before", huge_files_over_under_a_filter_from_before},
  {"huge_files_over_under_a_filter_that_says_nothing", huge_files_over_under_a_filter_that_says_nothing},
  {"out_untouched", out_untouched}, {"smaller_on_the_way", smaller_on_the_way}, {"not_managed_and_smaller_on_the_way", not_managed_and_smaller_on_the_way},
  {"as_long_where_it_stays", as_long_where_it_stays}, {"out_to_a_free_place", out_to_a_free_place}};
int main(int argc, char **argv) { return run(rows, sizeof rows / sizeof *rows, argc == 2 ? argv[1] : ""); }
