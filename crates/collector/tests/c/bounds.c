/* Names the bounds of the collector's heap, as GC_MARK_AND_PUSH of gc_mark.h does: a program then has copies of those words, and the
   collector uses these instead of its own. */
extern void *GC_least_plausible_heap_addr, *GC_greatest_plausible_heap_addr;

int in_heap(void *address) {
    return address >= GC_least_plausible_heap_addr && address < GC_greatest_plausible_heap_addr;
}
