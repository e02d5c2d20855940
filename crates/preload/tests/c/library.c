// A library with thread-local storage too large for the room that the loader keeps.
static __thread int slots[40000] = {5};
int *slot(void) { return slots; }
