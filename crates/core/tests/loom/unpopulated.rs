//! Frames without memory: which number a claim gets.

use std::num::NonZeroU32;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use selfpage_core::addr::Frame;
use selfpage_core::frame::{FrameSet, Unpopulated};

use crate::{Memory, ONE, explore};

const SLOTS: u32 = 2;

struct Numbers {
    unpopulated: Unpopulated,
    /// The frames that are out, a bit each.
    out: AtomicU64,
    _memory: (Memory<AtomicU64>, Memory<AtomicU64>),
}

impl Numbers {
    /// All but the last have had memory once, and were given up.
    fn new() -> Arc<Numbers> {
        let (mut words, mut summary) = (Memory::new(1), Memory::new(1));
        let unpopulated = Unpopulated::new(FrameSet::new(words.table(), summary.table()), SLOTS);
        let first = unpopulated.take(NonZeroU32::new(SLOTS - 1).unwrap()).unwrap();
        unpopulated.give(first.first, first.count.get());
        Arc::new(Numbers { unpopulated, out: AtomicU64::new(0), _memory: (words, summary) })
    }

    fn take(&self) -> Option<Frame> {
        let frame = self.unpopulated.take(ONE)?.first;
        assert!(frame.0 < SLOTS, "{frame:?} of {SLOTS}");
        assert_eq!(self.out.fetch_or(1 << frame.0, Ordering::Relaxed) >> frame.0 & 1, 0, "{frame:?} is out twice");
        Some(frame)
    }

    fn give(&self, frame: Frame) {
        self.out.fetch_and(!(1 << frame.0), Ordering::Relaxed);
        self.unpopulated.give(frame, 1);
    }
}

#[test]
fn every_claim_gets_a_frame_that_the_pool_has() {
    explore(3, || {
        let numbers = Numbers::new();
        let other = numbers.clone();
        let thread = thread::spawn(move || assert!(other.take().is_some()));
        // Two are out at most, and there are two: also while the other one hides what is given back.
        let frame = numbers.take().unwrap();
        numbers.give(frame);
        assert!(numbers.take().is_some());
        thread.join().unwrap();
    });
}
