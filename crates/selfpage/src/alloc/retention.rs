//! How many frames the allocator keeps: those of its blocks, and some more.

/// What counts against the bound. A block counts as if all of it had frames: what the program touches is not known here.
#[derive(Debug)]
pub(super) struct Retention {
    /// Bytes of blocks.
    pub(super) live_bytes: usize,
    /// Bytes of slots that may have frames, those of blocks included.
    pub(super) framed_bytes: usize,
    /// The most that was live lately.
    pub(super) peak_bytes: usize,
    /// What may be kept beside what is live; `None`: a quarter of the peak beyond the peak.
    pub(super) keep_bytes: Option<usize>,
}

impl Retention {
    pub(super) const fn new() -> Retention {
        Retention { live_bytes: 0, framed_bytes: 0, peak_bytes: 0, keep_bytes: None }
    }

    pub(super) fn grow_live(&mut self, bytes: usize) {
        self.live_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
    }

    /// Blocks and what is kept for later may have this much together.
    pub(super) fn bound_bytes(&self) -> usize {
        match self.keep_bytes {
            None => self.peak_bytes + self.peak_bytes / 4,
            Some(keep) => self.live_bytes.saturating_add(keep),
        }
    }

    /// What must go.
    pub(super) fn excess_bytes(&self) -> usize {
        self.framed_bytes.saturating_sub(self.bound_bytes())
    }

    /// Forgets an eighth of how far the peak lies above what is live.
    pub(super) fn decay(&mut self) {
        let above = self.peak_bytes - self.live_bytes.min(self.peak_bytes);
        self.peak_bytes -= above.div_ceil(8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_beyond_the_peak_is_kept_and_the_peak_is_forgotten() {
        let mut retention = Retention::new();
        retention.grow_live(1 << 20);
        assert_eq!(retention.bound_bytes(), 5 << 18);
        retention.live_bytes = 0;
        retention.framed_bytes = 1 << 20;
        assert_eq!(retention.excess_bytes(), 0);
        (0..200).for_each(|_| retention.decay());
        assert_eq!((retention.peak_bytes, retention.excess_bytes()), (0, 1 << 20));
        retention.keep_bytes = Some(3);
        assert_eq!(retention.excess_bytes(), (1 << 20) - 3);
    }
}
