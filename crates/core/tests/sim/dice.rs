//! One stream of chance for a whole run: whoever has the seed has the run.

use std::cell::Cell;

thread_local! {
    static STATE: Cell<u64> = const { Cell::new(1) };
}

/// Starts the stream of `seed`.
pub fn seed(seed: u64) {
    STATE.set(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    for _ in 0..4 {
        next();
    }
}

/// Does `work`, and goes on afterwards as if it had not been done.
pub fn apart<R>(work: impl FnOnce() -> R) -> R {
    let state = STATE.get();
    let result = work();
    STATE.set(state);
    result
}

/// The next 64 bits (xorshift64*).
pub fn next() -> u64 {
    let mut bits = STATE.get();
    bits ^= bits >> 12;
    bits ^= bits << 25;
    bits ^= bits >> 27;
    STATE.set(bits);
    bits.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

/// A number below `end`, which is not zero.
pub fn below(end: u64) -> u64 {
    ((u128::from(next()) * u128::from(end)) >> 64) as u64
}

/// Once in `times`; never if that is 0.
pub fn once_in(times: u64) -> bool {
    times != 0 && below(times) == 0
}
