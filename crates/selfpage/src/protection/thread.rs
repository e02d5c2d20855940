//! Which protection domains the calling thread is in.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{Ordering, compiler_fence};

use super::sandbox::Trial;
use super::table::Core;

/// How deep domains may be nested in one thread.
pub(super) const MOST_NESTED: usize = 16;

/// What the handler of `SIGSEGV` must know of its thread: cells without a destructor, which cost a load. To the compiler no access of the
/// program's reads them, so without a fence it would leave out, or put off beyond the access, what the handler of its refusal looks for.
pub(super) struct Here {
    depth: Cell<usize>,
    entered: [Cell<*const Core>; MOST_NESTED],
    /// The last refusal that was tried again: its address, where the kernel has put what it interrupted, and the epoch. The second tells an
    /// access of a handler of a signal from one at the same address that waits beneath it.
    pub(super) tried: Cell<(usize, usize, u32)>,
    /// Set on a thread that runs code which may be stopped.
    trial: Cell<*const Trial>,
}

/// What a domain that is entered has displaced: nothing, or what the code is just entering that a handler of a signal has interrupted.
#[derive(Clone, Copy)]
pub(super) struct Before(*const Core);

thread_local! {
    static HERE: Here = const {
        Here {
            depth: Cell::new(0),
            entered: [const { Cell::new(ptr::null()) }; MOST_NESTED],
            tried: Cell::new((0, 0, u32::MAX)),
            trial: Cell::new(ptr::null()),
        }
    };
}

/// Runs `work` with the calling thread's own.
#[inline]
pub(super) fn with<T>(work: impl FnOnce(&Here) -> T) -> T {
    HERE.with(work)
}

impl Here {
    /// The domain that the thread is in; null outside of all.
    #[inline]
    pub(super) fn current(&self) -> *const Core {
        match self.depth.get() {
            0 => ptr::null(),
            depth => self.entered[depth - 1].get(),
        }
    }

    /// How many it is in, one within the other.
    #[inline]
    pub(super) fn depth(&self) -> usize {
        self.depth.get()
    }

    /// Enters a domain. What is to be put back when it is left; `None`: there is no room for one more.
    ///
    /// A handler of a signal may come in between the two steps, enter and leave domains of its own in the same place, and leave there
    /// what it has found.
    #[inline]
    pub(super) fn push(&self, core: *const Core) -> Option<Before> {
        let depth = self.depth.get();
        let before = self.entered.get(depth)?.replace(core);
        compiler_fence(Ordering::SeqCst);
        self.depth.set(depth + 1);
        compiler_fence(Ordering::SeqCst);
        Some(Before(before))
    }

    /// Leaves the innermost domain.
    #[inline]
    pub(super) fn pop(&self, before: Before) {
        compiler_fence(Ordering::SeqCst);
        let depth = self.depth.get() - 1;
        self.depth.set(depth);
        compiler_fence(Ordering::SeqCst);
        self.entered[depth].set(before.0);
    }

    /// On whose trial the thread is; null: on nobody's.
    pub(super) fn trial(&self) -> *const Trial {
        self.trial.get()
    }

    /// Says so, from the access after this on, and not before.
    pub(super) fn set_trial(&self, trial: *const Trial) {
        compiler_fence(Ordering::SeqCst);
        self.trial.set(trial);
        compiler_fence(Ordering::SeqCst);
    }

    /// Leaves all that it is in, and says what that was.
    pub(super) fn leave_all(&self) -> Vec<*const Core> {
        let entered = self.entered().collect();
        self.depth.set(0);
        entered
    }

    /// All that it is in, the outermost first.
    pub(super) fn entered(&self) -> impl Iterator<Item = *const Core> {
        self.entered.iter().take(self.depth.get()).map(Cell::get)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::super::steps;
    use super::*;

    const OUTER: *const Core = ptr::without_provenance(8);
    const INNER: *const Core = ptr::without_provenance(16);
    const HANDLERS: *const Core = ptr::without_provenance(24);
    static STEPS: AtomicU32 = AtomicU32::new(0);
    static WRONG: AtomicU32 = AtomicU32::new(0);

    extern "C" fn on_step(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        with(|here| {
            let (outside, depth) = (here.current(), here.depth());
            let before = here.push(HANDLERS);
            let is_in = here.current() == HANDLERS && here.depth() == depth + 1;
            before.into_iter().for_each(|before| here.pop(before));
            if !is_in || here.current() != outside || ![ptr::null(), OUTER, INNER].contains(&outside) {
                WRONG.fetch_add(1, Ordering::Relaxed);
            }
        });
        STEPS.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_handler_of_a_signal_enters_and_leaves_between_any_two_instructions() {
        let seen = with(|here| {
            steps::after_each(on_step, || {
                let outer = here.push(OUTER);
                let inner = here.push(INNER);
                let within = here.current();
                inner.into_iter().for_each(|inner| here.pop(inner));
                let between = here.current();
                outer.into_iter().for_each(|outer| here.pop(outer));
                (within, between, here.current())
            })
        });
        assert_eq!(seen, (INNER, OUTER, ptr::null()));
        assert_eq!(WRONG.load(Ordering::Relaxed), 0);
        assert!(STEPS.load(Ordering::Relaxed) > 10);
    }
}
