//! Fork: the child has the blocks and the cache, page by page as either side writes.

use selfpage_core::linux::thread;

use super::block::{self, PAGES};
use super::keeper;
use super::limit;
use super::lock::Rest;
use super::workers::WORKERS;
use crate::fork::Once;

static REGISTERED: Once<()> = Once::new();

/// Has forks of this process take care of the allocator. Once is enough; who calls [`prepare`], [`parent`] and [`child`] himself
/// does not need it.
///
/// # Context
/// May allocate.
pub fn register() {
    // SAFETY: fork-handlers: three functions without arguments, which stay loaded as long as the allocator is used.
    REGISTERED.get_or_make(|| unsafe {
        libc::pthread_atfork(Some(before), Some(parent_after), Some(child_after));
    });
}

extern "C" fn before() {
    prepare();
}
extern "C" fn parent_after() {
    parent();
}
extern "C" fn child_after() {
    child();
}

/// Before a fork: brings the allocator to rest. This thread may go on to use it.
///
/// A handler of a signal may have interrupted this thread where it has the lock. Then nothing comes to rest: it goes on with what it was
/// doing on both sides, and until then neither may use the allocator.
pub fn prepare() {
    WORKERS.begin_fork();
    while PAGES.hold() == Rest::Whole && WORKERS.has_others() {
        // Somebody drops frames of a slot: in the child nobody would put it back.
        PAGES.let_go();
        thread::give_way();
    }
    WORKERS.end_fork();
}

/// After a fork, in the parent.
pub fn parent() {
    if PAGES.let_go() == Rest::Whole {
        // What became too much while the fork waited.
        block::settle(PAGES.take());
    }
}

/// After a fork, in the child.
pub fn child() {
    keeper::forget();
    limit::forget();
    WORKERS.forget_others();
    if PAGES.let_go() == Rest::Whole {
        // Nor does anybody look how much room there is.
        let mut pages = PAGES.take();
        pages.retention.most_bytes = usize::MAX;
        block::settle(pages);
    }
}
