//! Fork: the child's one thread is in the domains that it was in, and nobody else is in any.

use super::table::{self, Held};
use super::{stay, thread};
use crate::fork::{Once, OverFork};

static INSTALLED: Once<()> = Once::new();
static TABLE: OverFork<Held> = OverFork::nothing();

pub(super) fn install() {
    INSTALLED.get_or_make(|| {
        // Ours come later, so that the table is held before domains come to rest, and regions are back when the child's
        // protections are changed.
        crate::fork::attend();
        // SAFETY: fork-handlers: three functions without arguments, which stay loaded.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    });
}

extern "C" fn prepare() {
    TABLE.hold(table::hold);
}

extern "C" fn parent() {
    drop(TABLE.let_go());
}

extern "C" fn child() {
    let Some(mut table) = TABLE.let_go() else { return };
    thread::with(|here| {
        for entry in &table.domains {
            entry.core.set_users(here.entered().filter(|core| std::ptr::eq(*core, &*entry.core)).count() as u64);
        }
        table.stay_alone(stay(here.entered()));
    });
}
