// Forks at moments and in places where a pager is easily caught, one case each.
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define P 4096ul
#define MIB (1ul << 20)
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)

static void wait_ok(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static volatile int forks;
static void fork_here(int signal) {
  (void)signal;
  int before = errno;
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) _exit(0);
  wait_ok(child);
  forks++, errno = before;
}

// In the middle of what the library keeps of large blocks, and of the C library's own.
static void in_a_handler(void) {
  struct sigaction a = {.sa_handler = fork_here, .sa_flags = SA_RESTART};
  CHECK(!sigaction(SIGVTALRM, &a, 0));
  struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGVTALRM};
  struct itimerspec often = {{0, 3000000}, {0, 3000000}};
  timer_t timer;
  CHECK(!timer_create(CLOCK_MONOTONIC, &e, &timer) && !timer_settime(timer, 0, &often, 0));
  while (forks < 200) {
    for (int i = 0; i < 50; i++) free(strdup("x"));
    free(malloc(2 * MIB));
  }
  timer_delete(timer);
}

static struct { const char *name; void (*what)(void); } cases[] = {{"in_a_handler", in_a_handler}};
int main(int argc, char **argv) {
  // Where it hangs it ends, with its children.
  alarm(60);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (argc == 2 && !strcmp(argv[1], cases[i].name)) { cases[i].what(); puts("ok"); return 0; }
  return 2;
}
