// Who unwinds from within a call that is ours comes to who called it: profilers, debuggers, handlers that print where they are. The kernel hands
// the call back in its midst. With -DRAW it is made by number.
#include "mappings.h"
#include <execinfo.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <ucontext.h>
#undef mmap
#undef execve

#define LEN (1234 * P)
static void *caller;
static int found;
static void on_sigsys(int s, siginfo_t *i, void *context) {
  void *frames[64];
  for (int at = backtrace(frames, 64); at--;) found += frames[at] == caller;
  ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = -EPERM;
}
static void begin(void) {
  void *frames[4];
  struct sigaction a = {.sa_sigaction = on_sigsys, .sa_flags = SA_SIGINFO};
  struct sock_filter code[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execve, 3, 0),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 3),
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, LEN, 0, 1),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  CHECK(backtrace(frames, 4) > 0 && !sigaction(SIGSYS, &a, 0)); // the first one loads a library
  CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}
__attribute__((noinline)) static void maps(void) {
  caller = __builtin_return_address(0);
#ifdef RAW
  CHECK(syscall(SYS_mmap, 0, LEN, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0) == -1 && errno == EPERM);
#else
  CHECK(mmap(0, LEN, 3, MAP_SHARED | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EPERM);
#endif
}
static void through_mmap(void) {
  begin(), maps();
  CHECK(found == 1);
}
__attribute__((noinline)) static void executes(void) {
  caller = __builtin_return_address(0);
  CHECK(execl("/bin/true", "true", "1", "2", "3", "4", "5", "6", (char *)0) == -1 && errno == EPERM);
}
static void through_execl(void) {
  begin(), executes();
  CHECK(found == 1);
}
// The handler is called, once, whatever the call is about, and may map and allocate.
static void maps_there(int s, siginfo_t *i, void *context) {
  found++, free(malloc(2 * MIB));
  CHECK(!munmap(full(4 * P), 4 * P));
  ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = -EPERM;
}
// Or makes the call itself, by the one instruction that the filter allows it.
extern const char allowed[];
__attribute__((noinline, noclone)) static long make(long call, long a, long b, long c) {
  long result;
  __asm__ volatile("syscall\nallowed:" : "=a"(result) : "a"(call), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return result;
}
static void makes_it(int s, siginfo_t *i, void *context) {
  greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
  found++, r[REG_RAX] = make(i->si_syscall, r[REG_RDI], r[REG_RSI], r[REG_RDX]);
}
static void trap(void (*handler)(int, siginfo_t *, void *), int result) {
  char *managed = full(4 * P), *over = mmap(managed + 2 * P, 2 * P, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  char *file = mmap(0, 2 * P, 3, MAP_PRIVATE, open("/proc/self/exe", O_RDONLY), 0);
  const struct { long call; char *at; int arg; } all[] = {
    {SYS_mprotect, file, PROT_READ}, {SYS_munlock, file, 0}, {SYS_madvise, file, MADV_NORMAL}, {SYS_mprotect, over, PROT_READ},
    {SYS_munlock, over, 0}, {SYS_madvise, over, MADV_NORMAL}, {SYS_madvise, over, MADV_WILLNEED}, {SYS_mprotect, managed, PROT_READ},
    {SYS_madvise, managed, MADV_NORMAL}};
  struct sigaction a = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
  CHECK(file != MAP_FAILED && over == managed + 2 * P);
  struct sock_filter code[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(uintptr_t)allowed, 7, 0),
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 2, 0),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 1, 0), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_munlock, 0, 3),
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 2 * P, 0, 1),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  CHECK(!sigaction(SIGSYS, &a, 0) && !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
  for (size_t i = 0; i < sizeof all / sizeof *all; i++, found = 0) {
    CHECK(syscall(all[i].call, all[i].at, 2 * P, all[i].arg) == result && (!result || errno == EPERM));
    CHECK(result ? found == 1 : found >= 1);
  }
  CHECK(!writes(file) == !!result && !writes(over) == !!result && !writes(managed) == !!result);
}
static void trapped(void) { trap(maps_there, -1); }
static void trapped_and_made(void) { trap(makes_it, 0); }
// What has something on the stack as it calls another function has rules for it.
extern void *_Unwind_Find_FDE(void *, void *);
static void each_has_rules(void) {
  void *of_bases[3];
  char *names[] = {"mmap", "mmap64", "execl", "execlp", "execle", "dlsym"};
  for (int i = 0; i < 6; i++) CHECK(_Unwind_Find_FDE((char *)dlsym(RTLD_DEFAULT, names[i]) + 1, of_bases));
}
static struct row rows[] = {{"through_mmap", through_mmap}, {"through_execl", through_execl}, {"each_has_rules", each_has_rules}, {"trapped", trapped},
  {"trapped_and_made", trapped_and_made}};
int main(int argc, char **argv) { return run(rows, sizeof rows / sizeof *rows, argc == 2 ? argv[1] : ""); }
