//! Waiting for what may never come, in time that the process runs.

use std::time::{Duration, Instant};

/// What counts of the time between two looks: the process may be stopped (SIGSTOP) meanwhile.
const MOST_BETWEEN: Duration = Duration::from_millis(200);

/// How long the drop of a region or a domain waits for handlers: they may wait for a lock of whoever drops it, or have been killed.
const WITH_HANDLERS: Duration = Duration::from_secs(1);

/// How much longer to wait.
pub(crate) struct Patience {
    left: Duration,
    looked: Instant,
}

impl Patience {
    pub(crate) fn of(left: Duration) -> Patience {
        Patience { left, looked: Instant::now() }
    }

    /// What a drop has with handlers.
    pub(crate) fn with_handlers() -> Patience {
        Patience::of(WITH_HANDLERS)
    }

    /// Whether some of it is left, at this look.
    pub(crate) fn lasts(&mut self) -> bool {
        let now = Instant::now();
        self.left = self.left.saturating_sub(MOST_BETWEEN.min(now - self.looked));
        self.looked = now;
        !self.left.is_zero()
    }
}
