//! Closing gates that somebody is inside of, perhaps for long.

use std::time::Duration;

use selfpage_core::sync::Unclosed;

use super::Inner;

/// How long a gate is kept closed at first.
const FIRST_US: u32 = 20_000;
/// And at most: a device may never answer, and then others get in at times.
const LONGEST_US: u32 = 256 * FIRST_US;
/// This share of the time that it was closed in vain it is open then.
const OPEN_SHARE: u32 = 8;
/// When to try again where somebody else had it closed.
const BY_ANOTHER_US: u32 = 200;

/// One who closes gates, and tries again where it must.
///
/// A gate that cannot be closed opens for a while, since one inside may wait for a kernel lock whose holder waits to get in. All who
/// waited begin something then, which may take longer than the gate was closed: were that always as long, they could leave one after the other,
/// never to be all outside. So it is twice as long each time; and open in proportion, which the holder of that lock may need.
#[derive(Clone, Copy)]
pub(crate) struct Closer {
    closed_us: u32,
    open_us: u32,
}

impl Default for Closer {
    fn default() -> Closer {
        Closer { closed_us: FIRST_US, open_us: BY_ANOTHER_US }
    }
}

impl Closer {
    /// Closes the domain's gate, unless somebody is inside all the time.
    pub(crate) fn close(&mut self, inner: &Inner) -> Result<(), Unclosed> {
        let state = &inner.state;
        let closed = state.gate.close(state.mmu, self.closed_us);
        self.open_us = BY_ANOTHER_US;
        if closed == Err(Unclosed::InUse) {
            self.open_us = self.closed_us / OPEN_SHARE;
            self.closed_us = LONGEST_US.min(2 * self.closed_us);
        }
        closed
    }

    /// Time for those who wait at the gate to get in, before the next try.
    pub(crate) fn pause(self) {
        std::thread::sleep(Duration::from_micros(self.open_us.into()));
    }
}
