//! Whose turn it is to fork, of several threads.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::{DOMAINS, Locks, streams};
use crate::undisturbed;

/// Whoever waits for the library's locks may have the list of streams, which glibc wants of whoever has those.
pub(super) static TURN: Mutex<()> = Mutex::new(());

/// The turn, and before it the list of streams, where a fork is to hold that.
pub(super) struct Turn {
    // First: who gets the list next wants the turn then.
    turn: MutexGuard<'static, ()>,
    streams: Option<streams::Held>,
}

impl Turn {
    /// Takes the library's locks as well: which domains there are says whether the list is to be held, and they may come and go until then.
    ///
    /// # Context
    /// Normal, with signals blocked.
    pub(super) fn begin() -> (Turn, Locks) {
        loop {
            let wanted = streams::wanted(&undisturbed::lock(&DOMAINS));
            // With nothing else in hand: the thread that has it may be in a handler of a signal that forks, and wait for the turn.
            let streams = wanted.map(streams::Held::hold);
            let turn = match (&streams, TURN.try_lock()) {
                (_, Ok(turn)) => turn,
                (_, Err(TryLockError::Poisoned(turn))) => turn.into_inner(),
                (None, _) => TURN.lock().unwrap_or_else(PoisonError::into_inner),
                // Another that forks without the list comes to want it.
                (Some(_), _) => {
                    drop(streams);
                    drop(undisturbed::lock(&TURN));
                    continue;
                }
            };
            let locks = Locks::hold();
            if streams::wanted(&locks.registry).is_some() == streams.is_some() {
                return (Turn { turn, streams }, locks);
            }
        }
    }

    pub(super) fn end_in_child(self) {
        drop(self.turn);
        self.streams.into_iter().for_each(streams::Held::let_go_in_child);
    }
}
