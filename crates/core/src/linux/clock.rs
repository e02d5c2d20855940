//! The monotonic clock.

use super::syscall::call;
use linux_raw_sys::general as raw;

/// A clock: nanoseconds since some moment in the past, never going back. The library gives [`super::mmu::LinuxMmu`] one that
/// reads the vDSO; finding the vDSO takes more than core may use.
///
/// # Context
/// Any.
pub type Clock = fn() -> u64;

/// The clock by system call: about 0.1 µs.
///
/// # Context
/// Any.
pub fn monotonic_ns() -> u64 {
    let mut now = [0i64; 2];
    // SAFETY: syscall-contract: seconds and nanoseconds are borrowed until the call returns.
    let _ = unsafe {
        call(raw::__NR_clock_gettime, [raw::CLOCK_MONOTONIC as usize, now.as_mut_ptr() as usize, 0, 0, 0, 0])
    };
    let [seconds, nanoseconds] = now;
    (seconds as u64).wrapping_mul(1_000_000_000).wrapping_add(nanoseconds as u64)
}
