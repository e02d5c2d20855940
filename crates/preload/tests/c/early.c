// A library that the program needs from the beginning: its constructor runs before the preloaded library's. With -DLIBRARY that
// library, else a program that uses it.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#define BYTES (24ul << 20)
#ifdef LIBRARY
char *watched;
long wrong_before, wrong_in_child, wrong_in_parent;
static long wrong(void) {
  long count = 0;
  for (size_t i = 0; watched && i < BYTES; i += 4096) count += *(volatile uint64_t *)(watched + i) != i + 1;
  return count;
}
static void before(void) { wrong_before = wrong(); }
static void in_child(void) { wrong_in_child = wrong(); }
static void in_parent(void) { wrong_in_parent = wrong(); }
static void *ends(void *n) { return n; }
static void a_while(void) {
  struct timespec time = {0, 300000000};
  nanosleep(&time, 0);
}
// It runs on when `main` has ended, and lets that be noticed before it does something.
static void *runs_on(void *what) {
  struct sock_filter all[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  struct sock_fprog filter = {1, all};
  pthread_t t;
  a_while();
  if (!strcmp(what, "begin_another") && (pthread_create(&t, 0, ends, 0) || pthread_detach(t))) abort();
  if (!strcmp(what, "filter") &&
      (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0))) abort();
  a_while();
  return puts("done") < 0 || fflush(stdout) ? 0 : what;
}
static __attribute__((constructor)) void begin(int count, char **arguments) {
  pthread_t t;
  if (count > 2 && (pthread_create(&t, 0, runs_on, arguments[2]) || pthread_detach(t))) abort();
  if (pthread_atfork(before, in_parent, in_child) || pthread_create(&t, 0, ends, 0) || pthread_join(t, 0)) abort();
}
#else
extern char *watched;
extern long wrong_before, wrong_in_child, wrong_in_parent;
int main(int count, char **arguments) {
  if (count > 1) pthread_exit(0); // the last thread, but for such as the constructor has started
  char *p = malloc(BYTES);
  for (size_t i = 0; i < BYTES; i += 4096) *(volatile uint64_t *)(p + i) = i + 1;
  watched = p;
  pid_t child = fork();
  if (!child) _exit(wrong_before || wrong_in_child);
  int status;
  if (waitpid(child, &status, 0) != child) return 1;
  printf("%d %ld %ld\n", status, wrong_before, wrong_in_parent);
  return 0;
}
#endif
