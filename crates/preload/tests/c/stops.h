// Children that end, which is waited for, and children that stop a thread of their parent's where it is about to make a call.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>
// How a child has ended. One that does not end is killed.
static volatile pid_t awaited;
static void gives_it_up(int signal) { kill(awaited, SIGKILL); }
static int status_of(pid_t child) {
  int status;
  awaited = child;
  CHECK(signal(SIGALRM, gives_it_up) != SIG_ERR);
  alarm(60);
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  alarm(0);
  return status;
}
// A child traces this thread from when this returns. In the child it is the thread's number, and 0 in the parent.
enum progress { NOT_YET, MAY_BEGIN, BEGUN, THERE, DONE, FORBIDDEN };
static volatile enum progress *progress;
static void wait_for(enum progress which) {
  while (*progress != which && *progress != FORBIDDEN) {}
  if (*progress == FORBIDDEN) { puts("no tracing"), exit(0); }
}
static pid_t traced_by_a_child(void) {
  pid_t traced = getpid();
  progress = mmap(0, P, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t child = fork();
  CHECK(progress != MAP_FAILED && child >= 0);
  if (child) {
    prctl(PR_SET_PTRACER, child, 0, 0, 0);
    *progress = MAY_BEGIN;
    return wait_for(BEGUN), 0;
  }
  wait_for(MAY_BEGIN);
  if (ptrace(PTRACE_SEIZE, traced, 0, 0)) { *progress = FORBIDDEN, _exit(1); }
  CHECK(!ptrace(PTRACE_INTERRUPT, traced, 0, 0) && waitpid(traced, 0, __WALL) == traced);
  *progress = BEGUN;
  return traced;
}
static void registers(int get_or_set, pid_t of, struct user_regs_struct *all) { CHECK(!ptrace(get_or_set, of, 0, all)); }
static void to_next_stop(pid_t traced) {
  int status;
  CHECK(!ptrace(PTRACE_SYSCALL, traced, 0, 0) && waitpid(traced, &status, __WALL) == traced && WIFSTOPPED(status));
}
static void to_call(pid_t traced, int call, struct user_regs_struct *at) {
  do to_next_stop(traced), registers(PTRACE_GETREGS, traced, at); while ((int)at->orig_rax != call || (int)at->rax != -ENOSYS);
}
static void let_go(pid_t traced) { ptrace(PTRACE_DETACH, traced, 0, 0), kill(getpid(), SIGKILL); } // without a record
// A child stops this thread where it is about to make the last of a row of calls, and does something there.
static void stop_before(const int *calls, size_t count, void (*there)(pid_t)) {
  pid_t traced = traced_by_a_child();
  if (!traced) return;
  struct user_regs_struct at;
  for (size_t i = 0; i < count; i++) to_call(traced, calls[i], &at);
  // This call is none, and it goes back to where it makes it.
  at.orig_rax = -1, registers(PTRACE_SETREGS, traced, &at), to_next_stop(traced), registers(PTRACE_GETREGS, traced, &at);
  at.rip -= 2, at.rax = calls[count - 1], registers(PTRACE_SETREGS, traced, &at);
  there(traced), let_go(traced);
}
// What it may do there: send a signal, whose handler forks.
static volatile pid_t forked = -1;
static void forks_there(int signal) { forked = fork(); }
static void sends_it_a_signal(pid_t to) { CHECK(!syscall(SYS_tgkill, to, to, SIGUSR1)); }
