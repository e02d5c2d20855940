/* Before gctest: its own notes of what it writes are left out, so that it lives by ours alone. */
#include <stdlib.h>
#include "gc.h"
int selfpage_collector_prepare(void);
#undef GC_END_STUBBORN_CHANGE
#define GC_END_STUBBORN_CHANGE(p) ((void)(p))
#undef GC_PTR_STORE_AND_DIRTY
#define GC_PTR_STORE_AND_DIRTY(p, q) (*(const void **)(p) = (q))
#define GC_end_stubborn_change(p) ((void)(p))
#define GC_ptr_store_and_dirty(p, q) (*(const void **)(p) = (q))
/* What it calls first. */
#define GC_set_manual_vdb_allowed(allowed) (selfpage_collector_prepare() == 0 ? (void)0 : exit(3))
