//! The evictor keeps a reserve of frames ready, and the saver saves what it unmapped. Neither is ever waited for by a fill
//! as long as a clean page can be found.

use std::num::NonZeroU32;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use selfpage_core::fault::evict::{self, Evicted};
use selfpage_core::fault::{sample, save};
use selfpage_core::shortage::Shortage;
use selfpage_core::stack;

use crate::domain::Inner;
use crate::fork;

/// An event of a thread of ours, for whoever listens; none in a forked child. There its listener may wait for ever, for a thread of the
/// parent's that was telling it something, and our thread with it.
macro_rules! tell {
    ($level:ident, $($event:tt)+) => {
        if !fork::is_child() {
            tracing::$level!($($event)+);
        }
    };
}

/// How long the evictor tries in vain before faults are told that there is no frame: a device lets go of a page soon.
const PATIENCE_NS: u64 = 500_000_000;
/// The same when it is asked again after it has said so.
const PATIENCE_ASKED_AGAIN_NS: u64 = 10_000_000;
/// How long until it tries by itself what was in vain, while pages fail for want of a frame: each time twice as long, up to a second.
const UNASKED_US: u32 = 1000;
const UNASKED_MOST_US: u32 = 1_000_000;
/// An instruction may need several pages at once: with fewer frames than this to be had it could go on for ever, bringing each in where
/// another was.
const FEWEST: u32 = 8;
/// While no page more may be queued for saving, or none can be saved, this many are tried at a time in search of clean ones.
const SEARCH: u32 = 16;

/// Evicts ahead of need until the domain ends.
///
/// # Context
/// PagerThread.
pub(crate) fn run(inner: &Inner) {
    let state = inner.state();
    let stack = &state.stack;
    let mut vain: Option<Vain> = None;
    let mut patience_ns = PATIENCE_NS;
    let mut unasked_us = UNASKED_US;
    while let Some(seen) = stack.demand.wanted.count_unless(|| inner.stopping()) {
        let reserve = stack.reserve.load(Ordering::Relaxed);
        let keep = inner.standby_target();
        if stack.on_standby() > keep && evict::trim_standby(state, keep) > 0 {
            continue;
        }
        if stack.ready() >= reserve {
            (vain, patience_ns) = (None, PATIENCE_NS);
            stack.demand.end_shortage();
            inner.starved.end(state);
            // Unless somebody was at a page that fails.
            if !await_wanted(inner, seen, &mut unasked_us) {
                unasked_us = UNASKED_US;
            }
            continue;
        }
        let saves = state.save_error().is_none();
        if saves && stack.ready() >= reserve / 4 && stack.ready() + stack.saving() >= reserve {
            // Enough will be ready soon; more pages would go for nothing.
            stack.demand.wanted.wait(state.mmu, seen, 1000);
            continue;
        }
        let saves = saves && save::room(state) > 0;
        let want = if saves { reserve.saturating_sub(stack.ready()).max(8) } else { SEARCH };
        let available = stack.demand.available.count();
        let (begun_ns, let_go) = (state.mmu.now_ns(), stack.let_go());
        let evicted = {
            let mut policy = inner.policy.lock().unwrap_or_else(PoisonError::into_inner);
            evict::evict(state, &mut **policy, want)
        };
        tell!(trace, ?evicted, want, "evicted");
        // What is queued for a store that fails comes back.
        let mut enough = saves && evicted.ready + evicted.queued > 0;
        if !enough {
            let since = vain.get_or_insert_with(|| Vain::new(inner, seen, let_go, begun_ns + patience_ns));
            since.let_go[1] = let_go;
            since.note(evicted, stack.begun(), seen, begun_ns);
            enough = since.freed >= FEWEST;
        }
        if enough {
            (vain, patience_ns) = (None, PATIENCE_NS);
        }
        if enough || evicted.ready > 0 {
            stack.demand.end_shortage();
            if enough {
                unasked_us = UNASKED_US;
                inner.starved.end(state);
            }
            continue;
        }
        let Some(since) = vain else { continue };
        if saves && !since.tried_all {
            // The policy has named none that can go so far, and knows of others.
            continue;
        }
        if stack.saving() > 0 {
            // The saver is at work; it frees frames, or the queue.
            stack.demand.available.wait(state.mmu, available, 2000);
        } else {
            stack.demand.wanted.wait(state.mmu, seen, 1000);
        }
        if since.proves_shortage(inner) {
            let held = if stack.no_memory() { Shortage::NoMemory } else { Shortage::AllHeld };
            // What could not be saved before then, perhaps of a region that is gone, says nothing of now.
            let why = state.save_error().filter(|_| since.tried_to_save).map_or(held, Shortage::Unsaved);
            tell!(warn, ?why, "no frame can be freed");
            let Some(seen) = stack.demand.wanted.count_unless(|| inner.stopping()) else { return };
            stack.demand.state_shortage(state.mmu, since.asked, why);
            // Whoever asked later, or asks next, is given another look.
            if await_wanted(inner, seen, &mut unasked_us) {
                // The pins may have ended.
                if stack.no_memory() {
                    // Whether the system has some again nobody else may ask for.
                    stack::claim_ahead(state, NonZeroU32::MIN);
                }
                if stack.ready() > 0 {
                    // Others have given back fewer than the reserve, and no page can go for more.
                    inner.starved.end(state);
                }
            }
            (vain, patience_ns) = (None, PATIENCE_ASKED_AGAIN_NS);
        }
    }
}

/// Sleeps until somebody wants frames. Pages that fail for want of one are asked for by nobody: as long as there are any (`true`) it sleeps
/// no longer than it is told, and twice as long the next time.
fn await_wanted(inner: &Inner, seen: u32, unasked_us: &mut u32) -> bool {
    let (state, fails) = (inner.state(), !inner.starved.is_empty());
    state.stack.demand.wanted.wait(state.mmu, seen, if fails { *unasked_us } else { 0 });
    if fails {
        *unasked_us = (2 * *unasked_us).min(UNASKED_MOST_US);
    }
    fails
}

/// A time without success, or with little where pages cannot be saved.
#[derive(Clone, Copy, Default)]
struct Vain {
    deadline_ns: u64,
    /// The count of [`selfpage_core::shortage::Demand::wanted`] from before it began; or, once a frame was freed, from before the last look.
    asked: u32,
    /// When the last look began.
    begun_ns: u64,
    /// [`Inner::saver_turns`] when it began.
    turns: u64,
    /// [`stack::FrameStack::let_go`] from before it began, and from before the last look.
    let_go: [u32; 2],
    /// Suggestions of the policy that were looked at since all that it knows were.
    looked_at: u32,
    /// Frames that were freed among those.
    freed: u32,
    /// Whether any was, at any time.
    freed_any: bool,
    /// Whether all that it knows were: on a busy machine a page that a device holds may take a millisecond.
    tried_all: bool,
    /// Whether any page had to be saved first.
    tried_to_save: bool,
}

impl Vain {
    fn new(inner: &Inner, asked: u32, let_go: u32, deadline_ns: u64) -> Vain {
        let turns = inner.saver_turns.load(Ordering::SeqCst);
        let tried_to_save = inner.state().stack.saving() > 0;
        Vain { deadline_ns, asked, turns, let_go: [let_go; 2], tried_to_save, ..Vain::default() }
    }

    /// An eviction of a domain with so many frames, those that are gone again among them, came to this, begun at `begun_ns`, when the count of
    /// those who had asked was `seen`. Each frame is listed once at most, also where its page was dropped and the frame given up: nobody tells the
    /// policy. But it may say anything.
    fn note(&mut self, evicted: Evicted, frames: u32, seen: u32, begun_ns: u64) {
        self.begun_ns = begun_ns;
        if self.looked_at == 0 {
            self.freed = 0;
        }
        self.looked_at = self.looked_at.saturating_add(evicted.looked_at);
        self.freed = self.freed.saturating_add(evicted.ready);
        self.freed_any |= evicted.ready > 0;
        if self.freed_any {
            self.asked = seen;
        }
        if evicted.was_all || self.looked_at >= frames {
            (self.tried_all, self.looked_at) = (true, 0);
        }
        self.tried_to_save |= evicted.queued > 0;
    }

    /// Whether a look was in vain when it had lasted long enough. The time alone says nothing: the process may have been stopped (SIGSTOP) for
    /// all of it, and devices let go meanwhile.
    fn has_lasted(&self) -> bool {
        self.tried_all && self.begun_ns > self.deadline_ns
    }

    /// Whether it has lasted long enough, and neither can fills end it, nor the saver: it has nothing to do, or it has failed with what it
    /// began since. A store that takes its time is no shortage.
    fn proves_shortage(self, inner: &Inner) -> bool {
        let state = inner.state();
        let turns = inner.saver_turns.load(Ordering::SeqCst);
        let began_anew = self.turns + 2 + (self.turns & 1);
        let [since, seen] = self.let_go;
        self.has_lasted()
            && !state.stack.awaits_pagers(since, seen)
            && (state.stack.saving() == 0 || (turns >= began_anew && state.save_error().is_some()))
    }
}

/// Saves what the evictor queues until the domain ends and the queue is empty, and ends samples for forks.
///
/// # Context
/// PagerThread.
pub(crate) fn save(inner: &Inner) {
    let state = inner.state();
    loop {
        let seen = state.to_save.count();
        if inner.ends_samples.load(Ordering::SeqCst) {
            sample::end_all(state);
            // In this order: the fork goes on, and nobody ends the samples that begin after it.
            inner.ends_samples.store(false, Ordering::SeqCst);
        }
        // Odd: the saver is at work.
        inner.saver_turns.fetch_add(1, Ordering::SeqCst);
        let turn = save::save(state);
        inner.saver_turns.fetch_add(1, Ordering::SeqCst);
        if turn.taken > 0 {
            if turn.failed > 0 {
                tell!(warn, error = ?state.save_error(), "pages could not be saved, and stay in core");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_that_must_stay_do_not_prove_that_all_must() {
        let mut vain = Vain::default();
        // Pinned pages, as many as one eviction looks at, in a domain that wants more than that.
        let pinned = Evicted { kept: 1024, looked_at: 1024, ..Evicted::default() };
        (0..1023).for_each(|_| vain.note(pinned, 1 << 20, 1, 0));
        assert!(!vain.tried_all);
        vain.note(pinned, 1 << 20, 1, 0);
        assert!(vain.tried_all, "each frame was looked at");
        let mut few = Vain::default();
        few.note(Evicted { kept: 3, looked_at: 3, was_all: true, ..Evicted::default() }, 1 << 20, 1, 0);
        assert!(few.tried_all, "the policy knew of no more");
    }

    #[test]
    fn the_same_few_pages_again_and_again_are_few() {
        let mut vain = Vain::default();
        let one = Evicted { ready: 1, kept: 15, looked_at: 16, ..Evicted::default() };
        for seen in 1..100 {
            vain.note(one, 64, seen, 0);
            assert!(vain.freed < FEWEST, "all were looked at, and came again");
            assert_eq!(vain.asked, seen, "whoever asked before was served");
        }
        vain.note(Evicted { ready: FEWEST, looked_at: 16, ..Evicted::default() }, 64, 100, 0);
        assert!(vain.freed >= FEWEST);
    }

    #[test]
    fn a_process_that_was_stopped_looks_once_more() {
        let mut vain = Vain { deadline_ns: 1000, ..Vain::default() };
        let none = Evicted { kept: 3, looked_at: 3, was_all: true, ..Evicted::default() };
        vain.note(none, 64, 1, 1000);
        assert!(!vain.has_lasted(), "however late it is now");
        vain.note(none, 64, 1, 1001);
        assert!(vain.has_lasted());
    }
}
