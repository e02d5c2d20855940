// What happens while `selfpage run` is in one of these calls; preloaded into it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int is_the_tool(void) { return strcmp(program_invocation_short_name, "selfpage") == 0; }

#ifdef ENDS_IN_RAISE
// The program, which has stopped, is killed.
int raise(int signal) {
    int raised = (int)syscall(SYS_tgkill, getpid(), gettid(), signal);
    if (is_the_tool()) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
        FILE *children = fopen(path, "r");
        pid_t child;
        siginfo_t end;
        if (children == NULL || fscanf(children, "%d", &child) != 1 || kill(child, SIGKILL) != 0 ||
            waitid(P_PID, (id_t)child, &end, WEXITED | WNOWAIT) != 0) {
            abort();
        }
    }
    return raised;
}
#endif

#ifdef SIGNAL_IN_FORK
// Somebody ends the child before it executes the program.
pid_t fork(void) {
    pid_t (*next)(void) = (pid_t (*)(void))dlsym(RTLD_NEXT, "fork");
    pid_t child = next();
    if (child == 0 && is_the_tool()) kill(getpid(), SIGTERM);
    return child;
}
#endif
