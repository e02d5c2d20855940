//! What a domain counts. Any thread may read it at any time; no lock guards it.

use crate::sync::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts since the domain began.
        #[derive(Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
            /// How long faults took that nobody was asked of.
            pub fault_ns: Histogram,
        }

        /// One reading of the counters.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counts { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            /// Counts from nothing again: in a forked child.
            pub fn reset(&self) {
                $(self.$name.store(0, Ordering::Relaxed);)*
                self.fault_ns.reset();
            }

            /// Reads all counters, one after the other.
            pub fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Faults that reached the domain.
    faults_total,
    /// Pages mapped again whose contents a frame still had, without a fill: on standby, or unmapped for the program's sake.
    soft_faults_total,
    /// Pages unmapped to see whether they are used.
    sampled_total,
    /// Of these, pages that were used, and so mapped again.
    referenced_total,
    /// Pages brought in by their pager, or given their contents by the program's handler.
    fills_total,
    /// Of these, pages that nobody had asked for yet.
    fills_ahead_total,
    /// Pages handed to their pager to be saved.
    saves_total,
    /// Pages that lost their frame.
    evictions_total,
    /// Bytes brought in from a store or file.
    bytes_filled,
    /// Bytes saved to a store or file.
    bytes_saved,
    /// Pages that could not go because the kernel or a device held them.
    pinned_skips_total,
    /// Pages that the program dropped behind our back.
    lost_total,
    /// Pages copied to another frame because they were wanted while being saved.
    copied_back_total,
    /// Pages whose frame went to another page with their contents.
    moved_total,
    /// Suggestions of the policy that did not hold.
    bad_victims_total,
    /// Calls of a pager for contents, of one page or several, that failed: for whoever needed them, ahead of need, or for a snapshot or
    /// a clone.
    fill_errors_total,
    /// Of the pages handed to their pager to be saved, those that could not be: by the evictor or a flush.
    save_errors_total,
    /// Faults that had to wait for a frame.
    frame_waits_total,
    /// Frames in use at best.
    frames_held_max,
}

impl Counters {
    /// Adds `count` to a counter.
    pub fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

const SUB_BITS: u32 = 3;
const BUCKETS: usize = (65 - SUB_BITS as usize) << SUB_BITS;

/// A histogram of 64-bit values with a relative error below 1/8.
pub struct Histogram([AtomicU64; BUCKETS]);

impl Default for Histogram {
    fn default() -> Self {
        Histogram(core::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Histogram {
    fn bucket(value: u64) -> usize {
        if value < 1 << SUB_BITS {
            return value as usize;
        }
        let octave = 63 - value.leading_zeros();
        let sub = value >> (octave - SUB_BITS) & ((1 << SUB_BITS) - 1);
        (((octave - SUB_BITS + 1) as usize) << SUB_BITS) + sub as usize
    }

    /// The smallest value of a bucket.
    fn floor(bucket: usize) -> u64 {
        let octave = bucket >> SUB_BITS;
        let sub = (bucket & ((1 << SUB_BITS) - 1)) as u64;
        if octave == 0 { sub } else { ((1 << SUB_BITS) + sub) << (octave - 1) }
    }

    fn reset(&self) {
        self.0.iter().for_each(|bucket| bucket.store(0, Ordering::Relaxed));
    }

    /// Counts one value.
    ///
    /// # Context
    /// Trap.
    pub fn record(&self, value: u64) {
        if let Some(bucket) = self.0.get(Self::bucket(value)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The value below which `per_mille` of the values lie. 0 where there are none.
    pub fn quantile(&self, per_mille: u32) -> u64 {
        let total: u64 = self.0.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum();
        let wanted = (total * u64::from(per_mille)).div_ceil(1000);
        let mut seen = 0;
        for (index, bucket) in self.0.iter().enumerate() {
            seen += bucket.load(Ordering::Relaxed);
            if seen >= wanted && seen > 0 {
                return Self::floor(index);
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_begins_at_or_below_its_values_and_within_an_eighth() {
        for value in (0..5000).chain([u64::MAX, 1 << 40, (1 << 40) - 1]) {
            let floor = Histogram::floor(Histogram::bucket(value));
            assert!(floor <= value && value - floor <= value / 8, "{value} {floor}");
        }
    }

    #[test]
    fn every_value_has_a_bucket() {
        assert_eq!(Histogram::bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_of_a_ramp() {
        let histogram = Histogram::default();
        (1..=1000).for_each(|value| histogram.record(value));
        assert!((448..=500).contains(&histogram.quantile(500)));
        assert!((880..=990).contains(&histogram.quantile(990)));
        assert_eq!(Histogram::default().quantile(500), 0);
    }
}
