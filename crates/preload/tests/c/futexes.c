// Futexes in managed memory whose words the kernel changes itself: it waits for no pager then.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define P 4096ul
#define MIB (1ul << 20)
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)
#ifndef FUTEX_LOCK_PI2
#define FUTEX_LOCK_PI2 13
#endif

static void flood(void) {
  char *p = malloc(24 * MIB);
  for (size_t i = 0; i < 24 * MIB; i += P) *(volatile size_t *)(p + i) = i + 1;
  for (size_t i = 0; i < 24 * MIB; i += P) CHECK(*(volatile size_t *)(p + i) == i + 1);
  free(p);
}
static void *page(void *p) { return (void *)((uintptr_t)p & -P); }
// What may go, goes.
static void send_out(void *p) { CHECK(!madvise(page(p), P, MADV_PAGEOUT)); }
static int in_core(void *p) { unsigned char in; CHECK(!mincore(page(p), P, &in)); return in & 1; }
static int is_out(void *p) { for (int i = 0; i < 1000 && in_core(p); i++) send_out(p), usleep(1000); return !in_core(p); }
static void wait_ok(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

struct shared { char before[P]; pthread_mutex_t lock; volatile long count; char after[P]; };
static volatile int stop;
static struct shared *s;
static void *send_out_again(void *n) { while (!stop) send_out(&s->lock); return n; }
static void *take_turns(void *n) {
  for (int i = 0; i < 3000; i++) CHECK(!pthread_mutex_lock(&s->lock) && ++s->count && !pthread_mutex_unlock(&s->lock));
  return n;
}
static void *hold_it(void *n) { CHECK(!pthread_mutex_lock(&s->lock)); flood(); usleep(50000); CHECK(!pthread_mutex_unlock(&s->lock)); return n; }
static void contend(void) {
  pthread_t sender, others[3];
  s->count = stop = 0;
  CHECK(!pthread_create(&sender, 0, send_out_again, 0));
  for (int i = 0; i < 3; i++) CHECK(!pthread_create(&others[i], 0, take_turns, 0));
  for (int i = 0; i < 3; i++) CHECK(!pthread_join(others[i], 0));
  stop = 1;
  CHECK(!pthread_join(sender, 0) && s->count == 9000);
  CHECK(!pthread_create(&others[0], 0, hold_it, 0));
  usleep(20000);
  CHECK(!pthread_mutex_lock(&s->lock) && !pthread_mutex_unlock(&s->lock) && !pthread_join(others[0], 0));
}
// A mutex with priority inheritance, while its page is told to go.
static void inherit(void) {
  for (int i = 0; i < 2; i++) {
    s = i ? mmap(0, sizeof *s, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : malloc(sizeof *s);
    pthread_mutexattr_t a;
    CHECK(!pthread_mutexattr_init(&a) && !pthread_mutexattr_setprotocol(&a, PTHREAD_PRIO_INHERIT));
    CHECK(!pthread_mutex_init(&s->lock, &a));
    flood(), send_out(&s->lock);
    CHECK(in_core(&s->lock));
    contend();
    pid_t child = fork();
    if (!child) { contend(), _exit(0); }
    wait_ok(child);
    contend();
    CHECK(!pthread_mutex_destroy(&s->lock));
  }
}
// Half of the frames may stay for such mutexes: those that have gone keep nothing of it.
static pthread_mutex_t *inheriting(void *p) {
  pthread_mutexattr_t a;
  CHECK(p && p != MAP_FAILED && !pthread_mutexattr_init(&a) && !pthread_mutexattr_setprotocol(&a, PTHREAD_PRIO_INHERIT));
  CHECK(!pthread_mutex_init(p, &a));
  return p;
}
static void *new_page(void) { return mmap(0, P, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }
static void come_and_go(void) {
  static pthread_mutex_t *all[4000];
  for (int turn = 0; turn < 2; turn++) {
    pthread_mutex_t *early = inheriting(new_page());
    for (int i = 0; i < 4000; i++) all[i] = inheriting(malloc(2 * P));
    CHECK(is_out(inheriting(new_page()))); // there were too many
    flood(), send_out(early), send_out(all[0]);
    CHECK(in_core(early) && in_core(all[0]));
    for (int i = 0; i < 4000; i++) CHECK(!pthread_mutex_destroy(all[i]) && (free(all[i]), 1));
    for (int i = 0; i < 1000 && in_core(all[0]); i++) malloc_trim(0), usleep(1000);
  }
  pthread_mutex_t *late[] = {inheriting(new_page()), inheriting(malloc(2 * P))};
  flood(), send_out(late[0]), send_out(late[1]);
  CHECK(in_core(late[0]) && in_core(late[1]));
}

static long futex(void *word, int operation, uintptr_t value, uintptr_t more, void *second, uintptr_t third) {
  return syscall(SYS_futex, word, operation, value, more, second, third);
}
static uint32_t *absent(uint32_t value) {
  char *p = mmap(0, 4 * P, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(p != MAP_FAILED);
  uint32_t *word = (uint32_t *)(p + P + 64);
  *word = value;
  CHECK(is_out(word));
  return word;
}
static volatile uint32_t *lock, *start;
static int private;
static void *lock_by_number(void *n) {
  CHECK(!futex((void *)lock, FUTEX_LOCK_PI | private, 0, 0, 0, 0) && (*lock & FUTEX_TID_MASK) == (uint32_t)gettid());
  CHECK(!futex((void *)lock, FUTEX_UNLOCK_PI | private, 0, 0, 0, 0));
  return n;
}
static void *wait_to_lock(void *n) {
  CHECK(!futex((void *)start, FUTEX_WAIT_REQUEUE_PI | private, 7, 0, (void *)lock, 0));
  CHECK((*lock & FUTEX_TID_MASK) == (uint32_t)gettid() && !futex((void *)lock, FUTEX_UNLOCK_PI | private, 0, 0, 0, 0));
  return n;
}
static void locks(void) {
  uint32_t own = gettid();
  int kinds[] = {FUTEX_LOCK_PI, FUTEX_LOCK_PI2, FUTEX_TRYLOCK_PI};
  for (int i = 0; i < 3; i++) {
    lock = absent(0);
    CHECK(!futex((void *)lock, kinds[i] | private, 0, 0, 0, 0) && *lock == own);
    send_out((void *)lock);
    // One sleeps for it, while everything else goes.
    pthread_t t;
    CHECK(!pthread_create(&t, 0, lock_by_number, 0));
    while (!(*lock & FUTEX_WAITERS)) usleep(1000);
    flood(), send_out((void *)lock);
    CHECK(!futex((void *)lock, FUTEX_UNLOCK_PI | private, 0, 0, 0, 0) && !pthread_join(t, 0) && *lock == 0);
    lock = absent(own);
    CHECK(!futex((void *)lock, FUTEX_UNLOCK_PI | private, 0, 0, 0, 0) && *lock == 0);
  }
  lock = absent(0), start = absent(7);
  pthread_t t;
  CHECK(!pthread_create(&t, 0, wait_to_lock, 0));
  for (long moved = 0; !moved; usleep(1000)) {
    is_out((void *)lock), send_out((void *)start);
    CHECK((moved = futex((void *)start, FUTEX_CMP_REQUEUE_PI | private, 1, 0, (void *)lock, 7)) >= 0);
  }
  CHECK(!pthread_join(t, 0));
}
static void wake_and_change(void) {
  uint32_t here = 0, *there = absent(41);
  int add = FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 41);
  for (int i = 0; i < 20; i++) {
    *there = 41;
    CHECK(is_out(there)); // it does not stay when the call is over
    CHECK(futex(&here, FUTEX_WAKE_OP | private, 1, 1, there, add) == 0 && *there == 42);
  }
  uint32_t *first = absent(0), *only = absent(1);
  CHECK(futex(first, FUTEX_WAKE_OP | private, 1, 1, there, add) == 0 && *there == 43);
  CHECK(!mprotect(page(only), P, PROT_READ));
  CHECK(futex(first, FUTEX_WAKE_OP | private, 1, 1, only, add) == -1 && errno == EFAULT);
  CHECK(futex(first, FUTEX_WAKE_OP | private, 1, 1, (char *)there + 1, add) == -1 && errno == EINVAL);
  CHECK(!munmap(page(there), P) && futex(first, FUTEX_WAKE_OP | private, 1, 1, there, add) == -1 && errno == EFAULT);
  CHECK(futex(first, FUTEX_LOCK_PI | private, 0, 0, 0, 0) == 0 && futex((void *)8, FUTEX_LOCK_PI | private, 0, 0, 0, 0) == -1 && errno == EFAULT);
}
// The same by number.
static void by_number(void) {
  flood();
  for (int i = 0; i < 2; i++) {
    private = i ? FUTEX_PRIVATE_FLAG : 0;
    locks(), wake_and_change();
  }
}
// Where the kernel says that a thread has ended, which the program made itself.
static int ends_soon(void *n) { usleep(100000); return 0; }
static void cleared(void) {
  int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
  char *stack = mmap(0, MIB, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  uint32_t *word = absent(1), *other = absent(1);
  CHECK(clone(ends_soon, stack + MIB, flags, 0, 0, 0, word) > 0);
  for (int i = 0; i < 100 && *word; i++) send_out(word), usleep(20000);
  CHECK(!*word);
  int was = syscall(SYS_set_tid_address, other);
  send_out(other);
  CHECK(was == gettid() && in_core(other));
}
// So is the first thread of a child that is made a fork, by the others.
static uint32_t *in_child;
static volatile int ends_now;
static void *sees_it_end(void *n) {
  while (!ends_now) usleep(1000);
  usleep(200000);
  _exit(*in_child != 0);
}
static void cleared_in_a_fork(void) {
  in_child = absent(77);
  pid_t child = syscall(SYS_clone, CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD, 0, 0, in_child, 0);
  CHECK(child >= 0);
  if (!child) {
    pthread_t t;
    CHECK(*in_child == (uint32_t)getpid() && !pthread_create(&t, 0, sees_it_end, 0));
    flood(), send_out(in_child);
    ends_now = 1;
    syscall(SYS_exit, 1);
  }
  wait_ok(child);
  CHECK(*in_child == 77);
}
static struct { const char *name; void (*what)(void); } cases[] = {
  {"inherit", inherit}, {"come_and_go", come_and_go}, {"by_number", by_number}, {"cleared", cleared}, {"cleared_in_a_fork", cleared_in_a_fork}};
int main(int argc, char **argv) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc == 2 && !strcmp(argv[1], cases[i].name)) { cases[i].what(); puts("ok"); return 0; }
  return 2;
}
