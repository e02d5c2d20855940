//! Tests that disturb each other run one at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// From here until the guard goes no other test of the process runs that calls this.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
