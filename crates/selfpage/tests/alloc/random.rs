//! Numbers from a seed.

use std::time::{SystemTime, UNIX_EPOCH};

/// xorshift.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() >> 16) as usize % end
    }
}

/// A seed for this run, or the one in `SELFPAGE_SEED`.
pub fn seed() -> u64 {
    let given = std::env::var("SELFPAGE_SEED").ok().and_then(|seed| seed.parse().ok());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_nanos() as u64);
    given.unwrap_or(now | 1)
}
