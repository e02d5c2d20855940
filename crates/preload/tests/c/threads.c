// Programs whose threads begin and end at moments when few do: one case each.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>
#include "cases.h"
#include "stops.h"
static void say_ok(void) { CHECK(write(1, "ok\n", 3) == 3); }
static void ends_well(void) { say_ok(), exit(8); }

static void *nothing(void *of) { return of; }
static int nothing_in_c11(void *of) { return of != 0; }
static int begin(pthread_t *thread) {
  pthread_attr_t large; // No stack of that size is at hand.
  CHECK(!pthread_attr_init(&large) && !pthread_attr_setstacksize(&large, 24 << 20));
  return pthread_create(thread, &large, nothing, 0);
}
// A handler forks as the C library makes a thread its stack, and both processes go on with that.
static void stop_as_a_stack_is_made(void (*handler)(int)) {
  const int map = SYS_mmap;
  CHECK(signal(SIGUSR1, handler) != SIG_ERR);
  stop_before(&map, 1, sends_it_a_signal);
}
static void ends_with(pid_t child, int code) {
  int status = status_of(child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == code);
}
static void both_end_with(int code) {
  CHECK(forked != -1);
  if (!forked) exit(code);
  ends_with(forked, code), ends_well();
}
static void forks_as_one_begins(void) {
  pthread_t thread;
  stop_as_a_stack_is_made(forks_there);
  CHECK(!begin(&thread) && !pthread_join(thread, 0));
  both_end_with(8);
}
static void forks_as_one_begins_in_c11(void) {
  thrd_t thread;
  stop_as_a_stack_is_made(forks_there);
  CHECK(thrd_create(&thread, nothing_in_c11, 0) == thrd_success && thrd_join(thread, 0) == thrd_success);
  both_end_with(8);
}
// In the child there is no room for the stack, and the thread that forked is the last.
static void limit_addresses(rlim_t most) {
  struct rlimit limit;
  CHECK(!getrlimit(RLIMIT_AS, &limit));
  limit.rlim_cur = most < limit.rlim_max ? most : limit.rlim_max;
  CHECK(!setrlimit(RLIMIT_AS, &limit));
}
static void forks_without_room(int signal) {
  forks_there(signal);
  if (!forked) limit_addresses(P);
}
static void forks_as_none_begins(void) {
  pthread_t thread;
  stop_as_a_stack_is_made(forks_without_room);
  int failed = begin(&thread);
  if (!forked) {
    limit_addresses(RLIM_INFINITY);
    CHECK(failed == EAGAIN);
    pthread_exit(0);
  }
  CHECK(!failed && !pthread_join(thread, 0));
  both_end_with(0);
}
// A new thread forks before it runs a function, of the library's or the program's, and is the child's only one.
static void forks_before_it_runs(void) {
  sigset_t none, its;
  pthread_attr_t hears_it;
  pthread_t thread;
  CHECK(!sigemptyset(&none) && !sigemptyset(&its) && !sigaddset(&its, SIGUSR1) && signal(SIGUSR1, forks_there) != SIG_ERR);
  CHECK(!pthread_attr_init(&hears_it) && !pthread_attr_setsigmask_np(&hears_it, &none));
  CHECK(!pthread_sigmask(SIG_BLOCK, &its, 0) && !kill(getpid(), SIGUSR1));
  CHECK(!pthread_create(&thread, &hears_it, nothing, 0) && !pthread_join(thread, 0));
  both_end_with(0);
}

// A child that is forked as its thread ends goes on with the end: in the first round of destructors, and in the last, after ours. It may fork
// there in its turn.
static pthread_key_t forks_at_its_end;
static void (*also_in_the_child)(void);
static void forks_then(void *left) {
  if (left != (void *)1) CHECK(!pthread_setspecific(forks_at_its_end, (char *)left - 1));
  else if (!(forked = fork()) && also_in_the_child) also_in_the_child();
}
static void *ends_in(void *rounds) {
  CHECK(!pthread_setspecific(forks_at_its_end, rounds));
  return 0;
}
static volatile pid_t *grandchild;
static int said[2] = {-1, -1};
static void all_end_well(void) {
  char text[64] = "";
  ends_with(forked, 0);
  if (grandchild) ends_with(*grandchild, 0);
  if (said[0] >= 0) CHECK(!close(said[1]) && read(said[0], text, sizeof text - 1) >= 0 && !strcmp(text, "by the thread\nat exit\n"));
  ends_well();
}
static void forks_in_destructors_of(void *rounds) {
  pthread_t thread;
  CHECK(!pthread_key_create(&forks_at_its_end, forks_then));
  CHECK(!pthread_create(&thread, 0, ends_in, rounds) && !pthread_join(thread, 0));
  all_end_well();
}
static void forks_in_a_destructor(void) { forks_in_destructors_of((void *)1); }
static void forks_in_the_last_destructor(void) { forks_in_destructors_of((void *)4); }
static void forks_again(void) {
  pid_t child = fork();
  if (child) *grandchild = child;
}
// Who is to wait for the grandchild is this process, when the child has ended.
static void and_so_does_the_child(void) {
  also_in_the_child = forks_again;
  CHECK(!prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0));
  grandchild = mmap(0, P, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(grandchild != MAP_FAILED);
}
static void forks_twice_in_the_last_destructor(void) { and_so_does_the_child(), forks_in_the_last_destructor(); }
// What it has in its streams is written as it ends, and its functions for that are called, in its directory and with its descriptors.
static FILE *to_parent;
static void speaks_at_exit(void) {
  char where[64];
  same(), fill();
  CHECK(fcntl(said[1], F_GETFD) >= 0 && !getcwd(where, sizeof where) && errno == ENOENT && fputs("at exit\n", to_parent) >= 0);
}
static void speaks(void) {
  to_parent = fdopen(said[1], "w");
  CHECK(to_parent && !atexit(speaks_at_exit) && fputs("by the thread\n", to_parent) >= 0);
}
static void speaks_in_the_last_destructor(void) {
  char place[] = "/var/tmp/selfpage-threads-XXXXXX";
  CHECK(!pipe(said) && mkdtemp(place) && !chdir(place) && !rmdir(place)); // no other directory is this one
  also_in_the_child = speaks;
  forks_in_the_last_destructor();
}
// The C library starts a timer's thread itself.
static void ends_for_a_timer(union sigval round) { ends_in(round.sival_ptr); }
static void forks_in_a_timers_destructor(void) {
  struct sigevent by_a_thread = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = ends_for_a_timer, .sigev_value.sival_ptr = (void *)1};
  struct itimerspec once = {.it_value.tv_nsec = 1};
  timer_t timer;
  CHECK(!pthread_key_create(&forks_at_its_end, forks_then));
  CHECK(!timer_create(CLOCK_MONOTONIC, &by_a_thread, &timer) && !timer_settime(timer, 0, &once, 0));
  while (forked == -1) sched_yield();
  all_end_well();
}
static void forks_twice_in_a_timers_destructor(void) { and_so_does_the_child(), forks_in_a_timers_destructor(); }

// The first thread ends, and is told to fork when it has been taken off the count. If it does, the child has that thread alone.
static void until_the_first_has_ended(void) {
  for (char state = 0; state != 'Z'; ) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/task/%d/stat", getpid());
    FILE *stat = fopen(name, "r");
    CHECK(stat && fscanf(stat, "%*d (%*[^)]) %c", &state) == 1 && !fclose(stat));
    sched_yield();
  }
}
static void *looks_after_it(void *code) {
  until_the_first_has_ended();
  if (forked != -1) both_end_with((intptr_t)code);
  ends_well();
  return 0;
}
static void begin_to_end(intptr_t code) {
  const int end = SYS_exit;
  pthread_t thread;
  CHECK(signal(SIGUSR1, forks_there) != SIG_ERR);
  stop_before(&end, 1, sends_it_a_signal);
  CHECK(!pthread_create(&thread, 0, looks_after_it, (void *)code));
}
static void forks_as_it_returns(void) { begin_to_end(0), pthread_exit(0); }
static void forks_as_it_exits(void) { begin_to_end(5), syscall(SYS_exit, 5); }

// Timers have threads that the C library starts itself, and nobody counts. The first thread has ended for the program, and looks for them
// less and less often.
static void looks_seldom(pid_t traced) {
  const long seldom = 250000000;
  const int most = 30;
  struct user_regs_struct at;
  long time = 0;
  for (int i = 0; i < most && time < seldom; i++) {
    to_call(traced, SYS_nanosleep, &at);
    errno = 0, time = ptrace(PTRACE_PEEKDATA, traced, at.rdi + offsetof(struct timespec, tv_nsec), 0);
    CHECK(!errno);
  }
  *progress = time < seldom ? THERE : DONE;
  let_go(traced);
}
static void expires(union sigval of) {
  CHECK(*progress != THERE);
  if (*progress == DONE) ends_well();
}
static void timers_alone(void) {
  struct sigevent by_a_thread = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = expires};
  struct itimerspec often = {{0, 50000000}, {0, 50000000}};
  timer_t timer;
  pid_t traced = traced_by_a_child();
  if (traced) looks_seldom(traced);
  CHECK(!timer_create(CLOCK_MONOTONIC, &by_a_thread, &timer) && !timer_settime(timer, 0, &often, 0));
  pthread_exit(0);
}

// Such a timer goes off once, when the first thread has ended. What tells of threads may be hard to read then.
static void says_so(union sigval of) { ends_well(); }
static void arm_a_late_timer(void) {
  struct sigevent by_a_thread = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = says_so};
  struct itimerspec late = {.it_value.tv_nsec = 600000000};
  timer_t timer;
  CHECK(!timer_create(CLOCK_MONOTONIC, &by_a_thread, &timer) && !timer_settime(timer, 0, &late, 0));
}
// The kernel keeps 15 bytes, and the last of these letters has two.
static void take_a_cut_name(void) { CHECK(!prctl(PR_SET_NAME, "\xd0\xbe\xd0\xb1\xd1\x80\xd0\xb0\xd0\xb1\xd0\xbe\xd1\x82\xd0\xba\xd0\xb0", 0, 0, 0)); }
static void has_a_cut_name(void) { take_a_cut_name(), arm_a_late_timer(), pthread_exit(0); }
static void has_no_descriptor(void) {
  const struct rlimit few = {64, 64};
  arm_a_late_timer();
  CHECK(!setrlimit(RLIMIT_NOFILE, &few));
  while (dup(1) >= 0) {}
  CHECK(errno == EMFILE);
  pthread_exit(0);
}
static void has_another_root(void) {
  char place[] = "/var/tmp/selfpage-threads-XXXXXX";
  arm_a_late_timer();
  CHECK(mkdtemp(place) && !chdir(place) && !rmdir(place) && !chroot("."));
  pthread_exit(0);
}
// Nobody else runs: what is in a stream is written then, and its functions are called.
static void says_it_at_its_end(void) { same(), puts("ok"); }
static void is_alone(void) { CHECK(!atexit(says_it_at_its_end)); }
static void is_alone_without_a_descriptor(void) {
  const struct rlimit few = {64, 64};
  is_alone();
  CHECK(!setrlimit(RLIMIT_NOFILE, &few));
  while (dup(1) >= 0) {}
  pthread_exit(0);
}
static void is_alone_under_another_root(void) {
  is_alone();
  CHECK(!chdir("/var/tmp") && !chroot("."));
  pthread_exit(0);
}

static const struct one_case cases[] = {
  CASE(has_a_cut_name), CASE(has_no_descriptor), CASE(has_another_root),
  CASE(is_alone_without_a_descriptor), CASE(is_alone_under_another_root),
  CASE(forks_as_one_begins), CASE(forks_as_one_begins_in_c11), CASE(forks_as_none_begins),
  CASE(forks_before_it_runs), CASE(forks_as_it_returns), CASE(forks_as_it_exits), CASE(timers_alone),
  CASE(forks_in_a_destructor), CASE(forks_in_the_last_destructor), CASE(forks_in_a_timers_destructor),
  CASE(forks_twice_in_the_last_destructor), CASE(forks_twice_in_a_timers_destructor),
  CASE(speaks_in_the_last_destructor)};
int main(int argc, char **argv) { return has_done(cases, sizeof cases / sizeof *cases, argc, argv) ? 1 : 2; }
