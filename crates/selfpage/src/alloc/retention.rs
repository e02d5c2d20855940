//! How many frames the allocator keeps: those of its blocks, and some more.

use super::limit;
use super::slot::Slot;

/// What counts against the bound. A block counts as if all of it had frames: what the program touches is not known here.
#[derive(Debug)]
pub(super) struct Retention {
    /// Bytes of blocks.
    pub(super) live_bytes: usize,
    /// Bytes of slots that may have frames, those of blocks included.
    pub(super) framed_bytes: usize,
    /// Of those, bytes of packed slots that were never used: what was begun with others.
    pub(super) spare_bytes: usize,
    /// Bytes of packed slots, one of a class at most, that a huge page ends in: no slot counts them until the next one comes.
    pub(super) begun_bytes: usize,
    /// The most that was live lately.
    pub(super) peak_bytes: usize,
    /// And before some of that was forgotten.
    highest_peak_bytes: usize,
    /// What may be kept beside what is live; `None`: a quarter of the peak beyond the peak.
    pub(super) keep_bytes: Option<usize>,
    /// What the process's control groups leave to blocks and what is kept, as the keeper found last; without one, the most that there is.
    pub(super) most_bytes: usize,
    /// What they may have, with all of their processes; the most that there is: they have no limit.
    pub(super) limit_bytes: usize,
    /// What the object heap over this allocator may take without asking.
    pub(super) heap_bytes: usize,
}

impl Retention {
    pub(super) const fn new() -> Retention {
        Retention {
            live_bytes: 0,
            framed_bytes: 0,
            spare_bytes: 0,
            begun_bytes: 0,
            peak_bytes: 0,
            highest_peak_bytes: 0,
            keep_bytes: None,
            most_bytes: usize::MAX,
            limit_bytes: usize::MAX,
            heap_bytes: 0,
        }
    }

    pub(super) fn grow_live(&mut self, bytes: usize) {
        self.live_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
    }

    /// Blocks and what is kept for later may have this much together.
    pub(super) fn bound_bytes(&self) -> usize {
        let bound_bytes = match self.keep_bytes {
            None => self.peak_bytes + self.peak_bytes / 4,
            Some(keep) => self.live_bytes.saturating_add(keep),
        };
        let within_limit = (self.limit_bytes - limit::left_bytes(self.limit_bytes)).saturating_sub(self.heap_bytes);
        bound_bytes.min(self.most_bytes).min(within_limit).max(self.live_bytes)
    }

    /// A slot that was taken out of the cache is no longer spare.
    #[inline]
    pub(super) fn begin_use(&mut self, slot: &mut Slot) {
        if slot.freed_at == Slot::SPARE {
            self.spare_bytes -= slot.framed_bytes;
            slot.freed_at = 0;
        }
    }

    /// How many bytes of spare slots may be had for a block of `len_bytes`, its own included, where `cached_bytes` are in the cache: with
    /// what blocks have and all that is spare or begun they must be within the bound. What is kept of freed blocks gives way to them.
    pub(super) fn spare_allowed(&self, cached_bytes: usize, len_bytes: usize) -> usize {
        let (bound_bytes, _) = self.bound_and_live_with(len_bytes);
        bound_bytes.saturating_sub(self.framed_bytes - cached_bytes + self.spare_bytes + self.begun_bytes)
    }

    /// The bound, and what is live, when `more_bytes` more are.
    pub(super) fn bound_and_live_with(&self, more_bytes: usize) -> (usize, usize) {
        let live_bytes = self.live_bytes + more_bytes;
        let then = Retention { live_bytes, peak_bytes: self.peak_bytes.max(live_bytes), ..*self };
        (then.bound_bytes(), live_bytes)
    }

    /// What must go.
    pub(super) fn excess_bytes(&self) -> usize {
        self.framed_bytes.saturating_sub(self.bound_bytes())
    }

    /// The most that was live since the process began.
    pub(super) fn most_live_bytes(&self) -> usize {
        self.peak_bytes.max(self.highest_peak_bytes)
    }

    /// Forgets an eighth of how far the peak lies above what is live.
    pub(super) fn decay(&mut self) {
        self.highest_peak_bytes = self.most_live_bytes();
        let above = self.peak_bytes - self.live_bytes.min(self.peak_bytes);
        self.peak_bytes -= above.div_ceil(8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spare_is_a_quarter_of_what_is_live() {
        let mut retention = Retention::new();
        retention.grow_live(27 << 18);
        retention.framed_bytes = (27 << 18) + 1;
        assert_eq!(retention.spare_allowed(0, 256 << 10), (2 << 20) - 1);
        assert_eq!(retention.spare_allowed(1, 256 << 10), 2 << 20);
        retention.spare_bytes = 1;
        assert_eq!(retention.spare_allowed(1, 256 << 10), (2 << 20) - 1);
        retention.keep_bytes = Some(0);
        retention.spare_bytes = 0;
        assert_eq!(retention.spare_allowed(1, 1 << 20), 1 << 20);
    }

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
        assert_eq!(retention.most_live_bytes(), 1 << 20);
        retention.keep_bytes = Some(3);
        assert_eq!(retention.excess_bytes(), (1 << 20) - 3);
    }

    #[test]
    fn what_the_group_may_have_counts_before_what_may_be_kept() {
        let mut retention = Retention::new();
        retention.grow_live(1000);
        retention.most_bytes = 1100;
        assert_eq!(retention.bound_bytes(), 1100);
        retention.grow_live(500);
        assert_eq!(retention.bound_bytes(), 1500);
        retention.keep_bytes = Some(7);
        retention.most_bytes = usize::MAX;
        assert_eq!(retention.bound_bytes(), 1507);
        retention.keep_bytes = None;
        retention.limit_bytes = 1920;
        assert_eq!(retention.bound_bytes(), 1800);
        retention.heap_bytes = 200;
        assert_eq!(retention.bound_bytes(), 1600);
        retention.heap_bytes = 2000;
        assert_eq!(retention.bound_bytes(), 1500, "what is live");
    }
}
