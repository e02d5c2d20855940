// Forks, while one thread flushes all streams and another one has a stream and allocates for it.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define LINE_BYTES ((size_t)3 << 20)
#define FORKS 60

static void *flush_all(void *unused) {
    (void)unused;
    for (;;) fflush(NULL);
    return NULL;
}

static void *read_lines(void *given) {
    FILE *file = given;
    for (;;) {
        char *line = NULL;
        size_t room = 0;
        rewind(file);
        if (getline(&line, &room, file) != (ssize_t)LINE_BYTES + 1) _exit(3);
        free(line);
    }
}

// A child that uses streams, and so the list of them, too.
static void use_streams(void) {
    FILE *file = fopen("/dev/null", "w");
    if (file == NULL || fputs("x", file) == EOF || fclose(file) != 0) _exit(4);
    fflush(stdout);
    _exit(0);
}

int main(void) {
    FILE *file = fdopen(memfd_create("lines", 0), "w+");
    char *line = malloc(LINE_BYTES);
    memset(line, 'a', LINE_BYTES);
    if (fwrite(line, 1, LINE_BYTES, file) != LINE_BYTES || fputc('\n', file) == EOF || fflush(file) != 0) return 1;
    pthread_t thread;
    if (pthread_create(&thread, NULL, flush_all, NULL) != 0 || pthread_create(&thread, NULL, read_lines, file) != 0) return 1;
    for (int at = 0; at < FORKS; at++) {
        pid_t child = fork();
        if (child == 0) use_streams();
        int status = 0;
        if (waitpid(child, &status, 0) != child || status != 0) _exit(2);
    }
    if (write(1, "done\n", 5) != 5) _exit(1);
    _exit(0);
}
