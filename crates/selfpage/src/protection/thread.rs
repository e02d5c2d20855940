//! Which protection domains the calling thread is in.

use std::cell::Cell;
use std::ptr;

use super::sandbox::Trial;
use super::table::Core;

/// How deep domains may be nested in one thread.
pub(super) const MOST_NESTED: usize = 16;

/// What the handler of `SIGSEGV` must know of its thread: cells without a destructor, which cost a load.
pub(super) struct Here {
    depth: Cell<usize>,
    entered: [Cell<*const Core>; MOST_NESTED],
    /// Address and epoch of the last refusal that was tried again.
    pub(super) tried: Cell<(usize, u32)>,
    /// Set on a thread that runs code which may be stopped.
    pub(super) trial: Cell<*const Trial>,
}

thread_local! {
    static HERE: Here = const {
        Here {
            depth: Cell::new(0),
            entered: [const { Cell::new(ptr::null()) }; MOST_NESTED],
            tried: Cell::new((0, u32::MAX)),
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

    /// `false`: there is no room for one more.
    #[inline]
    pub(super) fn push(&self, core: *const Core) -> bool {
        let depth = self.depth.get();
        let Some(place) = self.entered.get(depth) else { return false };
        place.set(core);
        self.depth.set(depth + 1);
        true
    }

    #[inline]
    pub(super) fn pop(&self) {
        self.depth.set(self.depth.get() - 1);
    }

    /// All that it is in, the outermost first.
    pub(super) fn entered(&self) -> impl Iterator<Item = *const Core> {
        self.entered.iter().take(self.depth.get()).map(Cell::get)
    }
}
