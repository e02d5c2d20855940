// As the loader of another C library: it ends where it is told to load a library for a C library that is not its own. It has none itself.
static long call(long number, long a, const void *b, long c) {
  long result;
  __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return result;
}

static long length(const char *text) {
  long len = 0;
  while (text[len]) len++;
  return len;
}

static int begins(const char *text, const char *with) {
  while (*with && *text == *with) text++, with++;
  return !*with;
}

static void say(const char *text) { call(1, 1, text, length(text)); }

static const char *look_up(char **env, const char *name) {
  for (; *env; env++)
    if (begins(*env, name)) return *env + length(name);
  return 0;
}

__attribute__((used)) static void loader(long *stack) {
  char **env = (char **)(stack + 1 + stack[0] + 1);
  const char *list = look_up(env, "LD_PRELOAD="), *other = look_up(env, "OTHER=");
  int status = 7;
  say(list ? list : "none"), say(", "), say(other ? other : "none"), say("\n");
  for (const char *at = list; at && *at; at++)
    if (begins(at, "libselfpage")) status = 127;
  call(231, status, 0, 0);
}

__asm__(".globl _start\n_start: mov %rsp, %rdi\n and $-16, %rsp\n call loader\n");
