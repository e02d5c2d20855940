//! What goes wrong in a run, and how often. It changes while the run goes on.

use std::cell::Cell;

use crate::dice;

/// What goes wrong just now. A rate of 0 is never, of n once in n.
#[derive(Default)]
pub struct Weather {
    /// The machine refuses to move a page.
    pub pinned_once_in: Cell<u64>,
    /// The system has no memory.
    pub no_memory_once_in: Cell<u64>,
    /// A fill fails.
    pub fill_fails_once_in: Cell<u64>,
    /// A save fails.
    pub save_fails_once_in: Cell<u64>,
    /// The policy lies.
    pub lies_once_in: Cell<u64>,
    /// A pager says that a trap is the wrong place.
    pub wrong_context_once_in: Cell<u64>,
    /// The program has closed all its descriptors.
    pub closed: Cell<bool>,
    /// What may go wrong at all in this run.
    climate: Cell<Climate>,
}

// SAFETY: one-real-thread: the simulated threads of a world all run on the one that made it.
unsafe impl Sync for Weather {}

/// What may go wrong in a run.
#[derive(Clone, Copy, Default, Debug)]
pub struct Climate {
    pub pins: bool,
    pub no_memory: bool,
    pub bad_fills: bool,
    pub bad_saves: bool,
    pub lies: bool,
    pub closing: bool,
}

impl Climate {
    fn by_chance() -> Climate {
        Climate {
            pins: dice::once_in(3),
            no_memory: dice::once_in(5),
            bad_fills: dice::once_in(3),
            bad_saves: dice::once_in(3),
            lies: dice::once_in(3),
            closing: dice::once_in(3),
        }
    }

    /// Whether a domain may run out of frames for a while through no fault of its own.
    pub fn starves(self) -> bool {
        self.pins || self.no_memory || self.bad_saves || self.lies || self.closing
    }
}

impl Weather {
    pub fn begin(&self) {
        self.climate.set(Climate::by_chance());
        self.change();
    }

    pub fn climate(&self) -> Climate {
        self.climate.get()
    }

    /// Changes, within the climate.
    pub fn change(&self) {
        let climate = self.climate.get();
        let rate = |may: bool, most: u64| match dice::below(3) {
            0 if may => 1 + dice::below(most),
            1 if may => 16 + dice::below(most),
            _ => 0,
        };
        self.pinned_once_in.set(rate(climate.pins, 16) * 2);
        self.no_memory_once_in.set(rate(climate.no_memory, 256));
        self.fill_fails_once_in.set(rate(climate.bad_fills, 8));
        self.save_fails_once_in.set(rate(climate.bad_saves, 4));
        self.lies_once_in.set(rate(climate.lies, 4));
        self.wrong_context_once_in.set(dice::below(3) * 8);
        if climate.closing && dice::once_in(2) {
            self.closed.set(true);
        }
    }

    /// All goes well from now on, but that closed descriptors stay closed.
    pub fn clear_up(&self) {
        self.rates().into_iter().for_each(|rate| rate.set(0));
    }

    /// All goes well while `work` is done.
    pub fn calm<R>(&self, work: impl FnOnce() -> R) -> R {
        let (rates, closed) = (self.rates().map(|rate| rate.replace(0)), self.closed.replace(false));
        let result = work();
        self.rates().into_iter().zip(rates).for_each(|(rate, before)| rate.set(before));
        self.closed.set(closed);
        result
    }

    fn rates(&self) -> [&Cell<u64>; 6] {
        [
            &self.pinned_once_in,
            &self.no_memory_once_in,
            &self.fill_fails_once_in,
            &self.save_fails_once_in,
            &self.lies_once_in,
            &self.wrong_context_once_in,
        ]
    }
}
