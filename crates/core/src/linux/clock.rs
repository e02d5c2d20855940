//! The monotonic clock.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since some moment in the past, never going back. Reads the vDSO, no system call.
///
/// # Context
/// Any, once it was called in Normal: the first call finds the vDSO.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}
