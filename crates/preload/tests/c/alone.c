// A program for linking statically.
int main(void) { return 7; }
