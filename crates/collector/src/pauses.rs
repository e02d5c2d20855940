//! How long all threads stood still.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The pauses since the collector was started.
#[derive(Clone, Copy, Debug)]
pub struct Pauses {
    /// How many.
    pub count: u64,
    /// All of them.
    pub total: Duration,
    /// The longest.
    pub longest: Duration,
}

// Words and no lock: who reads them may be stopped while a collection writes them.
static COUNT: AtomicU64 = AtomicU64::new(0);
static TOTAL_NS: AtomicU64 = AtomicU64::new(0);
static LONGEST_NS: AtomicU64 = AtomicU64::new(0);
static BEGAN_NS: AtomicU64 = AtomicU64::new(0);

impl Pauses {
    /// Those so far.
    pub fn so_far() -> Pauses {
        Pauses {
            count: COUNT.load(Ordering::Relaxed),
            total: Duration::from_nanos(TOTAL_NS.load(Ordering::Relaxed)),
            longest: Duration::from_nanos(LONGEST_NS.load(Ordering::Relaxed)),
        }
    }
}

/// Threads are about to be stopped.
pub(crate) fn begin() {
    BEGAN_NS.store(now_ns(), Ordering::Relaxed);
}

/// All run again.
pub(crate) fn end() {
    let pause_ns = now_ns() - BEGAN_NS.load(Ordering::Relaxed);
    COUNT.fetch_add(1, Ordering::Relaxed);
    TOTAL_NS.fetch_add(pause_ns, Ordering::Relaxed);
    LONGEST_NS.fetch_max(pause_ns, Ordering::Relaxed);
}

/// Since the first call.
fn now_ns() -> u64 {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed().as_nanos() as u64
}
