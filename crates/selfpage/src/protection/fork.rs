//! Fork: the child's one thread is in the domains that it was in, and nobody else is in any.

use std::cell::UnsafeCell;
use std::sync::Once;

use super::table::{self, Held};
use super::{stay, thread};

static INSTALL: Once = Once::new();
static HELD: Over = Over(UnsafeCell::new(None));

/// The table, from before the fork until after it.
struct Over(UnsafeCell<Option<Held>>);

// SAFETY: fork-held: only the handlers use it, between `prepare`, which takes the lock on the table, and `parent` or `child`, which
// let go of it, on one thread.
unsafe impl Sync for Over {}

pub(super) fn install() {
    INSTALL.call_once(|| {
        // Ours come later, so that the table is held before domains come to rest, and regions are back when the child's
        // protections are changed.
        crate::fork::attend();
        // SAFETY: fork-handlers: three functions without arguments, which stay loaded.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    });
}

extern "C" fn prepare() {
    // SAFETY: fork-held: the lock is taken first.
    unsafe { *HELD.0.get() = Some(table::hold()) };
}

extern "C" fn parent() {
    // SAFETY: fork-held: this is the thread that ran `prepare`.
    drop(unsafe { (*HELD.0.get()).take() });
}

extern "C" fn child() {
    // SAFETY: fork-held: this is the thread that ran `prepare`.
    let Some(mut table) = (unsafe { (*HELD.0.get()).take() }) else { return };
    thread::with(|here| {
        for entry in &table.domains {
            entry.core.set_users(here.entered().filter(|core| std::ptr::eq(*core, &*entry.core)).count() as u64);
        }
        table.stay_alone(stay(here.entered()));
    });
}
