// The C library's list of streams, over a fork. fork takes its lock after all handlers have prepared. By then ours hold the page
// allocator's: a thread that has a stream may wait for a larger buffer (getline), another one that has the list for that stream (fflush of
// all), and the fork for the list, for ever. So the list is taken before what is ours.
#include <stdbool.h>
#include <stddef.h>

// A C library that lacks one of them has no such order, or says nothing of its threads.
extern void _IO_list_lock(void) __attribute__((weak));
extern void _IO_list_unlock(void) __attribute__((weak));
extern void _IO_list_resetlock(void) __attribute__((weak));
extern char __libc_single_threaded __attribute__((weak));

// How often this thread took it: a handler of a signal may fork in the middle of a fork. Under the lock itself.
static size_t times_held;

void selfpage_streams_hold_over_fork(void) {
    if (_IO_list_lock == NULL || _IO_list_unlock == NULL || _IO_list_resetlock == NULL) return;
    // Nobody else has anything. In this child the C library resets no lock, so one that this thread is in the middle of has to stay.
    if (&__libc_single_threaded != NULL && __libc_single_threaded) return;
    _IO_list_lock();
    times_held++;
}

void selfpage_streams_let_go_after_fork(void) {
    if (times_held == 0) return;
    times_held--;
    _IO_list_unlock();
}

void selfpage_streams_let_go_in_child(void) {
    if (times_held == 0) return;
    times_held = 0;
    _IO_list_resetlock();
}
