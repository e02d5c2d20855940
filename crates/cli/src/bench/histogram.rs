//! Latencies, to 3 %, in 15 KiB.

/// Buckets of a power of two.
const SPLIT: u64 = 32;
const BUCKETS: usize = 60 * SPLIT as usize;

/// How often each latency occurred: 32 buckets for each power of two of nanoseconds, and the exact maximum.
#[derive(Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    max_ns: u64,
}

impl Histogram {
    /// Nothing recorded.
    pub fn new() -> Histogram {
        Histogram { counts: vec![0; BUCKETS], total: 0, max_ns: 0 }
    }

    /// Counts one latency.
    #[inline(always)]
    pub fn record(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.total += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds what another thread recorded.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// How many were recorded.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The longest, in microseconds.
    pub fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1e3
    }

    /// The latency that `share` (0 to 1) of all records do not exceed, in microseconds.
    pub fn quantile_us(&self, share: f64) -> f64 {
        let wanted = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return (middle_ns(index).min(self.max_ns as f64)) / 1e3;
            }
        }
        0.0
    }
}

fn bucket(ns: u64) -> usize {
    if ns < SPLIT {
        return ns as usize;
    }
    let shift = u64::from(58 - ns.leading_zeros());
    ((shift * SPLIT + (ns >> shift)) as usize).min(BUCKETS - 1)
}

fn middle_ns(bucket: usize) -> f64 {
    let bucket = bucket as u64;
    if bucket < 2 * SPLIT {
        return bucket as f64;
    }
    let shift = bucket / SPLIT - 1;
    let low = (bucket - shift * SPLIT) << shift;
    low as f64 + (1u64 << shift) as f64 / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_what_is_near_its_middle() {
        for ns in (0..100_000).chain([1 << 33, (1 << 40) + 12_345]) {
            let middle = middle_ns(bucket(ns));
            assert!((middle - ns as f64).abs() <= ns as f64 / 32.0, "{ns} ns fell into the bucket of {middle}");
        }
    }

    #[test]
    fn quantiles_of_a_known_set() {
        let mut histogram = Histogram::new();
        for us in 1..=1000u64 {
            histogram.record(us * 1000);
        }
        let near = |found: f64, wanted: f64| assert!((found - wanted).abs() < wanted * 0.04, "{found}, not {wanted}");
        near(histogram.quantile_us(0.5), 500.0);
        near(histogram.quantile_us(0.99), 990.0);
        near(histogram.quantile_us(0.999), 999.0);
        assert_eq!(histogram.max_us(), 1000.0);
    }
}
