// Programs that filter their own system calls, one way each, in frames fewer than they touch.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/times.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include "cases.h"
#include "stops.h"
static char *self;
static void say_ok(void) { CHECK(write(1, "ok\n", 3) == 3); }

enum by { PRCTL, NUMBER, FOR_ALL_THREADS };
// Calls in the list meet `listed`, and all others `rest`.
static int filter(enum by by, const int *list, size_t count, unsigned listed, unsigned rest) {
  struct sock_filter code[40] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
  size_t len = 1;
  for (size_t i = 0; i < count; i++) {
    code[len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, list[i], 0, 1);
    code[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, listed);
  }
  code[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, rest);
  struct sock_fprog program = {len, code};
  CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
  return by == PRCTL ? prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0)
                     : syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, by == FOR_ALL_THREADS ? SECCOMP_FILTER_FLAG_TSYNC : 0, &program);
}
// What the C library's malloc and a program that computes need.
static void allow_little(enum by by) {
  const int allowed[] = {SYS_read, SYS_write, SYS_exit, SYS_exit_group, SYS_brk, SYS_mmap, SYS_munmap, SYS_mprotect, SYS_madvise,
                         SYS_futex, SYS_rt_sigreturn, SYS_rt_sigprocmask, SYS_mremap};
  CHECK(!filter(by, allowed, sizeof allowed / sizeof *allowed, SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS));
}
static void forbid(int call, unsigned action) { CHECK(!filter(NUMBER, &call, 1, action, SECCOMP_RET_ALLOW)); }
static void work(void) { fill(), same(), fill(), same(); }

static void by_prctl(void) { allow_little(PRCTL), work(), say_ok(), _exit(8); }
static void by_number(void) { allow_little(NUMBER), work(), say_ok(), exit(8); }
// Asked for and refused, as libseccomp finds out what there is, and then set.
static void after_refusals(void) {
  CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, 0) == -1 && errno == EFAULT);
  struct sock_fprog empty = {0, 0};
  CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &empty) == -1 && errno == EINVAL);
  CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &empty, 0, 0) == -1 && errno == EINVAL);
  by_prctl();
}
static void refused(void) {
  struct sock_fprog empty = {0, 0};
  CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &empty) == -1 && errno == EINVAL);
  work(), say_ok(), exit(8);
}
static void twice(void) { forbid(SYS_times, SECCOMP_RET_KILL_PROCESS), by_number(); }
static void as_another_user(void) { CHECK(!setuid(65534)); by_prctl(); }
static void in_a_child(void) {
  pid_t child = fork();
  if (!child) by_prctl();
  int status;
  CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 8);
  work(), exit(8);
}
static void filters_after_vfork(void) {
  pid_t child = vfork();
  if (!child) {
    forbid(SYS_times, SECCOMP_RET_KILL_PROCESS);
    execl("/bin/true", "true", (char *)0);
    _exit(1);
  }
  int status;
  CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
static void after_vfork(void) { filters_after_vfork(), work(), say_ok(), exit(8); }
static void while_main_ends(void) {
  struct timespec a_while = {0, 300000000};
  nanosleep(&a_while, 0);
}
// The last thread ends as the C library has it, and nothing may be looked at.
static void *return_from_it(void *of) { while_main_ends(), allow_little(PRCTL), work(), say_ok(); return of; }
static void last_by_return(void) {
  pthread_t thread;
  CHECK(!pthread_create(&thread, 0, return_from_it, 0));
  pthread_exit(0);
}

static void killed(void) { forbid(SYS_times, SECCOMP_RET_KILL_THREAD), work(), say_ok(), times(NULL), _exit(1); }
// The kernel cuts it within a letter.
static void killed_under_a_cut_name(void) { CHECK(!prctl(PR_SET_NAME, "aaaaaaaaaaaaaa\xd0\xb1", 0, 0, 0)); killed(); }
static void strict(void) { work(); CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0)); say_ok(); }
static void strict_exit(void) { strict(), syscall(SYS_exit, 6); }
static void strict_killed(void) { strict(), syscall(SYS_times); }
static void strict_by_number(void) { CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_STRICT, 0, 0)); say_ok(), syscall(SYS_exit, 6); }
static void child_asks(void) {
  pid_t child = fork();
  if (!child) work(), times(NULL), _exit(1);
  int status = status_of(child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS);
  work(), say_ok(), _exit(8);
}
static void killed_child(void) { forbid(SYS_times, SECCOMP_RET_KILL_THREAD), child_asks(); }
static void executes_itself(const char *as) {
  forbid(SYS_times, SECCOMP_RET_KILL_THREAD);
  execl(self, self, as, (char *)0);
}
static void killed_by_what_it_inherits(void) { executes_itself("ask"); }
static void killed_child_by_what_it_inherits(void) { executes_itself("child_asks"); }
static void ask(void) { work(), say_ok(), times(NULL), _exit(1); }
static void killed_under_another_root(void) {
  CHECK(!chdir("/var/tmp"));
  forbid(SYS_times, SECCOMP_RET_KILL_THREAD);
  CHECK(!chroot(".")); work(), say_ok(), times(NULL), _exit(1);
}
static void *killed_later(void *of) { while_main_ends(), work(), say_ok(), times(NULL); return of; }
static void killed_without_main(void) {
  forbid(SYS_times, SECCOMP_RET_KILL_THREAD);
  pthread_t thread;
  CHECK(!pthread_create(&thread, 0, killed_later, 0));
  syscall(SYS_exit, 5);
}
// The pager copies what may not be written with a call that is refused: such pages stay where they are, or are copied otherwise.
static void unreadable(int prot) {
  const size_t len = 1 << 20;
  char *old = mmap(0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *behind = mmap(0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(old != MAP_FAILED && behind == old + len);
  for (size_t i = 0; i < len; i += P) *(uint64_t *)(old + i) = ~i;
  const int read_at = SYS_pread64;
  CHECK(!mprotect(old, len, prot) && !filter(FOR_ALL_THREADS, &read_at, 1, SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW));
  work();
  CHECK(!mprotect(old, len, PROT_READ));
  for (size_t i = 0; i < len; i += P) CHECK(*(volatile uint64_t *)(old + i) == ~i);
  char *moved = mremap(old, len, 2 * len, MREMAP_MAYMOVE);
  CHECK(moved != MAP_FAILED && moved != old);
  for (int i = 0; i < 2; i++) {
    for (size_t i = 0; i < len; i += P) CHECK(*(volatile uint64_t *)(moved + i) == ~i);
    work();
  }
  say_ok(), _exit(8);
}
static void unreadable_to_read(void) { unreadable(PROT_READ); }
static void unreadable_to_nobody(void) { unreadable(PROT_NONE); }
// Pages cannot be saved, and the saver, which waits a moment then, may not: Rust's own library panics.
static void saver_panics(void) {
  const int calls[] = {SYS_pwrite64, SYS_pwritev, SYS_pwritev2, SYS_nanosleep, SYS_clock_nanosleep};
  CHECK(!filter(FOR_ALL_THREADS, calls, sizeof calls / sizeof *calls, SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW));
  for (size_t i = 0; i < LEN / 8; i += P / 8) block[i] = ~i;
}
static void *nothing(void *of) { return of; }
static void starts_threads(void) {
  pthread_t thread;
  forbid(SYS_gettid, SECCOMP_RET_KILL_PROCESS), work();
  for (int i = 0; i < 8; i++) CHECK(!pthread_create(&thread, 0, nothing, 0) && !pthread_join(thread, 0));
  say_ok(), _exit(8);
}
// Calls whose argument `arg` has one of these bits meet `action`.
static void forbid_bits(int call, int arg, unsigned bits, unsigned action) {
  struct sock_filter code[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[arg])), BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1),
    BPF_STMT(BPF_RET | BPF_K, action), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
}
// What a filter says of a call it says of managed memory too, which other threads change: each in a thread of its own.
struct said { long call, args[6]; int arg; unsigned bits; };
static void *is_said_of_managed_memory(void *of) {
  const struct said *s = of;
  const long *a = s->args;
  forbid_bits(s->call, s->arg, s->bits, SECCOMP_RET_ERRNO | EDOM);
  for (int i = 0; i < 2; i++) CHECK(syscall(s->call, a[0], a[1], a[2], a[3], a[4], a[5]) == -1 && errno == EDOM);
  return of;
}
static void holds_for_managed_memory(void) {
  const long any = PROT_READ | PROT_WRITE, code = PROT_READ | PROT_EXEC, private = MAP_PRIVATE | MAP_ANONYMOUS;
  const long at = (long)(block + LEN / 16) & -P, mapped = (long)mmap(0, 4 * P, any, private, -1, 0);
  const struct said all[] = {
    {SYS_mprotect, {at, P, code}, 2, PROT_EXEC}, {SYS_pkey_mprotect, {at, P, code, 0}, 2, PROT_EXEC}, {SYS_mmap, {0, P, any, private, -1}, 1, -1},
    {SYS_mmap, {mapped, P, any, private | MAP_FIXED, -1}, 3, MAP_FIXED}, {SYS_munmap, {mapped, P}, 1, P},
    {SYS_mremap, {mapped, 4 * P, 64 * P, MREMAP_MAYMOVE}, 3, MREMAP_MAYMOVE}, {SYS_madvise, {at, P, MADV_DONTNEED}, 2, MADV_DONTNEED}, {462 /* mseal */, {at, P}, 1, P}};
  CHECK(mapped != -1 && !(*(volatile char *)mapped = 0));
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    pthread_t thread;
    CHECK(!pthread_create(&thread, 0, is_said_of_managed_memory, (void *)(all + i)) && !pthread_join(thread, 0));
  }
  // By their names, of what is a file's as of what is managed; and what it lets through has its effect.
  char *file = mmap(0, P, PROT_READ, MAP_PRIVATE, open(self, O_RDONLY), 0);
  forbid_bits(SYS_mprotect, 2, PROT_EXEC, SECCOMP_RET_ERRNO | EPERM);
  CHECK(file != MAP_FAILED && mprotect(file, P, code) == -1 && errno == EPERM && mprotect((void *)at, P, code) == -1 && errno == EPERM);
  CHECK(mprotect((void *)at, P, ~0) == -1 && errno == EPERM && mprotect((void *)at, P, 64) == -1 && errno == EINVAL);
  CHECK(!mprotect((void *)at, P, PROT_READ) && (same(), 1) && !mprotect((void *)at, P, any) && !munmap((void *)mapped, 4 * P));
  work(), say_ok(), exit(8);
}
static void killed_for_managed_memory(void) {
  forbid_bits(SYS_mprotect, 2, PROT_EXEC, SECCOMP_RET_KILL_PROCESS);
  work(), say_ok();
  mprotect((void *)((uintptr_t)(block + LEN / 16) & -P), P, PROT_READ | PROT_EXEC);
  _exit(1);
}
// One from before is asked on the thread that calls, and not on ours, which have no handler to go to.
static void refuses(int signal, siginfo_t *about, void *context) { ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = -EPERM; }
static void trapped(void) {
  struct sigaction handled = {.sa_sigaction = refuses, .sa_flags = SA_SIGINFO};
  CHECK(!sigaction(SIGSYS, &handled, 0) && mprotect((void *)((uintptr_t)(block + LEN / 16) & -P), P, PROT_READ | PROT_EXEC) == -1);
  CHECK(errno == EPERM);
  work(), say_ok(), exit(8);
}
static void executed_to_be_trapped(void) {
  forbid_bits(SYS_mprotect, 2, PROT_EXEC, SECCOMP_RET_TRAP);
  execl(self, self, "trapped", (char *)0);
}
// What another thread does while the kernel reads a filter.
static int faults;
static void (*meanwhile)(void);
static pthread_t other;
static void *hands_it_over(void *page) {
  struct uffd_msg m;
  CHECK(read(faults, &m, sizeof m) == sizeof m);
  meanwhile();
  struct uffdio_copy copy = {.dst = m.arg.pagefault.address & -P, .src = (uintptr_t)page, .len = P};
  CHECK(!ioctl(faults, UFFDIO_COPY, &copy));
  return page;
}
// A filter of four instructions that is read so.
static struct sock_fprog read_late(void *page, void (*what)(void)) {
  char *late = mmap(0, P, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  struct uffdio_api api = {.api = UFFD_API};
  struct uffdio_register all = {.range = {(uintptr_t)late, P}, .mode = UFFDIO_REGISTER_MODE_MISSING};
  faults = syscall(SYS_userfaultfd, O_CLOEXEC);
  if (faults < 0) { puts("no faults of the kernel's"), exit(0); }
  CHECK(!ioctl(faults, UFFDIO_API, &api) && !ioctl(faults, UFFDIO_REGISTER, &all));
  meanwhile = what;
  CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !pthread_create(&other, 0, hands_it_over, page));
  return (struct sock_fprog){4, (struct sock_filter *)late};
}
// A thread begins when the kernel has the filter and who set it is not back: there a signal comes in, sent as the kernel reads the filter.
static void sends_a_signal(void) { CHECK(!syscall(SYS_tgkill, getpid(), getpid(), SIGUSR1)); }
static void begins_a_thread(int signal) {
  pthread_t thread;
  CHECK(prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == SECCOMP_MODE_FILTER);
  CHECK(!pthread_create(&thread, 0, nothing, 0) && !pthread_join(thread, 0));
}
static void set_as_a_thread_begins(void) {
  static _Alignas(P) struct sock_filter page[P / sizeof(struct sock_filter)] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_gettid, 0, 1),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  CHECK(signal(SIGUSR1, begins_a_thread) != SIG_ERR);
  struct sock_fprog program = read_late(page, sends_a_signal);
  CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program));
  CHECK(!pthread_join(other, 0));
  say_ok(), _exit(8);
}
// What the kernel then refuses leaves nothing behind.
static void refused_while(void (*what)(void)) {
  static _Alignas(P) char without_an_answer[P];
  struct sock_fprog program = read_late(without_an_answer, what);
  CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == -1 && errno == EINVAL);
  CHECK(!pthread_join(other, 0));
  work(), say_ok(), exit(8);
}
static void forks(void) {
  pid_t child = fork();
  if (!child) work(), exit(8);
  int status;
  CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 8);
}
static void sets_one(void) { forbid(SYS_times, SECCOMP_RET_KILL_PROCESS); }
static void forks_meanwhile(void) { refused_while(forks); }
static void vforks_meanwhile(void) { refused_while(filters_after_vfork); }
static void sets_one_meanwhile(void) { refused_while(sets_one); }
// A handler forks when all is ready for a filter but the kernel, and the child goes on and sets it, too.
static void forks_just_before(void) {
  const int set = SYS_seccomp;
  CHECK(signal(SIGUSR1, forks_there) != SIG_ERR);
  stop_before(&set, 1, sends_it_a_signal);
  forbid(SYS_getpid, SECCOMP_RET_KILL_PROCESS);
  CHECK(forked != -1);
  work();
  int status;
  if (!forked) exit(8);
  CHECK(waitpid(forked, &status, 0) == forked && WIFEXITED(status) && WEXITSTATUS(status) == 8);
  say_ok(), exit(8);
}
// The same, and the filter then kills the child's only thread.
static void killed_in_a_child_forked_before(const int *calls, size_t count) {
  CHECK(signal(SIGUSR1, forks_there) != SIG_ERR);
  stop_before(calls, count, sends_it_a_signal);
  forbid(SYS_times, SECCOMP_RET_KILL_THREAD);
  CHECK(forked != -1);
  work();
  if (!forked) times(NULL), _exit(1);
  int status = status_of(forked);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS);
  say_ok(), exit(8);
}
static void killed_and_forked_just_before(void) {
  const int set = SYS_seccomp;
  killed_in_a_child_forked_before(&set, 1);
}
// Signals are blocked there, since a thread of ours is started: the handler runs when it has been.
static void killed_and_forked_as_its_watch_begins(void) {
  const int calls[] = {SYS_prctl, SYS_rt_sigprocmask, SYS_rt_sigprocmask};
  killed_in_a_child_forked_before(calls, 3);
}
// Another thread sets a filter when a call has failed that the record was written for, and the record that is not the last is taken back.
static void *sets_one_there(void *of) { wait_for(THERE), sets_one(), *progress = DONE; return of; }
static void lets_it(pid_t traced) {
  *progress = THERE;
  // It may have to wait for the thread that is stopped here.
  for (int i = 0; i < 5 && *progress != DONE; i++) while_main_ends();
  *progress = DONE;
}
static void sets_one_after(int call, void (*fails)(void)) {
  const int calls[] = {call, SYS_open};
  stop_before(calls, 2, lets_it);
  CHECK(!pthread_create(&other, 0, sets_one_there, 0));
  fails();
  CHECK(!pthread_join(other, 0));
  work(), say_ok(), exit(8);
}
static void sets_an_empty_one(void) {
  struct sock_fprog empty = {0, 0};
  CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &empty) == -1 && errno == EINVAL);
}
static void executes_nothing(void) { CHECK(execl("/proc/self/nothing", "nothing", (char *)0) == -1 && errno == ENOENT); }
static void sets_one_after_a_refusal(void) { sets_one_after(SYS_seccomp, sets_an_empty_one); }
static void sets_one_after_an_exec(void) { sets_one_after(SYS_execve, executes_nothing); }
// A child that another thread forks as a thread of ours begins, for the first filter: what the C library allocates there is the program's.
static void *forks_there_and_allocates(void *of) {
  wait_for(THERE);
  pid_t child = fork();
  if (!child) {
    char *long_one = malloc(P << 7);
    memset(long_one, 'a', P << 7), long_one[(P << 7) - 1] = 0;
    for (int i = 0; i < 64; i++) CHECK(strdup(long_one));
    exit(8);
  }
  *progress = DONE;
  int status = status_of(child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 8);
  return of;
}
static void forks_as_its_watch_begins(void) {
  const int calls[] = {SYS_clone3, SYS_clone3};
  stop_before(calls, 2, lets_it);
  CHECK(!pthread_create(&other, 0, forks_there_and_allocates, 0));
  forbid(SYS_times, SECCOMP_RET_KILL_THREAD);
  CHECK(!pthread_join(other, 0));
  say_ok(), exit(8);
}
// A record counts although it was written for a call that fails: another thread, which goes on only when that has, counted on it before.
static volatile int is_late;
static void fails_there(void) { is_late = 1, wait_for(THERE); }
static void *sets_one_that_fails(void *program) {
  CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, program) == -1 && errno == EINVAL);
  return (void *)(*progress = DONE);
}
static void executes_as_one_fails(void) {
  const int call = SYS_execve;
  static _Alignas(P) char without_an_answer[P];
  pthread_t thread;
  stop_before(&call, 1, lets_it);
  struct sock_fprog program = read_late(without_an_answer, fails_there);
  CHECK(!pthread_create(&thread, 0, sets_one_that_fails, &program));
  while (!is_late) {}
  work(), say_ok();
  execl("/bin/true", "true", (char *)0);
}
static void *executes_what_fails(void *path) {
  CHECK(syscall(SYS_execveat, AT_FDCWD, path, (char *[]){"nothing", 0}, (char *[]){0}, 0) == -1 && errno == ENOENT);
  return (void *)(*progress = DONE);
}
static void exits_as_one_fails(void) {
  const int call = SYS_exit_group;
  static _Alignas(P) char nothing_there[P] = "/proc/self/nothing";
  pthread_t thread;
  stop_before(&call, 1, lets_it);
  struct sock_fprog path = read_late(nothing_there, fails_there);
  CHECK(!pthread_create(&thread, 0, executes_what_fails, path.filter));
  while (!is_late) {}
  work(), say_ok(), _exit(8);
}
// Another thread's filter, past the C library, keeps all from having the same: the kernel names that thread, and sets nothing.
static volatile int has_its_own;
static void *has_another(void *of) {
  struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  struct sock_fprog program = {1, &allow};
  long result;
  CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
  __asm__ volatile("syscall" : "=a"(result) : "a"(SYS_seccomp), "D"(SECCOMP_SET_MODE_FILTER), "S"(0), "d"(&program) : "rcx", "r11", "memory");
  CHECK(!result);
  for (has_its_own = 1;;) while_main_ends();
  return of;
}
static void for_all_but_one(void) {
  pthread_t thread;
  CHECK(!pthread_create(&thread, 0, has_another, 0));
  while (!has_its_own) {}
  CHECK(filter(FOR_ALL_THREADS, 0, 0, SECCOMP_RET_ALLOW, SECCOMP_RET_ALLOW) > 0 && !prctl(PR_GET_SECCOMP, 0, 0, 0, 0));
  forks(), work(), say_ok(), exit(8);
}
// Threads that hand the rest on to one another, and end, after the first has: at each moment there is one.
static time_t until;
static void *hands_on(void *unused) {
  pthread_t thread;
  if (time(0) >= until) work(), say_ok(), exit(8);
  int failed;
  while ((failed = pthread_create(&thread, 0, hands_on, 0))) CHECK(failed == EAGAIN);
  CHECK(!pthread_detach(pthread_self()));
  return unused;
}
static void handed_on(void) {
  until = time(0) + 8;
  forbid(SYS_times, SECCOMP_RET_KILL_PROCESS);
  hands_on(0), pthread_exit(0);
}
static void executes_echo_without(int call, unsigned action) {
  forbid(call, action);
  execl("/bin/echo", "echo", "ok", (char *)0);
}
static void executed(void) { executes_echo_without(SYS_unshare, SECCOMP_RET_ERRNO | ENOSYS); }
static void executed_where_threads_are_killed(void) { executes_echo_without(SYS_unshare, SECCOMP_RET_KILL_THREAD); }
static void executed_where_its_watch_is_killed(void) { executes_echo_without(SYS_chdir, SECCOMP_RET_KILL_THREAD); }
static void forked_where_threads_are_killed(void) {
  forbid(SYS_unshare, SECCOMP_RET_KILL_THREAD);
  pid_t child = fork();
  if (!child) work(), _exit(1);
  int status = status_of(child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
  work(), say_ok(), _exit(8);
}

// The first thread has ended, and another closes all that it has not opened: nothing of it is ours, and nobody else closes what it opens.
static void *closes_all(void *of) {
  for (time_t until = time(0) + 4; time(0) < until; ) {
    CHECK(!syscall(SYS_close_range, 3, ~0u, 0));
    int own = open(self, O_RDONLY | O_CLOEXEC);
    for (int i = 0; i < 10; i++) CHECK(own == 3 && fcntl(own, F_GETFD) == FD_CLOEXEC);
    CHECK(!close(own));
  }
  work(), say_ok(), exit(8);
  return of;
}
static void *sees_no_directory(void *of) {
  for (int i = 3;; i = i < 5 ? i + 1 : 3) {
    struct stat about;
    CHECK(fstat(i, &about) || !S_ISDIR(about.st_mode));
  }
  return of;
}
static void closes_all_after_main(void) {
  pthread_t thread;
  for (int i = 0; i < 3; i++) CHECK(!pthread_create(&thread, 0, sees_no_directory, 0));
  CHECK(!pthread_create(&thread, 0, closes_all, 0));
  pthread_exit(0);
}
static void closes_all_in_a_child(void) {
  forbid(SYS_times, SECCOMP_RET_KILL_THREAD);
  pid_t child = fork();
  if (!child) closes_all_after_main();
  int status = status_of(child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 8);
  _exit(8);
}
static const struct one_case cases[] = {
  CASE(by_prctl), CASE(by_number), CASE(after_refusals), CASE(refused), CASE(twice), CASE(as_another_user), CASE(in_a_child),
  CASE(after_vfork), CASE(last_by_return), CASE(killed), CASE(killed_under_a_cut_name), CASE(strict_exit), CASE(strict_killed), CASE(strict_by_number),
  CASE(killed_child), CASE(child_asks), CASE(killed_by_what_it_inherits), CASE(killed_child_by_what_it_inherits), CASE(ask), CASE(killed_under_another_root), CASE(killed_without_main),
  CASE(executed), CASE(executed_where_threads_are_killed), CASE(executed_where_its_watch_is_killed), CASE(forked_where_threads_are_killed), CASE(starts_threads), CASE(set_as_a_thread_begins), CASE(forks_meanwhile), CASE(vforks_meanwhile),
  CASE(sets_one_meanwhile), CASE(sets_one_after_a_refusal), CASE(sets_one_after_an_exec), CASE(forks_just_before), CASE(handed_on),
  CASE(killed_and_forked_just_before), CASE(killed_and_forked_as_its_watch_begins), CASE(forks_as_its_watch_begins),
  CASE(unreadable_to_read), CASE(unreadable_to_nobody), CASE(saver_panics), CASE(holds_for_managed_memory),
  CASE(killed_for_managed_memory), CASE(trapped), CASE(executed_to_be_trapped), CASE(executes_as_one_fails), CASE(exits_as_one_fails), CASE(for_all_but_one),
  CASE(closes_all_after_main), CASE(closes_all_in_a_child)};
int main(int argc, char **argv) {
  self = argv[0];
  if (argc > 2) { // a command, under a filter that is not its own
    forbid(SYS_times, SECCOMP_RET_KILL_THREAD);
    execv(argv[1], argv + 1);
  }
  return has_done(cases, sizeof cases / sizeof *cases, argc, argv) ? 1 : 2;
}
