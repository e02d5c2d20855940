//! Sleeping on a word of this process's memory.

use super::errno::Errno;
use super::syscall::call;
use core::sync::atomic::AtomicU32;
use linux_raw_sys::general as raw;

/// The kernel's `struct timespec`.
#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

/// Sleeps while `*word == expected`, for at most `timeout_us` microseconds (0: without limit).
///
/// # Errors
/// `EAGAIN`: the word has another value; `ETIMEDOUT`; `EINTR`: a signal.
pub fn wait(word: &AtomicU32, expected: u32, timeout_us: u32) -> Result<(), Errno> {
    let timeout =
        Timespec { seconds: i64::from(timeout_us / 1_000_000), nanoseconds: i64::from(timeout_us % 1_000_000) * 1000 };
    let timeout = if timeout_us == 0 { 0 } else { &raw const timeout as usize };
    let operation = (raw::FUTEX_WAIT | raw::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: syscall-contract: the word and the timeout are borrowed until the call returns.
    unsafe { call(raw::__NR_futex, [word.as_ptr() as usize, operation, expected as usize, timeout, 0, 0]) }.map(drop)
}

/// Wakes up to `count` sleepers on `word`; returns how many woke.
pub fn wake(word: &AtomicU32, count: u32) -> u32 {
    let operation = (raw::FUTEX_WAKE | raw::FUTEX_PRIVATE_FLAG) as usize;
    let count = count.min(i32::MAX as u32) as usize;
    // SAFETY: syscall-contract: the word is borrowed until the call returns, and is not written.
    unsafe { call(raw::__NR_futex, [word.as_ptr() as usize, operation, count, 0, 0, 0]) }.unwrap_or(0) as u32
}
