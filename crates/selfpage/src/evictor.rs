//! The evictor keeps a reserve of frames ready, and the saver saves what it unmapped. Neither is ever waited for by a fill
//! as long as a clean page can be found.

use std::sync::PoisonError;
use std::time::Duration;

use selfpage_core::fault::{evict, save};
use selfpage_core::stack::Shortage;

use crate::domain::Inner;

/// Fruitless rounds, a millisecond apart, before faults are told that there is no frame: a device lets go of a page soon.
const MOST_BARREN: u32 = 500;
/// While no page more may be queued for saving, this many are tried at a time in search of clean ones.
const SEARCH: u32 = 16;

/// Evicts ahead of need until the domain ends.
///
/// # Context
/// PagerThread.
pub(crate) fn run(inner: &Inner) {
    let state = inner.state();
    let stack = &state.stack;
    let mut barren = 0;
    while !inner.stopping() {
        let seen = stack.wanted.count();
        let reserve = stack.reserve.load(std::sync::atomic::Ordering::Relaxed);
        let keep = inner.standby_target();
        if stack.on_standby() > keep && evict::trim_standby(state, keep) > 0 {
            continue;
        }
        if stack.ready() >= reserve {
            barren = 0;
            stack.set_shortage(state.mmu, None);
            stack.wanted.wait(state.mmu, seen, 0);
            continue;
        }
        let room = save::room(state) > 0;
        let want = if room { reserve.saturating_sub(stack.ready()).max(8) } else { SEARCH };
        let available = stack.available.count();
        let evicted = {
            let mut policy = inner.policy.lock().unwrap_or_else(PoisonError::into_inner);
            evict::evict(state, &mut **policy, want)
        };
        if evicted.ready > 0 || evicted.queued > 0 {
            barren = 0;
            stack.set_shortage(state.mmu, None);
            continue;
        }
        if !room || !state.saves_drained() {
            // The saver is at work; it frees frames, or the queue.
            stack.available.wait(state.mmu, available, 2000);
            barren += 1;
        } else {
            barren += 1;
            stack.wanted.wait(state.mmu, seen, 1000);
        }
        if barren > MOST_BARREN {
            let why = state.save_error().map_or(Shortage::AllHeld, Shortage::Unsaved);
            let asked = stack.wanted.count();
            stack.set_shortage(state.mmu, Some(why));
            // Whoever needs a frame next asks again, and is given another look.
            stack.wanted.wait(state.mmu, asked, 0);
            barren = MOST_BARREN - 10;
        }
    }
}

/// Saves what the evictor queues until the domain ends and the queue is empty.
///
/// # Context
/// PagerThread.
pub(crate) fn save(inner: &Inner) {
    let state = inner.state();
    loop {
        let seen = state.to_save.count();
        let errors = state.counters.read().save_errors_total;
        if save::save(state) > 0 {
            if state.counters.read().save_errors_total > errors {
                // A store that fails is not helped by haste.
                std::thread::sleep(Duration::from_millis(2));
            }
            continue;
        }
        if inner.stopping() {
            return;
        }
        state.to_save.wait(state.mmu, seen, 0);
    }
}
