//! Free frames: each goes to one thread, and is found by whoever waits for it.

use std::num::NonZeroU32;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use selfpage_core::addr::{Frame, FrameRun};
use selfpage_core::frame::FrameSet;
use selfpage_core::sync::Event;

use crate::machine::{Bed, Sleeping};
use crate::{Memory, ONE, explore};

/// A set of free frames with its memory, and contents to hold it to its word.
struct Frames {
    set: FrameSet,
    total: u32,
    contents: Vec<UnsafeCell<u32>>,
    _memory: (Memory<AtomicU64>, Memory<AtomicU64>),
}

impl Frames {
    fn new(first: u32, count: u32) -> Arc<Frames> {
        let (mut words, mut summary) = (Memory::new(2), Memory::new(1));
        let set = FrameSet::new(words.table(), summary.table());
        set.give(Frame(first), count);
        let contents = (0..first + count).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Frames { set, total: count, contents, _memory: (words, summary) })
    }

    /// Takes a run, uses it, and gives it back. How many frames it was.
    fn use_run(&self, want: u32) -> u32 {
        assert!(self.set.count() <= self.total, "more than there are");
        let Some(run) = self.set.take(NonZeroU32::new(want).unwrap(), || {}) else { return 0 };
        for frame in run.first.0..run.first.0 + run.count.get() {
            // SAFETY: model-cell.
            self.contents[frame as usize].with_mut(|contents| unsafe { *contents += 1 });
        }
        assert!(self.set.count() <= self.total, "more than there are");
        self.set.give(run.first, run.count.get());
        run.count.get()
    }

    /// Takes everything, and says whether it was all.
    fn all_there(&self) -> bool {
        let mut found = 0;
        while let Some(run) = self.set.take(NonZeroU32::new(64).unwrap(), || {}) {
            found += run.count.get();
        }
        found == self.total && self.set.count() == 0
    }
}

#[test]
fn one_frame_goes_to_one_thread_and_comes_back() {
    explore(3, || {
        let frames = Frames::new(0, 1);
        let other = {
            let frames = frames.clone();
            thread::spawn(move || frames.use_run(1))
        };
        frames.use_run(1);
        assert!(frames.set.count() <= 1, "more than there are");
        other.join().unwrap();
        // It must be marked in the summary, whoever looked while it was away.
        assert!(frames.all_there());
    });
}

#[test]
fn runs_over_two_words_are_taken_once() {
    explore(3, || {
        let frames = Frames::new(62, 4);
        let other = {
            let frames = frames.clone();
            thread::spawn(move || frames.use_run(3))
        };
        frames.use_run(4);
        other.join().unwrap();
        assert!(frames.all_there());
    });
}

#[test]
fn whoever_waits_for_a_frame_gets_one() {
    explore(2, || {
        let frames = Frames::new(0, 1);
        let shared = Arc::new((frames, Event::default(), Sleeping(Bed::new())));
        let faulters: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || take_and_give(&shared.0, &shared.1, &shared.2))
            })
            .collect();
        faulters.into_iter().for_each(|faulter| faulter.join().unwrap());
        assert!(shared.0.all_there());
    });
}

fn take_and_give(frames: &Frames, available: &Event, mmu: &Sleeping) {
    let run = take_one(&frames.set, available, mmu);
    frames.set.give(run.first, 1);
    available.signal(mmu);
}

/// Takes a frame, as a fault does.
fn take_one(set: &FrameSet, available: &Event, mmu: &Sleeping) -> FrameRun {
    loop {
        let seen = available.count();
        if let Some(run) = set.take(ONE, || available.signal(mmu)) {
            return run;
        }
        available.wait(mmu, seen, 0);
    }
}

/// Frames that come together wake all who wait, once, and each finds one: whatever the others do to the word's mark meanwhile.
#[test]
fn frames_that_come_together_are_found_by_all_who_wait() {
    explore(2, || {
        let frames = Frames::new(0, 4);
        // The mark stays when the last one is taken.
        let run = frames.set.take(NonZeroU32::new(4).unwrap(), || {}).unwrap();
        let shared = Arc::new((frames, Event::default(), Sleeping(Bed::new())));
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || take_one(&shared.0.set, &shared.1, &shared.2))
            })
            .collect();
        shared.0.set.give(run.first, run.count.get());
        shared.1.signal(&shared.2);
        let taken: u32 = waiters.into_iter().map(|waiter| waiter.join().unwrap().count.get()).sum();
        assert_eq!((taken, shared.0.set.count()), (2, 2));
    });
}
