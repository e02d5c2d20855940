// What the programs of cases have in common: a block that is larger than their frames, and a case that is chosen by its name.
#define P 4096ul
#define LEN (24ul << 20)
#define CHECK(x) do { if (!(x)) { printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); fflush(stdout); _exit(1); } } while (0)
static volatile uint64_t *block;
static void fill(void) { for (size_t i = 0; i < LEN / 8; i += P / 8) block[i] = i + 1; }
static void same(void) { for (size_t i = 0; i < LEN / 8; i += P / 8) CHECK(block[i] == i + 1); }

#define CASE(name) {#name, name}
struct one_case { const char *name; void (*what)(void); };
// Does the case that the program was called with, on a block that is full. Whether there is one.
static int has_done(const struct one_case *cases, size_t count, int argc, char **argv) {
  for (size_t i = 0; i < count; i++)
    if (argc == 2 && !strcmp(argv[1], cases[i].name)) {
      block = malloc(LEN);
      CHECK(block);
      fill();
      same();
      cases[i].what();
      return 1;
    }
  return 0;
}
